/* A driver library for the detour's tests: entries written in assembly, so that their first bytes
 * are exactly what a test needs. Each returns the low 32 bits of the sum of its first arguments
 * plus its number, and counts its calls.
 *
 * The macro VARIANT chooses how cuLaunchKernel begins, VARIANT_COOP how the optional
 * cuLaunchCooperativeKernel does. */
#include <stdint.h>

/* What every entry of a 580 driver begins with: ten bytes that do not depend on their address. */
#define REAL "push %rbp\n mov %rsp, %rbp\n push %r12\n sub $8, %rsp\n"
#define ENDBR "endbr64\n" REAL
#define WIDE_PUSH "push %rbp\n mov %rsp, %rbp\n push %r12\n push %r15\n pop %r15\n sub $8, %rsp\n"
#define BIG_FRAME "push %rbp\n mov %rsp, %rbp\n push %r12\n sub $0x408, %rsp\n"
#define LONG_MOVE "mov $0x123456789ab, %rax\n" REAL
#define NO_POINTER "lea (%rdi,%rsi,4), %rax\n" REAL
#define RIP_RELATIVE "mov 8f(%rip), %rax\n8:\n" REAL
#define RELATIVE_CALL "call 8f\n8: pop %rax\n" REAL
#define BRANCH "test %edi, %edi\n je 8f\n8:\n" REAL
#define JUMP_NEAR "jmp 8f\n .skip 200\n8:\n" REAL
#define JUMP_SHORT "jmp 8f\n .skip 20\n8:\n" REAL
#define JUMP_FAR "jmp *9f(%rip)\n .p2align 3\n9: .quad 8f\n8:\n" REAL
#define JUMP_REGISTER "movabs $8f, %rax\n jmp *%rax\n8:\n" REAL
#define JUMP_BEHIND_ENDBR "endbr64\n jmp 8f\n .skip 200\n8:\n" REAL
#define BREAKPOINT "int3\n" REAL

#ifndef VARIANT
#define VARIANT REAL
#endif
#ifndef VARIANT_COOP
#define VARIANT_COOP REAL
#endif
#ifndef SHIFT /* bytes the entry lies behind a multiple of 16 */
#define SHIFT 0
#endif

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

uint64_t detour_driver_calls[8];

#define ENTRY(name, number, shift, prologue, stack_arguments)                                      \
  __asm__(".text\n .p2align 4\n .rept " TEXT(                                                      \
      shift) "\n nop\n .endr\n"                                                                    \
             ".globl " name "\n .type " name ", @function\n" name ":\n" prologue                   \
             "  mov %edi, %eax\n add %esi, %eax\n add %edx, %eax\n add %ecx, "                     \
             "%eax\n" stack_arguments "  add $" TEXT(                                              \
                 number) ", %eax\n"                                                                \
                         "  mov detour_driver_calls@GOTPCREL(%rip), %rcx\n"                        \
                         "  lock incq 8*" TEXT(                                                    \
                             number) "(%rcx)\n"                                                    \
                                     "  lea -8(%rbp), %rsp\n pop %r12\n pop %rbp\n ret\n"          \
                                     ".size " name ", . - " name "\n")
#define MANY "  add %r8d, %eax\n add %r9d, %eax\n add 16(%rbp), %eax\n add 24(%rbp), %eax\n"

ENTRY("cuLaunchKernel", 0, SHIFT, VARIANT, MANY);
ENTRY("cuLaunchKernel_ptsz", 1, 0, REAL, MANY);
#ifndef WITHOUT_EX
ENTRY("cuLaunchKernelEx", 2, 0, REAL, "");
#endif
ENTRY("cuLaunchKernelEx_ptsz", 3, 0, REAL, "");
ENTRY("cuLaunchCooperativeKernel", 4, 0, VARIANT_COOP, MANY);

/* What cuGetProcAddress is asked for on the way to each of them. */
static void *choose(const char *name, uint64_t flags) {
  extern char plain[] __asm__("cuLaunchKernel"), per_thread[] __asm__("cuLaunchKernel_ptsz");
  extern char v1[] __asm__("cuGetProcAddress"), v2[] __asm__("cuGetProcAddress_v2");
  if (__builtin_strcmp(name, "cuLaunchKernel") == 0)
    return (flags & 2) != 0 ? per_thread : plain;
  if (__builtin_strcmp(name, "cuGetProcAddress") == 0)
    return (flags & 0x100) != 0 ? v1 : v2;
  return (void *)0;
}

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
  (void)version;
  *found = choose(name, flags);
  return *found != (void *)0 ? 0 : 500;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *how) {
  (void)how;
  return cuGetProcAddress(name, found, version, version < 12000 ? flags | 0x100 : flags);
}

int cuOther(void) {
  return 7;
}
