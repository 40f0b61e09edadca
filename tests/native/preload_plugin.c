/* A library that asks for the next definition after itself. */
#define _GNU_SOURCE
#include <dlfcn.h>

const char *plugin_symbol(void) {
  return "plugin";
}

void *plugin_next(const char *name) {
  void *volatile found = dlsym(RTLD_NEXT, name);
  return found;
}
