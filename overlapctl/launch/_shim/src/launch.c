/* The hooks: what happens when the job calls the driver.
 *
 * Without a policy a launch costs one load and a jump. With one, the row of the launch is found,
 * the cached decision for this policy is taken, and the launch goes out changed or not. Nothing
 * here locks, allocates or prints. */
#include "intercept.h"
#include "state.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  MAX_ATTRIBUTES = 60,
  MAX_THREADS = 1024,
  MAX_DYNAMIC = (1 << 20) - 1,
  MAX_CLUSTER_SIDE = 31
};

/* ---- originals ------------------------------------------------------------------------------- */

#define OVL_ENTRY(id, legacy, per_thread, kind, required) static void *original_##id[OVL_FLAVOURS];
#include "entries.def"
#undef OVL_ENTRY

/* ---- state of a thread and of captures ------------------------------------------------------- */

static __thread int thread_role __attribute__((tls_model("initial-exec"))) = OVL_BY_NAME;
static __thread int inside __attribute__((tls_model("initial-exec")));
static __thread int lane __attribute__((tls_model("initial-exec")));
static __thread uint32_t thread_id __attribute__((tls_model("initial-exec")));

static OVL_HOT _Atomic int32_t captures; /* streams being captured, as far as we saw them begin */

int ovl_role_set_thread(int role) {
  int before = thread_role;
  if (role >= OVL_COMPUTE && role <= OVL_BY_NAME)
    thread_role = role;
  return before;
}

static bool is_capturing(CUstream stream, int flavour) {
  int status = 0;
  return ovl_driver.is_capturing[flavour] &&
         ovl_driver.is_capturing[flavour](stream, &status) == CU_OK && status != 0;
}

/* ---- one launch ------------------------------------------------------------------------------ */

enum way { PLAIN, EXTENDED, COOPERATIVE_CALL };

struct request {
  CUfunction function;
  unsigned grid[3], block[3], dynamic_smem;
  CUstream stream;
  void **parameters, **extra;
  const CUlaunchConfig *config; /* EXTENDED: the caller's */
  int way, flavour;
};

struct plan {
  unsigned dynamic_smem;
  int priority, carveout;
  int actions; /* ovl_action */
};

/* The size is an argument of its own so that a padded launch needs no copy of the request. */
static inline CUresult send_plain(const struct request *r, unsigned dynamic_smem) {
  return ((ovl_launch_fn)original_launch[r->flavour])(
      r->function, r->grid[0], r->grid[1], r->grid[2], r->block[0], r->block[1], r->block[2],
      dynamic_smem, r->stream, r->parameters, r->extra);
}

static CUresult send_as_asked(const struct request *r) {
  if (r->way == EXTENDED)
    return ((ovl_launch_ex_fn)original_launch_ex[r->flavour])(r->config, r->function, r->parameters,
                                                              r->extra);
  if (r->way == COOPERATIVE_CALL)
    return ((ovl_coop_fn)original_launch_coop[r->flavour])(
        r->function, r->grid[0], r->grid[1], r->grid[2], r->block[0], r->block[1], r->block[2],
        r->dynamic_smem, r->stream, r->parameters);
  return send_plain(r, r->dynamic_smem);
}

static void set_attribute(CUlaunchAttribute *attributes, unsigned *count, int id, int value) {
  unsigned i = 0;
  while (i < *count && attributes[i].id != id)
    ++i;
  if (i == *count)
    ++*count;
  memset(&attributes[i], 0, sizeof attributes[i]);
  attributes[i].id = id;
  attributes[i].value.number = value;
  for (unsigned j = i + 1; j < *count; ++j) /* said twice: the driver must not meet the old value */
    if (attributes[j].id == id)
      attributes[j].value.number = value;
}

static __attribute__((noinline)) CUresult send_with_attributes(const struct request *r,
                                                               const struct plan *plan) {
  CUlaunchAttribute attributes[MAX_ATTRIBUTES + 2];
  CUlaunchConfig config;
  if (r->config) {
    config = *r->config;
    if (config.numAttrs)
      memcpy(attributes, config.attrs, config.numAttrs * sizeof *attributes);
  } else {
    config = (CUlaunchConfig){.gridDimX = r->grid[0],
                              .gridDimY = r->grid[1],
                              .gridDimZ = r->grid[2],
                              .blockDimX = r->block[0],
                              .blockDimY = r->block[1],
                              .blockDimZ = r->block[2],
                              .hStream = r->stream};
  }
  config.sharedMemBytes = plan->dynamic_smem;
  config.attrs = attributes;
  if (plan->actions & OVL_PRIORITISED)
    set_attribute(attributes, &config.numAttrs, CU_ATTR_PRIORITY, plan->priority);
  if (plan->actions & OVL_CARVED)
    set_attribute(attributes, &config.numAttrs, CU_ATTR_PREFERRED_SHARED_MEMORY_CARVEOUT,
                  plan->carveout);
  return ((ovl_launch_ex_fn)original_launch_ex[r->flavour])(&config, r->function, r->parameters,
                                                            r->extra);
}

static CUresult send(const struct request *r, const struct plan *plan) {
  if (plan->actions & (OVL_PRIORITISED | OVL_CARVED))
    return send_with_attributes(r, plan);
  if (!(plan->actions & OVL_PADDED))
    return send_as_asked(r);
  if (r->way == EXTENDED) {
    CUlaunchConfig config = *r->config;
    config.sharedMemBytes = plan->dynamic_smem;
    return ((ovl_launch_ex_fn)original_launch_ex[r->flavour])(&config, r->function, r->parameters,
                                                              r->extra);
  }
  return send_plain(r, plan->dynamic_smem);
}

/* A changed launch was refused. The caller's own code may have lowered the function's limit since
 * it was raised: raise it and try again. Else launch as asked, and only if the driver takes that is
 * the change to blame. */
static __attribute__((noinline, cold)) CUresult recover(const struct request *r, struct plan *plan,
                                                        struct ovl_function *row) {
  bool raised = false;
  CUfunction resolved = (CUfunction)(uintptr_t)OVL_LOAD(row->resolved);
  if (plan->actions & OVL_PADDED &&
      ovl_function_allow(resolved, (int)plan->dynamic_smem, &raised) && raised &&
      send(r, plan) == CU_OK)
    return CU_OK;
  CUresult result = send_as_asked(r);
  plan->actions &= OVL_CAPTURED;
  plan->dynamic_smem = r->dynamic_smem;
  if (result == CU_OK) {
    OVL_STORE(row->failed, 1);
    OVL_ADD(row->failures, 1);
    plan->actions |= OVL_FAILED;
  }
  return result;
}

struct seen { /* in the attributes of a launch */
  bool cooperative, preferred;
  unsigned cluster[3];
};

static void scan(const CUlaunchConfig *config, struct seen *seen) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute *a = &config->attrs[i];
    if (a->id == CU_ATTR_COOPERATIVE)
      seen->cooperative = a->value.number != 0;
    else if (a->id == CU_ATTR_CLUSTER_DIMENSION) {
      seen->cluster[0] = a->value.cluster.x;
      seen->cluster[1] = a->value.cluster.y;
      seen->cluster[2] = a->value.cluster.z;
    } else if (a->id == CU_ATTR_PREFERRED_CLUSTER_DIMENSION)
      seen->preferred = true;
  }
}

static inline uint64_t word_for(struct ovl_function *row, const struct ovl_interned *policy,
                                int which) {
  uint32_t epoch = OVL_LOAD(row->epoch);
  ovl_word word = {.bits = OVL_LOAD(row->words[policy->identity % OVL_CACHED_POLICIES][which])};
  if (OVL_LIKELY(word.identity == policy->identity && word.epoch == (epoch & 3)))
    return word.bits;
  ovl_word words[2];
  ovl_function_plan(row, policy, epoch, words);
  return words[which].bits;
}

/* The decision for a compute launch: what was cached for its kernel, and its grid. */
static inline int shape(const struct request *r, struct ovl_function *row,
                        const struct ovl_interned *policy, uint64_t blocks, bool can_attribute,
                        struct plan *plan, int *blocks_after) {
  ovl_word word = {.bits = word_for(row, policy, 0)};
  bool resident = blocks <= OVL_LOAD(row->capacity);
  if (OVL_UNLIKELY(word.carveout != OVL_WORD_NO_CARVEOUT) && can_attribute &&
      (word.carveout == 100 || !resident)) {
    plan->carveout = word.carveout;
    plan->actions |= OVL_CARVED;
  }
  if (OVL_UNLIKELY(resident && blocks > word.capacity && word.capacity != UINT16_MAX))
    word.bits = word_for(row, policy, 1);
  if (resident && blocks > word.capacity && word.capacity != UINT16_MAX)
    return OVL_RULE_KEEPS_GRID_RESIDENT;
  if (word.dynamic_smem != r->dynamic_smem) {
    plan->dynamic_smem = word.dynamic_smem;
    plan->actions |= OVL_PADDED;
    *blocks_after = word.blocks;
  }
  return word.rule;
}

static CUresult launch(const struct request *r, const struct ovl_interned *policy) {
  uint64_t threads = (uint64_t)r->block[0] * r->block[1] * r->block[2];
  uint64_t blocks = (uint64_t)r->grid[0] * r->grid[1] * r->grid[2];
  struct seen seen = {.cooperative = r->way == COOPERATIVE_CALL};
  struct ovl_function *row = NULL;
  if (r->config && r->config->numAttrs <= MAX_ATTRIBUTES && r->config->attrs)
    scan(r->config, &seen);
  if (OVL_UNLIKELY(!r->function || !blocks || threads - 1 >= MAX_THREADS ||
                   r->dynamic_smem > MAX_DYNAMIC || inside ||
                   (r->config && r->config->numAttrs &&
                    (r->config->numAttrs > MAX_ATTRIBUTES || !r->config->attrs)) ||
                   (seen.cluster[0] | seen.cluster[1] | seen.cluster[2]) > MAX_CLUSTER_SIDE)) {
    OVL_ADD(ovl_globals.unknown, 1);
    return send_as_asked(r);
  }
  /* Queries and the launch itself may call back into an entry: that call passes through. */
  inside = 1;
  row = ovl_function_find(
      r->function, (uint32_t)threads, r->dynamic_smem,
      ovl_cluster_key(seen.cluster[0], seen.cluster[1], seen.cluster[2], seen.preferred));
  if (OVL_UNLIKELY(!row)) {
    CUresult result = send_as_asked(r);
    OVL_ADD(ovl_globals.unknown, 1);
    inside = 0;
    return result;
  }
  int role = thread_role;
  if (role == OVL_BY_NAME && OVL_UNLIKELY(OVL_LOAD(ovl_stream_roles)))
    role = ovl_role_of_stream(r->stream);
  if (role == OVL_BY_NAME)
    role = OVL_LOAD(row->role);

  struct plan plan = {.dynamic_smem = r->dynamic_smem};
  int rule, blocks_after = OVL_LOAD(row->blocks);
  bool can_attribute = r->way != COOPERATIVE_CALL && original_launch_ex[r->flavour];
  /* Captures that began before we were attached are not counted: to leave captures alone, ask. */
  if (OVL_UNLIKELY(OVL_LOAD(captures) > 0 || !policy->policy.shape_captures) &&
      is_capturing(r->stream, r->flavour))
    plan.actions = OVL_CAPTURED;
  bool known = OVL_LOAD(row->known);
  if (plan.actions && !policy->policy.shape_captures) {
    rule = OVL_RULE_CAPTURE_LEFT_ALONE;
  } else if (role == OVL_COMMUNICATION) {
    rule = OVL_RULE_COMMUNICATION;
    if (policy->policy.comm_priority && can_attribute && known && !OVL_LOAD(row->failed)) {
      plan.priority = OVL_LOAD(row->priority_greatest);
      plan.actions |= OVL_PRIORITISED;
    }
  } else if (role == OVL_IGNORED) {
    rule = OVL_RULE_IGNORED;
  } else if (OVL_UNLIKELY(seen.cooperative)) {
    rule = OVL_RULE_COOPERATIVE;
  } else if (OVL_UNLIKELY(OVL_LOAD(row->failed))) {
    rule = OVL_RULE_FAILED_BEFORE;
  } else {
    rule = shape(r, row, policy, blocks, can_attribute, &plan, &blocks_after);
  }
  if (OVL_UNLIKELY(!known))
    OVL_ADD(ovl_globals.unknown_rows, 1);
  if (OVL_UNLIKELY(seen.cooperative))
    OVL_ADD(ovl_globals.cooperative, 1);

  CUresult result = send(r, &plan);
  if (OVL_UNLIKELY(result != CU_OK) && plan.actions & (OVL_PADDED | OVL_PRIORITISED | OVL_CARVED)) {
    result = recover(r, &plan, row);
    if (!(plan.actions & OVL_PADDED)) {
      blocks_after = OVL_LOAD(row->blocks);
      if (role == OVL_COMPUTE)
        rule = OVL_RULE_FAILED_BEFORE;
    }
  }

  if (OVL_UNLIKELY(!thread_id)) {
    thread_id = (uint32_t)syscall(SYS_gettid);
    lane = ovl_lane_take(thread_id);
  }
  ovl_count(lane, OVL_LOAD(row->place), plan.actions);
  ovl_last last = {0};
  last.dynamic_smem = plan.dynamic_smem & 0xffffff;
  last.blocks = (unsigned)blocks_after & 255;
  last.rule = (unsigned)rule & 255;
  last.role = (unsigned)role & 255;
  if (OVL_UNLIKELY(OVL_LOAD(row->last) != last.bits)) /* else the line stays shared */
    OVL_STORE(row->last, last.bits);
  if (OVL_UNLIKELY(OVL_LOAD(ovl_listeners)))
    ovl_record_write(
        (uint64_t)(uintptr_t)r->function, (uint64_t)(uintptr_t)r->stream, blocks,
        ovl_pair(thread_id, (uint32_t)threads), ovl_pair(r->dynamic_smem, plan.dynamic_smem),
        ovl_pair((uint32_t)result, ((uint32_t)OVL_LOAD(row->cluster) & 0xffff) |
                                       ((uint32_t)role & 255) << 16 | (uint32_t)rule << 24),
        (uint64_t)plan.actions);
  inside = 0;
  return result;
}

/* ---- hooks, one function per kind; each flavour gets its own
 * -------------------------------------- */

static inline const struct ovl_interned *active(void) {
  return atomic_load_explicit(&ovl_active, memory_order_relaxed);
}

#define ARGUMENTS                                                                                  \
  CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,      \
      unsigned smem, CUstream stream, void **parameters

#define LAUNCH(id, flavour, name)                                                                  \
  static __attribute__((noinline)) CUresult name##_on(ARGUMENTS, void **extra) {                   \
    const struct ovl_interned *policy = atomic_load_explicit(&ovl_active, memory_order_acquire);   \
    struct request r = {f,          {gx, gy, gz}, {bx, by, bz}, smem,  stream,                     \
                        parameters, extra,        NULL,         PLAIN, flavour};                   \
    return policy ? launch(&r, policy) : send_as_asked(&r);                                        \
  }                                                                                                \
  static CUresult name(ARGUMENTS, void **extra) {                                                  \
    if (OVL_LIKELY(!active()))                                                                     \
      return ((ovl_launch_fn)original_##id[flavour])(f, gx, gy, gz, bx, by, bz, smem, stream,      \
                                                     parameters, extra);                           \
    return name##_on(f, gx, gy, gz, bx, by, bz, smem, stream, parameters, extra);                  \
  }

#define LAUNCH_EX(id, flavour, name)                                                               \
  static __attribute__((noinline)) CUresult name##_on(const CUlaunchConfig *c, CUfunction f,       \
                                                      void **parameters, void **extra) {           \
    const struct ovl_interned *policy = atomic_load_explicit(&ovl_active, memory_order_acquire);   \
    if (!policy || !c)                                                                             \
      return ((ovl_launch_ex_fn)original_##id[flavour])(c, f, parameters, extra);                  \
    struct request r = {f,                                                                         \
                        {c->gridDimX, c->gridDimY, c->gridDimZ},                                   \
                        {c->blockDimX, c->blockDimY, c->blockDimZ},                                \
                        c->sharedMemBytes,                                                         \
                        c->hStream,                                                                \
                        parameters,                                                                \
                        extra,                                                                     \
                        c,                                                                         \
                        EXTENDED,                                                                  \
                        flavour};                                                                  \
    return launch(&r, policy);                                                                     \
  }                                                                                                \
  static CUresult name(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra) {   \
    if (OVL_LIKELY(!active()))                                                                     \
      return ((ovl_launch_ex_fn)original_##id[flavour])(c, f, parameters, extra);                  \
    return name##_on(c, f, parameters, extra);                                                     \
  }

#define COOP(id, flavour, name)                                                                    \
  static CUresult name(ARGUMENTS) {                                                                \
    const struct ovl_interned *policy = atomic_load_explicit(&ovl_active, memory_order_acquire);   \
    struct request r = {f,    {gx, gy, gz}, {bx, by, bz},     smem,   stream, parameters,          \
                        NULL, NULL,         COOPERATIVE_CALL, flavour};                            \
    return policy ? launch(&r, policy) : send_as_asked(&r);                                        \
  }

/* Handles may be given to other kernels from now on. */
#define UNLOAD(id, flavour, name)                                                                  \
  static CUresult name(void *handle) {                                                             \
    CUresult result = ((ovl_unload_fn)original_##id[flavour])(handle);                             \
    ovl_functions_forget();                                                                        \
    return result;                                                                                 \
  }

#define CAPTURE_BEGIN(id, flavour, name)                                                           \
  static CUresult name(CUstream stream, int mode) {                                                \
    CUresult result = ((ovl_capture_begin_fn)original_##id[flavour])(stream, mode);                \
    if (result == CU_OK)                                                                           \
      OVL_ADD(captures, 1);                                                                        \
    return result;                                                                                 \
  }

#define CAPTURE_TO_GRAPH(id, flavour, name)                                                        \
  static CUresult name(CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *data, \
                       size_t count, int mode) {                                                   \
    CUresult result = ((ovl_capture_to_graph_fn)original_##id[flavour])(stream, graph, nodes,      \
                                                                        data, count, mode);        \
    if (result == CU_OK)                                                                           \
      OVL_ADD(captures, 1);                                                                        \
    return result;                                                                                 \
  }

/* Ending may fail and leave the capture going (wrong thread), or fail and end it (invalidated). */
#define CAPTURE_END(id, flavour, name)                                                             \
  static CUresult name(CUstream stream, CUgraph *graph) {                                          \
    bool was = is_capturing(stream, flavour);                                                      \
    CUresult result = ((ovl_capture_end_fn)original_##id[flavour])(stream, graph);                 \
    if ((result == CU_OK || was) && !is_capturing(stream, flavour)) {                              \
      int32_t now = OVL_LOAD(captures);                                                            \
      while (now > 0 && !atomic_compare_exchange_weak(&captures, &now, now - 1))                   \
        ;                                                                                          \
    }                                                                                              \
    return result;                                                                                 \
  }

#define GRAPH(id, flavour, name)                                                                   \
  static CUresult name(CUgraphExec graph, CUstream stream) {                                       \
    if (active())                                                                                  \
      OVL_ADD(ovl_globals.graph_launches, 1);                                                      \
    return ((ovl_graph_fn)original_##id[flavour])(graph, stream);                                  \
  }

/* Grids on a partition have fewer SMs than the device tells: from now on no pad may end the
 * residency of a grid there. */
#define PARTITION(id, flavour, name)                                                               \
  static CUresult name(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device,          \
                       unsigned flags) {                                                           \
    CUresult result =                                                                              \
        ((ovl_partition_fn)original_##id[flavour])(context, resources, device, flags);             \
    if (result == CU_OK && context)                                                                \
      note_partition(*context);                                                                    \
    return result;                                                                                 \
  }

static void note_partition(CUgreenCtx context) {
  CUdevResource resource;
  memset(&resource, 0, sizeof resource);
  int32_t granted = 1; /* not told: as few as can be */
  if (ovl_driver.green_resource &&
      ovl_driver.green_resource(context, &resource, CU_RESOURCE_TYPE_SM) == CU_OK &&
      resource.sm_count > 0)
    granted = (int32_t)resource.sm_count;
  int32_t now = OVL_LOAD(ovl_smallest_partition);
  while (granted < now && !atomic_compare_exchange_weak(&ovl_smallest_partition, &now, granted))
    ;
  ovl_functions_forget();
}

/* Kinds that take no stream have no per-thread-stream twin. */
#define TWIN_LAUNCH(...) __VA_ARGS__
#define TWIN_LAUNCH_EX(...) __VA_ARGS__
#define TWIN_COOP(...) __VA_ARGS__
#define TWIN_UNLOAD(...)
#define TWIN_CAPTURE_BEGIN(...) __VA_ARGS__
#define TWIN_CAPTURE_TO_GRAPH(...) __VA_ARGS__
#define TWIN_CAPTURE_END(...) __VA_ARGS__
#define TWIN_GRAPH(...) __VA_ARGS__
#define TWIN_PARTITION(...)

#define OVL_ENTRY(id, legacy, per_thread, kind, required)                                          \
  kind(id, 0, hook_##id) TWIN_##kind(kind(id, 1, hook_##id##_ptsz))
#include "entries.def"
#undef OVL_ENTRY

#define OVL_ENTRY(id, legacy, per_thread, kind, required)                                          \
  {legacy, (void *)hook_##id, &original_##id[0], required, OVL_KIND_##kind},                       \
      TWIN_##kind(                                                                                 \
          {per_thread, (void *)hook_##id##_ptsz, &original_##id[1], required, OVL_KIND_##kind}, )
const struct ovl_entry ovl_entries[] = {
#include "entries.def"
};
#undef OVL_ENTRY
const size_t ovl_entry_count = sizeof ovl_entries / sizeof *ovl_entries;

void ovl_launch_after_fork(void) {
  OVL_STORE(captures, 0);
  inside = 0;
  thread_id = 0;
}
