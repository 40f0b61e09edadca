/* A forked child starts untouched: no policy, nothing counted, no lock held. */
#include "state.h"

#include <pthread.h>

static void in_child(void) {
  ovl_policy_after_fork();
  ovl_roles_after_fork();
  ovl_records_after_fork();
  ovl_functions_after_fork();
  ovl_launch_after_fork();
}

__attribute__((constructor)) static void prepare(void) {
  pthread_atfork(NULL, NULL, in_child);
}
