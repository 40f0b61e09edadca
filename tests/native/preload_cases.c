/* Programs that reach the driver in each of the ways a preloaded shim must see. Prints one word:
 * what the case found.
 *
 *   preload_cases CASE [ARGUMENT] */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*get_v1)(const char *, void **, int, uint64_t);
typedef int (*get_v2)(const char *, void **, int, uint64_t, int *);

/* The file an address belongs to: tells a hook (the shim) from the driver's own function. */
static const char *owner(const void *address) {
  Dl_info info;
  if (address == NULL)
    return "nothing";
  if (dladdr(address, &info) == 0)
    return "unknown";
  const char *slash = strrchr(info.dli_fname, '/');
  return slash != NULL ? slash + 1 : info.dli_fname;
}

static void *driver(void) {
  return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
}

static void *ask(const char *name, int version, uint64_t flags, int second) {
  void *found = NULL;
  int status, how = 0;
  if (second) {
    get_v2 get;
    *(void **)&get = dlsym(driver(), "cuGetProcAddress_v2");
    status = get(name, &found, version, flags, &how);
  } else {
    get_v1 get;
    *(void **)&get = dlsym(driver(), "cuGetProcAddress");
    status = get(name, &found, version, flags);
  }
  return status == 0 ? found : NULL;
}

/* A second opinion: through an address obtained by the first. */
static void *ask_through_itself(const char *name, uint64_t flags) {
  get_v2 get;
  void *found = NULL;
  int how = 0;
  *(void **)&get = ask("cuGetProcAddress", 12000, 0, 1);
  return get(name, &found, 12000, flags, &how) == 0 ? found : NULL;
}

#ifdef LINKED
extern unsigned cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, void *, void **, void **);
static int linked(void) {
  unsigned got = cuLaunchKernel((void *)1, 2, 3, 4, 5, 6, 7, 0, NULL, NULL, NULL);
  printf("%s %u\n", owner((void *)cuLaunchKernel), got);
  return 0;
}
#else
static int linked(void) {
  return 64;
}
#endif

int main(int count, char **arguments) {
  const char *name = count > 1 ? arguments[1] : "";
  const char *argument = count > 2 ? arguments[2] : "";
  if (strcmp(name, "dlsym") == 0)
    puts(owner(dlsym(driver(), argument)));
  else if (strcmp(name, "default") == 0)
    puts(owner(dlsym(RTLD_DEFAULT, argument)));
  else if (strcmp(name, "default-after-load") == 0)
    puts(driver() != NULL ? owner(dlsym(RTLD_DEFAULT, argument)) : "no driver");
  else if (strcmp(name, "next") == 0)
    puts(owner(dlsym(RTLD_NEXT, argument)));
  else if (strcmp(name, "next-of-plugin") == 0) { /* asked from inside a library */
    void *(*next)(const char *);
    *(void **)&next = dlsym(dlopen(argument, RTLD_NOW), "plugin_next");
    puts(owner(next("plugin_symbol")));
  } else if (strcmp(name, "missing") == 0) {
    void *found = dlsym(driver(), "cuNoSuchEntry");
    const char *why = dlerror();
    puts(found == NULL && why != NULL && strstr(why, "cuNoSuchEntry") != NULL ? "told"
                                                                              : "not told");
  } else if (strcmp(name, "v1") == 0)
    puts(owner(ask(argument, 11000, count > 3 ? strtoul(arguments[3], NULL, 0) : 0, 0)));
  else if (strcmp(name, "v2") == 0)
    puts(owner(ask(argument, 12000, count > 3 ? strtoul(arguments[3], NULL, 0) : 0, 1)));
  else if (strcmp(name, "through-itself") == 0)
    puts(owner(ask_through_itself(argument, 0)));
  else if (strcmp(name, "call") == 0) {
    unsigned (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void *, void **, void **);
    *(void **)&launch = dlsym(driver(), argument);
    printf("%u\n", launch((void *)1, 2, 3, 4, 5, 6, 7, 0, NULL, NULL, NULL));
  } else if (strcmp(name, "linked") == 0)
    return linked();
  else if (strcmp(name, "attach") == 0) {
    int (*attach)(const char *, void *);
    char report[1024];
    *(void **)&attach = dlsym(dlopen(argument, RTLD_NOW | RTLD_LOCAL), "ovl_attach_detour");
    printf("%d\n", attach(NULL, report));
  } else if (strcmp(name, "state") == 0) {
    int (*call)(void);
    void *shim = dlopen(argument, RTLD_NOW | RTLD_LOCAL);
    const char *const names[] = {"ovl_attachment_state", "ovl_policy_depth",
                                 "ovl_policy_text_ignored"};
    for (int i = 0; i < 3; i++) {
      *(void **)&call = dlsym(shim, names[i]);
      printf("%d ", call());
    }
    puts("");
  } else
    return 64;
  return 0;
}
