/* What attaching and the rest of the shim know of each other.
 *
 * Attachment (detour.c, preload.c) makes driver calls arrive at `hook`; the core does its work
 * there and calls on through `*original`. Attachment must store `*original`, and call
 * ovl_set_driver, before a hook can be reached. */
#ifndef OVERLAPCTL_INTERCEPT_H
#define OVERLAPCTL_INTERCEPT_H

#include "overlapctl_shim.h"

#include <stdatomic.h>

typedef enum ovl_kind {
  OVL_KIND_LAUNCH,
  OVL_KIND_LAUNCH_EX,
  OVL_KIND_COOP,
  OVL_KIND_UNLOAD,
  OVL_KIND_CAPTURE_BEGIN,
  OVL_KIND_CAPTURE_TO_GRAPH,
  OVL_KIND_CAPTURE_END,
  OVL_KIND_GRAPH,
  OVL_KIND_PARTITION
} ovl_kind;

/* One row per exported symbol of entries.def, legacy and per-thread-stream alike. */
struct ovl_entry {
  const char *symbol;
  void *hook;      /* same signature as the driver's function */
  void **original; /* how the hook calls on; points to NULL until attached */
  int required;    /* attaching fails without it */
  int kind;        /* ovl_kind */
};

extern const struct ovl_entry ovl_entries[];
extern const size_t ovl_entry_count;

/* Tells the core where to find the driver calls it makes itself (attributes, occupancy, names).
 * `lookup` returns NULL for symbols the driver lacks, and must not return a hook. Any number of
 * times; not on the launch path. */
void ovl_set_driver(void *(*lookup)(const char *symbol));

/* An ovl_attachment, set by attachment once it is complete; ovl_attachment_state() reads it.
 * Defined by the core. */
extern _Atomic int ovl_attachment_now;

#endif
