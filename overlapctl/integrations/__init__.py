"""Entry points into other frameworks; each module needs its framework only when called."""
