/* Attaches the shim to a driver that is already in use, by redirecting its exported entries.
 *
 *   entry:  jmp stub      (5 bytes, the only change)     stub:        jmp hook
 *           ...rest                                      trampoline:  first instructions; jmp rest
 *
 * Why this is safe:
 *  - everything is decoded, allocated and written before the first entry changes: either all
 *    required entries are redirected or none;
 *  - the five bytes lie within one aligned 8-byte word and are replaced by one atomic store, so
 *    that no thread ever fetches half a jump;
 *  - no thread may go on between the old instructions that the jump replaces: all threads stand
 *    still at known addresses outside of them (stop_threads.c) while the stores are made;
 *  - bytes after the jump keep their value, so threads inside the copied instructions behind the
 *    jump, and threads deeper in the function, go on as before;
 *  - the hook is never taken out again. "Off" is an empty policy, not a second patch.
 */
#define _GNU_SOURCE
#include "attach.h"
#include "intercept.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static ovl_attach_report first_report;
static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;

static int fail(ovl_attach_report *report, int status, const char *entry) {
  if (entry != NULL)
    snprintf(report->entry, sizeof report->entry, "%s", entry);
  return status;
}

#if defined(__linux__) && defined(__x86_64__)

#include <linux/membarrier.h>
#include <sys/syscall.h>

enum {
  SLOT_BYTES = 64,
  STUB_AT = 32,  /* the trampoline before it needs at most 14 + 14 bytes */
  MAGIC_AT = 48, /* behind the stub's 14 bytes */
  SHOWN_BYTES = 16
};
static const char stub_magic[8] = {'O', 'V', 'L', 'S', 'T', 'U', 'B', '1'};

typedef struct patch {
  const struct ovl_entry *entry;
  uint8_t *target;
  int copied;              /* bytes of whole instructions in the trampoline */
  struct patch *same_code; /* an earlier entry that exports the same address */
  int status;
} patch;

/* ---- memory map ------------------------------------------------------------------------------ */

typedef struct mapping {
  uintptr_t start, end;
  int protection;
} mapping;

typedef struct memory_map {
  mapping *list;
  size_t count;
} memory_map;

static bool read_memory_map(memory_map *map) {
  FILE *file = fopen("/proc/self/maps", "re");
  if (file == NULL)
    return false;
  size_t capacity = 0;
  map->list = NULL;
  map->count = 0;
  char *line = NULL;
  size_t line_size = 0;
  bool ok = true;
  while (ok && getline(&line, &line_size, file) > 0) {
    mapping m;
    char flags[5];
    if (sscanf(line, "%lx-%lx %4s", &m.start, &m.end, flags) != 3)
      continue;
    m.protection = (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) |
                   (flags[2] == 'x' ? PROT_EXEC : 0);
    if (map->count == capacity) {
      capacity = capacity == 0 ? 512 : 2 * capacity;
      mapping *grown = realloc(map->list, capacity * sizeof *grown);
      ok = grown != NULL;
      if (ok)
        map->list = grown;
    }
    if (ok)
      map->list[map->count++] = m;
  }
  free(line);
  fclose(file);
  if (!ok)
    free(map->list);
  return ok;
}

static const mapping *find_mapping(const memory_map *map, uintptr_t address) {
  for (size_t i = 0; i < map->count; i++)
    if (address >= map->list[i].start && address < map->list[i].end)
      return &map->list[i];
  return NULL;
}

static size_t readable_bytes(const memory_map *map, const void *address) {
  const mapping *m = find_mapping(map, (uintptr_t)address);
  return m != NULL && (m->protection & PROT_READ) ? m->end - (uintptr_t)address : 0;
}

/* ---- looking at an entry --------------------------------------------------------------------- */

static int32_t read_int32(const uint8_t *at) {
  int32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

static bool is_own_stub(const memory_map *map, const uint8_t *at) {
  size_t offset = MAGIC_AT - STUB_AT;
  return readable_bytes(map, at) >= offset + sizeof stub_magic &&
         memcmp(at + offset, stub_magic, sizeof stub_magic) == 0;
}

/* A jump or breakpoint where a compiler would put a prologue: somebody else was here. */
static int check_untouched(const memory_map *map, const uint8_t *code, size_t size) {
  if (size >= 4 && memcmp(code, "\xf3\x0f\x1e\xfa", 4) == 0) {
    code += 4;
    size -= 4;
  }
  if (size < 16)
    return OVL_E_PROLOGUE;
  if (code[0] == 0xe9)
    return is_own_stub(map, code + OVL_JUMP_BYTES + read_int32(code + 1)) ? OVL_E_ALREADY_ATTACHED
                                                                          : OVL_E_FOREIGN_DETOUR;
  bool jump = code[0] == 0xeb || code[0] == 0xcc || (code[0] == 0xff && code[1] == 0x25);
  /* mov register, address; jmp register */
  bool long_jump = (code[0] & 0xfe) == 0x48 && code[1] >= 0xb8 && code[1] <= 0xbf &&
                   (code[10] == 0xff || (code[10] == 0x41 && code[11] == 0xff));
  return jump || long_jump ? OVL_E_FOREIGN_DETOUR : OVL_OK;
}

static void describe(const patch *p, const memory_map *map, char *out, size_t size) {
  size_t shown = readable_bytes(map, p->target);
  shown = shown < SHOWN_BYTES ? shown : SHOWN_BYTES;
  int used = snprintf(out, size, "found");
  for (size_t i = 0; i < shown && used > 0 && (size_t)used < size; i++)
    used += snprintf(out + used, size - (size_t)used, " %02x", p->target[i]);
  if (((uintptr_t)p->target & 7) + OVL_JUMP_BYTES > 8 && used > 0 && (size_t)used < size)
    snprintf(out + used, size - (size_t)used, " at %p (not within one aligned word)",
             (const void *)p->target);
}

static int examine(patch *p, const memory_map *map) {
  const mapping *m = find_mapping(map, (uintptr_t)p->target);
  size_t available = readable_bytes(map, p->target);
  if (m == NULL || !(m->protection & PROT_EXEC))
    return OVL_E_PROLOGUE;
  int status = check_untouched(map, p->target, available);
  if (status != OVL_OK)
    return status;
  p->copied = ovl_decode_prologue(p->target, available, OVL_JUMP_BYTES);
  bool one_word = ((uintptr_t)p->target & 7) + OVL_JUMP_BYTES <= 8;
  return p->copied > 0 && one_word ? OVL_OK : OVL_E_PROLOGUE;
}

/* ---- trampolines ----------------------------------------------------------------------------- */

static bool in_reach(uintptr_t from, uintptr_t to) {
  int64_t distance = (int64_t)(to - from);
  return distance > INT32_MIN + 65536 && distance < INT32_MAX - 65536;
}

/* The free place nearest to `near`, at least `beyond` away from it; 0 if there is none in reach.
 * Only gaps of the map are tried: probing address by address would cost thousands of calls. */
static uintptr_t nearest_gap(const memory_map *map, uintptr_t near, size_t size, uint64_t beyond) {
  const uintptr_t lowest = 1 << 20; /* stay clear of the null page and vm.mmap_min_addr */
  uintptr_t best = 0, gap_start = lowest;
  uint64_t best_distance = UINT64_MAX;
  for (size_t i = 0; i < map->count; i++) {
    uintptr_t gap_end = map->list[i].start;
    if (gap_end > gap_start && gap_end - gap_start >= size) {
      uintptr_t place = near < gap_start ? gap_start : gap_end - size;
      uint64_t distance = place > near ? place - near : near - place;
      if (distance > beyond && distance < best_distance && in_reach(near, place)) {
        best = place;
        best_distance = distance;
      }
    }
    if (map->list[i].end > gap_start)
      gap_start = map->list[i].end;
  }
  return best;
}

static uint8_t *map_near(const memory_map *map, uintptr_t near, size_t size) {
  uint64_t beyond = 0;
  for (int attempt = 0; attempt < 64; attempt++) {
    uintptr_t place = nearest_gap(map, near, size, beyond);
    if (place == 0)
      return NULL;
    void *got = mmap((void *)place, size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == (void *)place)
      return got;
    if (got != MAP_FAILED) /* a kernel that takes the address as a hint only */
      munmap(got, size);
    beyond = place > near ? place - near : near - place; /* taken meanwhile: the next one */
  }
  return NULL;
}

/* jmp [rip+0] with the address behind it: reaches everywhere and needs no register. */
static void write_far_jump(uint8_t *at, const void *to) {
  static const uint8_t opcode[6] = {0xff, 0x25, 0, 0, 0, 0};
  memcpy(at, opcode, sizeof opcode);
  memcpy(at + sizeof opcode, &to, sizeof to);
}

static void write_slot(uint8_t *slot, const patch *p) {
  memset(slot, 0xcc, SLOT_BYTES);
  memcpy(slot, p->target, (size_t)p->copied);
  write_far_jump(slot + p->copied, p->target + p->copied);
  write_far_jump(slot + STUB_AT, p->entry->hook);
  memcpy(slot + MAGIC_AT, stub_magic, sizeof stub_magic);
}

/* ---- patching -------------------------------------------------------------------------------- */

static bool protect_target(const patch *p, int protection) {
  uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
  uintptr_t page = (uintptr_t)p->target & ~(page_size - 1); /* one word lies within one page */
  return mprotect((void *)page, page_size, protection) == 0;
}

static void store_jump(const patch *p, const uint8_t *stub) {
  uintptr_t word = (uintptr_t)p->target & ~(uintptr_t)7;
  size_t offset = (uintptr_t)p->target - word;
  int32_t distance = (int32_t)(stub - (p->target + OVL_JUMP_BYTES));
  uint8_t bytes[8];
  memcpy(bytes, (const void *)word, sizeof bytes);
  bytes[offset] = 0xe9;
  memcpy(bytes + offset + 1, &distance, sizeof distance);
  uint64_t value;
  memcpy(&value, bytes, sizeof value);
  __atomic_store_n((uint64_t *)word, value, __ATOMIC_SEQ_CST);
}

/* Other processors may hold the old bytes in their pipelines: make each serialise before it next
 * returns to the program. Where the kernel lacks the call, the return from the signal does it. */
static void serialise_processors(void) {
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0) == 0)
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
}

static int patch_all(patch *patches, size_t count, const uint8_t *slots,
                     ovl_attach_report *report) {
  ovl_window windows[OVL_MAX_PATCHES];
  size_t live = 0, writable = 0;
  int status = OVL_OK;
  for (; writable < count && status == OVL_OK; writable++) {
    patch *p = &patches[writable];
    if (p->status != OVL_OK || p->same_code != NULL)
      continue;
    if (!protect_target(p, PROT_READ | PROT_WRITE | PROT_EXEC))
      status = fail(report, OVL_E_PROTECT, p->entry->symbol);
    windows[live].first = (uintptr_t)p->target;
    windows[live++].end = (uintptr_t)p->target + OVL_JUMP_BYTES;
  }
  if (status == OVL_OK)
    status =
        ovl_stop_threads(windows, live, &report->attempts, report->detail, sizeof report->detail);
  if (status == OVL_OK) {
    for (size_t i = 0; i < count; i++)
      if (patches[i].status == OVL_OK && patches[i].same_code == NULL)
        store_jump(&patches[i], slots + i * SLOT_BYTES + STUB_AT);
    serialise_processors();
    ovl_resume_threads();
  }
  for (size_t i = 0; i < writable; i++)
    if (patches[i].status == OVL_OK && patches[i].same_code == NULL)
      protect_target(&patches[i], PROT_READ | PROT_EXEC);
  return status;
}

/* ---- the whole attachment -------------------------------------------------------------------- */

static size_t find_entries(void *driver, patch *patches) {
  ovl_dlsym_function find = ovl_real_dlsym();
  size_t count = 0;
  for (size_t i = 0; i < ovl_entry_count && count < OVL_MAX_PATCHES; i++) {
    patch *p = &patches[count++];
    memset(p, 0, sizeof *p);
    p->entry = &ovl_entries[i];
    p->target = find(driver, p->entry->symbol);
    for (size_t k = 0; k + 1 < count && p->target != NULL; k++)
      if (patches[k].target == p->target && p->same_code == NULL)
        p->same_code = &patches[k];
  }
  return count;
}

static int examine_all(patch *patches, size_t count, const memory_map *map,
                       ovl_attach_report *report) {
  for (size_t i = 0; i < count; i++) {
    patch *p = &patches[i];
    if (p->target == NULL)
      p->status = OVL_E_MISSING_ENTRY;
    else
      p->status = p->same_code != NULL ? p->same_code->status : examine(p, map);
    if (p->status == OVL_OK)
      continue;
    /* An entry in another shim's hands is never skipped: two shims would both shape. */
    if (p->entry->required || p->status == OVL_E_ALREADY_ATTACHED) {
      if (p->target != NULL)
        describe(p, map, report->detail, sizeof report->detail);
      return fail(report, p->status, p->entry->symbol);
    }
  }
  return OVL_OK;
}

static void describe_skipped(const patch *patches, size_t count, ovl_attach_report *report) {
  size_t used = 0, size = sizeof report->detail;
  for (size_t i = 0; i < count && used < size; i++)
    if (patches[i].status != OVL_OK)
      used += (size_t)snprintf(report->detail + used, size - used, "%s%s (%s)",
                               used == 0 ? "not redirected: " : ", ", patches[i].entry->symbol,
                               patches[i].status == OVL_E_MISSING_ENTRY ? "not exported"
                                                                        : "unknown code");
}

static void *attached_driver;

/* For the core's own calls: an entry's exported address now leads to its hook, so the trampoline
 * is given instead. */
static void *driver_symbol(const char *name) {
  for (size_t i = 0; i < ovl_entry_count; i++)
    if (*ovl_entries[i].original != NULL && strcmp(name, ovl_entries[i].symbol) == 0)
      return *ovl_entries[i].original;
  return ovl_real_dlsym()(attached_driver, name);
}

static void read_driver_version(ovl_attach_report *report) {
  int (*get_version)(int *);
  void *found = driver_symbol("cuDriverGetVersion");
  memcpy(&get_version, &found, sizeof found);
  int version = 0;
  report->driver_version = get_version != NULL && get_version(&version) == 0 ? version : 0;
}

static int attach_entries(void *driver, ovl_attach_report *report) {
  patch patches[OVL_MAX_PATCHES];
  memory_map map;
  if (!read_memory_map(&map))
    return OVL_E_MEMORY;
  size_t count = find_entries(driver, patches);
  int status = examine_all(patches, count, &map, report);
  size_t size = (count * SLOT_BYTES + 4095) & ~(size_t)4095;
  uint8_t *slots = status == OVL_OK ? map_near(&map, (uintptr_t)patches[0].target, size) : NULL;
  free(map.list);
  if (status != OVL_OK)
    return status;
  if (slots == NULL)
    return fail(report, OVL_E_MEMORY, patches[0].entry->symbol);
  for (size_t i = 0; i < count; i++) {
    if (patches[i].status != OVL_OK || patches[i].same_code != NULL)
      continue;
    if (!in_reach((uintptr_t)slots, (uintptr_t)patches[i].target)) {
      munmap(slots, size);
      return fail(report, OVL_E_MEMORY, patches[i].entry->symbol);
    }
    write_slot(slots + i * SLOT_BYTES, &patches[i]);
  }
  if (mprotect(slots, size, PROT_READ | PROT_EXEC) != 0) {
    munmap(slots, size);
    return OVL_E_PROTECT;
  }
  attached_driver = driver;
  for (size_t i = 0; i < count; i++) {
    const patch *from = patches[i].same_code != NULL ? patches[i].same_code : &patches[i];
    if (patches[i].status == OVL_OK)
      *patches[i].entry->original = (void *)(slots + (size_t)(from - patches) * SLOT_BYTES);
  }
  ovl_set_driver(driver_symbol);
  status = patch_all(patches, count, slots, report);
  if (status != OVL_OK) { /* no entry was changed */
    for (size_t i = 0; i < count; i++)
      *patches[i].entry->original = NULL;
    munmap(slots, size);
    return status;
  }
  for (size_t i = 0; i < count; i++)
    report->entries += patches[i].status == OVL_OK;
  describe_skipped(patches, count, report);
  read_driver_version(report);
  return OVL_OK;
}

#else

static int attach_entries(void *driver, ovl_attach_report *report) {
  (void)driver, (void)report;
  return OVL_E_ARCHITECTURE;
}

#endif

/* The jumps lead here for the rest of the process's life. */
static void stay_loaded(void) {
  Dl_info self;
  if (dladdr(&first_report, &self) != 0 && self.dli_fname != NULL)
    (void)dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

static bool other_copy_preloaded(void) {
  int (*state)(void);
  void *found = ovl_real_dlsym()(RTLD_DEFAULT, "ovl_attachment_state");
  memcpy(&state, &found, sizeof found);
  return state != NULL && !ovl_is_own_object(found) && state() == OVL_PRELOAD;
}

static int attach_locked(const char *driver, ovl_attach_report *report) {
  if (ovl_is_disabled())
    return OVL_E_DISABLED;
  if (ovl_preload_active()) {
    report->attachment = OVL_PRELOAD;
    return OVL_E_ALREADY_ATTACHED;
  }
  if (other_copy_preloaded()) {
    snprintf(report->detail, sizeof report->detail, "it is preloaded");
    return OVL_E_ALREADY_ATTACHED;
  }
  if (atomic_load(&ovl_attachment_now) == OVL_DETOUR) {
    *report = first_report;
    return OVL_E_ALREADY_ATTACHED;
  }
  void *handle = dlopen(driver != NULL ? driver : OVL_DRIVER_SONAME, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    const char *why = dlerror();
    snprintf(report->detail, sizeof report->detail, "%s", why != NULL ? why : "");
    return OVL_E_NO_DRIVER;
  }
  stay_loaded();
  int status = attach_entries(handle, report);
  if (status != OVL_OK) {
    dlclose(handle);
    return status;
  }
  report->attachment = OVL_DETOUR;
  first_report = *report;
  atomic_store(&ovl_attachment_now, OVL_DETOUR);
  return OVL_OK;
}

/* A child forked while another thread attached must not wait for that thread. */
static void in_child(void) {
  pthread_mutex_init(&attach_lock, NULL);
}

__attribute__((constructor)) static void prepare(void) {
  pthread_atfork(NULL, NULL, in_child);
}

int ovl_attach_detour(const char *driver, ovl_attach_report *report) {
  ovl_attach_report unused;
  if (report == NULL)
    report = &unused;
  memset(report, 0, sizeof *report);
  pthread_mutex_lock(&attach_lock);
  int status = attach_locked(driver, report);
  pthread_mutex_unlock(&attach_lock);
  return status;
}
