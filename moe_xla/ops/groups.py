"""Reductions over the rows of each group, and values spread from groups to their rows.

`group_sum` and the spreading in `add_group_bias` are two linear primitives, each the transpose of the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core

from moe_xla.ops import blocked, checks
from moe_xla.ops.primitive import LinearOp, bind, primitive
from moe_xla.ops.routing import expert_of_row


def group_sum(rows: Any, group_sizes: Any, *, preferred_element_type: Any = None) -> jax.Array:
    """Sums the rows of each group.

    Args:
      rows: [A, n] floating point; tail rows are not read.
      group_sizes: [E] integers.
      preferred_element_type: dtype of the result, that of `rows` if None.

    Returns:
      [E, n], summed in float32 at least, exactly zero for empty groups.

    Raises:
      TypeError, ValueError: an argument is not of that kind.
    """
    rows_an = checks.float_array("rows", rows, 2)
    sizes = checks.int_vector("group_sizes", group_sizes)
    out = checks.float_dtype("preferred_element_type", preferred_element_type, rows_an.dtype)
    return bind(group_sum_p, rows_an, sizes, out_dtype=out)


def add_group_bias(rows: Any, bias: Any, group_sizes: Any) -> jax.Array:
    """Adds to each row the bias of its group.

    Args:
      rows: [A, n] floating point.
      bias: [E, n] floating point.
      group_sizes: [E] integers.

    Returns:
      [A, n] of the promoted dtype of both, zero in tail rows.

    Raises:
      TypeError, ValueError: an argument is not of that kind, or shapes do not agree.
    """
    rows_an, bias_en = checks.float_array("rows", rows, 2), checks.float_array("bias", bias, 2)
    sizes = checks.int_vector("group_sizes", group_sizes)
    checks.equal("the leading size of bias", bias_en.shape[0], "the size of group_sizes", sizes.size)
    checks.equal("the last size of bias", bias_en.shape[1], "the last size of rows", rows_an.shape[1])
    out = jnp.promote_types(rows_an.dtype, bias_en.dtype)
    spread = bind(spread_p, lax.convert_element_type(bias_en, out), sizes, rows=rows_an.shape[0])
    inside = lax.iota(np.int32, rows_an.shape[0]) < lax.reduce_sum(sizes, (0,))
    inside = lax.broadcast_in_dim(inside, rows_an.shape, (0,))
    kept = lax.select(inside, lax.convert_element_type(rows_an, out), lax.full_like(spread, 0))
    return kept + spread


def group_max(rows: Any, group_sizes: Any, initial: Any) -> jax.Array:
    """Largest value of each column in each group.

    Args:
      rows: [A, n] floating point; tail rows are not read.
      group_sizes: [E] integers.
      initial: scalar, the least possible result and the one for empty groups.

    Returns:
      [E, n] of the dtype of `rows`.  Derivatives are those of `jax.lax.reduce_max`: shared equally by the rows that
      attain the maximum, and none where `initial` is larger than every row.  `initial` counts as a constant.

    Raises:
      TypeError, ValueError: an argument is not of that kind.
    """
    rows_an = checks.float_array("rows", rows, 2)
    sizes = checks.int_vector("group_sizes", group_sizes)
    least = checks.array("initial", initial)
    if least.ndim:
        raise ValueError(f"initial has shape {least.shape}; it must be a scalar")
    return _group_max(rows_an, sizes, lax.convert_element_type(lax.stop_gradient(least), rows_an.dtype))


@jax.custom_jvp
def _group_max(rows: jax.Array, sizes: jax.Array, initial: jax.Array) -> jax.Array:
    return bind(group_max_p, rows, sizes, initial)


@_group_max.defjvp
def _group_max_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    rows, sizes, _ = primals
    largest = _group_max(*primals)
    spread = bind(spread_p, largest, sizes, rows=rows.shape[0])
    attained = lax.eq(rows, spread)
    share = lax.select(attained, tangents[0], lax.full_like(rows, 0))
    count = bind(group_sum_p, lax.convert_element_type(attained, rows.dtype), sizes, out_dtype=rows.dtype)
    total = bind(group_sum_p, share, sizes, out_dtype=rows.dtype)
    return largest, total / lax.max(count, lax.full_like(count, 1))


def _largest(rows: jax.Array, sizes: jax.Array, initial: jax.Array) -> jax.Array:
    largest = functools.partial(lax.reduce_max, axes=(0,))
    return lax.convert_element_type(blocked.reduce_groups(rows, sizes, initial, largest, lax.max), rows.dtype)


def _group_sum(rows: jax.Array, sizes: jax.Array, out_dtype: Any) -> jax.Array:
    total = blocked.reduce_groups(
        rows, sizes, lax.full((), 0, rows.dtype), functools.partial(lax.reduce_sum, axes=(0,)), lax.add
    )
    return lax.convert_element_type(total, out_dtype)


def _spread(values: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    if 0 in values.shape:
        return lax.full((rows, values.shape[1]), 0, values.dtype)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    expert = expert_of_row(sizes, rows)[:, None]
    return lax.gather(values, expert, numbers, (1, values.shape[1]), mode="fill", fill_value=0)


group_sum_p = primitive(
    LinearOp(
        name="moe_group_sum",
        shape=lambda rows, sizes, out_dtype: ((sizes.shape[0], rows.shape[1]), out_dtype),
        implementation=_group_sum,
        transposes={
            0: lambda ct, rows, sizes, out_dtype: lax.convert_element_type(
                bind(spread_p, ct, sizes, rows=rows.shape[0]), rows.dtype
            )
        },
    )
)

spread_p: core.Primitive = primitive(
    LinearOp(
        name="moe_group_spread",
        shape=lambda values, sizes, rows: ((rows, values.shape[1]), values.dtype),
        implementation=_spread,
        transposes={0: lambda ct, values, sizes, rows: bind(group_sum_p, ct, sizes, out_dtype=values.dtype)},
    )
)

# Not linear: `_group_max` gives its derivative.
group_max_p: core.Primitive = primitive(
    LinearOp(
        name="moe_group_max",
        shape=lambda rows, sizes, initial: ((sizes.shape[0], rows.shape[1]), rows.dtype),
        implementation=_largest,
        transposes={},
    )
)
