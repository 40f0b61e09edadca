#define _GNU_SOURCE

#include "fake_driver.h"

#include "driver_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  INVALID_VALUE = 1,
  INVALID_HANDLE = 400,
  OUT_OF_RESOURCES = 701,
  SMS = 132,
  THREADS = 2048,
  SLOTS = 32,
  REGISTERS = 65536,
  SMEM = 233472,
  OPTIN = 232448,
  RESERVED = 1024,
  MAX_CALLS = 65536,
  MAX_STREAMS = 64
};

struct CUfunc_st {
  uint32_t magic; /* 'F' */
  int registers, static_smem, max_dynamic, cluster_x;
  char name[300];
};

struct CUkern_st {
  uint32_t magic; /* 'K' */
  CUfunction function;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_call *calls;
static int call_count;
static char failing[40];
static int fail_times, fail_code, hidden, granted = SMS, cluster_limit = -1;
static volatile int quiet;
static void (*nested)(void);
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
static CUstream capturing[MAX_STREAMS];
static int capturing_count;

/* ---- control --------------------------------------------------------------------------------- */

EXPORT void *fake_function(const char *name, int registers, int static_smem) {
  CUfunction f = calloc(1, sizeof *f);
  f->magic = 'F';
  fake_rename(f, name, registers, static_smem);
  return f;
}

EXPORT void fake_rename(void *function, const char *name, int registers, int static_smem) {
  CUfunction f = function;
  snprintf(f->name, sizeof f->name, "%s", name);
  f->registers = registers;
  f->static_smem = static_smem;
  f->max_dynamic = 49152 - static_smem;
}

EXPORT void *fake_kernel(void *function) {
  CUkernel k = calloc(1, sizeof *k);
  k->magic = 'K';
  k->function = function;
  return k;
}

EXPORT void fake_require_cluster(void *function, int x) {
  ((CUfunction)function)->cluster_x = x;
}
EXPORT int fake_max_dynamic(void *function) {
  return ((CUfunction)function)->max_dynamic;
}
EXPORT void fake_set_max_dynamic(void *function, int bytes) {
  ((CUfunction)function)->max_dynamic = bytes;
}
EXPORT void fake_hide(int what) {
  hidden = what;
}
EXPORT void fake_sms(int count) {
  granted = count;
}
EXPORT void fake_cluster_limit(int clusters) {
  cluster_limit = clusters;
}
EXPORT void fake_nest(void (*callback)(void)) {
  nested = callback;
}
EXPORT void fake_quiet(int on) {
  quiet = on;
}

EXPORT void fake_fail(const char *symbol, int times, int code) {
  snprintf(failing, sizeof failing, "%s", symbol);
  fail_times = times;
  fail_code = code;
}

EXPORT int fake_call_count(void) {
  return call_count;
}

EXPORT int fake_call_at(int index, struct fake_call *out) {
  if (index < 0 || index >= call_count)
    return 0;
  *out = calls[index];
  return 1;
}

EXPORT void fake_clear(void) {
  call_count = fail_times = hidden = capturing_count = quiet = 0;
  granted = SMS;
  cluster_limit = -1;
  nested = NULL;
}

/* The call's result after a failure asked for; recorded. */
static CUresult finish(struct fake_call *call, const char *symbol, CUresult result) {
  pthread_mutex_lock(&lock);
  if (fail_times > 0 && !strcmp(failing, symbol)) {
    --fail_times;
    result = fail_code;
  }
  snprintf(call->symbol, sizeof call->symbol, "%s", symbol);
  call->result = result;
  if (!calls)
    calls = malloc(MAX_CALLS * sizeof *calls);
  if (call_count < MAX_CALLS)
    calls[call_count++] = *call;
  pthread_mutex_unlock(&lock);
  return result;
}

static CUresult note(const char *symbol, const void *function, CUstream stream) {
  struct fake_call call = {.function = (uintptr_t)function, .stream = (uintptr_t)stream};
  return finish(&call, symbol, CU_OK);
}

static CUfunction function_of(CUfunction f) {
  if (f && f->magic == 'K')
    return ((CUkernel)(void *)f)->function;
  return f && f->magic == 'F' ? f : NULL;
}

/* ---- launches -------------------------------------------------------------------------------- */

static CUresult launch(const char *symbol, const CUlaunchConfig *c, CUfunction f, void **parameters,
                       void **extra) {
  if (__builtin_expect(quiet, 1))
    return CU_OK;
  CUresult result = CU_OK;
  CUfunction function = function_of(f);
  if (!c)
    return INVALID_VALUE;
  struct fake_call call = {.function = (uintptr_t)f,
                           .stream = (uintptr_t)c->hStream,
                           .parameters = (uintptr_t)parameters,
                           .extra = (uintptr_t)extra,
                           .grid = {c->gridDimX, c->gridDimY, c->gridDimZ},
                           .block = {c->blockDimX, c->blockDimY, c->blockDimZ},
                           .dynamic_smem = c->sharedMemBytes,
                           .attribute_count = c->numAttrs};
  for (unsigned i = 0; c->attrs && i < c->numAttrs && i < FAKE_MAX_ATTRIBUTES; ++i) {
    call.attribute_ids[i] = c->attrs[i].id;
    call.attribute_values[i] = c->attrs[i].value.number;
  }
  if (!function)
    result = INVALID_HANDLE;
  else if (!c->gridDimX || !c->blockDimX || c->blockDimX * c->blockDimY * c->blockDimZ > 1024 ||
           (int)c->sharedMemBytes > function->max_dynamic)
    result = INVALID_VALUE;
  if (nested)
    nested();
  return finish(&call, symbol, result);
}

#define PLAIN(symbol)                                                                              \
  __attribute__((used)) static CUresult impl_##symbol(                                             \
      CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,  \
      unsigned smem, CUstream stream, void **parameters, void **extra) {                           \
    CUlaunchConfig c = {gx, gy, gz, bx, by, bz, smem, stream, NULL, 0};                            \
    return launch(#symbol, &c, f, parameters, extra);                                              \
  }
#define EX(symbol)                                                                                 \
  __attribute__((used)) static CUresult impl_##symbol(const CUlaunchConfig *c, CUfunction f,       \
                                                      void **parameters, void **extra) {           \
    return launch(#symbol, c, f, parameters, extra);                                               \
  }
#define COOPERATIVE(symbol)                                                                        \
  __attribute__((used)) static CUresult impl_##symbol(                                             \
      CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,  \
      unsigned smem, CUstream stream, void **parameters) {                                         \
    CUlaunchConfig c = {gx, gy, gz, bx, by, bz, smem, stream, NULL, 0};                            \
    return launch(#symbol, &c, f, parameters, NULL);                                               \
  }

PLAIN(cuLaunchKernel)
PLAIN(cuLaunchKernel_ptsz)
EX(cuLaunchKernelEx)
EX(cuLaunchKernelEx_ptsz)
COOPERATIVE(cuLaunchCooperativeKernel)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz)

/* ---- unloading, capture, graphs, partitions ---------------------------------------------------
 */

#define UNLOAD(symbol)                                                                             \
  __attribute__((used)) static CUresult impl_##symbol(void *handle) {                              \
    return note(#symbol, handle, NULL);                                                            \
  }
UNLOAD(cuModuleUnload)
UNLOAD(cuLibraryUnload)

static CUresult begin(const char *symbol, CUstream stream) {
  CUresult result = note(symbol, NULL, stream);
  pthread_mutex_lock(&capture_lock);
  if (result == CU_OK && capturing_count < MAX_STREAMS)
    capturing[capturing_count++] = stream;
  pthread_mutex_unlock(&capture_lock);
  return result;
}

/* With the lock held. */
static int capturing_index(CUstream stream) {
  for (int i = 0; i < capturing_count; ++i)
    if (capturing[i] == stream)
      return i;
  return -1;
}

static bool is_capturing(CUstream stream) {
  pthread_mutex_lock(&capture_lock);
  bool is = capturing_index(stream) >= 0;
  pthread_mutex_unlock(&capture_lock);
  return is;
}

static CUresult end(const char *symbol, CUstream stream) {
  CUresult result = note(symbol, NULL, stream);
  pthread_mutex_lock(&capture_lock);
  int at = capturing_index(stream);
  if (at >= 0)
    capturing[at] = capturing[--capturing_count];
  pthread_mutex_unlock(&capture_lock);
  return result;
}

#define CAPTURES(suffix)                                                                           \
  __attribute__((used)) static CUresult impl_cuStreamBeginCapture_v2##suffix(CUstream s, int m) {  \
    (void)m;                                                                                       \
    return begin("cuStreamBeginCapture_v2" #suffix, s);                                            \
  }                                                                                                \
  __attribute__((used)) static CUresult impl_cuStreamBeginCaptureToGraph##suffix(                  \
      CUstream s, CUgraph g, const CUgraphNode *n, const void *d, size_t c, int m) {               \
    (void)g, (void)n, (void)d, (void)c, (void)m;                                                   \
    return begin("cuStreamBeginCaptureToGraph" #suffix, s);                                        \
  }                                                                                                \
  __attribute__((used)) static CUresult impl_cuStreamEndCapture##suffix(CUstream s, CUgraph *g) {  \
    (void)g;                                                                                       \
    return end("cuStreamEndCapture" #suffix, s);                                                   \
  }                                                                                                \
  EXPORT CUresult cuStreamIsCapturing##suffix(CUstream s, int *status) {                           \
    *status = is_capturing(s);                                                                     \
    return CU_OK;                                                                                  \
  }                                                                                                \
  __attribute__((used)) static CUresult impl_cuGraphLaunch##suffix(CUgraphExec g, CUstream s) {    \
    return note("cuGraphLaunch" #suffix, g, s);                                                    \
  }
CAPTURES()
CAPTURES(_ptsz)

__attribute__((used)) static CUresult impl_cuGreenCtxCreate(CUgreenCtx *c, CUdevResourceDesc r,
                                                            CUdevice d, unsigned flags) {
  (void)r, (void)d, (void)flags;
  *c = (CUgreenCtx)(uintptr_t)(0x1000 + granted);
  return note("cuGreenCtxCreate", NULL, NULL);
}

EXPORT CUresult cuGreenCtxGetDevResource(CUgreenCtx c, CUdevResource *out, int type) {
  out->type = type;
  out->sm_count = (unsigned)((uintptr_t)c - 0x1000);
  return CU_OK;
}

/* ---- queries --------------------------------------------------------------------------------- */

static int blocks_of(CUfunction f, int threads, size_t dynamic) {
  int warps = (threads + 31) / 32, blocks = SLOTS;
  int per_warp = (f->registers * 32 + 255) / 256 * 256;
  size_t smem = (f->static_smem + dynamic + RESERVED + 127) / 128 * 128;
  if (warps < 1 || (int)dynamic > f->max_dynamic)
    return 0;
#define AT_MOST(n) blocks = (int)(n) < blocks ? (int)(n) : blocks
  AT_MOST(THREADS / 32 / warps);
  if (per_warp)
    AT_MOST(REGISTERS / 4 / per_warp * 4 / warps);
  AT_MOST(SMEM / smem);
  return blocks;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int threads,
                                                            size_t dynamic) {
  if (hidden & 1 || !f || f->magic != 'F')
    return INVALID_HANDLE;
  *n = blocks_of(f, threads, dynamic);
  return CU_OK;
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  if (hidden & 2 || !f || f->magic != 'F')
    return INVALID_HANDLE;
  int size = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == CU_ATTR_CLUSTER_DIMENSION)
      size = (int)(c->attrs[i].value.cluster.x * c->attrs[i].value.cluster.y *
                   c->attrs[i].value.cluster.z);
  int blocks = blocks_of(f, (int)(c->blockDimX * c->blockDimY * c->blockDimZ), c->sharedMemBytes);
  *n = blocks * SMS / size;
  if (cluster_limit >= 0 && c->sharedMemBytes > 49152 && *n > cluster_limit)
    *n = cluster_limit;
  return CU_OK;
}

EXPORT CUresult cuFuncGetAttribute(int *out, int attribute, CUfunction f) {
  if (hidden & 8 || !f || f->magic != 'F')
    return INVALID_HANDLE;
  switch (attribute) {
  case CU_FUNC_SHARED_SIZE_BYTES:
    *out = f->static_smem;
    return CU_OK;
  case CU_FUNC_NUM_REGS:
    *out = f->registers;
    return CU_OK;
  case CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES:
    *out = f->max_dynamic;
    return CU_OK;
  case CU_FUNC_REQUIRED_CLUSTER_WIDTH:
    *out = f->cluster_x;
    return CU_OK;
  case CU_FUNC_REQUIRED_CLUSTER_HEIGHT:
  case CU_FUNC_REQUIRED_CLUSTER_DEPTH:
    *out = f->cluster_x ? 1 : 0;
    return CU_OK;
  default:
    return INVALID_VALUE;
  }
}

EXPORT CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value) {
  if (!f || f->magic != 'F')
    return INVALID_HANDLE;
  if (attribute != CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
      f->static_smem + value > OPTIN)
    return INVALID_VALUE;
  struct fake_call call = {.function = (uintptr_t)f, .dynamic_smem = (uint32_t)value};
  CUresult result = finish(&call, "cuFuncSetAttribute", CU_OK);
  if (result == CU_OK)
    f->max_dynamic = value;
  return result;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction f) {
  if (hidden & 4 || !f || f->magic != 'F')
    return INVALID_HANDLE;
  *name = f->name;
  return CU_OK;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *f, CUkernel k) {
  if (!k || k->magic != 'K')
    return INVALID_HANDLE;
  *f = k->function;
  return CU_OK;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  if (hidden & 16)
    return 201;
  *device = 0;
  return CU_OK;
}

EXPORT CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice device) {
  (void)device;
  switch (attribute) {
  case CU_DEVICE_WARP_SIZE:
    *out = 32;
    return CU_OK;
  case CU_DEVICE_MULTIPROCESSOR_COUNT:
    *out = SMS;
    return CU_OK;
  case CU_DEVICE_MAX_THREADS_PER_MULTIPROCESSOR:
    *out = THREADS;
    return CU_OK;
  case CU_DEVICE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *out = SMEM;
    return CU_OK;
  case CU_DEVICE_MAX_REGISTERS_PER_MULTIPROCESSOR:
    *out = REGISTERS;
    return CU_OK;
  case CU_DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *out = OPTIN;
    return CU_OK;
  case CU_DEVICE_MAX_BLOCKS_PER_MULTIPROCESSOR:
    *out = SLOTS;
    return CU_OK;
  case CU_DEVICE_RESERVED_SHARED_MEMORY_PER_BLOCK:
    *out = RESERVED;
    return CU_OK;
  default:
    return INVALID_VALUE;
  }
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return CU_OK;
}

EXPORT CUresult cuInit(unsigned flags) {
  (void)flags;
  return CU_OK;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CU_OK;
}

/* ---- look-up as the CUDA runtime does it ------------------------------------------------------
 */

static void *self_symbol(const char *symbol, uint64_t flags) {
  static void *self;
  char name[80];
  if (!self) {
    Dl_info info;
    dladdr((void *)self_symbol, &info);
    self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  if (flags & 2) {
    snprintf(name, sizeof name, "%s_ptsz", symbol);
    void *found = dlsym(self, name);
    if (found)
      return found;
  }
  void *found = dlsym(self, symbol);
  snprintf(name, sizeof name, "%s_v2", symbol);
  return found ? found : dlsym(self, name);
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags,
                                    int *status) {
  (void)version;
  *out = self_symbol(symbol, flags);
  if (status)
    *status = *out ? 0 : 1;
  return *out ? CU_OK : 500;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, out, version, flags, NULL);
}

/* ---- entries, with the first instructions of the real driver's --------------------------------
 */

#if defined(__x86_64__)
#define UNDO "add $8, %rsp\n pop %r12\n pop %rbp\n"
#define ENTRY_AS(symbol, target, prologue)                                                         \
  __asm__(".text\n.p2align 4\n.globl " #symbol "\n.type " #symbol ", @function\n" #symbol ":\n"    \
          "" prologue "jmp " #target "\n.size " #symbol ", . - " #symbol "\n");
#define ENTRY(symbol)                                                                              \
  ENTRY_AS(symbol, impl_##symbol, "push %rbp\n mov %rsp, %rbp\n push %r12\n sub $8, %rsp\n" UNDO)
/* Other first instructions, for the detour's tests: both flavours of what decodes and what not. */
ENTRY_AS(variant_endbr, impl_cuLaunchKernel,
         "endbr64\n push %rbp\n mov %rsp, %rbp\n push %r12\n sub $8, %rsp\n" UNDO)
ENTRY_AS(variant_short_jump, impl_cuLaunchKernel, "jmp 1f\n nop\n nop\n nop\n nop\n 1:\n")
ENTRY_AS(variant_rip_relative, impl_cuLaunchKernel, "lea 0x10(%rip), %rax\n")
ENTRY_AS(variant_near_jump, impl_cuLaunchKernel, ".byte 0xe9, 0, 0, 0, 0\n")
#else
#define ENTRY(symbol)                                                                              \
  extern __typeof__(impl_##symbol) symbol                                                          \
      __attribute__((alias("impl_" #symbol), visibility("default")));
#endif

ENTRY(cuLaunchKernel)
ENTRY(cuLaunchKernel_ptsz)
ENTRY(cuLaunchKernelEx)
ENTRY(cuLaunchKernelEx_ptsz)
ENTRY(cuLaunchCooperativeKernel)
ENTRY(cuLaunchCooperativeKernel_ptsz)
ENTRY(cuModuleUnload)
ENTRY(cuLibraryUnload)
ENTRY(cuStreamBeginCapture_v2)
ENTRY(cuStreamBeginCapture_v2_ptsz)
ENTRY(cuStreamBeginCaptureToGraph)
ENTRY(cuStreamBeginCaptureToGraph_ptsz)
ENTRY(cuStreamEndCapture)
ENTRY(cuStreamEndCapture_ptsz)
ENTRY(cuGraphLaunch)
ENTRY(cuGraphLaunch_ptsz)
ENTRY(cuGreenCtxCreate)
