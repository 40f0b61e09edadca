/* Stops every other thread of the process at a place that is known, without asking it to help.
 *
 * Each thread is sent a real-time signal that the program does not use; the handler notes where
 * the thread was interrupted and waits until it is released. A parked thread executes nothing but
 * the handler, so what it was interrupted at is where it goes on.
 *
 * Threads that must not be signalled, because they block the signal or take it with sigwait, are
 * accepted only while they are inside a system call: the kernel then tells the address they return
 * to. That is read twice, the second time after everything else has stopped.
 *
 * Where a thread "goes on" is more than its instruction pointer: it may be inside a signal handler
 * that will return to an interrupted launch. Such an address lies on its stack, so the stack is
 * searched too. An address inside a replaced jump is never a return address (there are no calls in
 * it), so a find is either that case or a stale word; in both cases we let go and try again.
 *
 * While threads are stopped nothing here allocates, takes a lock or calls the loader. */
#define _GNU_SOURCE
#include "attach.h"

#if defined(__linux__) && defined(__x86_64__)

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum {
  MAX_THREADS = 16384,
  MAX_ROUNDS = 200,         /* how often we let go and try again */
  PASS_TIMEOUT_MS = 5,      /* wait for signalled threads before looking at the others again */
  ROUND_TIMEOUT_MS = 400,   /* longest time the program stands still in one round */
  STACK_SEARCH_BYTES = 8192 /* enough for a few signal frames with wide vector registers */
};

typedef enum how {
  RUNNING,    /* nothing known yet */
  SIGNALLED,  /* parks, or has parked */
  ASLEEP,     /* in the kernel with the signal pending: parks before its next instruction */
  IN_SYSCALL, /* not signalled; in a system call when last looked at */
  GONE
} how;

typedef struct slot {
  pid_t tid;
  how how;
  _Atomic uint32_t parked;
  uintptr_t ip, sp;
} slot;

typedef struct syscall_state {
  long number;
  uintptr_t ip, sp;
} syscall_state;

static slot *slots;
static size_t slot_count;
static int stop_signal;
static struct sigaction previous_action;
static sigset_t previous_mask;
static pid_t own_pid;

/* The round in progress, 0 for none: threads are parked while it keeps the number they were
 * signalled with. Futex word. */
static _Atomic uint32_t round_now;
static uint32_t round_last;
static _Atomic uint32_t parked_count; /* futex word: the stopper waits for it to grow */
static _Atomic uint32_t inside_handler;

static long futex(_Atomic uint32_t *word, int operation, uint32_t value,
                  const struct timespec *timeout) {
  return syscall(SYS_futex, (uint32_t *)word, operation | FUTEX_PRIVATE_FLAG, value, timeout, NULL,
                 0);
}

static int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- in the stopped thread: async-signal-safe only ------------------------------------------- */

static void park(int number, siginfo_t *info, void *context) {
  (void)number;
  int saved_errno = errno;
  atomic_fetch_add(&inside_handler, 1);
  uint64_t ticket = (uint64_t)(uintptr_t)info->si_value.sival_ptr;
  uint32_t round = (uint32_t)(ticket >> 32), index = (uint32_t)ticket;
  /* A late signal, or somebody else's, finds no such round and returns at once. */
  if (info->si_code == SI_QUEUE && info->si_pid == own_pid && round != 0 &&
      round == atomic_load(&round_now) && index < MAX_THREADS) {
    const ucontext_t *interrupted = context;
    slots[index].ip = (uintptr_t)interrupted->uc_mcontext.gregs[REG_RIP];
    slots[index].sp = (uintptr_t)interrupted->uc_mcontext.gregs[REG_RSP];
    atomic_store(&slots[index].parked, 1);
    atomic_fetch_add(&parked_count, 1);
    futex(&parked_count, FUTEX_WAKE, INT_MAX, NULL);
    while (atomic_load(&round_now) == round)
      futex(&round_now, FUTEX_WAIT, round, NULL);
  }
  atomic_fetch_sub(&inside_handler, 1);
  errno = saved_errno;
}

/* ---- what the kernel says of a thread -------------------------------------------------------- */

static ssize_t read_task_file(pid_t tid, const char *file, char *text, size_t size) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/task/%d/%s", (int)tid, file);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return -1;
  ssize_t got = read(fd, text, size - 1);
  close(fd);
  text[got < 0 ? 0 : got] = 0;
  return got;
}

/* False while the thread runs, and where the kernel does not tell. */
static bool in_syscall(pid_t tid, syscall_state *state) {
  char text[256];
  if (read_task_file(tid, "syscall", text, sizeof text) <= 0 || strncmp(text, "running", 7) == 0)
    return false;
  /* "number arg1 .. arg6 sp ip", or "-1 sp ip" when the kernel was entered without a call */
  uintptr_t words[9];
  int count = 0;
  char *at = text;
  state->number = strtol(at, &at, 10);
  while (count < 9) {
    char *end;
    uintptr_t word = strtoull(at, &end, 16);
    if (end == at)
      break;
    words[count++] = word;
    at = end;
  }
  if (count < 2)
    return false;
  state->sp = words[count - 2];
  state->ip = words[count - 1];
  return true;
}

static uint64_t hex_field(const char *text, const char *name) {
  const char *at = strstr(text, name);
  return at == NULL ? 0 : strtoull(at + strlen(name), NULL, 16);
}

/* Would the signal reach the program instead of our handler? While a thread waits in sigwait the
 * kernel shows the awaited signals as not blocked, so that call is looked for as well. */
static bool must_not_signal(pid_t tid) {
  char text[4096];
  if (read_task_file(tid, "status", text, sizeof text) > 0 &&
      (hex_field(text, "\nSigBlk:") >> (stop_signal - 1) & 1) != 0)
    return true;
  syscall_state state;
  return in_syscall(tid, &state) && state.number == SYS_rt_sigtimedwait;
}

static bool is_gone(pid_t tid) {
  char text[512];
  if (read_task_file(tid, "stat", text, sizeof text) <= 0)
    return true;
  const char *name_end = strrchr(text, ')');
  return name_end != NULL && (name_end[2] == 'Z' || name_end[2] == 'X');
}

/* ---- one round ------------------------------------------------------------------------------- */

static void signal_thread(size_t index) {
  siginfo_t info;
  memset(&info, 0, sizeof info);
  info.si_signo = stop_signal;
  info.si_code = SI_QUEUE;
  info.si_pid = own_pid;
  info.si_uid = getuid();
  info.si_value.sival_ptr = (void *)(uintptr_t)((uint64_t)atomic_load(&round_now) << 32 | index);
  if (syscall(SYS_rt_tgsigqueueinfo, own_pid, slots[index].tid, stop_signal, &info) == 0)
    slots[index].how = SIGNALLED;
  else if (errno == ESRCH)
    slots[index].how = GONE;
}

/* Adds threads not seen before; returns how many, or -1 if the list cannot be read. */
static int list_threads(void) {
  int fd = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0)
    return -1;
  pid_t self = (pid_t)syscall(SYS_gettid);
  int added = 0;
  bool self_seen = false; /* if not, these are the numbers of another process-id namespace */
  char buffer[4096] __attribute__((aligned(8)));
  long got;
  while ((got = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < got;) {
      const struct dirent64 *entry = (const struct dirent64 *)(buffer + at);
      at += entry->d_reclen;
      pid_t tid = (pid_t)strtol(entry->d_name, NULL, 10);
      self_seen = self_seen || tid == self;
      size_t known = 0;
      while (known < slot_count && slots[known].tid != tid)
        known++;
      if (tid <= 0 || tid == self || known < slot_count)
        continue;
      if (slot_count == MAX_THREADS) {
        got = -1;
        break;
      }
      slots[slot_count].tid = tid;
      slots[slot_count].how = RUNNING;
      atomic_store(&slots[slot_count].parked, 0);
      slot_count++;
      added++;
    }
    if (got < 0)
      break;
  }
  close(fd);
  return got < 0 || !self_seen ? -1 : added;
}

/* Brings one thread nearer to a stop; true once its place is known and it cannot leave it. */
static bool settle(size_t index) {
  slot *s = &slots[index];
  if (s->how == GONE || s->how == ASLEEP || (s->how == SIGNALLED && atomic_load(&s->parked)))
    return true;
  if (is_gone(s->tid)) {
    s->how = GONE;
    return true;
  }
  if (s->how == SIGNALLED) /* on its way */
    return false;
  syscall_state state;
  if (!must_not_signal(s->tid)) {
    signal_thread(index);
    return s->how == GONE;
  }
  if (!in_syscall(s->tid, &state)) {
    s->how = RUNNING;
    return false;
  }
  s->how = IN_SYSCALL;
  s->ip = state.ip;
  s->sp = state.sp;
  return true;
}

static bool all_settled(void) {
  bool all = true;
  for (size_t i = 0; i < slot_count; i++)
    all = settle(i) && all;
  return all;
}

static void wait_for_parking(void) {
  uint32_t seen = atomic_load(&parked_count);
  for (size_t i = 0; i < slot_count; i++) {
    if (slots[i].how == SIGNALLED && !atomic_load(&slots[i].parked)) {
      struct timespec limit = {0, PASS_TIMEOUT_MS * 1000000L};
      futex(&parked_count, FUTEX_WAIT, seen, &limit);
      return;
    }
  }
  struct timespec pause = {0, 200000};
  nanosleep(&pause, NULL);
}

/* A thread in uninterruptible sleep does not answer, but its signal is pending: it cannot execute
 * an instruction of the program before it parks, so its place is the one the kernel tells. (If it
 * came to block the signal meanwhile, it is like the threads that were never signalled.) */
static void accept_sleepers(void) {
  for (size_t i = 0; i < slot_count; i++) {
    slot *s = &slots[i];
    syscall_state state;
    if (s->how != SIGNALLED || atomic_load(&s->parked) || !in_syscall(s->tid, &state))
      continue;
    s->how = must_not_signal(s->tid) ? IN_SYSCALL : ASLEEP;
    s->ip = state.ip;
    s->sp = state.sp;
  }
}

static bool inside(const ovl_window *windows, size_t count, uintptr_t address) {
  for (size_t i = 0; i < count; i++)
    if (address > windows[i].first && address < windows[i].end)
      return true;
  return false;
}

static bool stack_leads_inside(const ovl_window *windows, size_t count, int memory, uintptr_t sp) {
  static uintptr_t words[STACK_SEARCH_BYTES / sizeof(uintptr_t)];
  ssize_t got = pread(memory, words, sizeof words, (off_t)(sp & ~(uintptr_t)7));
  for (ssize_t i = 0; i < got / (ssize_t)sizeof words[0]; i++)
    if (inside(windows, count, words[i]))
      return true;
  return false;
}

static bool all_outside(const ovl_window *windows, size_t count) {
  int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  bool outside = true;
  for (size_t i = 0; i < slot_count && outside; i++)
    outside = slots[i].how == GONE ||
              !(inside(windows, count, slots[i].ip) ||
                (memory >= 0 && stack_leads_inside(windows, count, memory, slots[i].sp)));
  if (memory >= 0)
    close(memory);
  return outside;
}

/* Threads we could not signal must still be in the call they were in. */
static bool callers_unmoved(void) {
  for (size_t i = 0; i < slot_count; i++) {
    syscall_state state;
    if (slots[i].how == IN_SYSCALL &&
        !(in_syscall(slots[i].tid, &state) && state.ip == slots[i].ip && state.sp == slots[i].sp))
      return false;
  }
  return true;
}

static void release(void) {
  atomic_store(&round_now, 0);
  futex(&round_now, FUTEX_WAKE, INT_MAX, NULL);
}

typedef enum outcome { STOPPED, TRY_AGAIN, CANNOT_LIST } outcome;

static outcome try_round(const ovl_window *windows, size_t count) {
  slot_count = 0;
  atomic_store(&parked_count, 0);
  if (++round_last == 0)
    round_last = 1;
  atomic_store(&round_now, round_last);
  int64_t end = now_ms() + ROUND_TIMEOUT_MS;
  for (;;) {
    int added = list_threads();
    if (added < 0)
      return CANNOT_LIST;
    bool settled = all_settled();
    bool late = now_ms() > end;
    if (!settled && late) {
      accept_sleepers();
      settled = all_settled();
    }
    /* Only a list that brings nothing new, read after all known threads had stopped, is complete:
     * the threads that could have started another one no longer run. */
    if (settled && added == 0 && list_threads() == 0)
      break;
    if (late)
      return TRY_AGAIN;
    if (!settled)
      wait_for_parking();
  }
  return all_outside(windows, count) && callers_unmoved() ? STOPPED : TRY_AGAIN;
}

/* ---- signal choice and clean-up -------------------------------------------------------------- */

/* A real-time signal nobody handles and the calling thread does not block (blocked signals with
 * the default action are those a program reads with signalfd or sigwait). SIGRTMAX is left out:
 * debuggers and emulators like to take it. */
static int choose_signal(void) {
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, NULL, &blocked);
  for (int number = SIGRTMAX - 1; number > SIGRTMIN; number--) {
    struct sigaction action;
    if (sigaction(number, NULL, &action) == 0 && !(action.sa_flags & SA_SIGINFO) &&
        action.sa_handler == SIG_DFL && !sigismember(&blocked, number))
      return number;
  }
  return 0;
}

static bool begin(void) {
  if (slots == NULL) {
    void *memory = mmap(NULL, MAX_THREADS * sizeof(slot), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
      return false;
    slots = memory;
  }
  own_pid = getpid();
  stop_signal = choose_signal();
  if (stop_signal == 0)
    return false;
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = park;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigfillset(&action.sa_mask); /* no handler of the program runs in a parked thread */
  if (sigaction(stop_signal, &action, &previous_action) != 0)
    return false;
  /* A handler of the program on this thread could wait for a lock a parked thread holds. */
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous_mask);
  return true;
}

static void end(void) {
  /* Threads on their way out of the handler: code and stack frames stay valid, only the count is
   * awaited so that a later stop starts clean. */
  for (int i = 0; i < 1000 && atomic_load(&inside_handler) != 0; i++) {
    struct timespec pause = {0, 100000};
    nanosleep(&pause, NULL);
  }
  /* Ignoring a signal discards what is still pending of it in any thread; the default action,
   * put back at once, would end the process. */
  struct sigaction ignore;
  memset(&ignore, 0, sizeof ignore);
  ignore.sa_handler = SIG_IGN;
  sigaction(stop_signal, &ignore, NULL);
  sigaction(stop_signal, &previous_action, NULL);
  pthread_sigmask(SIG_SETMASK, &previous_mask, NULL);
}

static void describe_failure(char *detail, size_t size) {
  for (size_t i = 0; i < slot_count; i++) {
    bool parked = slots[i].how == SIGNALLED && atomic_load(&slots[i].parked);
    if (!parked && (slots[i].how == SIGNALLED || slots[i].how == RUNNING)) {
      snprintf(detail, size, "thread %d of %zu %s", (int)slots[i].tid, slot_count,
               slots[i].how == SIGNALLED ? "did not answer signal"
                                         : "blocks signals and is not inside a system call");
      return;
    }
  }
  snprintf(detail, size, "one of %zu threads kept being inside an entry's first instructions",
           slot_count);
}

int ovl_stop_threads(const ovl_window *windows, size_t count, int *attempts, char *detail,
                     size_t detail_size) {
  if (!begin()) {
    snprintf(detail, detail_size, "no memory, or no unused real-time signal");
    return OVL_E_THREADS;
  }
  int stuck = 0;
  for (int round = 0; round < MAX_ROUNDS && stuck < 5; round++) {
    ++*attempts;
    int64_t start = now_ms();
    outcome result = try_round(windows, count);
    if (result == STOPPED)
      return OVL_OK;
    if (result == CANNOT_LIST) {
      release();
      end();
      snprintf(detail, detail_size, "the threads of the process cannot be listed");
      return OVL_E_THREADS;
    }
    describe_failure(detail, detail_size);
    release();
    stuck += now_ms() - start >= ROUND_TIMEOUT_MS;
    /* Let the threads move on, a little longer each time. */
    struct timespec pause = {0, 100000L * (1 + round % 20)};
    nanosleep(&pause, NULL);
  }
  end();
  return OVL_E_THREADS;
}

void ovl_resume_threads(void) {
  release();
  end();
}

#else

int ovl_stop_threads(const ovl_window *windows, size_t count, int *attempts, char *detail,
                     size_t detail_size) {
  (void)windows, (void)count, (void)attempts, (void)detail, (void)detail_size;
  return OVL_E_ARCHITECTURE;
}

void ovl_resume_threads(void) {}

#endif
