"""Grouped matmuls in plain XLA: a loop over blocks of rows, each against its expert's matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.ops import checks
from moe_xla.ops.contract import Contract
from moe_xla.ops.routing import group_ends

CONTRACT = Contract(
    platforms=("cpu", "cuda", "rocm", "tpu"),
    dtypes=("bfloat16", "float16", "float32", "float64"),
    temporaries="one block of rows",
)

_BLOCK = 128


def grouped_dot(
    rows: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transpose_w: bool, out_dtype: Any
) -> jax.Array:
    """[A, n]: each row times its group's matrix; see `moe_xla.ops.grouped_dot`."""
    common = jnp.promote_types(rows.dtype, w.dtype)
    contracted, produced = (2, 1) if transpose_w else (1, 2)
    out = lax.full((rows.shape[0], w.shape[produced]), 0, out_dtype)

    def visit(expert: jax.Array, first: jax.Array, inside: jax.Array, out: jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(rows, first, inside.size, 0)
        matrix = lax.dynamic_index_in_dim(w, expert, 0, keepdims=False)
        y = lax.dot_general(
            lax.convert_element_type(x, common),
            lax.convert_element_type(matrix, common),
            (((1,), (contracted - 1,)), ((), ())),
            preferred_element_type=checks.accumulator(common),
        )
        old = lax.dynamic_slice_in_dim(out, first, inside.size, 0)
        inside = lax.broadcast_in_dim(inside, old.shape, (0,))
        return lax.dynamic_update_slice_in_dim(
            out, lax.select(inside, lax.convert_element_type(y, out_dtype), old), first, 0
        )

    return _over_blocks(rows.shape[0], group_sizes, visit, out)


def grouped_outer(a: jax.Array, b: jax.Array, group_sizes: jax.Array, *, out_dtype: Any) -> jax.Array:
    """[E, m, n]: the product of each group's rows; see `moe_xla.ops.grouped_outer`."""
    common = jnp.promote_types(a.dtype, b.dtype)
    wide = checks.accumulator(common)

    def visit(expert: jax.Array, first: jax.Array, inside: jax.Array, out: jax.Array) -> jax.Array:
        left, right = (_masked(lax.dynamic_slice_in_dim(x, first, inside.size, 0), inside) for x in (a, b))
        product = lax.dot_general(
            lax.convert_element_type(left, common),
            lax.convert_element_type(right, common),
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        return _accumulate(out, product, expert, lax.add)

    out = lax.full((group_sizes.size, a.shape[1], b.shape[1]), 0, wide)
    return lax.convert_element_type(_over_blocks(a.shape[0], group_sizes, visit, out), out_dtype)


def reduce_groups(
    rows: jax.Array,
    group_sizes: jax.Array,
    initial: jax.Array,
    reduce_block: Callable[[jax.Array], jax.Array],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """[E, n]: rows [A, n] reduced over each group; rows outside read as `initial`."""

    def visit(expert: jax.Array, first: jax.Array, inside: jax.Array, out: jax.Array) -> jax.Array:
        block = _masked(lax.dynamic_slice_in_dim(rows, first, inside.size, 0), inside, initial)
        return _accumulate(out, reduce_block(block), expert, join)

    wide = jax.eval_shape(reduce_block, jax.ShapeDtypeStruct((1, rows.shape[1]), rows.dtype)).dtype
    start = lax.convert_element_type(initial, wide)
    return _over_blocks(rows.shape[0], group_sizes, visit, lax.broadcast(start, (group_sizes.size, rows.shape[1])))


def _over_blocks(count: int, group_sizes: jax.Array, visit: Callable[..., jax.Array], out: jax.Array) -> jax.Array:
    if count == 0 or 0 in out.shape or group_sizes.size == 0:
        return out
    block = min(_BLOCK, count)
    ends = group_ends(group_sizes, count)

    def over_expert(expert: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = state
        end = ends[expert]

        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at, out = state
            first = lax.min(at, np.int32(count - block))
            row = first + lax.iota(np.int32, block)
            return at + block, visit(expert, first, (row >= at) & (row < end), out)

        _, out = lax.while_loop(lambda state: state[0] < end, step, (start, out))
        return end, out

    return lax.fori_loop(0, group_sizes.size, over_expert, (lax.full((), 0, np.int32), out))[1]


def _accumulate(out: jax.Array, value: jax.Array, expert: jax.Array, join: Callable[..., jax.Array]) -> jax.Array:
    old = lax.dynamic_index_in_dim(out, expert, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(out, join(old, value), expert, 0)


def _masked(block: jax.Array, inside: jax.Array, fill: Any = 0) -> jax.Array:
    return lax.select(
        lax.broadcast_in_dim(inside, block.shape, (0,)),
        block,
        lax.broadcast(lax.convert_element_type(fill, block.dtype), block.shape),
    )
