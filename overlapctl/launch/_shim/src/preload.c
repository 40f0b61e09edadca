/* The shim as LD_PRELOAD: programs that look the driver's entries up get the hooks instead.
 *
 * A program reaches the driver in three ways, and each is answered here:
 *  - dlsym on the driver library: our dlsym hands out the hook;
 *  - cuGetProcAddress, itself found by dlsym: ours compares what the driver returns, so that every
 *    version and per-thread-stream flag is right by construction;
 *  - linked directly against the driver: our exports of the entries' names come first in the
 *    search order, and call on.
 *
 * dlsym must not call the real one as an ordinary function: what RTLD_NEXT and RTLD_DEFAULT mean
 * depends on who called, which the C library reads off the return address. So dlsym is written in
 * assembly: it asks ovl_preload_lookup and, unless that knows better, jumps to the real dlsym with
 * registers and return address as they were.
 *
 * All this is active only if OVERLAPCTL_SHIM names this file and our dlsym is the one the process
 * uses. Otherwise (loaded with ctypes, linked, a left-over variable) everything passes through. No
 * locks are taken: a thread inside the loader may wait for us and the other way round. What is
 * worked out lazily comes out the same on every thread. */
#define _GNU_SOURCE
#include "attach.h"
#include "intercept.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef int (*get_proc_address_v1)(const char *, void **, int, uint64_t);
typedef int (*get_proc_address_v2)(const char *, void **, int, uint64_t, int *);

enum { NOT_INITIALIZED = 3, PER_THREAD_STREAM = 2, MAX_ENTRIES = 64 };

OVL_API int cuGetProcAddress(const char *, void **, int, uint64_t);
OVL_API int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

/* Where our dlsym goes on; set before it is read. */
__attribute__((visibility("hidden"))) void *ovl_next_dlsym;

#if defined(__x86_64__) || defined(__aarch64__)
#define HAS_PRELOAD 1
/* The label behind our export of dlsym: &dlsym would be whichever the process uses. */
__attribute__((visibility("hidden"))) extern const char ovl_own_dlsym[];
#else
#define HAS_PRELOAD 0
#endif

/* ---- the C library's dlsym --------------------------------------------------------------------
 */

ovl_dlsym_function ovl_real_dlsym(void) {
  void *found = __atomic_load_n(&ovl_next_dlsym, __ATOMIC_ACQUIRE);
  if (found == NULL) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (size_t i = 0; i < 3 && found == NULL; i++)
      found = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (found == NULL) { /* no dependency of ours has it: ask the C library by name */
      void *c_library = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
      for (size_t i = 0; i < 3 && found == NULL && c_library != NULL; i++)
        found = dlvsym(c_library, "dlsym", versions[i]);
    }
    __atomic_store_n(&ovl_next_dlsym, found, __ATOMIC_RELEASE);
  }
  ovl_dlsym_function function;
  memcpy(&function, &found, sizeof function);
  return function;
}

/* ---- are we preloaded? ------------------------------------------------------------------------
 */

bool ovl_is_disabled(void) {
  const char *value = getenv("OVERLAPCTL_DISABLE");
  return value != NULL && value[0] != 0 && strcmp(value, "0") != 0;
}

bool ovl_is_own_object(const void *address) {
  Dl_info ours, theirs;
  return dladdr(&ovl_next_dlsym, &ours) != 0 && dladdr(address, &theirs) != 0 &&
         ours.dli_fbase == theirs.dli_fbase;
}

static bool names_this_file(const char *path) {
  Dl_info self;
  struct stat named, own;
  return dladdr(&ovl_next_dlsym, &self) != 0 && self.dli_fname != NULL && stat(path, &named) == 0 &&
         stat(self.dli_fname, &own) == 0 && named.st_dev == own.st_dev &&
         named.st_ino == own.st_ino;
}

static bool find_out_if_preloaded(void) {
#if HAS_PRELOAD
  const char *path = getenv("OVERLAPCTL_SHIM");
  if (path == NULL || path[0] == 0 || ovl_is_disabled() || !names_this_file(path))
    return false;
  ovl_dlsym_function real = ovl_real_dlsym();
  return real != NULL && real(RTLD_DEFAULT, "dlsym") == (const void *)ovl_own_dlsym;
#else
  return false;
#endif
}

bool ovl_preload_active(void) {
  static _Atomic int known; /* 0: not asked yet, 1: no, 2: yes */
  int value = atomic_load(&known);
  if (value == 0) {
    value = find_out_if_preloaded() ? 2 : 1;
    atomic_store(&known, value);
  }
  return value == 2;
}

/* ---- the driver -------------------------------------------------------------------------------
 */

static void *driver;                      /* its handle, once known */
static void *driver_entries[MAX_ENTRIES]; /* its own address of each entry */
static void *driver_get_proc_address;     /* v1 */
static void *driver_get_proc_address_v2;

static void *driver_symbol(const char *name) {
  return ovl_real_dlsym()(driver, name);
}

static bool adopted(void) {
  return __atomic_load_n(&driver, __ATOMIC_ACQUIRE) != NULL;
}

/* Takes the library behind `handle` for the driver. Any thread may do it at any time: all store
 * the same values. */
static bool adopt(void *handle) {
  ovl_dlsym_function find = ovl_real_dlsym();
  for (size_t i = 0; i < ovl_entry_count && i < MAX_ENTRIES; i++) {
    void *found = find(handle, ovl_entries[i].symbol);
    if (found != NULL && ovl_is_own_object(found))
      return false; /* the program itself: that search finds our exports first */
    if (found == NULL && ovl_entries[i].required)
      return false;
    __atomic_store_n(&driver_entries[i], found, __ATOMIC_RELEASE);
  }
  for (size_t i = 0; i < ovl_entry_count && i < MAX_ENTRIES; i++)
    __atomic_store_n(ovl_entries[i].original, driver_entries[i], __ATOMIC_RELEASE);
  __atomic_store_n(&driver_get_proc_address, find(handle, "cuGetProcAddress"), __ATOMIC_RELEASE);
  __atomic_store_n(&driver_get_proc_address_v2, find(handle, "cuGetProcAddress_v2"),
                   __ATOMIC_RELEASE);
  __atomic_store_n(&driver, handle, __ATOMIC_RELEASE);
  ovl_set_driver(driver_symbol);
  return true;
}

static bool adopt_owner_of(void *address) {
  if (adopted())
    return true;
  Dl_info owner;
  if (ovl_is_own_object(address) || dladdr(address, &owner) == 0 || owner.dli_fname == NULL)
    return false;
  void *handle = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  return handle != NULL && adopt(handle);
}

/* For callers that name no library: whatever comes after us, or a driver loaded by its name. */
static void *find_in_process(const char *name) {
  void *found = ovl_real_dlsym()(RTLD_NEXT, name);
  if (found == NULL) {
    void *handle = dlopen(OVL_DRIVER_SONAME, RTLD_LAZY | RTLD_NOLOAD);
    found = handle != NULL ? ovl_real_dlsym()(handle, name) : NULL;
  }
  return found != NULL && ovl_is_own_object(found) ? NULL : found;
}

/* ---- substitution -----------------------------------------------------------------------------
 */

/* The hook of the entry called `name`, if the driver has it. */
static void *hook_named(const char *name) {
  for (size_t i = 0; i < ovl_entry_count && i < MAX_ENTRIES; i++)
    if (strcmp(name, ovl_entries[i].symbol) == 0)
      return driver_entries[i] != NULL ? ovl_entries[i].hook : NULL;
  return NULL;
}

/* The hook of the entry the driver exports at `address`. */
static void *hook_at(const void *address) {
  for (size_t i = 0; i < ovl_entry_count && i < MAX_ENTRIES; i++)
    if (address == driver_entries[i])
      return ovl_entries[i].hook;
  return NULL;
}

static void *as_object(get_proc_address_v1 v1, get_proc_address_v2 v2) {
  void *object;
  if (v1 != NULL)
    memcpy(&object, &v1, sizeof object);
  else
    memcpy(&object, &v2, sizeof object);
  return object;
}

static bool is_substituted_name(const char *name) {
  if (strcmp(name, "cuGetProcAddress") == 0 || strcmp(name, "cuGetProcAddress_v2") == 0)
    return true;
  for (size_t i = 0; i < ovl_entry_count; i++)
    if (strcmp(name, ovl_entries[i].symbol) == 0)
      return true;
  return false;
}

/* What a program that would get `found` shall get. Going by the address, not the name, leaves
 * functions of the same name in other libraries alone. */
static void *substitute(void *found) {
  if (!adopt_owner_of(found))
    return found;
  if (found == driver_get_proc_address)
    return as_object(cuGetProcAddress, NULL);
  if (found == driver_get_proc_address_v2)
    return as_object(NULL, cuGetProcAddress_v2);
  void *hook = hook_at(found);
  return hook != NULL ? hook : found;
}

/* The same for what cuGetProcAddress chose by version and flags. A driver that hands out other
 * addresses than it exports is met by the name. */
static void *substitute_chosen(const char *name, void *found, uint64_t flags) {
  void *chosen = substitute(found);
  if (chosen != found || !adopted())
    return chosen;
  char symbol[64];
  size_t length = strnlen(name, sizeof symbol - 8);
  memcpy(symbol, name, length);
  memcpy(symbol + length, flags & PER_THREAD_STREAM ? "_ptsz" : "",
         flags & PER_THREAD_STREAM ? 6 : 1);
  void *hook = hook_named(symbol);
  return hook != NULL ? hook : found;
}

/* What our dlsym shall return; NULL: ask the real one; NOTHING: NULL, dlerror is set. */
#define NOTHING ((void *)1)

__attribute__((visibility("hidden"), used)) void *ovl_preload_lookup(void *handle,
                                                                     const char *name) {
  ovl_dlsym_function real = ovl_real_dlsym();
  if (real == NULL)
    return NOTHING;
  if (name == NULL || name[0] != 'c' || name[1] != 'u' || handle == RTLD_NEXT ||
      !ovl_preload_active() || !is_substituted_name(name))
    return NULL;
  void *found = handle == RTLD_DEFAULT ? NULL : real(handle, name);
  if (handle != RTLD_DEFAULT && found == NULL)
    return NULL; /* let the real one fail, so that dlerror tells the same */
  if (found == NULL || ovl_is_own_object(found)) { /* a search that meets our export first */
    found = find_in_process(name);
    if (found == NULL)
      return NOTHING;
  }
  return substitute(found);
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  void *next = adopted() ? driver_get_proc_address : find_in_process("cuGetProcAddress");
  get_proc_address_v1 call;
  memcpy(&call, &next, sizeof call);
  if (call == NULL)
    return NOT_INITIALIZED;
  int status = call(name, function, version, flags);
  if (status == 0 && name != NULL && function != NULL && *function != NULL && ovl_preload_active())
    *function = substitute_chosen(name, *function, flags);
  return status;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *found) {
  void *next = adopted() ? driver_get_proc_address_v2 : find_in_process("cuGetProcAddress_v2");
  get_proc_address_v2 call;
  memcpy(&call, &next, sizeof call);
  if (call == NULL)
    return NOT_INITIALIZED;
  int status = call(name, function, version, flags, found);
  if (status == 0 && name != NULL && function != NULL && *function != NULL && ovl_preload_active())
    *function = substitute_chosen(name, *function, flags);
  return status;
}

/* ---- exports for directly linked programs ------------------------------------------------------
 */

#if HAS_PRELOAD

static const char *const export_names[] = {
#define OVL_ENTRY(id, symbol, twin, kind, required) symbol, twin,
#include "entries.def"
#undef OVL_ENTRY
};

enum { EXPORTS = sizeof export_names / sizeof export_names[0] };

static int missing(void) {
  return NOT_INITIALIZED;
}

/* Where export `index` goes on. First call only, as long as there is an answer to remember. */
__attribute__((visibility("hidden"), used)) void *ovl_export_resolve(size_t index);
/* Read by the exports; starts with the address that asks ovl_export_resolve. */
__attribute__((visibility("hidden"))) extern void *ovl_export_targets[EXPORTS];

void *ovl_export_resolve(size_t index) {
  const char *name = export_names[index];
  void *next = find_in_process(name);
  if (next == NULL) {
    int (*answer)(void) = missing;
    memcpy(&next, &answer, sizeof next);
    return next; /* the driver may come later: ask again */
  }
  if (ovl_preload_active())
    next = substitute(next);
  __atomic_store_n(&ovl_export_targets[index], next, __ATOMIC_RELEASE);
  return next;
}

/* One export per name: jumps through its target. Signatures do not matter, as registers and stack
 * are passed on untouched. `none` stands for "has no per-thread-stream twin". */
#ifdef __x86_64__
#define EXPORT(name)                                                                               \
  ".ifnc " name ", ovl_none\n"                                                                     \
  ".globl " name "\n.type " name ", @function\n" name ":\n"                                        \
  "  endbr64\n"                                                                                    \
  "  movq ovl_export_targets + 8*ovl_index(%rip), %rax\n"                                          \
  "  jmp *%rax\n"                                                                                  \
  ".size " name ", . - " name "\n.endif\n"                                                         \
  "1: endbr64\n  movl $ovl_index, %eax\n  jmp ovl_export_first_call\n"                             \
  ".pushsection .data.rel.local, \"aw\"\n  .quad 1b\n.popsection\n"                                \
  ".set ovl_index, ovl_index + 1\n"

__asm__(".pushsection .data.rel.local, \"aw\"\n.balign 8\n.hidden ovl_export_targets\n"
        ".globl ovl_export_targets\novl_export_targets:\n.popsection\n"
        ".text\n.balign 16\n.set ovl_index, 0\n"
        "ovl_export_first_call:\n"
        "  pushq %rdi\n  pushq %rsi\n  pushq %rdx\n  pushq %rcx\n  pushq %r8\n  pushq %r9\n"
        "  subq $8, %rsp\n"
        "  movl %eax, %edi\n"
        "  call ovl_export_resolve\n"
        "  addq $8, %rsp\n"
        "  popq %r9\n  popq %r8\n  popq %rcx\n  popq %rdx\n  popq %rsi\n  popq %rdi\n"
        "  jmp *%rax\n"
        ".globl dlsym\n.type dlsym, @function\n"
        ".hidden ovl_own_dlsym\n.globl ovl_own_dlsym\n"
        "dlsym:\novl_own_dlsym:\n"
        "  endbr64\n"
        "  pushq %rdi\n  pushq %rsi\n  subq $8, %rsp\n"
        "  call ovl_preload_lookup\n"
        "  addq $8, %rsp\n  popq %rsi\n  popq %rdi\n"
        "  cmpq $1, %rax\n"
        "  ja 2f\n  je 3f\n"
        "  movq ovl_next_dlsym(%rip), %rax\n"
        "  jmp *%rax\n"
        "3: xorl %eax, %eax\n"
        "2: ret\n"
        ".size dlsym, . - dlsym\n"
#else /* aarch64 */
#define EXPORT(name)                                                                               \
  ".ifnc " name ", ovl_none\n"                                                                     \
  ".globl " name "\n.type " name ", %function\n" name ":\n"                                        \
  "  hint #34\n"                                                                                   \
  "  adrp x16, ovl_export_targets + 8*ovl_index\n"                                                 \
  "  ldr x16, [x16, #:lo12:ovl_export_targets + 8*ovl_index]\n"                                    \
  "  br x16\n"                                                                                     \
  ".size " name ", . - " name "\n.endif\n"                                                         \
  "1: hint #34\n  mov x17, #ovl_index\n  b ovl_export_first_call\n"                                \
  ".pushsection .data.rel.local, \"aw\"\n  .quad 1b\n.popsection\n"                                \
  ".set ovl_index, ovl_index + 1\n"

__asm__(".pushsection .data.rel.local, \"aw\"\n.balign 8\n.hidden ovl_export_targets\n"
        ".globl ovl_export_targets\novl_export_targets:\n.popsection\n"
        ".text\n.balign 16\n.set ovl_index, 0\n"
        "ovl_export_first_call:\n"
        "  stp x29, x30, [sp, #-80]!\n  mov x29, sp\n"
        "  stp x0, x1, [sp, #16]\n  stp x2, x3, [sp, #32]\n"
        "  stp x4, x5, [sp, #48]\n  stp x6, x7, [sp, #64]\n"
        "  mov x0, x17\n"
        "  bl ovl_export_resolve\n"
        "  mov x16, x0\n"
        "  ldp x0, x1, [sp, #16]\n  ldp x2, x3, [sp, #32]\n"
        "  ldp x4, x5, [sp, #48]\n  ldp x6, x7, [sp, #64]\n"
        "  ldp x29, x30, [sp], #80\n"
        "  br x16\n"
        ".globl dlsym\n.type dlsym, %function\n"
        ".hidden ovl_own_dlsym\n.globl ovl_own_dlsym\n"
        "dlsym:\novl_own_dlsym:\n"
        "  hint #34\n"
        "  stp x29, x30, [sp, #-32]!\n  mov x29, sp\n"
        "  stp x0, x1, [sp, #16]\n"
        "  bl ovl_preload_lookup\n"
        "  mov x16, x0\n"
        "  ldp x0, x1, [sp, #16]\n"
        "  ldp x29, x30, [sp], #32\n"
        "  cmp x16, #1\n"
        "  b.hi 2f\n  b.eq 3f\n"
        "  adrp x16, ovl_next_dlsym\n"
        "  ldr x16, [x16, #:lo12:ovl_next_dlsym]\n"
        "  br x16\n"
        "3: mov x0, #0\n  ret\n"
        "2: mov x0, x16\n  ret\n"
        ".size dlsym, . - dlsym\n"
#endif
#undef NULL /* the list's word for "no twin", spelt for the assembler */
#define NULL "ovl_none"
#define OVL_ENTRY(id, symbol, twin, kind, required) EXPORT(symbol) EXPORT(twin)
#include "entries.def"
#undef OVL_ENTRY
#undef NULL
#define NULL ((void *)0)
);

#endif

/* ---- start ------------------------------------------------------------------------------------
 */

static int start_ignored;

int ovl_policy_text_ignored(void) {
  return start_ignored;
}

__attribute__((constructor)) static void start(void) {
  if (!ovl_preload_active())
    return;
  atomic_store(&ovl_attachment_now, OVL_PRELOAD);
  const char *text = getenv("OVERLAPCTL_POLICY");
  uint64_t token;
  if (text != NULL && text[0] != 0)
    (void)ovl_policy_push_text(text, &token, &start_ignored);
}
