/* One attach under one circumstance per call; the tests run it and read the line it prints.
 *
 *   detour_cases SHIM DRIVER CASE [NUMBER]
 *
 * Prints "status attachment entries attempts entry|detail" of the last attach, and exits 0 unless a
 * call went wrong. */
#define _GNU_SOURCE
#include "overlapctl_shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { HAMMERS = 8 };

typedef unsigned (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, void *, void **, void **);
typedef unsigned (*launch_ex)(void *, void *, void **, void **);
typedef int (*attach)(const char *, ovl_attach_report *);

static const char *driver_path;
static attach attach_detour;
static launch launch_plain, launch_ptsz;
static launch_ex launch_config, launch_config_ptsz;
static uint64_t *calls;
static atomic_int stop, ready, wrong;
static atomic_ulong made;

static void *handle(unsigned long value) {
  return (void *)value;
}

static void sleep_us(long us) {
  struct timespec pause = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&pause, NULL);
}

static long now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) {
    fprintf(stderr, "%s: %s\n", name, dlerror());
    _exit(70);
  }
  return found;
}

static void load(const char *shim_path) {
  void *driver = dlopen(driver_path, RTLD_NOW | RTLD_LOCAL);
  void *shim = dlopen(shim_path, RTLD_NOW | RTLD_LOCAL);
  if (driver == NULL || shim == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(70);
  }
  *(void **)&attach_detour = symbol(shim, "ovl_attach_detour");
  *(void **)&launch_plain = symbol(driver, "cuLaunchKernel");
  *(void **)&launch_ptsz = symbol(driver, "cuLaunchKernel_ptsz");
  *(void **)&launch_config = dlsym(driver, "cuLaunchKernelEx");
  *(void **)&launch_config_ptsz = symbol(driver, "cuLaunchKernelEx_ptsz");
  calls = symbol(driver, "detour_driver_calls");
}

static int attach_and_tell(void) {
  ovl_attach_report report;
  int status = attach_detour(driver_path, &report);
  printf("%d %d %d %d %s|%s\n", status, report.attachment, report.entries, report.attempts,
         report.entry, report.detail);
  fflush(stdout);
  return status;
}

static void expect(unsigned got, unsigned wanted) {
  if (got != wanted)
    atomic_fetch_add(&wrong, 1);
}

static void call_all(unsigned seed) {
  unsigned b = seed % 1000;
  expect(launch_plain(handle(1), 2, 3, 4, 5, 6, 7, b, NULL, NULL, NULL), 28 + b);
  expect(launch_ptsz(handle(1), 2, 3, 4, 5, 6, 7, b, NULL, NULL, NULL), 28 + b + 1);
  unsigned count = 2;
  if (launch_config != NULL) {
    expect(launch_config(handle(1), handle(b), (void **)3, (void **)4), 8 + b + 2);
    expect(launch_config_ptsz(handle(1), handle(b), (void **)3, (void **)4), 8 + b + 3);
    count = 4;
  }
  atomic_fetch_add(&made, count);
}

static void *hammer(void *seed) {
  unsigned n = (unsigned)(uintptr_t)seed;
  atomic_fetch_add(&ready, 1);
  while (!atomic_load(&stop))
    call_all(n++);
  return NULL;
}

static void *in_thread(void *(*body)(void *), void *argument) {
  static pthread_t threads[64];
  static int count;
  pthread_create(&threads[count], NULL, body, argument);
  return &threads[count++];
}

static int all_right(void) {
  uint64_t counted = calls[0] + calls[1] + calls[2] + calls[3];
  if (atomic_load(&wrong) != 0 || counted != atomic_load(&made)) {
    fprintf(stderr, "%d wrong results, %lu calls made, %lu arrived\n", atomic_load(&wrong),
            atomic_load(&made), (unsigned long)counted);
    return 1;
  }
  return 0;
}

static int real_time_signals_are_default(void) {
  for (int number = SIGRTMIN; number <= SIGRTMAX; number++) {
    struct sigaction action;
    sigaction(number, NULL, &action);
    if (action.sa_handler != SIG_DFL)
      return 0;
  }
  return 1;
}

/* ---- cases ----------------------------------------------------------------------------------- */

static int case_plain(void) {
  call_all(1);
  attach_and_tell();
  call_all(2);
  return all_right();
}

static int case_attach_only(void) {
  attach_and_tell();
  return 0;
}

static int case_two_shims(const char *other) {
  attach_and_tell();
  void *second = dlopen(other, RTLD_NOW | RTLD_LOCAL);
  if (second == NULL)
    return 70;
  *(void **)&attach_detour = symbol(second, "ovl_attach_detour");
  attach_and_tell();
  call_all(1);
  return all_right();
}

static int case_twice(void) {
  attach_and_tell();
  attach_and_tell();
  call_all(1);
  return all_right();
}

/* Attach after a random while, in a process of its own, with eight threads launching. */
static int hammer_once(unsigned seed) {
  void *threads[HAMMERS];
  for (uintptr_t i = 0; i < HAMMERS; i++)
    threads[i] = in_thread(hammer, (void *)(i + seed));
  while (atomic_load(&ready) < 1)
    sleep_us(10);
  sleep_us(rand_r(&seed) % 2000);
  ovl_attach_report report;
  int status = attach_detour(driver_path, &report);
  sleep_us(2000);
  atomic_store(&stop, 1);
  for (int i = 0; i < HAMMERS; i++)
    pthread_join(*(pthread_t *)threads[i], NULL);
  if (status != OVL_OK)
    fprintf(stderr, "status %d: %s\n", status, report.detail);
  if (!real_time_signals_are_default())
    fprintf(stderr, "a signal's action was left behind\n");
  return status != OVL_OK || !real_time_signals_are_default() || all_right();
}

static int case_hammer(const char *shim, int runs) {
  int failed = 0;
  for (int i = 0; i < runs; i++) {
    pid_t child = fork();
    if (child == 0) {
      load(shim);
      _exit(hammer_once((unsigned)i));
    }
    int how;
    waitpid(child, &how, 0);
    failed += how != 0;
  }
  printf("%d of %d failed\n", failed, runs);
  return failed != 0;
}

/* A thread that is single-stepped into the entry and then held, inside a signal handler, with the
 * interrupted address inside the bytes that the jump replaces. */
static atomic_int held;
static long hold_us;

static void on_step(int number, siginfo_t *info, void *context) {
  (void)number, (void)info;
  ucontext_t *interrupted = context;
  uintptr_t ip = (uintptr_t)interrupted->uc_mcontext.gregs[REG_RIP];
  uintptr_t entry = (uintptr_t)launch_plain;
  if (ip > entry && ip < entry + 5) {
    interrupted->uc_mcontext.gregs[REG_EFL] &= ~0x100L; /* no further steps */
    atomic_store(&held, 1);
    for (long end = now_us() + hold_us; now_us() < end;) /* signals cut a sleep short */
      sleep_us(1000);
    atomic_store(&held, 2);
  }
}

static void *step_into_entry(void *unused) {
  (void)unused;
  __asm__ volatile("pushfq\n orq $0x100, (%%rsp)\n popfq" ::: "memory", "cc");
  unsigned got = launch_plain(handle(1), 2, 3, 4, 5, 6, 7, 0, NULL, NULL, NULL);
  expect(got, 28);
  atomic_fetch_add(&made, 1);
  return NULL;
}

static int case_held_inside(long us) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_step;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, NULL);
  hold_us = us;
  void *thread = in_thread(step_into_entry, NULL);
  while (atomic_load(&held) == 0)
    sleep_us(10);
  int status = attach_and_tell();
  int left = atomic_load(&held) == 2;
  pthread_join(*(pthread_t *)thread, NULL);
  call_all(3);
  /* Attached only after the thread had left, or not at all. */
  return all_right() || (status == OVL_OK && !left);
}

static int pipe_ends[2];
static atomic_int woken;

static void block_all(void) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, NULL);
  atomic_fetch_add(&ready, 1);
}

static void unblock_all(void) {
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, NULL);
}

static void *blocked_in_read(void *unused) {
  (void)unused;
  block_all();
  char byte;
  ssize_t got = read(pipe_ends[0], &byte, 1);
  unblock_all(); /* a signal left pending would arrive now, and end the process */
  call_all((unsigned)got);
  return NULL;
}

static void *blocked_spinning(void *unused) {
  (void)unused;
  block_all();
  while (!atomic_load(&stop))
    ;
  unblock_all();
  return NULL;
}

static void *waiting_for_signals(void *unused) {
  (void)unused;
  sigset_t all;
  sigfillset(&all);
  block_all();
  int number;
  sigwait(&all, &number);
  if (number != SIGUSR1)
    atomic_fetch_add(&woken, 1);
  return NULL;
}

static int with_thread(void *(*body)(void *)) {
  if (pipe(pipe_ends) != 0)
    return 70;
  pthread_t *thread = in_thread(body, NULL);
  while (atomic_load(&ready) == 0)
    sleep_us(10);
  sleep_us(20000);
  attach_and_tell();
  atomic_store(&stop, 1);
  if (write(pipe_ends[1], "x", 1) != 1)
    return 70;
  if (body == waiting_for_signals)
    pthread_kill(*thread, SIGUSR1);
  pthread_join(*thread, NULL);
  call_all(5);
  return all_right() || atomic_load(&woken) != 0 || !real_time_signals_are_default();
}

int main(int count, char **arguments) {
  if (count < 4)
    return 64;
  const char *name = arguments[3];
  int number = count > 4 ? atoi(arguments[4]) : 0;
  driver_path = arguments[2];
  if (strcmp(name, "hammer") == 0)
    return case_hammer(arguments[1], number);
  load(arguments[1]);
  if (strcmp(name, "plain") == 0)
    return case_plain();
  if (strcmp(name, "attach-only") == 0)
    return case_attach_only();
  if (strcmp(name, "two-shims") == 0 && count > 4)
    return case_two_shims(arguments[4]);
  if (strcmp(name, "twice") == 0)
    return case_twice();
  if (strcmp(name, "held-inside") == 0)
    return case_held_inside(number);
  if (strcmp(name, "blocked-in-read") == 0)
    return with_thread(blocked_in_read);
  if (strcmp(name, "blocked-spinning") == 0)
    return with_thread(blocked_spinning);
  if (strcmp(name, "sigwait") == 0)
    return with_thread(waiting_for_signals);
  return 64;
}
