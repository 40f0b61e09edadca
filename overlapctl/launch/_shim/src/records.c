/* The ring of launch records, the process-wide counters and the clock.
 *
 * A slot carries 2n+1 while record n is being written and 2n+2 once it is complete. Readers copy
 * and look at the number again; they never hold a writer up. A writer that slept for a whole lap of
 * the ring may write into a newer record: the check sum tells, and that record counts as lost. */
#include "state.h"

#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

/* The words ovl_record_write is given are the record's (on a little-endian processor). */
_Static_assert(sizeof(ovl_record) == 72 && offsetof(ovl_record, ticks) == 8 &&
                   offsetof(ovl_record, blocks) == 32 && offsetof(ovl_record, threads) == 44 &&
                   offsetof(ovl_record, after) == 52 && offsetof(ovl_record, cluster) == 60 &&
                   offsetof(ovl_record, role) == 62 && offsetof(ovl_record, actions) == 64,
               "the record's layout");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the record's layout");

enum { RING = 8192, WORDS = sizeof(ovl_record) / 8, PATIENCE = 256 };

struct ovl_globals ovl_globals;
OVL_HOT _Atomic int32_t ovl_listeners;

static struct {
  _Alignas(128) _Atomic uint64_t number;
  _Atomic uint64_t words[WORDS];
  _Atomic uint64_t check;
} ring[RING];

static _Alignas(128) _Atomic uint64_t head;
static _Atomic uint64_t base; /* records before it were forgotten */
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static uint64_t consumed, lost;

/* ---- clock: the processor's counter where it is steady, else the monotonic clock ---------------
 */

static _Atomic int clock_ready; /* 1: counter, 2: monotonic clock */
static uint64_t first_ticks, first_ns;
static double ns_per_tick;

static uint64_t monotonic_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t ticks_now(void) {
#if defined(__x86_64__)
  if (OVL_LIKELY(OVL_LOAD(clock_ready) == 1))
    return __rdtsc();
#endif
  return monotonic_ns();
}

int ovl_records_listen(int change) {
  pthread_mutex_lock(&reading);
  int now = OVL_LOAD(ovl_listeners) + change;
  OVL_STORE(ovl_listeners, now > 0 ? now : 0);
  pthread_mutex_unlock(&reading);
  return now > 0 ? now : 0;
}

void ovl_records_start(void) {
  if (atomic_load_explicit(&clock_ready, memory_order_acquire))
    return;
  pthread_mutex_lock(&reading);
  if (!OVL_LOAD(clock_ready)) {
    int kind = 2;
#if defined(__x86_64__)
    unsigned a, b, c, d = 0;
    if (__get_cpuid(0x80000007, &a, &b, &c, &d) && d & 1u << 8) {
      kind = 1;
      first_ns = monotonic_ns();
      first_ticks = __rdtsc();
    }
#endif
    atomic_store_explicit(&clock_ready, kind, memory_order_release);
  }
  pthread_mutex_unlock(&reading);
}

/* With the lock held. The rate is fixed at the first reading at least 10 ms after the start, when
 * the two clocks' reading errors (some 100 ns) are 10 parts in a million; provisional before. */
static double clock_rate(void) {
#if defined(__x86_64__)
  if (OVL_LOAD(clock_ready) == 1 && ns_per_tick == 0) {
    uint64_t ns = monotonic_ns() - first_ns, ticks = __rdtsc() - first_ticks;
    double rate = ticks ? (double)ns / (double)ticks : 1;
    if (ns >= 10000000)
      ns_per_tick = rate;
    return rate;
  }
#endif
  return ns_per_tick;
}

static uint64_t to_ns(uint64_t ticks, double rate) {
  if (OVL_LOAD(clock_ready) != 1)
    return ticks;
  return first_ns + (uint64_t)((double)(int64_t)(ticks - first_ticks) * rate);
}

/* ---- ring ------------------------------------------------------------------------------------ */

/* Each word turned by its place, so that exchanged words show. */
static inline uint64_t turned(uint64_t word, unsigned place) {
  unsigned by = 7 * place & 63;
  return word << by | word >> (-by & 63);
}

void ovl_record_write(uint64_t function, uint64_t stream, uint64_t blocks,
                      uint64_t thread_id_threads, uint64_t before_after,
                      uint64_t result_cluster_role_rule, uint64_t actions) {
  uint64_t ticks = ticks_now();
  uint64_t n = OVL_ADD(head, 1), check = 0;
  __typeof__(ring[0]) *slot = &ring[n % RING];
  OVL_STORE(slot->number, 2 * n + 1);
  atomic_thread_fence(memory_order_release);
#define PUT(index, value)                                                                          \
  do {                                                                                             \
    uint64_t word = (value);                                                                       \
    OVL_STORE(slot->words[index], word);                                                           \
    check ^= turned(word, index);                                                                  \
  } while (0)
  PUT(0, n);
  PUT(1, ticks);
  PUT(2, function);
  PUT(3, stream);
  PUT(4, blocks);
  PUT(5, thread_id_threads);
  PUT(6, before_after);
  PUT(7, result_cluster_role_rule);
  PUT(8, actions);
#undef PUT
  OVL_STORE(slot->check, check);
  atomic_store_explicit(&slot->number, 2 * n + 2, memory_order_release);
}

/* 1: copied, 0: not written yet, -1: overwritten. */
static int read_slot(uint64_t n, ovl_record *out) {
  __typeof__(ring[0]) *slot = &ring[n % RING];
  uint64_t number = atomic_load_explicit(&slot->number, memory_order_acquire);
  if (number < 2 * n + 2)
    return 0;
  uint64_t words[WORDS], check = 0;
  for (size_t i = 0; i < WORDS; ++i) {
    words[i] = OVL_LOAD(slot->words[i]);
    check ^= turned(words[i], (unsigned)i);
  }
  check ^= OVL_LOAD(slot->check);
  atomic_thread_fence(memory_order_acquire);
  if (number != 2 * n + 2 || check || OVL_LOAD(slot->number) != number)
    return -1;
  memcpy(out, words, sizeof *out);
  return 1;
}

size_t ovl_records_read(uint64_t *next, ovl_record *out, size_t capacity) {
  if (!next || (capacity && !out))
    return 0;
  size_t copied = 0;
  pthread_mutex_lock(&reading);
  double rate = clock_rate();
  uint64_t end = OVL_LOAD(head), n = *next, first = OVL_LOAD(base);
  if (n < first)
    n = first;
  if (consumed < first)
    consumed = first;
  if (end > RING && n < end - RING)
    n = end - RING;
  while (copied < capacity && n < end) {
    int state = read_slot(n, &out[copied]);
    if (state == 0 && end - n <= PATIENCE)
      break; /* being written: next time */
    if (state == 1) {
      out[copied].ticks = to_ns(out[copied].ticks, rate);
      ++copied;
      if (n >= consumed) {
        lost += n - consumed;
        consumed = n + 1;
      }
    }
    ++n;
  }
  *next = n;
  pthread_mutex_unlock(&reading);
  return copied;
}

uint64_t ovl_records_dropped(void) {
  pthread_mutex_lock(&reading);
  uint64_t first = OVL_LOAD(base), from = consumed > first ? consumed : first;
  uint64_t end = OVL_LOAD(head), count = lost;
  if (end > from + RING)
    count += end - RING - from;
  pthread_mutex_unlock(&reading);
  return count;
}

static void forget(void) {
  OVL_STORE(base, OVL_LOAD(head));
  lost = 0;
}

static void zero_globals(void) {
  OVL_STORE(ovl_globals.cooperative, 0);
  OVL_STORE(ovl_globals.graph_launches, 0);
  OVL_STORE(ovl_globals.unknown, 0);
  OVL_STORE(ovl_globals.unknown_rows, 0);
  OVL_STORE(ovl_globals.retired_failures, 0);
  for (int i = 0; i < OVL_COUNTS; ++i)
    OVL_STORE(ovl_globals.retired[i], 0);
}

void ovl_records_reset(void) {
  pthread_mutex_lock(&reading);
  forget();
  zero_globals();
  pthread_mutex_unlock(&reading);
}

/* A writer of the parent that was interrupted in the middle left its slot marked as being written.
 */
void ovl_records_after_fork(void) {
  pthread_mutex_init(&reading, NULL);
  OVL_STORE(ovl_listeners, 0);
  for (size_t i = 0; i < RING; ++i) {
    uint64_t number = OVL_LOAD(ring[i].number);
    if (number & 1)
      OVL_STORE(ring[i].number, number - 1);
  }
  forget();
  zero_globals();
}
