"""Builders of schedules: ``build(call, recipe)`` has every operation for any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

from overlapctl.collectives.algorithms import direct, hierarchical, ring
from overlapctl.collectives.algorithms.builder import Builder
from overlapctl.collectives.algorithms.recipe import Recipe
from overlapctl.collectives.schedule import Call, Schedule
from overlapctl.errors import UsageError

__all__ = ["Recipe", "build"]

_BUILDERS: dict[str, dict[str, Callable[[Builder], None]]] = {
    "direct": direct.BUILDERS,
    "ring": ring.BUILDERS,
    "hierarchical": hierarchical.BUILDERS,
    "inner": hierarchical.HANDED_OVER,
}


@functools.lru_cache(maxsize=512)
def build(call: Call, recipe: Recipe) -> Schedule:
    """Build the schedule of a call; equal arguments give the same object.

    Raises
    ------
    UsageError
        If the recipe does not fit the call: the algorithm lacks the operation, the ring does not
        name every rank once, or hosts have different numbers of ranks.
    """
    builder = _BUILDERS[recipe.algorithm].get(call.op)
    if builder is None:
        raise UsageError(
            f"algorithm {recipe.algorithm} for {call.op}",
            remedy='use "direct", or "inner" where ranks lack peer access',
        )
    if recipe.order and sorted(recipe.order) != list(range(call.world)):
        raise UsageError(
            f"ring order {recipe.order} in a group of {call.world}", remedy="name every rank once"
        )
    if recipe.pull and recipe.algorithm == "ring":
        raise UsageError("pull in a ring", remedy="rings push: leave pull out")
    b = Builder(call, recipe)
    builder(b)
    return b.finish(recipe.algorithm)
