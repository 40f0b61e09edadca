/* What the parts of the shim's core share. Nothing here is called from outside the library. */
#ifndef OVERLAPCTL_STATE_H
#define OVERLAPCTL_STATE_H

#include "driver_api.h"
#include "overlapctl_shim.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Also for declarations, which -fvisibility leaves out: else each use goes through a table. */
#pragma GCC visibility push(hidden)

#define OVL_LIKELY(x) __builtin_expect(!!(x), 1)
#define OVL_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define OVL_LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define OVL_STORE(x, v) atomic_store_explicit(&(x), (v), memory_order_relaxed)
#define OVL_ADD(x, v) atomic_fetch_add_explicit(&(x), (v), memory_order_relaxed)

/* Read on every launch: kept together, so that they share one or two cache lines. */
#define OVL_HOT __attribute__((section("ovl_hot")))

enum { OVL_FLAVOURS = 2 }; /* 0: legacy default stream, 1: per-thread default stream (_ptsz) */

enum ovl_action {
  OVL_PADDED = 1,
  OVL_PRIORITISED = 2,
  OVL_CARVED = 4,
  OVL_CAPTURED = 8,
  OVL_FAILED = 16
};

/* ---- driver.c: the driver calls the core makes, and the devices' limits ---------------------- */

struct ovl_driver {
  CUresult (*func_get_attribute)(int *, int, CUfunction);
  CUresult (*func_set_attribute)(CUfunction, int, int);
  CUresult (*func_get_name)(const char **, CUfunction);
  CUresult (*kernel_get_function)(CUfunction *, CUkernel);
  CUresult (*ctx_get_device)(CUdevice *);
  CUresult (*device_get_attribute)(int *, int, CUdevice);
  CUresult (*max_blocks)(int *, CUfunction, int, size_t);
  CUresult (*max_clusters)(int *, CUfunction, const CUlaunchConfig *);
  CUresult (*priority_range)(int *, int *);
  CUresult (*is_capturing[OVL_FLAVOURS])(CUstream, int *);
  CUresult (*green_resource)(CUgreenCtx, CUdevResource *, int);
};

extern struct ovl_driver ovl_driver;
/* Smallest SM count granted to a green context so far, or INT32_MAX. */
extern _Atomic int32_t ovl_smallest_partition;

/* Limits of the device of the calling thread's context; false if the driver does not tell. */
bool ovl_device_now(ovl_device_limits *limits);

/* ---- decide.c -------------------------------------------------------------------------------- */

/* How many blocks per SM (clusters on the device) fit with this much dynamic shared memory. */
typedef struct ovl_oracle {
  int (*blocks)(void *context, int dynamic_smem);
  int (*clusters)(void *context, int dynamic_smem); /* -1: not known */
  void *context;
} ovl_oracle;

typedef struct ovl_candidate {
  int32_t dynamic_smem, blocks;
  uint32_t capacity; /* blocks of the grid resident at once, at least */
  int32_t rule;
} ovl_candidate;

/* Everything about a launch's pad that does not depend on its grid. */
typedef struct ovl_shape {
  ovl_candidate candidates[2]; /* larger pad first */
  int32_t count;
  int32_t reason;   /* why there is no candidate (count 0) */
  int32_t carveout; /* percent, -1: leave */
} ovl_shape;

void ovl_shape_for(const ovl_device_limits *limits, const ovl_launch *launch, const ovl_wish *wish,
                   const ovl_oracle *oracle, uint32_t partition_sms, ovl_shape *out);

/* ---- policy.c -------------------------------------------------------------------------------- */

enum { OVL_MAX_POLICIES = 1024 };

struct ovl_interned {
  uint32_t identity; /* 1 ... OVL_MAX_POLICIES */
  ovl_policy policy; /* strings point into the same allocation */
};

extern _Atomic(const struct ovl_interned *) ovl_active;

void ovl_wish_for(const ovl_policy *policy, const char *name, ovl_wish *wish);
void ovl_policy_after_fork(void);

/* ---- roles.c --------------------------------------------------------------------------------- */

extern _Atomic uint32_t ovl_stream_roles; /* entries in the stream table; 0: skip the look-up */
int ovl_role_of_stream(CUstream stream);  /* OVL_BY_NAME if none */
void ovl_roles_after_fork(void);

/* ---- functions.c: the table of (function, block size, dynamic size, cluster) ----------------- */

enum { OVL_SLOTS = 16384, OVL_CACHED_POLICIES = 4, OVL_NAME_BYTES = 256, OVL_COUNTS = 16 };

/* A decision in one word, valid for one policy and one epoch of the table. */
typedef union ovl_word {
  uint64_t bits;
  struct {
    uint64_t identity : 11, epoch : 2, rule : 4, carveout : 7, blocks : 6, capacity : 16,
        dynamic_smem : 18;
  };
} ovl_word;

enum { OVL_WORD_NO_CARVEOUT = 127 };

struct ovl_function {
  /* read on every launch: one cache line, and the words */
  _Alignas(64) _Atomic uint64_t key[2];
  _Atomic uint32_t epoch; /* epoch the facts were gathered in */
  _Atomic int32_t role;   /* by name */
  _Atomic int32_t known;  /* 0: the driver did not tell */
  _Atomic int32_t failed;
  _Atomic uint32_t capacity; /* blocks resident at once today, at most */
  _Atomic int32_t blocks;    /* per SM, today */
  _Atomic int32_t priority_greatest;
  _Atomic int32_t cluster; /* blocks per cluster */
  _Atomic uint32_t place;  /* its number in the order of claiming, from 1; set before the epoch */
  _Atomic uint64_t last;   /* packed: see ovl_last; written when it changes */
  _Alignas(64) _Atomic uint64_t words[OVL_CACHED_POLICIES][2];
  _Atomic uint64_t failures;
  /* facts */
  _Alignas(64) _Atomic uint64_t resolved; /* CUfunction */
  _Atomic int32_t registers, static_smem;
  _Atomic uint64_t forgotten[OVL_COUNTS]; /* counts at the last reset */
  _Atomic uint64_t name[OVL_NAME_BYTES / 8];
};

typedef union ovl_last {
  uint64_t bits;
  struct {
    uint64_t dynamic_smem : 24, blocks : 8, rule : 8, role : 8;
  };
} ovl_last;

extern _Atomic uint32_t ovl_epoch;

/* Launches by row and combination of actions, in a lane for each launching thread, so that counting
 * needs no locked instruction. Lane 0 is shared by the threads that found no lane of their own. */
enum { OVL_LANES = 16 };
extern _Atomic uint64_t ovl_lanes[OVL_LANES][OVL_SLOTS + 1][OVL_COUNTS];

int ovl_lane_take(uint32_t thread_id);

static inline void ovl_count(int lane, uint32_t place, int actions) {
  _Atomic uint64_t *count = &ovl_lanes[lane][place][actions & (OVL_COUNTS - 1)];
  if (OVL_LIKELY(lane))
    OVL_STORE(*count, OVL_LOAD(*count) + 1);
  else
    OVL_ADD(*count, 1);
}

/* The launch's row, claimed and filled on first sight; NULL if the table is full. */
struct ovl_function *ovl_function_find(CUfunction function, uint32_t threads, uint32_t dynamic_smem,
                                       uint64_t cluster);
/* Key bits for a cluster of x * y * z blocks; `preferred` if a second size was offered too. */
#define OVL_KEY_PREFERRED (1ull << 46)
static inline uint64_t ovl_cluster_key(unsigned x, unsigned y, unsigned z, bool preferred) {
  return (uint64_t)(x & 31) << 31 | (uint64_t)(y & 31) << 36 | (uint64_t)(z & 31) << 41 |
         (preferred ? OVL_KEY_PREFERRED : 0);
}
/* Computes and stores both words of the row for this policy. */
void ovl_function_plan(struct ovl_function *row, const struct ovl_interned *policy, uint32_t epoch,
                       ovl_word words[2]);
/* True if the function now accepts that much dynamic shared memory; never lowers the limit. */
bool ovl_function_allow(CUfunction resolved, int dynamic_smem, bool *raised);
void ovl_functions_reset(void);
void ovl_functions_after_fork(void);
/* Facts gathered so far are to be gathered again. */
void ovl_functions_forget(void);

static inline uint32_t ovl_key_threads(uint64_t key) {
  return key & 0x7ff;
}
static inline uint32_t ovl_key_dynamic(uint64_t key) {
  return (key >> 11) & 0xfffff;
}

/* ---- records.c ------------------------------------------------------------------------------- */

struct ovl_globals {
  _Alignas(64) _Atomic uint64_t cooperative;
  _Atomic uint64_t graph_launches;
  _Atomic uint64_t unknown;      /* let through without a row */
  _Atomic uint64_t unknown_rows; /* with a row, facts missing */
  _Atomic uint64_t retired[OVL_COUNTS];
  _Atomic uint64_t retired_failures;
};

extern struct ovl_globals ovl_globals;

static inline uint64_t ovl_pair(uint32_t low, uint32_t high) {
  return low | (uint64_t)high << 32;
}

/* Writes an ovl_record, given as the words it consists of after sequence and ticks: they stay in
 * registers, where a structure would be stored in small pieces and loaded again in large ones. */
void ovl_record_write(uint64_t function, uint64_t stream, uint64_t blocks,
                      uint64_t thread_id_threads, uint64_t before_after,
                      uint64_t result_cluster_role_rule, uint64_t actions);
extern _Atomic int32_t ovl_listeners; /* records are written while it is above 0 */

void ovl_records_start(void);
void ovl_records_reset(void);
uint64_t ovl_records_dropped(void);
void ovl_records_after_fork(void);

/* ---- launch.c -------------------------------------------------------------------------------- */

void ovl_launch_after_fork(void);

#pragma GCC visibility pop

#endif
