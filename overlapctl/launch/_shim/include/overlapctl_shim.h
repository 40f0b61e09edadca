/* The shim's C ABI: everything Python (ctypes) and the tests may call.
 *
 * Rules that hold for every function here: it never exits, prints or calls Python; it returns an
 * ovl_status (0 = ok) or a plain value; it is safe from any thread.
 */
#ifndef OVERLAPCTL_SHIM_H
#define OVERLAPCTL_SHIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OVL_ABI_VERSION 2
#define OVL_API __attribute__((visibility("default")))

typedef enum ovl_status {
  OVL_OK = 0,
  OVL_E_NO_DRIVER = 1,        /* the driver library could not be opened */
  OVL_E_MISSING_ENTRY = 2,    /* a required entry is not exported by it */
  OVL_E_PROLOGUE = 3,         /* an entry's first instructions are not known: refused */
  OVL_E_FOREIGN_DETOUR = 4,   /* an entry has been patched by somebody else */
  OVL_E_ALREADY_ATTACHED = 5, /* by this shim (harmless) or by another copy of it (not) */
  OVL_E_MEMORY = 6,           /* no memory within jump distance, or none at all */
  OVL_E_PROTECT = 7,          /* the code page could not be made writable */
  OVL_E_THREADS = 8,          /* the other threads could not be stopped at a safe place */
  OVL_E_ARCHITECTURE = 9,     /* no detour for this processor: use the preload */
  OVL_E_ARGUMENT = 10,        /* an argument is out of range */
  OVL_E_FULL = 11,            /* too many policies, patterns or streams */
  OVL_E_NOT_FOUND = 12,       /* no such policy token */
  OVL_E_DISABLED = 13         /* OVERLAPCTL_DISABLE is set */
} ovl_status;

typedef enum ovl_attachment { OVL_DETACHED = 0, OVL_DETOUR = 1, OVL_PRELOAD = 2 } ovl_attachment;

typedef enum ovl_role {
  OVL_COMPUTE = 0,
  OVL_COMMUNICATION = 1,
  OVL_IGNORED = 2,
  OVL_BY_NAME = 3
} ovl_role;

typedef enum ovl_rule {
#define OVL_RULE(id, name, text) OVL_RULE_##id,
#include "rules.def"
#undef OVL_RULE
  OVL_RULE_COUNT
} ovl_rule;

/* ---- attaching ---------------------------------------------------------------------------- */

typedef struct ovl_attach_report {
  int32_t attachment;     /* ovl_attachment */
  int32_t entries;        /* entries now going through the shim */
  int32_t driver_version; /* as cuDriverGetVersion says, 0 if unknown */
  int32_t attempts;       /* how often the other threads had to be stopped */
  char entry[64];         /* on failure: which entry */
  char detail[192];       /* on failure: what was found there, for the error message */
} ovl_attach_report;

OVL_API uint32_t ovl_abi_version(void);
OVL_API int ovl_attachment_state(void);
/* driver: path or soname, NULL for "libcuda.so.1". Never detached again: off is a null policy. */
OVL_API int ovl_attach_detour(const char *driver, ovl_attach_report *report);
/* Pure: length of whole position-independent instructions covering >= need bytes, or -1. */
OVL_API int ovl_decode_prologue(const uint8_t *code, size_t available, int need);

/* ---- policy ------------------------------------------------------------------------------- */

typedef struct ovl_kernel_rule {
  const char *pattern; /* shell style, * and ? */
  uint32_t pad_bytes;
  int32_t max_blocks_per_sm; /* 0: no target */
  int32_t carveout;          /* percent, -1: leave */
} ovl_kernel_rule;

typedef struct ovl_policy {
  uint32_t pad_bytes;
  int32_t max_blocks_per_sm;
  int32_t carveout;
  int32_t comm_priority;  /* 0/1 */
  int32_t shape_captures; /* 0/1 */
  uint32_t include_count, exclude_count, rule_count;
  const char *const *include;
  const char *const *exclude;
  const ovl_kernel_rule *rules;
} ovl_policy;

/* The policy on top of the stack is in force, process-wide. Equal policies share one identity, so
 * entering the same region every step costs no re-evaluation and no memory. Tokens may be popped
 * in any order (regions on different threads): the newest one left is in force. */
OVL_API int ovl_policy_push(const ovl_policy *policy, uint64_t *token);
OVL_API int ovl_policy_pop(uint64_t token);
OVL_API int ovl_policy_depth(void);

/* ---- roles -------------------------------------------------------------------------------- */

/* Kernels whose name matches get the role; asked before the built-in communication patterns. */
OVL_API int ovl_role_add_pattern(const char *pattern, int role);
/* All launches on this stream get the role; OVL_BY_NAME removes the entry. Streams are compared
 * by handle: remove the entry before destroying the stream. */
OVL_API int ovl_role_set_stream(void *stream, int role);
/* All launches of the calling thread get the role; OVL_BY_NAME restores naming. Returns the
 * previous value. Strongest of the three. */
OVL_API int ovl_role_set_thread(int role);
/* Role by name alone (patterns added + built in). */
OVL_API int ovl_role_of_name(const char *kernel_name);

/* ---- the decision, pure (oracle: launch/twin.py) ------------------------------------------- */

typedef struct ovl_device_limits {
  int32_t sm_count, warp_size, max_threads_per_sm, max_blocks_per_sm;
  int32_t registers_per_sm, register_granule, subpartitions;
  int32_t smem_per_sm, smem_per_block_optin, smem_reserved_per_block, smem_granule;
  int32_t priority_greatest;
} ovl_device_limits;

typedef struct ovl_launch {
  int32_t role;      /* ovl_role, never OVL_BY_NAME */
  int32_t threads;   /* per block */
  int32_t registers; /* per thread */
  int32_t static_smem, dynamic_smem;
  uint64_t blocks;        /* in the grid */
  int32_t cluster;        /* blocks per cluster, 1: none */
  int32_t cooperative;    /* 0/1 */
  int32_t capturing;      /* 0/1 */
  int32_t failed_before;  /* 0/1 */
  int32_t natural_blocks; /* residency by the driver, or -1: use the model */
} ovl_launch;

typedef struct ovl_wish { /* what the policy asks for this kernel */
  uint32_t pad_bytes;
  int32_t max_blocks_per_sm, carveout, comm_priority, shape_captures;
  int32_t included; /* 0: include list given, no match; 2: excluded; 1: shape it */
} ovl_wish;

typedef struct ovl_decision {
  int32_t dynamic_smem; /* to launch with */
  int32_t blocks_before, blocks_after;
  int32_t set_priority; /* 0/1 */
  int32_t priority;     /* value if set_priority */
  int32_t carveout;     /* percent, or -1: leave */
  int32_t rule;         /* ovl_rule */
} ovl_decision;

OVL_API int ovl_residency(const ovl_device_limits *limits, int threads, int registers, int smem);
OVL_API void ovl_decide(const ovl_device_limits *limits, const ovl_launch *launch,
                        const ovl_wish *wish, ovl_decision *out);
OVL_API const char *ovl_rule_name(int rule);
OVL_API const char *ovl_rule_text(int rule);
OVL_API int ovl_match(const char *pattern, const char *text);

/* ---- what happened ------------------------------------------------------------------------ */

typedef struct ovl_counters {
  uint64_t launches; /* seen while a policy was in force */
  uint64_t shaped, prioritised, carved;
  uint64_t failed;          /* shaped launches refused by the driver, repeated as asked */
  uint64_t cooperative;     /* cooperative launches (never shaped) */
  uint64_t captured;        /* launches seen during graph capture */
  uint64_t graph_launches;  /* cuGraphLaunch calls */
  uint64_t unknown;         /* launches let through because facts or table space were missing */
  uint64_t dropped_records; /* ring entries overwritten before anybody read them */
} ovl_counters;

typedef struct ovl_kernel_row { /* one (function, block size, dynamic size) */
  char name[256];
  uint64_t function;
  uint64_t launches, shaped, prioritised, carved, failed, captured;
  int32_t role, threads, registers, static_smem, before, after, blocks_before, blocks_after, rule;
} ovl_kernel_row;

typedef struct ovl_record { /* one launch */
  uint64_t sequence, ticks; /* ticks: monotonic clock, ns */
  uint64_t function, stream;
  uint64_t blocks;
  uint32_t thread_id;
  int32_t threads, before, after, result;
  uint16_t cluster;
  uint8_t role, rule,
      actions; /* actions: 1 padded, 2 priority, 4 carve-out, 8 captured, 16 failed */
} ovl_record;

OVL_API void ovl_counters_read(ovl_counters *out);
OVL_API size_t ovl_kernel_rows(ovl_kernel_row *rows, size_t capacity); /* returns how many exist */
/* Records are written only while somebody listens (+1 begins, -1 ends; nests; returns how many
 * listen now): writing one touches cache lines a job of small kernels would rather keep. */
OVL_API int ovl_records_listen(int change);
/* Copies records with sequence >= *next (oldest first), sets *next past the last one copied. */
OVL_API size_t ovl_records_read(uint64_t *next, ovl_record *out, size_t capacity);
/* Forgets counters, rows' counts and records (for tests and between trials). */
OVL_API void ovl_reset(void);

#ifdef __cplusplus
}
#endif
#endif
