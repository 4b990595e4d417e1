"""Grouped matmuls as `jax.lax.ragged_dot`, native on TPU.

Elsewhere XLA gets a masked dense dot, E times the work and the memory, in which one expert's NaN reaches every row and
tail rows are whatever the platform leaves there.  So rows past the last group are cleared here, before and after, and
weights that are not finite are taken out and put back as NaN into the columns they reach.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.ops import checks
from moe_xla.ops.contract import Contract
from moe_xla.ops.routing import expert_of_row

CONTRACT = Contract(
    platforms=("cpu", "cuda", "rocm", "tpu"),
    dtypes=("bfloat16", "float16", "float32", "float64"),
    non_finite_weights="only the rows of that expert, an infinity as NaN",
    temporaries="cleared copies of the operands; E copies of the rows where ragged_dot is not native",
)

_DOT = (((1,), (1,)), ((), ()))
_PLAIN = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_OUTER = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def grouped_dot(
    rows: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transpose_w: bool, out_dtype: Any, precision: Any = None
) -> jax.Array:
    """[A, n]: each row times its group's matrix; see `moe_xla.ops.grouped_dot`."""
    shape = (rows.shape[0], w.shape[1 if transpose_w else 2])
    if 0 in (*rows.shape, *w.shape):
        return lax.full(shape, 0, out_dtype)
    common = jnp.promote_types(rows.dtype, w.dtype)
    finite = lax.is_finite(w)
    poisoned = lax.reduce_or(lax.bitwise_not(finite), (2 if transpose_w else 1,))
    product = lax.ragged_dot_general(
        _cleared(lax.convert_element_type(rows, common), group_sizes),
        lax.convert_element_type(lax.select(finite, w, lax.full_like(w, 0)), common),
        group_sizes,
        _TRANSPOSED if transpose_w else _PLAIN,
        precision=precision,
        preferred_element_type=checks.accumulator(common),
    )
    poison = _of_rows(poisoned, group_sizes, rows.shape[0])
    product = lax.select(poison, lax.full_like(product, np.nan), product)
    return lax.convert_element_type(_cleared(product, group_sizes), out_dtype)


def grouped_outer(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, *, out_dtype: Any, precision: Any = None
) -> jax.Array:
    """[E, m, n]: the product of each group's rows; see `moe_xla.ops.grouped_outer`."""
    shape = (group_sizes.size, a.shape[1], b.shape[1])
    if 0 in (a.shape[0], *shape):
        return lax.full(shape, 0, out_dtype)
    common = jnp.promote_types(a.dtype, b.dtype)
    product = lax.ragged_dot_general(
        _cleared(lax.convert_element_type(a, common), group_sizes),
        _cleared(lax.convert_element_type(b, common), group_sizes),
        group_sizes,
        _OUTER,
        precision=precision,
        preferred_element_type=checks.accumulator(common),
    )
    empty = lax.broadcast_in_dim(group_sizes <= 0, product.shape, (0,))
    return lax.convert_element_type(lax.select(empty, lax.full_like(product, 0), product), out_dtype)


def _cleared(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    inside = lax.broadcasted_iota(np.int32, rows.shape, 0) < lax.reduce_sum(group_sizes, (0,))
    return lax.select(inside, rows, lax.full_like(rows, 0))


def _of_rows(flags: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    expert = expert_of_row(group_sizes, rows)[:, None]
    return lax.gather(flags, expert, numbers, (1, flags.shape[1]), mode="fill", fill_value=False)
