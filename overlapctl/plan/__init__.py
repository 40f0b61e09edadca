"""Decisions, in pure Python: residency, room, the block-level simulation, candidates and choice."""
