/* Shell-style patterns on kernel names: `*` any run of characters, `?` any one. */
#include "state.h"

int ovl_match(const char *pattern, const char *text) {
  const char *star = NULL, *resume = NULL;
  if (!pattern || !text)
    return 0;
  while (*text) {
    if (*pattern == '*') {
      star = ++pattern;
      resume = text;
    } else if (*pattern == '?' || *pattern == *text) {
      ++pattern;
      ++text;
    } else if (star) { /* let the last star take one character more */
      pattern = star;
      text = ++resume;
    } else {
      return 0;
    }
  }
  while (*pattern == '*')
    ++pattern;
  return !*pattern;
}
