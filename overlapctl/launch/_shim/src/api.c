/* The small remaining parts of the public ABI. */
#include "intercept.h"
#include "state.h"

_Atomic int ovl_attachment_now;

uint32_t ovl_abi_version(void) {
  return OVL_ABI_VERSION;
}

int ovl_attachment_state(void) {
  return atomic_load(&ovl_attachment_now);
}

static const char *const names[] = {
#define OVL_RULE(id, name, text) name,
#include "rules.def"
#undef OVL_RULE
};

static const char *const texts[] = {
#define OVL_RULE(id, name, text) text,
#include "rules.def"
#undef OVL_RULE
};

const char *ovl_rule_name(int rule) {
  return rule >= 0 && rule < OVL_RULE_COUNT ? names[rule] : NULL;
}

const char *ovl_rule_text(int rule) {
  return rule >= 0 && rule < OVL_RULE_COUNT ? texts[rule] : NULL;
}

void ovl_reset(void) {
  ovl_functions_reset();
  ovl_records_reset();
}
