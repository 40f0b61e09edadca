/* Lets the tests and the benchmark drive the shim's core without patching any code: the hooks'
 * originals are set to the fake driver's entries, and the hooks are called by name. */
#include "intercept.h"
#include "state.h"

#include <dlfcn.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static void *driver;

static void *lookup(const char *symbol) {
  return dlsym(driver, symbol);
}

EXPORT int harness_attach(const char *path) {
  driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!driver)
    return 0;
  for (size_t i = 0; i < ovl_entry_count; ++i)
    *ovl_entries[i].original = lookup(ovl_entries[i].symbol);
  ovl_set_driver(lookup);
  return 1;
}

EXPORT void *harness_hook(const char *symbol) {
  for (size_t i = 0; i < ovl_entry_count; ++i)
    if (!strcmp(ovl_entries[i].symbol, symbol))
      return ovl_entries[i].hook;
  return NULL;
}

EXPORT const char *harness_symbol(size_t index) {
  return index < ovl_entry_count ? ovl_entries[index].symbol : NULL;
}

/* As if the driver lacked it. */
EXPORT void harness_remove(const char *symbol) {
  for (size_t i = 0; i < ovl_entry_count; ++i)
    if (!strcmp(ovl_entries[i].symbol, symbol))
      *ovl_entries[i].original = NULL;
}

/* Partitions are remembered for the life of a process; tests need to forget them. */
EXPORT void harness_forget_partitions(void) {
  atomic_store(&ovl_smallest_partition, INT32_MAX);
  ovl_functions_forget();
}
