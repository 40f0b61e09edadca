/* What no sane program does, and what an unlucky one does: one case per call, exit 0 if every count
 * and every launch was right.
 *
 *   core_abuse FAKE_DRIVER malformed|first-sight|full-table|signals|forks|captures|limits|policies
 */
#include "driver_api.h"
#include "fake_driver.h"
#include "overlapctl_shim.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int harness_attach(const char *path);
void *harness_hook(const char *symbol);

enum { THREADS = 4 };

static ovl_launch_fn launch;
static ovl_launch_ex_fn launch_ex;
static ovl_unload_fn unload;
static ovl_capture_begin_fn begin_capture;
static ovl_capture_end_fn end_capture;
static atomic_int done;
static atomic_ulong started;

#define REQUIRE(condition)                                                                         \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                      \
      _exit(1);                                                                                    \
    }                                                                                              \
  } while (0)

static ovl_policy padding(unsigned bytes) {
  return (ovl_policy){.pad_bytes = bytes, .carveout = -1, .comm_priority = 1, .shape_captures = 1};
}

static uint64_t push(ovl_policy policy) {
  uint64_t token = 0;
  REQUIRE(ovl_policy_push(&policy, &token) == OVL_OK);
  return token;
}

static ovl_counters counters(void) {
  ovl_counters now;
  ovl_counters_read(&now);
  return now;
}

static CUresult simple(CUfunction f, unsigned smem) {
  return launch(f, 4096, 1, 1, 128, 1, 1, smem, NULL, NULL, NULL);
}

static struct fake_call last_call(void) {
  struct fake_call call;
  REQUIRE(fake_call_at(fake_call_count() - 1, &call));
  return call;
}

static void on_threads(void *(*work)(void *), int count) {
  pthread_t threads[THREADS];
  for (int i = 0; i < count; ++i)
    REQUIRE(pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i) == 0);
  for (int i = 0; i < count; ++i)
    pthread_join(threads[i], NULL);
}

/* ---- arguments out of any range -------------------------------------------------------------- */

static void malformed(void) {
  CUfunction f = fake_function("gemm", 128, 0), comm = fake_function("ncclDevKernel", 96, 0);
  push(padding(2048));
  REQUIRE(launch(NULL, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) != CU_OK);
  REQUIRE(launch_ex(NULL, f, NULL, NULL) != CU_OK);
  unsigned odd[] = {0, 1, 1025, 65536, 1u << 21, 1u << 22, INT_MAX, UINT_MAX};
  for (size_t i = 0; i < sizeof odd / sizeof *odd; ++i)
    for (size_t j = 0; j < sizeof odd / sizeof *odd; ++j)
      for (size_t k = 0; k < sizeof odd / sizeof *odd; ++k) {
        launch(f, odd[i], odd[j], odd[k], 32, 1, 1, 0, NULL, NULL, NULL);
        struct fake_call call = last_call();
        REQUIRE(call.grid[0] == odd[i] && call.grid[1] == odd[j] && call.grid[2] == odd[k]);
        launch(f, 4096, 1, 1, odd[i], odd[j], odd[k], 0, NULL, NULL, NULL);
        call = last_call();
        REQUIRE(call.block[0] == odd[i] && call.block[1] == odd[j] && call.block[2] == odd[k]);
        /* A pad only where there could be a block at all. */
        uint64_t threads = (uint64_t)odd[i] * odd[j] * odd[k];
        REQUIRE(call.dynamic_smem == 0 || (threads >= 1 && threads <= 1024));
      }
  for (size_t i = 0; i < sizeof odd / sizeof *odd; ++i) {
    launch(f, 4096, 1, 1, 128, 1, 1, odd[i], NULL, NULL, NULL);
    REQUIRE(last_call().dynamic_smem == odd[i] || last_call().dynamic_smem == odd[i] + 2048);
  }
  /* A huge but legal grid is an ordinary one. */
  launch(f, INT_MAX, 65535, 65535, 128, 1, 1, 4096, NULL, NULL, NULL);
  REQUIRE(last_call().dynamic_smem == 4096 + 2048 && last_call().grid[0] == INT_MAX);
  /* No attributes, at no address. */
  CUlaunchConfig config = {4096, 1, 1, 128, 1, 1, 4096, NULL, NULL, 0};
  REQUIRE(launch_ex(&config, comm, NULL, NULL) == CU_OK);
  REQUIRE(last_call().attribute_count == 1 && last_call().attribute_values[0] == -5);
  config.numAttrs = 3; /* announced, but at no address */
  launch_ex(&config, f, NULL, NULL);
  REQUIRE(last_call().attribute_count == 3 && last_call().dynamic_smem == 4096);
  static CUlaunchAttribute attributes[62];
  config.attrs = attributes;
  for (unsigned count = 58; count <= 62; ++count) {
    config.numAttrs = count;
    for (unsigned i = 0; i < count; ++i)
      attributes[i].id = 9; /* a memory-synchronisation domain: none of ours */
    REQUIRE(launch_ex(&config, comm, NULL, NULL) == CU_OK);
    REQUIRE(last_call().attribute_count == (count <= 60 ? count + 1 : count));
    REQUIRE(config.numAttrs == count && config.attrs == attributes);
  }
  attributes[0].id = CU_ATTR_CLUSTER_DIMENSION;
  attributes[0].value.cluster.x = UINT_MAX;
  attributes[0].value.cluster.y = attributes[0].value.cluster.z = UINT_MAX;
  config.numAttrs = 1;
  launch_ex(&config, f, NULL, NULL);
  REQUIRE(last_call().dynamic_smem == 4096);

  /* The rest of the ABI. */
  uint64_t token, next = 0;
  ovl_policy bad = padding(0);
  bad.include_count = 1;
  REQUIRE(ovl_policy_push(&bad, &token) == OVL_E_ARGUMENT);
  REQUIRE(ovl_policy_push(NULL, &token) == OVL_E_ARGUMENT);
  REQUIRE(ovl_policy_push(&bad, NULL) == OVL_E_ARGUMENT);
  REQUIRE(ovl_policy_pop(0) == OVL_E_NOT_FOUND && ovl_policy_pop(UINT64_MAX) == OVL_E_NOT_FOUND);
  ovl_counters_read(NULL);
  REQUIRE(ovl_kernel_rows(NULL, 0) > 0);
  REQUIRE(ovl_records_read(NULL, NULL, 0) == 0 && ovl_records_read(&next, NULL, 5) == 0);
  next = UINT64_MAX;
  ovl_record record;
  REQUIRE(ovl_records_read(&next, &record, 1) == 0);
  REQUIRE(ovl_role_of_name(NULL) == OVL_COMPUTE && ovl_match(NULL, "x") == 0);
  REQUIRE(ovl_records_listen(-100) == 0 && ovl_records_listen(1) == 1);
  REQUIRE(ovl_role_set_thread(77) == OVL_BY_NAME && ovl_role_set_thread(-1) == OVL_BY_NAME);
}

/* ---- all threads meet each new kernel at the same moment ------------------------------------- */

enum { NEW_KERNELS = 1500 };
static CUfunction fresh[NEW_KERNELS];
static pthread_barrier_t together;

static void *meeting(void *unused) {
  (void)unused;
  for (int i = 0; i < NEW_KERNELS; ++i) {
    pthread_barrier_wait(&together);
    atomic_fetch_add(&started, 1);
    simple(fresh[i], 16384);
  }
  return NULL;
}

static void *never_too_many(void *unused) {
  (void)unused;
  while (!atomic_load(&done)) {
    uint64_t launches = counters().launches;
    REQUIRE(launches <= atomic_load(&started));
  }
  return NULL;
}

static void first_sight(void) {
  static ovl_kernel_row rows[NEW_KERNELS + 1];
  for (int i = 0; i < NEW_KERNELS; ++i)
    fresh[i] = fake_function("gemm", 128, 0);
  fake_quiet(1);
  push(padding(1024));
  pthread_barrier_init(&together, NULL, THREADS);
  pthread_t reader;
  REQUIRE(pthread_create(&reader, NULL, never_too_many, NULL) == 0);
  on_threads(meeting, THREADS);
  atomic_store(&done, 1);
  pthread_join(reader, NULL);
  REQUIRE(ovl_kernel_rows(rows, NEW_KERNELS + 1) == NEW_KERNELS);
  for (int i = 0; i < NEW_KERNELS; ++i)
    REQUIRE(rows[i].launches == THREADS && rows[i].shaped == THREADS);
  REQUIRE(counters().launches == THREADS * NEW_KERNELS && counters().unknown == 0);
}

/* ---- more kernels than there is room for ----------------------------------------------------- */

enum { MANY = 20000 };

static void *many(void *which) {
  CUfunction f = fake_function("gemm", 128, 0);
  fake_set_max_dynamic(f, 232448);
  for (unsigned i = 0; i < MANY / THREADS; ++i)
    simple(f, 4 * (i * THREADS + (unsigned)(intptr_t)which));
  return NULL;
}

static void full_table(void) {
  fake_quiet(1);
  push(padding(1024));
  on_threads(many, THREADS);
  ovl_counters now = counters();
  REQUIRE(now.launches == MANY && now.unknown > 0 && now.shaped > 15000);
  REQUIRE(now.shaped + now.unknown == MANY);
  REQUIRE(ovl_kernel_rows(NULL, 0) == now.shaped);
}

/* ---- launches from a signal handler ---------------------------------------------------------- */

static CUfunction handled, interrupted;

static void on_signal(int number) {
  (void)number;
  atomic_fetch_add(&started, 1);
  simple(handled, 16384);
}

static void *launching_while_interrupted(void *unused) {
  (void)unused;
  for (int i = 0; !atomic_load(&done); ++i) {
    atomic_fetch_add(&started, 1);
    simple(interrupted, 64 * (unsigned)(i % 97));
  }
  return NULL;
}

static void signals(void) {
  handled = fake_function("gemm", 128, 0);
  interrupted = fake_function("gemm", 128, 0);
  fake_quiet(1);
  push(padding(1024));
  ovl_records_listen(1);
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_NODEFER};
  sigaction(SIGUSR1, &action, NULL);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; ++i)
    pthread_create(&threads[i], NULL, launching_while_interrupted, NULL);
  for (int i = 0; i < 5000; ++i) {
    pthread_kill(threads[i % THREADS], SIGUSR1);
    if (i % 50 == 0)
      unload(NULL);
    if (i % 16 == 0)
      usleep(100);
  }
  atomic_store(&done, 1);
  for (int i = 0; i < THREADS; ++i)
    pthread_join(threads[i], NULL);
  REQUIRE(counters().launches == atomic_load(&started));
}

/* ---- forks while others launch and change policies ------------------------------------------- */

static void *launching_new_kernels(void *which) {
  CUfunction f = fake_function("gemm", 128, 0);
  for (unsigned i = 0; !atomic_load(&done); ++i) {
    simple(f, 4 * (i % 2000));
    if ((intptr_t)which == 0) {
      ovl_policy policy = padding(1024 + 16 * (i % 500));
      uint64_t token;
      if (ovl_policy_push(&policy, &token) == OVL_OK)
        ovl_policy_pop(token);
      ovl_role_set_stream((void *)(uintptr_t)16, (int)(i % 4));
      ovl_role_add_pattern("never", (int)(i % 4));
    }
  }
  return NULL;
}

static void in_child(CUfunction f) {
  alarm(20); /* ends a child that waits for a lock */
  REQUIRE(ovl_policy_depth() == 0 && counters().launches == 0);
  simple(f, 4);
  REQUIRE(counters().launches == 0);
  uint64_t token = push(padding(4096)), next = 0;
  ovl_records_listen(1);
  for (unsigned i = 0; i < 3000; ++i)
    simple(f, 4 * i);
  ovl_record record;
  REQUIRE(counters().launches == 3000 && counters().unknown == 0 && counters().shaped == 3000);
  REQUIRE(ovl_records_read(&next, &record, 1) == 1 && record.after == record.before + 4096);
  REQUIRE(ovl_role_set_stream((void *)(uintptr_t)32, OVL_IGNORED) == OVL_OK);
  REQUIRE(ovl_policy_pop(token) == OVL_OK && ovl_policy_depth() == 0);
  _exit(0);
}

static void forks(void) {
  CUfunction f = fake_function("gemm", 128, 0);
  fake_quiet(1);
  push(padding(1024));
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; ++i)
    pthread_create(&threads[i], NULL, launching_new_kernels, (void *)(intptr_t)i);
  for (int i = 0; i < 20; ++i) {
    usleep(300);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0)
      in_child(f);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
  }
  atomic_store(&done, 1);
  for (int i = 0; i < THREADS; ++i)
    pthread_join(threads[i], NULL);
}

/* ---- captures on many streams, to be left alone ---------------------------------------------- */

static void *capturing(void *which) {
  CUstream stream = (CUstream)(uintptr_t)(0x1000 + 16 * (intptr_t)which);
  CUfunction f = fake_function("gemm", 128, 0);
  for (unsigned i = 0; i < 1000; ++i) {
    CUgraph graph;
    begin_capture(stream, 0);
    launch(f, 4096, 1, 1, 128, 1, 1, 8192, stream, NULL, NULL);
    end_capture(stream, &graph);
    launch(f, 4096, 1, 1, 128, 1, 1, 12288, stream, NULL, NULL);
    if (i % 32 == 0)
      end_capture(stream, &graph); /* nothing to end */
  }
  return NULL;
}

static void captures(void) {
  ovl_policy policy = padding(1024);
  policy.shape_captures = 0;
  push(policy);
  on_threads(capturing, THREADS);
  REQUIRE(counters().captured == THREADS * 1000 && counters().shaped == THREADS * 1000);
  struct fake_call call;
  for (int i = 0; fake_call_at(i, &call); ++i)
    if (!strcmp(call.symbol, "cuLaunchKernel"))
      REQUIRE(call.dynamic_smem == 8192 || call.dynamic_smem == 12288 + 1024);
}

/* ---- a limit that all threads raise, each to its own value ------------------------------------
 */

enum { RAISED = 400 };

static void *raise_limit(void *which) {
  for (int i = 0; i < RAISED; ++i) {
    pthread_barrier_wait(&together);
    simple(fresh[i], 49152 - 1024 * (unsigned)(intptr_t)which);
    pthread_barrier_wait(&together);
    REQUIRE(fake_max_dynamic(fresh[i]) == 49152 + 8192);
  }
  return NULL;
}

static void limits(void) {
  for (int i = 0; i < RAISED; ++i)
    fresh[i] = fake_function("gemm", 128, 0);
  push(padding(8192));
  pthread_barrier_init(&together, NULL, THREADS);
  on_threads(raise_limit, THREADS);
  REQUIRE(counters().shaped == THREADS * RAISED && counters().failed == 0);
}

/* ---- policies entered and left on all threads while all launch --------------------------------
 */

static void *regions(void *which) {
  CUfunction f = fake_function("gemm", 128, 0);
  for (unsigned i = 0; i < 4000; ++i) {
    uint64_t outer = push(padding(512 * (1 + (unsigned)(intptr_t)which)));
    uint64_t inner = push(padding(512 * (i % 16)));
    atomic_fetch_add(&started, 1);
    simple(f, 16384);
    REQUIRE(ovl_policy_pop(i % 2 ? inner : outer) == OVL_OK);
    REQUIRE(ovl_policy_pop(i % 2 ? outer : inner) == OVL_OK);
    REQUIRE(ovl_policy_pop(inner) == OVL_E_NOT_FOUND);
  }
  return NULL;
}

static void policies(void) {
  on_threads(regions, THREADS);
  REQUIRE(ovl_policy_depth() == 0);
  REQUIRE(counters().launches == atomic_load(&started) && counters().failed == 0);
  uint64_t before = counters().launches;
  simple(fake_function("gemm", 128, 0), 16384);
  REQUIRE(last_call().dynamic_smem == 16384 && counters().launches == before);
  struct fake_call call;
  for (int i = 0; fake_call_at(i, &call); ++i)
    if (!strcmp(call.symbol, "cuLaunchKernel"))
      REQUIRE((call.dynamic_smem - 16384) % 512 == 0 && call.dynamic_smem <= 16384 + 15 * 512);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(void);
  } cases[] = {{"malformed", malformed},   {"first-sight", first_sight},
               {"full-table", full_table}, {"signals", signals},
               {"forks", forks},           {"captures", captures},
               {"limits", limits},         {"policies", policies}};
  if (argc < 3 || !harness_attach(argv[1]))
    return 2;
  *(void **)&launch = harness_hook("cuLaunchKernel");
  *(void **)&launch_ex = harness_hook("cuLaunchKernelEx");
  *(void **)&unload = harness_hook("cuModuleUnload");
  *(void **)&begin_capture = harness_hook("cuStreamBeginCapture_v2");
  *(void **)&end_capture = harness_hook("cuStreamEndCapture");
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
    if (!strcmp(cases[i].name, argv[2])) {
      cases[i].run();
      return 0;
    }
  return 2;
}
