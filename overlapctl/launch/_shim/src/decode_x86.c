/* Length of the instructions at the start of a function, for the few kinds that may be copied to
 * another address unchanged. It is a whitelist: whatever is not listed is refused. */
#include "overlapctl_shim.h"

#include <stdbool.h>

/* What is left of the code; every read is checked against it. */
typedef struct cursor {
  const uint8_t *code;
  size_t left;
} cursor;

enum { REFUSED = -1 };

static int byte_at(cursor c, size_t index) {
  return index < c.left ? c.code[index] : REFUSED;
}

/* Length of ModRM, SIB and displacement of a memory operand that does not depend on the address
 * of the instruction, or REFUSED. `at` is the index of the ModRM byte. */
static int memory_operand(cursor c, size_t at) {
  int modrm = byte_at(c, at);
  if (modrm < 0)
    return REFUSED;
  int mod = modrm >> 6, rm = modrm & 7, length = 1;
  if (mod == 3 || (mod == 0 && rm == 5)) /* a register; or relative to the instruction pointer */
    return REFUSED;
  if (rm == 4) {
    int sib = byte_at(c, at + 1);
    if (sib < 0)
      return REFUSED;
    length += 1;
    if (mod == 0 && (sib & 7) == 5)
      length += 4;
  }
  length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
  return at + (size_t)length <= c.left ? length : REFUSED;
}

static bool is_register_operand(int modrm) {
  return modrm >= 0 && modrm >> 6 == 3;
}

static int endbr64(cursor c) {
  return byte_at(c, 0) == 0xf3 && byte_at(c, 1) == 0x0f && byte_at(c, 2) == 0x1e &&
                 byte_at(c, 3) == 0xfa
             ? 4
             : REFUSED;
}

/* add/sub/and rsp, immediate: opens a frame. `extended`: REX.B, which would name r12 instead. */
static int adjust_stack(cursor c, size_t at, bool wide, bool extended, int immediate) {
  int modrm = byte_at(c, at + 1);
  if (!wide || extended || !is_register_operand(modrm) || (modrm & 7) != 4)
    return REFUSED;
  int operation = (modrm >> 3) & 7;
  if (operation != 0 && operation != 4 && operation != 5)
    return REFUSED;
  return (int)at + 2 + immediate;
}

static int one_instruction(cursor c) {
  int length = endbr64(c);
  if (length > 0)
    return length;
  size_t at = 0;
  int rex = 0, op = byte_at(c, 0);
  if (op >= 0x40 && op <= 0x4f) {
    rex = op;
    at = 1;
    op = byte_at(c, 1);
  }
  bool wide = (rex & 8) != 0, extended = (rex & 1) != 0;
  int modrm = byte_at(c, at + 1);
  if (op >= 0x50 && op <= 0x5f) /* push, pop */
    return (int)at + 1;
  if (op == 0x90 && rex == 0) /* nop */
    return 1;
  if (op >= 0xb8 && op <= 0xbf) /* mov register, immediate */
    return (int)at + (wide ? 9 : 5);
  switch (op) {
  case 0x31:
  case 0x33: /* xor */
  case 0x85: /* test */
    return is_register_operand(modrm) ? (int)at + 2 : REFUSED;
  case 0x89:
  case 0x8b: /* mov between registers, or from/to memory addressed by registers */
    if (is_register_operand(modrm))
      return (int)at + 2;
    /* fall through */
  case 0x8d: /* lea */
    length = memory_operand(c, at + 1);
    return length < 0 ? REFUSED : (int)at + 1 + length;
  case 0x81:
    return adjust_stack(c, at, wide, extended, 4);
  case 0x83:
    return adjust_stack(c, at, wide, extended, 1);
  case 0xc7: /* mov register, sign-extended immediate */
    return is_register_operand(modrm) && (modrm & 0x38) == 0 ? (int)at + 6 : REFUSED;
  default:
    return REFUSED;
  }
}

int ovl_decode_prologue(const uint8_t *code, size_t available, int need) {
  if (code == NULL || need <= 0)
    return REFUSED;
  size_t done = 0;
  while (done < (size_t)need) {
    cursor rest = {code + done, available - done};
    int length = one_instruction(rest);
    if (length <= 0 || (size_t)length > rest.left)
      return REFUSED;
    done += (size_t)length;
  }
  return (int)done;
}
