/* Reads the policy `overlapctl run` hands to the program it starts (the format is described in
 * env.py, written by launch/shim.py). A part that is unknown, malformed or out of range is left out
 * and counted: the program must start whatever the variable holds. */
#define _GNU_SOURCE
#include "attach.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TEXT = 65536, MAX_PATTERNS = 256 };

typedef struct reader {
  ovl_policy policy;
  const char *include[MAX_PATTERNS], *exclude[MAX_PATTERNS];
  ovl_kernel_rule rules[MAX_PATTERNS];
} reader;

static bool read_number(const char *text, long low, long high, long *value) {
  if (text == NULL || !((text[0] >= '0' && text[0] <= '9') || text[0] == '-'))
    return false;
  char *end;
  *value = strtol(text, &end, 10);
  return *end == 0 && end != text && *value >= low && *value <= high;
}

static int hex_digit(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Undoes %XX in place: patterns may hold any character. */
static bool decode_pattern(char *text) {
  char *to = text;
  for (const char *from = text; *from != 0; from++) {
    if (*from != '%') {
      *to++ = *from;
      continue;
    }
    int high = hex_digit(from[1]), low = high < 0 ? -1 : hex_digit(from[2]);
    if (low < 0 || 16 * high + low == 0)
      return false;
    *to++ = (char)(16 * high + low);
    from += 2;
  }
  *to = 0;
  return text[0] != 0;
}

static bool add_pattern(char *text, const char **list, uint32_t *count) {
  if (*count == MAX_PATTERNS || !decode_pattern(text))
    return false;
  list[(*count)++] = text;
  return true;
}

/* pattern,pad,blocks,carveout */
static bool add_rule(char *text, reader *r) {
  char *field[4] = {text, NULL, NULL, NULL};
  for (int i = 1; i < 4; i++) {
    char *comma = strchr(field[i - 1], ',');
    if (comma == NULL)
      return false;
    *comma = 0;
    field[i] = comma + 1;
  }
  long pad, blocks, carveout;
  if (r->policy.rule_count == MAX_PATTERNS || !read_number(field[1], 0, INT32_MAX, &pad) ||
      !read_number(field[2], 0, 1024, &blocks) || !read_number(field[3], -1, 100, &carveout) ||
      !decode_pattern(field[0]))
    return false;
  r->rules[r->policy.rule_count++] =
      (ovl_kernel_rule){field[0], (uint32_t)pad, (int32_t)blocks, (int32_t)carveout};
  return true;
}

static bool read_part(char *part, reader *r) {
  char *value = strchr(part, '=');
  if (value == NULL)
    return false;
  *value++ = 0;
  long number;
  if (strcmp(part, "include") == 0)
    return add_pattern(value, r->include, &r->policy.include_count);
  if (strcmp(part, "exclude") == 0)
    return add_pattern(value, r->exclude, &r->policy.exclude_count);
  if (strcmp(part, "rule") == 0)
    return add_rule(value, r);
  if (strcmp(part, "pad") == 0 && read_number(value, 0, INT32_MAX, &number))
    r->policy.pad_bytes = (uint32_t)number;
  else if (strcmp(part, "blocks") == 0 && read_number(value, 0, 1024, &number))
    r->policy.max_blocks_per_sm = (int32_t)number;
  else if (strcmp(part, "carveout") == 0 && read_number(value, -1, 100, &number))
    r->policy.carveout = (int32_t)number;
  else if (strcmp(part, "priority") == 0 && read_number(value, 0, 1, &number))
    r->policy.comm_priority = (int32_t)number;
  else if (strcmp(part, "captures") == 0 && read_number(value, 0, 1, &number))
    r->policy.shape_captures = (int32_t)number;
  else
    return false;
  return true;
}

int ovl_policy_push_text(const char *text, uint64_t *token, int *ignored) {
  if (text == NULL || token == NULL || ignored == NULL || strnlen(text, MAX_TEXT) == MAX_TEXT)
    return OVL_E_ARGUMENT;
  *ignored = 0;
  char *copy = strdup(text);
  reader *r = calloc(1, sizeof *r);
  int status = OVL_E_MEMORY;
  if (copy != NULL && r != NULL) {
    r->policy.carveout = -1;
    r->policy.shape_captures = 1;
    r->policy.include = r->include;
    r->policy.exclude = r->exclude;
    r->policy.rules = r->rules;
    char *rest = copy, *part;
    while ((part = strsep(&rest, ";")) != NULL)
      if (part[0] != 0)
        *ignored += !read_part(part, r);
    status = ovl_policy_push(&r->policy, token);
  }
  free(r);
  free(copy);
  return status;
}
