/* The decision: pure arithmetic over limits, a launch's facts and what the policy wishes.
 *
 * The live path and ovl_decide share ovl_shape_for; they differ in the oracle (the driver's
 * occupancy query, or the model below). launch/twin.py decides the same independently. */
#include "state.h"

#include <limits.h>

static int min_int(int a, int b) {
  return a < b ? a : b;
}

static int64_t round_up(int64_t value, int64_t unit) {
  return unit > 0 ? (value + unit - 1) / unit * unit : value;
}

int ovl_residency(const ovl_device_limits *limits, int threads, int registers, int smem) {
  if (!limits || threads < 1 || registers < 0 || smem < 0 || limits->warp_size < 1 ||
      limits->subpartitions < 1 || smem > limits->smem_per_block_optin)
    return 0;
  int warps = (threads + limits->warp_size - 1) / limits->warp_size;
  int64_t blocks =
      min_int(limits->max_blocks_per_sm, limits->max_threads_per_sm / limits->warp_size / warps);
  int64_t per_warp = round_up((int64_t)registers * limits->warp_size, limits->register_granule);
  if (per_warp > 0) {
    /* A launch is checked as if each sub-partition got equally many of its warps. */
    if (per_warp * round_up(warps, limits->subpartitions) > limits->registers_per_sm)
      return 0;
    int64_t per_part = limits->registers_per_sm / limits->subpartitions / per_warp;
    int64_t by_registers = per_part * limits->subpartitions / warps;
    blocks = by_registers < blocks ? by_registers : blocks;
  }
  int64_t per_block =
      round_up((int64_t)smem + limits->smem_reserved_per_block, limits->smem_granule);
  if (per_block > 0) {
    int64_t by_smem = limits->smem_per_sm / per_block;
    blocks = by_smem < blocks ? by_smem : blocks;
  }
  return (int)blocks;
}

struct model {
  const ovl_device_limits *limits;
  const ovl_launch *launch;
};

static int model_blocks(void *context, int dynamic_smem) {
  const struct model *model = context;
  return ovl_residency(model->limits, model->launch->threads, model->launch->registers,
                       model->launch->static_smem + dynamic_smem);
}

static int model_clusters(void *context, int dynamic_smem) {
  (void)context;
  (void)dynamic_smem;
  return -1;
}

/* The least dynamic size in (from, to] at which no more than `target` blocks fit, or -1. More
 * shared memory never makes more blocks fit, so bisection finds it. */
static int64_t smallest_for_target(const ovl_oracle *oracle, int64_t from, int64_t to, int target) {
  if (to <= from || oracle->blocks(oracle->context, (int)to) > target)
    return -1;
  while (to - from > 1) {
    int64_t middle = from + (to - from) / 2;
    if (oracle->blocks(oracle->context, (int)middle) > target)
      from = middle;
    else
      to = middle;
  }
  return to;
}

/* As above, asking the model first and the oracle only to confirm: the driver answers for sizes the
 * function's limit has been raised to, and that should not be raised further than needed. */
static int64_t size_for_target(const ovl_device_limits *limits, const ovl_launch *launch,
                               const ovl_oracle *oracle, int target) {
  struct model model = {limits, launch};
  ovl_oracle by_model = {model_blocks, model_clusters, &model};
  int64_t from = launch->dynamic_smem;
  int64_t most = (int64_t)limits->smem_per_block_optin - launch->static_smem;
  int64_t guess = smallest_for_target(&by_model, from, most, target);
  if (guess > from && oracle->blocks(oracle->context, (int)guess) <= target &&
      (guess == from + 1 || oracle->blocks(oracle->context, (int)guess - 1) > target))
    return guess;
  return smallest_for_target(oracle, from, most, target);
}

/* Whether the grid may be launched with that much, as far as that does not depend on its size. */
static int examine(const ovl_device_limits *limits, const ovl_launch *launch,
                   const ovl_oracle *oracle, uint32_t partition_sms, int64_t dynamic, int rule,
                   ovl_candidate *out) {
  if (launch->static_smem + dynamic > limits->smem_per_block_optin)
    return OVL_RULE_OPT_IN_LIMIT;
  int before = launch->natural_blocks;
  int after = min_int(before, oracle->blocks(oracle->context, (int)dynamic));
  if (after < 1)
    return OVL_RULE_NO_EFFECT;
  *out = (ovl_candidate){(int32_t)dynamic, after, (uint32_t)after * partition_sms, rule};
  if (launch->cluster > 1) {
    int clusters = oracle->clusters(oracle->context, (int)dynamic);
    if (clusters < 0 ? after != before : clusters < 1)
      return OVL_RULE_CLUSTER;
    if (clusters >= 0 && (uint32_t)clusters * (uint32_t)launch->cluster < out->capacity)
      out->capacity = (uint32_t)clusters * (uint32_t)launch->cluster;
  }
  return OVL_RULE_COUNT;
}

void ovl_shape_for(const ovl_device_limits *limits, const ovl_launch *launch, const ovl_wish *wish,
                   const ovl_oracle *oracle, uint32_t partition_sms, ovl_shape *out) {
  *out = (ovl_shape){.reason = OVL_RULE_NOTHING_ASKED, .carveout = -1};
  if (wish->included != 1) {
    out->reason = wish->included == 2 ? OVL_RULE_EXCLUDED : OVL_RULE_NOT_INCLUDED;
    return;
  }
  if (wish->carveout >= 0)
    out->carveout = min_int(wish->carveout, 100);
  if (!wish->pad_bytes && wish->max_blocks_per_sm <= 0)
    return;
  int before = launch->natural_blocks;
  if (before < 1) {
    out->reason = OVL_RULE_NO_EFFECT;
    return;
  }
  int64_t sizes[2];
  int rules[2], count = 0;
  if (wish->pad_bytes) {
    sizes[count] = launch->dynamic_smem + (int64_t)wish->pad_bytes;
    rules[count++] = OVL_RULE_PADDED_BYTES;
  }
  if (wish->max_blocks_per_sm > 0) {
    int64_t size = -1;
    if (before <= wish->max_blocks_per_sm)
      out->reason = OVL_RULE_ALREADY_AT_TARGET;
    else {
      size = size_for_target(limits, launch, oracle, wish->max_blocks_per_sm);
      out->reason = OVL_RULE_OPT_IN_LIMIT;
    }
    if (size >= 0) { /* keep the larger first; of two equal ones the target names the reason */
      int at = count && sizes[0] > size ? 1 : 0;
      if (at == 0 && count) {
        sizes[1] = sizes[0];
        rules[1] = rules[0];
      }
      sizes[at] = size;
      rules[at] = OVL_RULE_PADDED_TO_TARGET;
      ++count;
    }
  }
  for (int i = 0; i < count; ++i) {
    int reason = examine(limits, launch, oracle, partition_sms, sizes[i], rules[i],
                         &out->candidates[out->count]);
    if (reason == OVL_RULE_COUNT)
      ++out->count;
    else
      out->reason = reason;
  }
}

void ovl_decide(const ovl_device_limits *limits, const ovl_launch *launch, const ovl_wish *wish,
                ovl_decision *out) {
  *out = (ovl_decision){.dynamic_smem = launch->dynamic_smem, .carveout = -1};
  struct model model = {limits, launch};
  ovl_oracle oracle = {model_blocks, model_clusters, &model};
  ovl_launch facts = *launch;
  if (facts.natural_blocks < 0)
    facts.natural_blocks = model_blocks(&model, launch->dynamic_smem);
  out->blocks_before = out->blocks_after = facts.natural_blocks;
  if (launch->capturing && !wish->shape_captures) {
    out->rule = OVL_RULE_CAPTURE_LEFT_ALONE;
    return;
  }
  if (launch->role == OVL_IGNORED) {
    out->rule = OVL_RULE_IGNORED;
    return;
  }
  if (launch->role == OVL_COMMUNICATION) {
    out->rule = OVL_RULE_COMMUNICATION;
    out->set_priority = wish->comm_priority && !launch->failed_before;
    out->priority = out->set_priority ? limits->priority_greatest : 0;
    return;
  }
  if (launch->cooperative || launch->failed_before) {
    out->rule = launch->cooperative ? OVL_RULE_COOPERATIVE : OVL_RULE_FAILED_BEFORE;
    return;
  }
  ovl_shape shape;
  ovl_shape_for(limits, &facts, wish, &oracle, (uint32_t)limits->sm_count, &shape);
  uint64_t today = (uint64_t)facts.natural_blocks * (uint64_t)limits->sm_count;
  bool resident = launch->blocks <= today;
  if (shape.carveout == 100 || (shape.carveout >= 0 && !resident))
    out->carveout = shape.carveout;
  out->rule = shape.count ? OVL_RULE_KEEPS_GRID_RESIDENT : shape.reason;
  for (int i = 0; i < shape.count; ++i) {
    const ovl_candidate *candidate = &shape.candidates[i];
    if (resident && launch->blocks > candidate->capacity)
      continue;
    out->dynamic_smem = candidate->dynamic_smem;
    out->blocks_after = candidate->blocks;
    out->rule = candidate->rule;
    break;
  }
}
