/* Everything at once, to be built with a sanitizer: launches, policies, roles, unloads and readers
 * on several threads. Exits with 0 if the counts are exact. */
#include "driver_api.h"
#include "fake_driver.h"
#include "overlapctl_shim.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

int harness_attach(const char *path);
void *harness_hook(const char *symbol);

enum { LAUNCHERS = 4, ROUNDS = 3000, FUNCTIONS = 6 };

static CUfunction functions[FUNCTIONS];
static ovl_launch_fn launch;
static ovl_unload_fn unload;
static atomic_int done;

static void *launching(void *unused) {
  (void)unused;
  for (int i = 0; i < ROUNDS; ++i)
    launch(functions[i % FUNCTIONS], 4096, 1, 1, 128, 1, 1, 16384, NULL, NULL, NULL);
  return NULL;
}

static void *changing(void *unused) {
  (void)unused;
  for (int i = 0; !atomic_load(&done); ++i) {
    ovl_policy policy = {.pad_bytes = 1024u * (unsigned)(i % 7),
                         .max_blocks_per_sm = i % 3,
                         .carveout = i % 2 ? 100 : -1,
                         .comm_priority = i % 2,
                         .shape_captures = 1};
    uint64_t token;
    if (ovl_policy_push(&policy, &token) == OVL_OK)
      ovl_policy_pop(token);
    ovl_role_set_stream((void *)(uintptr_t)(16 * (i % 5 + 1)), i % 4);
    ovl_role_add_pattern("stress_*", i % 4);
    if (i % 16 == 0)
      unload(NULL);
  }
  return NULL;
}

static void *reading(void *unused) {
  static ovl_record records[512];
  static ovl_kernel_row rows[64];
  uint64_t next = 0;
  (void)unused;
  while (!atomic_load(&done)) {
    ovl_counters counters;
    size_t count = ovl_records_read(&next, records, 512);
    for (size_t i = 0; i < count; ++i)
      if (records[i].blocks != 4096 || records[i].threads != 128 || records[i].before != 16384)
        return (void *)1;
    ovl_kernel_rows(rows, 64);
    ovl_counters_read(&counters);
  }
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t launchers[LAUNCHERS], changer, reader;
  if (argc < 2 || !harness_attach(argv[1]))
    return 2;
  for (int i = 0; i < FUNCTIONS; ++i)
    functions[i] = fake_function(i % 2 ? "ncclDevKernel" : "stress_gemm", 128, 0);
  *(void **)&launch = harness_hook("cuLaunchKernel");
  *(void **)&unload = harness_hook("cuModuleUnload");
  ovl_policy always = {.carveout = -1, .shape_captures = 1};
  uint64_t token;
  if (ovl_policy_push(&always, &token) != OVL_OK)
    return 2;
  pthread_create(&changer, NULL, changing, NULL);
  pthread_create(&reader, NULL, reading, NULL);
  for (int i = 0; i < LAUNCHERS; ++i)
    pthread_create(&launchers[i], NULL, launching, NULL);
  for (int i = 0; i < LAUNCHERS; ++i)
    pthread_join(launchers[i], NULL);
  atomic_store(&done, 1);
  void *torn = NULL;
  pthread_join(changer, NULL);
  pthread_join(reader, &torn);
  ovl_counters counters;
  ovl_counters_read(&counters);
  if (torn || counters.launches != LAUNCHERS * ROUNDS || counters.failed) {
    fprintf(stderr, "torn %d, %llu launches, %llu failed\n", torn != NULL,
            (unsigned long long)counters.launches, (unsigned long long)counters.failed);
    return 1;
  }
  return 0;
}
