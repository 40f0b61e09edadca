/* Policies: interned by content, stacked by token, the top one published with one store. */
#include "state.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 4096, MAX_STRINGS = 1024 };

static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;
static struct ovl_interned *interned[OVL_MAX_POLICIES];
static uint32_t interned_count;

static struct {
  uint64_t token;
  const struct ovl_interned *policy;
} stack[MAX_DEPTH];
static uint32_t depth;
static uint64_t last_token;

OVL_HOT _Atomic(const struct ovl_interned *) ovl_active;

static void publish(void) {
  atomic_store_explicit(&ovl_active, depth ? stack[depth - 1].policy : NULL, memory_order_release);
}

static bool same_text(uint32_t count, const char *const *a, const char *const *b) {
  for (uint32_t i = 0; i < count; ++i)
    if (strcmp(a[i], b[i]))
      return false;
  return true;
}

static bool same_policy(const ovl_policy *a, const ovl_policy *b) {
  if (a->pad_bytes != b->pad_bytes || a->max_blocks_per_sm != b->max_blocks_per_sm ||
      a->carveout != b->carveout || a->comm_priority != b->comm_priority ||
      a->shape_captures != b->shape_captures || a->include_count != b->include_count ||
      a->exclude_count != b->exclude_count || a->rule_count != b->rule_count ||
      !same_text(a->include_count, a->include, b->include) ||
      !same_text(a->exclude_count, a->exclude, b->exclude))
    return false;
  for (uint32_t i = 0; i < a->rule_count; ++i) {
    const ovl_kernel_rule *x = &a->rules[i], *y = &b->rules[i];
    if (strcmp(x->pattern, y->pattern) || x->pad_bytes != y->pad_bytes ||
        x->max_blocks_per_sm != y->max_blocks_per_sm || x->carveout != y->carveout)
      return false;
  }
  return true;
}

static bool is_wish(uint32_t pad_bytes, int32_t max_blocks, int32_t carveout) {
  return pad_bytes <= 1u << 30 && max_blocks >= 0 && carveout >= -1 && carveout <= 100;
}

/* Bytes its strings need, or 0 if a field is out of range. */
static size_t check_policy(const ovl_policy *policy) {
  size_t bytes = 1;
  if (!policy || !is_wish(policy->pad_bytes, policy->max_blocks_per_sm, policy->carveout) ||
      policy->include_count > MAX_STRINGS || policy->exclude_count > MAX_STRINGS ||
      policy->rule_count > MAX_STRINGS || (policy->include_count && !policy->include) ||
      (policy->exclude_count && !policy->exclude) || (policy->rule_count && !policy->rules))
    return 0;
  for (uint32_t i = 0; i < policy->include_count + policy->exclude_count; ++i) {
    const char *text =
        i < policy->include_count ? policy->include[i] : policy->exclude[i - policy->include_count];
    if (!text)
      return 0;
    bytes += strlen(text) + 1;
  }
  for (uint32_t i = 0; i < policy->rule_count; ++i) {
    const ovl_kernel_rule *rule = &policy->rules[i];
    if (!rule->pattern || !is_wish(rule->pad_bytes, rule->max_blocks_per_sm, rule->carveout))
      return 0;
    bytes += strlen(rule->pattern) + 1;
  }
  return bytes;
}

static const char *keep_text(char **room, const char *text) {
  size_t bytes = strlen(text) + 1;
  char *kept = memcpy(*room, text, bytes);
  *room += bytes;
  return kept;
}

/* A copy in one allocation: the header, the rules, the pointers, the strings. */
static struct ovl_interned *copy_policy(const ovl_policy *policy, size_t text_bytes) {
  size_t rules = sizeof(ovl_kernel_rule) * policy->rule_count;
  size_t texts = sizeof(char *) * (policy->include_count + policy->exclude_count);
  struct ovl_interned *copy = malloc(sizeof *copy + rules + texts + text_bytes);
  if (!copy)
    return NULL;
  ovl_kernel_rule *to_rules = (ovl_kernel_rule *)(copy + 1);
  const char **include = (const char **)(to_rules + policy->rule_count);
  const char **exclude = include + policy->include_count;
  char *room = (char *)(exclude + policy->exclude_count);
  copy->policy = *policy;
  for (uint32_t i = 0; i < policy->rule_count; ++i) {
    to_rules[i] = policy->rules[i];
    to_rules[i].pattern = keep_text(&room, policy->rules[i].pattern);
  }
  for (uint32_t i = 0; i < policy->include_count; ++i)
    include[i] = keep_text(&room, policy->include[i]);
  for (uint32_t i = 0; i < policy->exclude_count; ++i)
    exclude[i] = keep_text(&room, policy->exclude[i]);
  copy->policy.rules = to_rules;
  copy->policy.include = include;
  copy->policy.exclude = exclude;
  return copy;
}

static int intern(const ovl_policy *policy, size_t bytes, const struct ovl_interned **out) {
  for (uint32_t i = 0; i < interned_count; ++i)
    if (same_policy(&interned[i]->policy, policy)) {
      *out = interned[i];
      return OVL_OK;
    }
  if (interned_count == OVL_MAX_POLICIES)
    return OVL_E_FULL;
  struct ovl_interned *copy = copy_policy(policy, bytes);
  if (!copy)
    return OVL_E_MEMORY;
  copy->identity = interned_count + 1;
  interned[interned_count] = copy;
  ++interned_count;
  *out = copy;
  return OVL_OK;
}

int ovl_policy_push(const ovl_policy *policy, uint64_t *token) {
  size_t bytes = check_policy(policy);
  if (!bytes || !token)
    return OVL_E_ARGUMENT;
  ovl_records_start();
  pthread_mutex_lock(&changing);
  const struct ovl_interned *kept = NULL;
  int status = depth == MAX_DEPTH ? OVL_E_FULL : intern(policy, bytes, &kept);
  if (status == OVL_OK) {
    stack[depth].token = *token = ++last_token;
    stack[depth].policy = kept;
    ++depth;
    publish();
  }
  pthread_mutex_unlock(&changing);
  return status;
}

int ovl_policy_pop(uint64_t token) {
  int status = OVL_E_NOT_FOUND;
  pthread_mutex_lock(&changing);
  for (uint32_t i = depth; i-- > 0;)
    if (stack[i].token == token) {
      memmove(&stack[i], &stack[i + 1], (depth - i - 1) * sizeof *stack);
      --depth;
      publish();
      status = OVL_OK;
      break;
    }
  pthread_mutex_unlock(&changing);
  return status;
}

int ovl_policy_depth(void) {
  pthread_mutex_lock(&changing);
  int now = (int)depth;
  pthread_mutex_unlock(&changing);
  return now;
}

static bool any_match(uint32_t count, const char *const *patterns, const char *name) {
  for (uint32_t i = 0; i < count; ++i)
    if (ovl_match(patterns[i], name))
      return true;
  return false;
}

void ovl_wish_for(const ovl_policy *policy, const char *name, ovl_wish *wish) {
  *wish = (ovl_wish){policy->pad_bytes,     policy->max_blocks_per_sm, policy->carveout,
                     policy->comm_priority, policy->shape_captures,    1};
  if (any_match(policy->exclude_count, policy->exclude, name))
    wish->included = 2;
  else if (policy->include_count && !any_match(policy->include_count, policy->include, name))
    wish->included = 0;
  for (uint32_t i = 0; i < policy->rule_count; ++i)
    if (ovl_match(policy->rules[i].pattern, name)) {
      wish->pad_bytes = policy->rules[i].pad_bytes;
      wish->max_blocks_per_sm = policy->rules[i].max_blocks_per_sm;
      wish->carveout = policy->rules[i].carveout;
      break;
    }
}

/* The child owns no region and no lock of the parent's threads. */
void ovl_policy_after_fork(void) {
  pthread_mutex_init(&changing, NULL);
  depth = 0;
  publish();
}
