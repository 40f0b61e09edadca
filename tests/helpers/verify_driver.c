/* A driver that runs one kernel: the probe, which stores the dynamic shared memory it was launched
 * with. `verify_extra` stands in for what a shim adds, `verify_fail` names a call that fails. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int verify_context = 1;   /* 0: no context is current */
int verify_extra[2];      /* added by cuLaunchKernel, cuLaunchKernelEx */
char verify_fail[64];     /* name of the call that fails */
int verify_live;          /* things created and not yet destroyed */
int verify_capture_mode;  /* of the thread */
char verify_function[64]; /* the kernel that was looked up */

static int status(const char *name) {
  return strcmp(name, verify_fail) == 0 ? 719 : 0;
}

static int create(const char *name, uint64_t *out) {
  int result = status(name);
  if (result == 0) {
    *out = (uint64_t)(uintptr_t)malloc(64);
    verify_live++;
  }
  return result;
}

static int destroy(uint64_t what) {
  free((void *)(uintptr_t)what);
  verify_live--;
  return 0;
}

static void launch(unsigned dynamic_smem, void **parameters) {
  uint32_t *word = *(uint32_t **)parameters[0];
  *word = dynamic_smem;
}

int cuCtxGetCurrent(void **context) {
  *context = verify_context ? (void *)1 : NULL;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = verify_capture_mode;
  verify_capture_mode = *mode;
  *mode = before;
  return 0;
}

int cuStreamCreate(uint64_t *stream, unsigned flags) {
  return flags == 1 ? create("cuStreamCreate", stream) : 1;
}
int cuStreamDestroy_v2(uint64_t stream) {
  return destroy(stream);
}
int cuStreamSynchronize(uint64_t stream) {
  return stream != 0 ? status("cuStreamSynchronize") : 1;
}
int cuModuleLoadData(uint64_t *module, const char *ptx) {
  return strstr(ptx, "%dynamic_smem_size") != NULL ? create("cuModuleLoadData", module) : 218;
}
int cuModuleUnload(uint64_t module) {
  return destroy(module);
}
int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
  *function = module;
  strncpy(verify_function, name, sizeof verify_function - 1);
  return status("cuModuleGetFunction");
}
int cuMemAlloc_v2(uint64_t *memory, size_t size) {
  return size == 4 ? create("cuMemAlloc_v2", memory) : 1;
}
int cuMemFree_v2(uint64_t memory) {
  return destroy(memory);
}
int cuMemsetD32Async(uint64_t memory, unsigned value, size_t count, uint64_t stream) {
  *(uint32_t *)(uintptr_t)memory = value;
  return count == 1 && stream != 0 ? status("cuMemsetD32Async") : 1;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, uint64_t stream) {
  memcpy(to, (void *)(uintptr_t)from, size);
  return stream != 0 ? status("cuMemcpyDtoHAsync_v2") : 1;
}

int cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned smem, uint64_t stream, void **parameters,
                   void **extra) {
  if (function == 0 || gx * gy * gz != 1 || bx * by * bz != 32 || stream == 0 || extra != NULL)
    return 1;
  launch(smem + (unsigned)verify_extra[0], parameters);
  return status("cuLaunchKernel");
}

struct config {
  unsigned grid[3], block[3], smem;
  uint64_t stream;
  void *attributes;
  unsigned count;
};

int cuLaunchKernelEx(const struct config *c, uint64_t function, void **parameters, void **extra) {
  if (function == 0 || c->grid[0] * c->grid[1] * c->grid[2] != 1 || c->block[0] != 32 ||
      c->stream == 0 || c->count != 0 || extra != NULL)
    return 1;
  launch(c->smem + (unsigned)verify_extra[1], parameters);
  return status("cuLaunchKernelEx");
}
