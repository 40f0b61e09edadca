/* A CUDA driver without a GPU: the calls the shim intercepts or makes, with the limits of an H200.
 * Tests create functions, launch, and read back every call with its arguments. */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <stdint.h>

enum { FAKE_MAX_ATTRIBUTES = 64 };

struct fake_call {
  char symbol[40];
  uint64_t function, stream, parameters, extra;
  uint32_t grid[3], block[3], dynamic_smem, attribute_count;
  int32_t attribute_ids[FAKE_MAX_ATTRIBUTES];
  int32_t attribute_values[FAKE_MAX_ATTRIBUTES]; /* first word of each value */
  int32_t result;
};

void *fake_function(const char *name, int registers, int static_smem);
void *fake_kernel(void *function); /* a CUkernel of that function */
void fake_rename(void *function, const char *name, int registers, int static_smem);
void fake_require_cluster(void *function, int x);
int fake_max_dynamic(void *function);
void fake_set_max_dynamic(void *function, int bytes);
void fake_fail(const char *symbol, int times, int code); /* the next calls fail */
void fake_hide(int what); /* bits: 1 occupancy, 2 clusters, 4 names, 8 attributes, 16 devices */
void fake_sms(int count); /* SMs granted by the next green context */
void fake_cluster_limit(int clusters);  /* -1: as many as fit */
void fake_nest(void (*callback)(void)); /* called from inside every launch */
void fake_quiet(int on);                /* do not record calls */
int fake_call_count(void);
int fake_call_at(int index, struct fake_call *out);
void fake_clear(void);

#endif
