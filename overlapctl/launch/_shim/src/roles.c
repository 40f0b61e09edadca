/* Who a launch belongs to: thread > stream > patterns added > built-in patterns > compute. */
#include "state.h"

#include <pthread.h>
#include <string.h>

/* Kernel names come mangled (_Z27ncclDevKernel_...), so most patterns start with a star. */
static const char *const communication[] = {
    "nccl*",
    "*ncclDev*",
    "*ncclKernel*",
    "*ncclSym*",
    "*nccl*symk*",
    "rccl*",
    "*rcclGenericKernel*",
    "*mscclKernel*",
    "*mscclpp*",
    "nvshmem*",
    "*nvshmemi_*",
    "*nvshmemx_*",
    "*one_shot_all_reduce*",
    "*two_shot_all_reduce*",
    "*multimem_*",
    "*symm_mem*",
    "*symmetric_memory*",
    "*deep_ep*",
    "*DeepEP*",
    "*cross_device_reduce*",
    "overlapctl_comm_*",
    "*overlapctl_comm_*",
};

enum { MAX_PATTERNS = 256, PATTERN_BYTES = 256, MAX_STREAMS = 256 };

struct pattern {
  char text[PATTERN_BYTES];
  _Atomic int32_t role;
};

static struct pattern patterns[MAX_PATTERNS];
static _Atomic uint32_t pattern_count;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

/* stream << 2 | role + 1: user addresses leave the two top bits free. 0: unused. */
static _Atomic uint64_t streams[MAX_STREAMS];
OVL_HOT _Atomic uint32_t ovl_stream_roles;

static bool is_role(int role) {
  return role >= OVL_COMPUTE && role <= OVL_BY_NAME;
}

int ovl_role_of_name(const char *kernel_name) {
  if (!kernel_name)
    return OVL_COMPUTE;
  /* The pattern added last is asked first, so that a caller can refine what was added before. */
  for (uint32_t i = atomic_load_explicit(&pattern_count, memory_order_acquire); i-- > 0;) {
    int role = OVL_LOAD(patterns[i].role);
    if (role != OVL_BY_NAME && ovl_match(patterns[i].text, kernel_name))
      return role;
  }
  for (size_t i = 0; i < sizeof communication / sizeof *communication; ++i)
    if (ovl_match(communication[i], kernel_name))
      return OVL_COMMUNICATION;
  return OVL_COMPUTE;
}

int ovl_role_add_pattern(const char *pattern, int role) {
  if (!pattern || !*pattern || strlen(pattern) >= PATTERN_BYTES || !is_role(role))
    return OVL_E_ARGUMENT;
  int status = OVL_OK;
  pthread_mutex_lock(&writing);
  uint32_t count = OVL_LOAD(pattern_count), i = 0;
  while (i < count && strcmp(patterns[i].text, pattern))
    ++i;
  if (i < count) {
    OVL_STORE(patterns[i].role, role);
  } else if (count == MAX_PATTERNS) {
    status = OVL_E_FULL;
  } else {
    memcpy(patterns[count].text, pattern, strlen(pattern) + 1);
    OVL_STORE(patterns[count].role, role);
    atomic_store_explicit(&pattern_count, count + 1, memory_order_release);
  }
  pthread_mutex_unlock(&writing);
  if (status == OVL_OK)
    ovl_functions_forget();
  return status;
}

int ovl_role_set_stream(void *stream, int role) {
  if (!is_role(role) || (uintptr_t)stream >> 62)
    return OVL_E_ARGUMENT;
  uint64_t handle = (uint64_t)(uintptr_t)stream << 2, word = handle | (uint64_t)(role + 1);
  int status = OVL_OK;
  pthread_mutex_lock(&writing);
  uint32_t count = OVL_LOAD(ovl_stream_roles), i = 0;
  while (i < count && (OVL_LOAD(streams[i]) & ~3ull) != handle)
    ++i;
  if (role == OVL_BY_NAME) {
    if (i < count) { /* the last one takes its place; a reader meets it twice at worst */
      OVL_STORE(streams[i], OVL_LOAD(streams[count - 1]));
      OVL_STORE(ovl_stream_roles, count - 1);
      OVL_STORE(streams[count - 1], 0);
    }
  } else if (i == MAX_STREAMS) {
    status = OVL_E_FULL;
  } else {
    OVL_STORE(streams[i], word);
    if (i == count)
      atomic_store_explicit(&ovl_stream_roles, count + 1, memory_order_release);
  }
  pthread_mutex_unlock(&writing);
  return status;
}

int ovl_role_of_stream(CUstream stream) {
  uint64_t handle = (uint64_t)(uintptr_t)stream << 2;
  uint32_t count = atomic_load_explicit(&ovl_stream_roles, memory_order_acquire);
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t word = OVL_LOAD(streams[i]);
    if ((word & ~3ull) == handle && (word & 3))
      return (int)(word & 3) - 1;
  }
  return OVL_BY_NAME;
}

void ovl_roles_after_fork(void) {
  pthread_mutex_init(&writing, NULL);
}
