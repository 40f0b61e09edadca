/* The driver calls the core makes itself, and the limits of each device, asked once. */
#include "intercept.h"
#include "state.h"

#include <limits.h>

enum { MAX_DEVICES = 64 };

struct ovl_driver ovl_driver;
_Atomic int32_t ovl_smallest_partition = INT32_MAX;

/* Filled by whoever comes first; racing threads write equal values. */
static struct {
  _Atomic int32_t ready;
  _Atomic int32_t sm_count, warp_size, threads, blocks, registers, smem, optin, reserved, greatest;
} devices[MAX_DEVICES];

void ovl_set_driver(void *(*lookup)(const char *symbol)) {
#define FIND(field, symbol) *(void **)&ovl_driver.field = lookup(symbol)
  FIND(func_get_attribute, "cuFuncGetAttribute");
  FIND(func_set_attribute, "cuFuncSetAttribute");
  FIND(func_get_name, "cuFuncGetName");
  FIND(kernel_get_function, "cuKernelGetFunction");
  FIND(ctx_get_device, "cuCtxGetDevice");
  FIND(device_get_attribute, "cuDeviceGetAttribute");
  FIND(max_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  FIND(max_clusters, "cuOccupancyMaxActiveClusters");
  FIND(priority_range, "cuCtxGetStreamPriorityRange");
  FIND(is_capturing[0], "cuStreamIsCapturing");
  FIND(is_capturing[1], "cuStreamIsCapturing_ptsz");
  FIND(green_resource, "cuGreenCtxGetDevResource");
#undef FIND
  ovl_functions_forget();
}

static bool ask(CUdevice device, int attribute, _Atomic int32_t *out) {
  int value = 0;
  if (ovl_driver.device_get_attribute(&value, attribute, device) != CU_OK || value < 0)
    return false;
  OVL_STORE(*out, value);
  return true;
}

bool ovl_device_now(ovl_device_limits *limits) {
  CUdevice device = -1;
  if (!ovl_driver.ctx_get_device || !ovl_driver.device_get_attribute ||
      ovl_driver.ctx_get_device(&device) != CU_OK || device < 0 || device >= MAX_DEVICES)
    return false;
  __typeof__(devices[0]) *d = &devices[device];
  if (!atomic_load_explicit(&d->ready, memory_order_acquire)) {
    if (!ask(device, CU_DEVICE_MULTIPROCESSOR_COUNT, &d->sm_count) ||
        !ask(device, CU_DEVICE_WARP_SIZE, &d->warp_size) ||
        !ask(device, CU_DEVICE_MAX_THREADS_PER_MULTIPROCESSOR, &d->threads) ||
        !ask(device, CU_DEVICE_MAX_BLOCKS_PER_MULTIPROCESSOR, &d->blocks) ||
        !ask(device, CU_DEVICE_MAX_REGISTERS_PER_MULTIPROCESSOR, &d->registers) ||
        !ask(device, CU_DEVICE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &d->smem) ||
        !ask(device, CU_DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &d->optin) ||
        !ask(device, CU_DEVICE_RESERVED_SHARED_MEMORY_PER_BLOCK, &d->reserved))
      return false;
    int least = 0, greatest = 0;
    if (!ovl_driver.priority_range || ovl_driver.priority_range(&least, &greatest) != CU_OK)
      greatest = 0;
    OVL_STORE(d->greatest, greatest);
    atomic_store_explicit(&d->ready, 1, memory_order_release);
  }
  /* The driver tells neither granule: 256 registers a warp, 128 bytes and 4 sub-partitions hold for
   * compute capability 7.0 and later. The driver's occupancy query has the last word. */
  *limits = (ovl_device_limits){.sm_count = OVL_LOAD(d->sm_count),
                                .warp_size = OVL_LOAD(d->warp_size),
                                .max_threads_per_sm = OVL_LOAD(d->threads),
                                .max_blocks_per_sm = OVL_LOAD(d->blocks),
                                .registers_per_sm = OVL_LOAD(d->registers),
                                .register_granule = 256,
                                .subpartitions = 4,
                                .smem_per_sm = OVL_LOAD(d->smem),
                                .smem_per_block_optin = OVL_LOAD(d->optin),
                                .smem_reserved_per_block = OVL_LOAD(d->reserved),
                                .smem_granule = 128,
                                .priority_greatest = OVL_LOAD(d->greatest)};
  return limits->sm_count > 0 && limits->warp_size > 0;
}
