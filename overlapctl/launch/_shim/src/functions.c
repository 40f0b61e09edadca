/* The table of launches seen: one row per (function, block size, dynamic size, cluster).
 *
 * Open addressing in static storage. A row is claimed word by word with compare-and-swap and never
 * given back, so every thread probing for one key ends at the same row without a lock. Facts are
 * gathered by whoever finds them missing; threads that race gather the same values. */
#include "state.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PROBES = 512 }; /* bounds what a launch costs that finds no room */

static struct ovl_function rows[OVL_SLOTS];
/* Rows by place, as index + 1 (0: not, or not yet, taken), so that reading counters does not walk
 * the whole table. */
static _Atomic uint32_t order[OVL_SLOTS + 1];
static _Atomic uint32_t places;

_Alignas(64) OVL_HOT _Atomic uint32_t ovl_epoch = 1;

/* ---- counting -------------------------------------------------------------------------------- */

_Atomic uint64_t ovl_lanes[OVL_LANES][OVL_SLOTS + 1][OVL_COUNTS];
static _Atomic uint32_t lane_owner[OVL_LANES]; /* thread ids */

static bool is_gone(uint32_t thread_id) {
  int saved = errno;
  bool gone = syscall(SYS_tgkill, getpid(), thread_id, 0) != 0 && errno == ESRCH;
  errno = saved;
  return gone;
}

/* A thread keeps its lane until it ends; the next owner counts on from there. */
int ovl_lane_take(uint32_t thread_id) {
  for (int lane = 1; lane < OVL_LANES; ++lane) {
    uint32_t owner = OVL_LOAD(lane_owner[lane]);
    if ((owner == 0 || owner == thread_id || is_gone(owner)) &&
        atomic_compare_exchange_strong(&lane_owner[lane], &owner, thread_id))
      return lane;
  }
  return 0;
}

static uint64_t count_of(const struct ovl_function *row, int actions) {
  uint32_t place = OVL_LOAD(row->place);
  uint64_t sum = OVL_LOAD(ovl_lanes[0][place][actions]);
  for (int lane = 1; lane < OVL_LANES && OVL_LOAD(lane_owner[lane]); ++lane)
    sum += OVL_LOAD(ovl_lanes[lane][place][actions]);
  return sum;
}

static uint64_t counted(const struct ovl_function *row, int actions) {
  return count_of(row, actions) - OVL_LOAD(row->forgotten[actions]);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define KEY_VALID (1ull << 63)

static unsigned cluster_side(uint64_t key, int axis) {
  return (key >> (31 + 5 * axis)) & 31;
}

/* The word is ours if it was free or equal. */
static inline bool claim(_Atomic uint64_t *word, uint64_t value) {
  uint64_t now = atomic_load_explicit(word, memory_order_acquire);
  if (OVL_LIKELY(now == value))
    return true;
  if (now)
    return false;
  return atomic_compare_exchange_strong_explicit(word, &now, value, memory_order_acq_rel,
                                                 memory_order_acquire) ||
         now == value;
}

/* Whoever meets a row without a place gives it one: the thread that claimed it may be held up, or
 * left behind by a fork. A place that lost the race stays empty. */
static bool has_place(struct ovl_function *row) {
  if (OVL_LOAD(row->place))
    return true;
  if (OVL_LOAD(places) >= OVL_SLOTS)
    return false;
  uint32_t place = OVL_ADD(places, 1) + 1, none = 0;
  if (place > OVL_SLOTS)
    return OVL_LOAD(row->place) != 0;
  if (atomic_compare_exchange_strong(&row->place, &none, place))
    atomic_store_explicit(&order[place], (uint32_t)(row - rows) + 1, memory_order_release);
  return true;
}

static void gather(struct ovl_function *row, CUfunction function, uint64_t key, uint32_t epoch);

struct ovl_function *ovl_function_find(CUfunction function, uint32_t threads, uint32_t dynamic_smem,
                                       uint64_t cluster) {
  uint64_t handle = (uint64_t)(uintptr_t)function;
  uint64_t key = KEY_VALID | threads | (uint64_t)dynamic_smem << 11 | cluster;
  uint64_t hash = (handle ^ key * 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull;
  uint32_t at = (uint32_t)(hash >> 40);
  for (uint32_t probe = 0; probe < PROBES; ++probe) {
    struct ovl_function *row = &rows[(at + probe) % OVL_SLOTS];
    if (!claim(&row->key[0], handle) || !claim(&row->key[1], key))
      continue;
    uint32_t epoch = atomic_load_explicit(&ovl_epoch, memory_order_acquire);
    if (OVL_UNLIKELY(atomic_load_explicit(&row->epoch, memory_order_acquire) != epoch)) {
      if (!has_place(row))
        return NULL;
      gather(row, function, key, epoch);
    }
    return row;
  }
  return NULL;
}

static void read_name(const struct ovl_function *row, char name[OVL_NAME_BYTES]) {
  for (int i = 0; i < OVL_NAME_BYTES / 8; ++i) {
    uint64_t part = OVL_LOAD(row->name[i]);
    memcpy(name + 8 * i, &part, 8);
  }
  name[OVL_NAME_BYTES - 1] = 0;
}

/* Another kernel may have taken over the handle: what was counted for the old one is kept apart. */
static void store_name(struct ovl_function *row, const char *name) {
  char before[OVL_NAME_BYTES], after[OVL_NAME_BYTES] = {0};
  read_name(row, before);
  strncpy(after, name, OVL_NAME_BYTES - 1);
  if (*before && strcmp(before, after)) {
    for (int i = 0; i < OVL_COUNTS; ++i) {
      uint64_t now = count_of(row, i);
      uint64_t old = atomic_exchange_explicit(&row->forgotten[i], now, memory_order_relaxed);
      OVL_ADD(ovl_globals.retired[i], now - old);
    }
    OVL_ADD(ovl_globals.retired_failures,
            atomic_exchange_explicit(&row->failures, 0, memory_order_relaxed));
    OVL_STORE(row->failed, 0);
  }
  for (int i = 0; i < OVL_NAME_BYTES / 8; ++i) {
    uint64_t part;
    memcpy(&part, after + 8 * i, 8);
    OVL_STORE(row->name[i], part);
  }
}

/* ---- occupancy, asked of the driver ---------------------------------------------------------- */

struct live {
  CUfunction resolved;
  uint64_t key;
  ovl_device_limits limits;
  int registers, static_smem, asked;
};

static atomic_flag raising = ATOMIC_FLAG_INIT;

static int dynamic_limit(CUfunction resolved) {
  int now = -1;
  if (!ovl_driver.func_get_attribute || !ovl_driver.func_set_attribute ||
      ovl_driver.func_get_attribute(&now, CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, resolved) != CU_OK)
    return -1;
  return now;
}

/* Reading and raising are two calls: threads that raise the same limit take turns, or the smaller
 * value could come last. The wait is bounded because the holder is inside the driver, which may in
 * turn wait for this thread. */
bool ovl_function_allow(CUfunction resolved, int dynamic_smem, bool *raised) {
  int now = dynamic_limit(resolved);
  *raised = false;
  if (now < 0 || now >= dynamic_smem)
    return now >= 0;
  bool mine = false;
  for (int i = 0; i < 2000 && !mine; ++i) { /* 0.2 s at least: the holder may not be running */
    mine = !atomic_flag_test_and_set_explicit(&raising, memory_order_acquire);
    if (!mine)
      nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
  }
  now = dynamic_limit(resolved);
  if (now < dynamic_smem)
    *raised =
        now >= 0 && ovl_driver.func_set_attribute(resolved, CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                  dynamic_smem) == CU_OK;
  if (mine)
    atomic_flag_clear_explicit(&raising, memory_order_release);
  return now >= dynamic_smem || *raised;
}

/* The query counts no block beyond the function's own limit, so that is raised first. */
static int live_blocks(void *context, int dynamic_smem) {
  const struct live *live = context;
  int threads = (int)ovl_key_threads(live->key), blocks = 0;
  int model =
      ovl_residency(&live->limits, threads, live->registers, live->static_smem + dynamic_smem);
  bool raised;
  if (!ovl_driver.max_blocks)
    return model;
  if (dynamic_smem > live->asked && !ovl_function_allow(live->resolved, dynamic_smem, &raised))
    return 0;
  if (ovl_driver.max_blocks(&blocks, live->resolved, threads, (size_t)dynamic_smem) != CU_OK)
    return model;
  return blocks;
}

static int live_clusters(void *context, int dynamic_smem) {
  const struct live *live = context;
  bool raised;
  if (!ovl_driver.max_clusters || live->key & OVL_KEY_PREFERRED)
    return -1;
  if (dynamic_smem > live->asked && !ovl_function_allow(live->resolved, dynamic_smem, &raised))
    return 0;
  unsigned x = cluster_side(live->key, 0), y = cluster_side(live->key, 1),
           z = cluster_side(live->key, 2);
  CUlaunchAttribute attribute = {.id = CU_ATTR_CLUSTER_DIMENSION};
  attribute.value.cluster.x = x;
  attribute.value.cluster.y = y;
  attribute.value.cluster.z = z;
  CUlaunchConfig config = {.gridDimX = x,
                           .gridDimY = y,
                           .gridDimZ = z,
                           .blockDimX = ovl_key_threads(live->key),
                           .blockDimY = 1,
                           .blockDimZ = 1,
                           .sharedMemBytes = (unsigned)dynamic_smem};
  /* Dimensions fixed at compile time need no attribute. */
  if (x) {
    config.attrs = &attribute;
    config.numAttrs = 1;
  } else {
    return -1;
  }
  int clusters = 0;
  return ovl_driver.max_clusters(&clusters, live->resolved, &config) == CU_OK ? clusters : -1;
}

static void live_of(const struct ovl_function *row, struct live *live) {
  live->resolved = (CUfunction)(uintptr_t)OVL_LOAD(row->resolved);
  live->key = OVL_LOAD(row->key[1]);
  live->registers = OVL_LOAD(row->registers);
  live->static_smem = OVL_LOAD(row->static_smem);
  live->asked = (int)ovl_key_dynamic(live->key);
}

static uint32_t capped(uint64_t blocks) {
  return blocks > UINT16_MAX ? UINT16_MAX : (uint32_t)blocks;
}

static uint32_t partition_sms(const ovl_device_limits *limits) {
  int32_t smallest = OVL_LOAD(ovl_smallest_partition);
  return (uint32_t)(smallest < limits->sm_count ? smallest : limits->sm_count);
}

/* ---- facts ----------------------------------------------------------------------------------- */

static int fact(CUfunction function, int attribute) {
  int value = 0;
  return ovl_driver.func_get_attribute(&value, attribute, function) == CU_OK ? value : -1;
}

static void gather(struct ovl_function *row, CUfunction function, uint64_t key, uint32_t epoch) {
  struct live live = {.resolved = function, .key = key, .asked = (int)ovl_key_dynamic(key)};
  CUfunction resolved = function;
  const char *name = NULL;
  bool known = false;
  if (ovl_driver.func_get_attribute) {
    int registers = fact(function, CU_FUNC_NUM_REGS);
    /* A CUkernel passed where a CUfunction is expected: launches take both, queries do not. */
    if (registers < 0 && ovl_driver.kernel_get_function &&
        ovl_driver.kernel_get_function(&resolved, (CUkernel)(void *)function) == CU_OK)
      registers = fact(resolved, CU_FUNC_NUM_REGS);
    live.resolved = resolved;
    live.registers = registers;
    live.static_smem = fact(resolved, CU_FUNC_SHARED_SIZE_BYTES);
    known = registers >= 0 && live.static_smem >= 0 && ovl_device_now(&live.limits);
    if (!ovl_driver.func_get_name || ovl_driver.func_get_name(&name, resolved) != CU_OK || !name)
      name = "";
  }
  int blocks = 0, cluster = 1;
  if (known) {
    blocks = live_blocks(&live, live.asked);
    cluster = (int)(cluster_side(key, 0) * cluster_side(key, 1) * cluster_side(key, 2));
    if (cluster < 1) {
      int x = fact(resolved, CU_FUNC_REQUIRED_CLUSTER_WIDTH);
      int y = fact(resolved, CU_FUNC_REQUIRED_CLUSTER_HEIGHT);
      int z = fact(resolved, CU_FUNC_REQUIRED_CLUSTER_DEPTH);
      cluster = (x > 1 ? x : 1) * (y > 1 ? y : 1) * (z > 1 ? z : 1);
    }
  }
  uint64_t capacity = (uint64_t)(blocks > 0 ? blocks : 0) * (uint64_t)live.limits.sm_count;
  int clusters = known && cluster > 1 ? live_clusters(&live, live.asked) : -1;
  if (clusters >= 0)
    capacity = (uint64_t)clusters * (uint64_t)cluster;
  store_name(row, name ? name : "");
  OVL_STORE(row->resolved, (uint64_t)(uintptr_t)resolved);
  OVL_STORE(row->registers, live.registers);
  OVL_STORE(row->static_smem, live.static_smem);
  OVL_STORE(row->blocks, blocks);
  OVL_STORE(row->cluster, cluster);
  OVL_STORE(row->capacity, (uint32_t)(capacity > UINT32_MAX ? UINT32_MAX : capacity));
  OVL_STORE(row->priority_greatest, live.limits.priority_greatest);
  OVL_STORE(row->role, ovl_role_of_name(name ? name : ""));
  OVL_STORE(row->known, known);
  for (int i = 0; i < OVL_CACHED_POLICIES; ++i)
    for (int j = 0; j < 2; ++j)
      OVL_STORE(row->words[i][j], 0);
  atomic_store_explicit(&row->epoch, epoch, memory_order_release);
}

void ovl_function_plan(struct ovl_function *row, const struct ovl_interned *policy, uint32_t epoch,
                       ovl_word words[2]) {
  struct live live = {0};
  char name[OVL_NAME_BYTES];
  ovl_wish wish;
  ovl_shape shape = {.reason = OVL_RULE_FACTS_UNKNOWN, .carveout = -1};
  live_of(row, &live);
  read_name(row, name);
  ovl_wish_for(&policy->policy, name, &wish);
  if (OVL_LOAD(row->known) && ovl_device_now(&live.limits)) {
    ovl_launch launch = {.threads = (int32_t)ovl_key_threads(live.key),
                         .registers = live.registers,
                         .static_smem = live.static_smem,
                         .dynamic_smem = live.asked,
                         .cluster = OVL_LOAD(row->cluster),
                         .natural_blocks = OVL_LOAD(row->blocks)};
    ovl_oracle oracle = {live_blocks, live_clusters, &live};
    ovl_shape_for(&live.limits, &launch, &wish, &oracle, partition_sms(&live.limits), &shape);
  }
  for (int i = 0; i < 2; ++i) {
    ovl_word word = {0};
    word.identity = policy->identity;
    word.epoch = epoch & 3;
    word.carveout = shape.carveout < 0 ? OVL_WORD_NO_CARVEOUT : (unsigned)shape.carveout & 127;
    bool raised = false;
    const ovl_candidate *candidate = &shape.candidates[i];
    if (i < shape.count && candidate->dynamic_smem < 1 << 18 && candidate->blocks < 64 &&
        ovl_function_allow(live.resolved, candidate->dynamic_smem, &raised)) {
      word.rule = (unsigned)candidate->rule & 15;
      word.dynamic_smem = (unsigned)candidate->dynamic_smem & 0x3ffff;
      word.blocks = (unsigned)candidate->blocks & 63;
      word.capacity = capped(candidate->capacity);
    } else { /* no pad: of any size, hence no capacity lost */
      word.rule = (unsigned)(i < shape.count   ? OVL_RULE_OPT_IN_LIMIT
                             : shape.count > 0 ? OVL_RULE_KEEPS_GRID_RESIDENT
                                               : shape.reason) &
                  15;
      word.dynamic_smem = (unsigned)live.asked & 0x3ffff;
      word.capacity = UINT16_MAX;
    }
    words[i] = word;
  }
  _Atomic uint64_t *cached = row->words[policy->identity % OVL_CACHED_POLICIES];
  OVL_STORE(cached[0], words[0].bits);
  OVL_STORE(cached[1], words[1].bits);
  /* Two bits of the epoch are kept: after four more, words worked out for this one would pass. */
  if (atomic_load(&row->epoch) != epoch) {
    OVL_STORE(cached[0], 0);
    OVL_STORE(cached[1], 0);
  }
}

void ovl_functions_forget(void) {
  atomic_fetch_add_explicit(&ovl_epoch, 1, memory_order_acq_rel);
}

/* ---- reading --------------------------------------------------------------------------------- */

static uint32_t place_count(void) {
  uint32_t count = OVL_LOAD(places);
  return count < OVL_SLOTS ? count : OVL_SLOTS;
}

static struct ovl_function *row_at(uint32_t place) {
  uint32_t index = atomic_load_explicit(&order[place], memory_order_acquire);
  return index ? &rows[index - 1] : NULL;
}

static void totals(uint64_t count, int actions, ovl_counters *out) {
  out->launches += count;
  out->shaped += actions & OVL_PADDED ? count : 0;
  out->prioritised += actions & OVL_PRIORITISED ? count : 0;
  out->carved += actions & OVL_CARVED ? count : 0;
  out->captured += actions & OVL_CAPTURED ? count : 0;
}

void ovl_counters_read(ovl_counters *out) {
  if (!out)
    return;
  *out = (ovl_counters){.cooperative = OVL_LOAD(ovl_globals.cooperative),
                        .graph_launches = OVL_LOAD(ovl_globals.graph_launches)};
  uint64_t unknown = OVL_LOAD(ovl_globals.unknown);
  out->unknown = unknown + OVL_LOAD(ovl_globals.unknown_rows);
  out->launches = unknown;
  out->failed = OVL_LOAD(ovl_globals.retired_failures);
  for (int i = 0; i < OVL_COUNTS; ++i)
    totals(OVL_LOAD(ovl_globals.retired[i]), i, out);
  for (uint32_t i = 1, last = place_count(); i <= last; ++i) {
    const struct ovl_function *row = row_at(i);
    for (int j = 0; row && j < OVL_COUNTS; ++j)
      totals(counted(row, j), j, out);
    out->failed += row ? OVL_LOAD(row->failures) : 0;
  }
  out->dropped_records = ovl_records_dropped();
}

size_t ovl_kernel_rows(ovl_kernel_row *out, size_t capacity) {
  size_t found = 0;
  for (uint32_t i = 1, end = place_count(); i <= end; ++i) {
    const struct ovl_function *row = row_at(i);
    ovl_counters sums = {0};
    for (int j = 0; row && j < OVL_COUNTS; ++j)
      totals(counted(row, j), j, &sums);
    if (!sums.launches)
      continue;
    if (out && found < capacity) {
      ovl_last last = {.bits = OVL_LOAD(row->last)};
      uint64_t key = OVL_LOAD(row->key[1]);
      ovl_kernel_row *to = &out[found];
      *to = (ovl_kernel_row){.function = OVL_LOAD(row->key[0]),
                             .launches = sums.launches,
                             .shaped = sums.shaped,
                             .prioritised = sums.prioritised,
                             .carved = sums.carved,
                             .failed = OVL_LOAD(row->failures),
                             .captured = sums.captured,
                             .role = (int32_t)last.role,
                             .threads = (int32_t)ovl_key_threads(key),
                             .registers = OVL_LOAD(row->registers),
                             .static_smem = OVL_LOAD(row->static_smem),
                             .before = (int32_t)ovl_key_dynamic(key),
                             .after = (int32_t)last.dynamic_smem,
                             .blocks_before = OVL_LOAD(row->blocks),
                             .blocks_after = (int32_t)last.blocks,
                             .rule = (int32_t)last.rule};
      read_name(row, to->name);
    }
    ++found;
  }
  return found;
}

void ovl_functions_reset(void) {
  for (uint32_t i = 1, last = place_count(); i <= last; ++i) {
    struct ovl_function *row = row_at(i);
    if (!row)
      continue;
    for (int j = 0; j < OVL_COUNTS; ++j)
      OVL_STORE(row->forgotten[j], count_of(row, j));
    OVL_STORE(row->failures, 0);
  }
}

void ovl_functions_after_fork(void) {
  atomic_flag_clear(&raising);
  ovl_functions_reset();
}
