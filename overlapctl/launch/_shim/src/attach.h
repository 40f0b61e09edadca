/* Shared between the parts that attach the shim to the driver. Not part of the public ABI, except
 * for the functions marked OVL_API, which the Python face and the tests also call. */
#ifndef OVERLAPCTL_ATTACH_H
#define OVERLAPCTL_ATTACH_H

#include "overlapctl_shim.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OVL_DRIVER_SONAME "libcuda.so.1"

/* A relative jump: opcode and a signed 32-bit distance. The only bytes a detour changes. */
enum { OVL_JUMP_BYTES = 5, OVL_MAX_PATCHES = 64 };

/* ---- stop_threads.c ------------------------------------------------------------------------- */

/* Addresses no thread may resume at: first < address < end. */
typedef struct ovl_window {
  uintptr_t first, end;
} ovl_window;

/* Stops all other threads of the process outside the windows. On OVL_OK the caller must call
 * ovl_resume_threads soon, and must not allocate, lock or load anything in between: a stopped
 * thread may hold any lock. */
int ovl_stop_threads(const ovl_window *windows, size_t count, int *attempts, char *detail,
                     size_t detail_size);
void ovl_resume_threads(void);

/* ---- preload.c ------------------------------------------------------------------------------ */

typedef void *(*ovl_dlsym_function)(void *handle, const char *name);

/* The C library's dlsym, whatever overrides it in this process. */
ovl_dlsym_function ovl_real_dlsym(void);
/* True if this library was preloaded by `overlapctl run` and its dlsym is the one in use. */
bool ovl_preload_active(void);
bool ovl_is_disabled(void);
/* Is the address in this very copy of the shim? */
bool ovl_is_own_object(const void *address);

/* ---- policy_text.c -------------------------------------------------------------------------- */

/* Pushes the policy written as `key=value;...` (see env.py). Parts that are unknown or malformed
 * are left out and counted in *ignored. */
OVL_API int ovl_policy_push_text(const char *text, uint64_t *token, int *ignored);
/* How many parts of OVERLAPCTL_POLICY were ignored when the process started. */
OVL_API int ovl_policy_text_ignored(void);

#endif
