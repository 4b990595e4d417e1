"""The order of rows: which assignment sits in which row, and where each expert's rows lie.

In: the expert of each assignment.  Out: a `Plan`, three int32 arrays on the device that every other op reads.  Rows
are sorted by expert, in the order of the assignments within an expert; assignments to no expert come last (the tail).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from moe_xla.ops import checks


class Plan(NamedTuple):
    """Where the A assignments of a routing sit in the rows.

    Attributes:
      permutation: [A] int32, row `r` holds assignment `permutation[r]`.
      inverse: [A] int32, assignment `a` sits in row `inverse[a]`.
      group_sizes: [E] int32, rows per expert; rows from their sum on are the tail and belong to no expert.
    """

    permutation: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array


def checked(routing: Any) -> Plan:
    """`routing` as a Plan of int32 arrays; raises unless it is a Plan whose arrays fit together."""
    if not isinstance(routing, Plan):
        raise TypeError(f"plan must be a moe_xla.ops.Plan, got {type(routing).__name__}")
    arrays = Plan(*(checks.int_vector(f"plan.{name}", x) for name, x in routing._asdict().items()))
    checks.equal("the size of plan.permutation", arrays.permutation.size, "that of plan.inverse", arrays.inverse.size)
    return arrays


def plan(expert_index: Any, num_experts: int) -> Plan:
    """Sorts assignments by expert, stably.

    Args:
      expert_index: integer array of any shape; read in row-major order it holds the expert of each of the A
        assignments, e.g. [T, K] as `jax.lax.top_k` returns it.  Values below 0 or from `num_experts` on are
        assignments to no expert: they go to the tail rows.
      num_experts: E, a static int.

    Returns:
      The `Plan`; all of its arrays are int32 and stay on the device.

    Raises:
      TypeError: `expert_index` is not an integer array, or `num_experts` not a static int.
      ValueError: `num_experts` is negative.
    """
    experts = checks.count("num_experts", num_experts)
    return _plan(checks.int_array("expert_index", expert_index), experts)


@functools.partial(jax.jit, static_argnums=1)
def _plan(index: jax.Array, experts: int) -> Plan:
    index = lax.reshape(index, (index.size,))
    key = lax.select((index >= 0) & (index < experts), index, lax.full_like(index, experts))
    permutation = _stable_argsort(key, experts + 1)
    return Plan(permutation, _inverse(permutation), _counts(key, experts))


def _stable_argsort(key: jax.Array, bound: int) -> jax.Array:
    """Positions of `key` [A], of values from 0 to before `bound`, in ascending order, equal ones in their own order."""
    position = lax.iota(np.int32, key.size)
    if key.size * bound > np.iinfo(np.int32).max:
        return lax.sort((key, position), num_keys=1, is_stable=True)[1]
    # One sort of distinct numbers is several times faster than a stable sort of pairs.
    packed = lax.sort(key * np.int32(key.size) + position, is_stable=False)
    return lax.rem(packed, np.int32(max(key.size, 1)))


def _inverse(permutation: jax.Array) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    position = lax.iota(np.int32, permutation.size)
    return lax.scatter(
        lax.full_like(permutation, 0),
        permutation[:, None],
        position,
        numbers,
        unique_indices=True,
        mode="promise_in_bounds",
    )


def _counts(key: jax.Array, experts: int) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    none = lax.full_like(key, 0, shape=(experts + 1,))
    counts = lax.scatter_add(none, key[:, None], lax.full_like(key, 1), numbers, mode="promise_in_bounds")
    return lax.slice(counts, (0,), (experts,))


def group_ends(group_sizes: jax.Array, rows: int) -> jax.Array:
    """[E] int32: the row after the last one of each group, at most `rows`."""
    # One reduction of E * E numbers compiles several times faster than a cumulative sum of E.
    shape = (group_sizes.size, group_sizes.size)
    before = lax.broadcasted_iota(np.int32, shape, 1) <= lax.broadcasted_iota(np.int32, shape, 0)
    sizes = lax.broadcast_in_dim(lax.max(group_sizes, np.int32(0)), shape, (1,))
    ends = lax.reduce_sum(lax.select(before, sizes, lax.full_like(sizes, 0)), (1,))
    return lax.min(ends, np.int32(rows))


def kept_rows(group_sizes: jax.Array) -> jax.Array:
    """Scalar int32: the number of rows that belong to an expert."""
    return lax.reduce_sum(group_sizes, (0,))


def rank(routing: Plan) -> jax.Array:
    """Position of each assignment in its expert's queue, counted from 0.

    Returns:
      [A] int32, in the order of the assignments.  Assignments to no expert are counted in a queue of their own.

    Raises:
      TypeError, ValueError: `routing` is not a `Plan`.
    """
    _, inverse, group_sizes = checked(routing)
    return _rank(inverse, group_sizes)


@jax.jit
def _rank(inverse: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return inverse - _last_end(inverse, group_ends(group_sizes, inverse.size))


def _last_end(row: jax.Array, ends: jax.Array) -> jax.Array:
    shape = (row.size, ends.size)
    ends = lax.broadcast_in_dim(ends, shape, (1,))
    passed = lax.select(ends <= lax.broadcast_in_dim(row, shape, (0,)), ends, lax.full_like(ends, 0))
    return lax.reduce_max(passed, (1,)) if shape[1] else lax.full_like(row, 0)


def expert_of_row(group_sizes: Any, rows: int) -> jax.Array:
    """Expert that each row belongs to.

    Args:
      group_sizes: [E] integers.
      rows: A, a static int.

    Returns:
      [A] int32; E for the tail rows.

    Raises:
      TypeError, ValueError: an argument is not of that kind.
    """
    sizes = checks.int_vector("group_sizes", group_sizes)
    count = checks.count("rows", rows)
    shape = (count, sizes.size)
    ends = lax.broadcast_in_dim(group_ends(sizes, count), shape, (1,))
    passed = ends <= lax.broadcasted_iota(np.int32, shape, 0)
    return lax.reduce_sum(lax.convert_element_type(passed, np.int32), (1,))
