/* What one launch costs: straight to the fake driver, through the shim without a policy, and
 * through the shim while it pads a kernel it knows or raises a known communication kernel's
 * priority. Prints JSON; nanoseconds per launch, medians of repetitions that take turns.
 *
 *   shim_overhead PATH_OF_FAKE_DRIVER [repetitions] [launches per repetition] */
#include "driver_api.h"
#include "fake_driver.h"
#include "overlapctl_shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int harness_attach(const char *path);
void *harness_hook(const char *symbol);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void **, void **);

enum { ARMS = 4, MAX_REPETITIONS = 1001 };

static const char *const arm_names[ARMS] = {"direct", "off", "shaping", "priority"};

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static double per_launch(ovl_launch_fn volatile launch, CUfunction f, long launches) {
  double start = now_ns();
  for (long i = 0; i < launches; ++i)
    launch(f, 4096, 1, 1, 128, 1, 1, 16384, NULL, NULL, NULL);
  return (now_ns() - start) / (double)launches;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  static double times[ARMS][MAX_REPETITIONS];
  long repetitions = argc > 2 ? atol(argv[2]) : 51, launches = argc > 3 ? atol(argv[3]) : 100000;
  if (argc < 2 || repetitions < 1 || repetitions > MAX_REPETITIONS || launches < 1 ||
      !harness_attach(argv[1]))
    return 2;
  CUfunction compute = fake_function("gemm_64x64x64", 128, 0);
  CUfunction communication = fake_function("ncclDevKernel_AllReduce", 96, 0);
  ovl_launch_fn hook;
  *(void **)&hook = harness_hook("cuLaunchKernel");
  ovl_policy policy = {
      .max_blocks_per_sm = 3, .carveout = -1, .comm_priority = 1, .shape_captures = 1};
  fake_quiet(1);
  for (long i = 0; i < repetitions; ++i) {
    uint64_t token;
    times[0][i] = per_launch(cuLaunchKernel, compute, launches);
    times[1][i] = per_launch(hook, compute, launches);
    if (ovl_policy_push(&policy, &token) != OVL_OK)
      return 1;
    times[2][i] = per_launch(hook, compute, launches);
    times[3][i] = per_launch(hook, communication, launches);
    ovl_policy_pop(token);
  }
  ovl_counters counters;
  ovl_counters_read(&counters);
  uint64_t expected = (uint64_t)(repetitions * launches);
  if (counters.shaped != expected || counters.prioritised != expected) {
    fprintf(stderr, "%llu shaped and %llu prioritised of %llu each\n",
            (unsigned long long)counters.shaped, (unsigned long long)counters.prioritised,
            (unsigned long long)expected);
    return 1;
  }
  printf("{\"unit\": \"ns per launch\", \"repetitions\": %ld, \"launches\": %ld, \"rows\": [",
         repetitions, launches);
  double direct = 0;
  for (int arm = 0; arm < ARMS; ++arm) {
    qsort(times[arm], (size_t)repetitions, sizeof times[arm][0], ascending);
    double median = times[arm][repetitions / 2];
    direct = arm ? direct : median;
    printf("%s{\"arm\": \"%s\", \"median\": %.2f, \"p10\": %.2f, \"p90\": %.2f, \"added\": %.2f}",
           arm ? ", " : "", arm_names[arm], median, times[arm][repetitions / 10],
           times[arm][repetitions * 9 / 10], median - direct);
  }
  printf("]}\n");
  return 0;
}
