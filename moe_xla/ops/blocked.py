"""Grouped matmuls in plain XLA: a loop over experts, and for each a loop over blocks of its rows.

MegaBlocks' idea without its padding: rows stay compact and sorted, a block may start at any row, and loops with trip
counts from the device walk over the blocks, so nothing but the result and one block is ever allocated.  Why it looks
like this, from measurements on XLA:CPU:

- A dot inside a loop runs on all threads, everything else in a loop on one.  So a loop does little beside its dots: an
  expert's matrix is sliced once for all its blocks, and `grouped_outer` sums as few products as it can.
- `grouped_dot` uses one size of block.  The last block of a group reaches beyond it and keeps what is there, which
  needs no order between blocks.  Blocks of half a mean group cost within a few percent of the best.
- `grouped_outer` is one loop over the blocks of all groups.  It has two sizes of block, and chooses the one that fits
  what is left of a group with a `switch`, which returns the product, never the carry, which every branch would have to
  copy.  Products are added up in float32 at least.
- Compiling takes time in proportion to the number of kernels: no tables are sorted, no loop is there twice.  Small
  products have no loop at all: they run every expert on every row and select.
- XLA:CPU slices and updates 16-bit floats as float32, which converts the whole array in every step; so they are carried
  as integers.  The dot itself takes 16-bit blocks with a float32 result several times faster than one dense 16-bit dot.
- For many experts the cost of `grouped_outer` is that of writing E * m * n values for the first time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.ops import checks, varying
from moe_xla.ops.contract import Contract
from moe_xla.ops.routing import expert_of_row

_Product = Callable[[jax.Array, jax.Array], jax.Array]
_OuterState = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

CONTRACT = Contract(
    platforms=("cpu", "cuda", "rocm", "tpu"),
    dtypes=("bfloat16", "float16", "float32", "float64"),
    temporaries="one block of rows, one matrix; for 16-bit dtypes also a copy of operands and a float32 result",
)

_MOST_BLOCK, _MOST_OUTER_BLOCK, _LEAST_BLOCK = 256, 512, 8
# Up to this many multiply-adds, every expert on every row costs no more than a fraction of a millisecond.
_SMALL_WORK = 2**21
_REDUCED_ROWS = 256


def grouped_dot(
    rows: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transpose_w: bool, out_dtype: Any, precision: Any = None
) -> jax.Array:
    """[A, n]: each row times its group's matrix; see `moe_xla.ops.grouped_dot`."""
    count, (experts, *matrix) = rows.shape[0], w.shape
    k_axis = 1 if transpose_w else 0
    shape = (count, matrix[1 - k_axis])
    if 0 in (count, experts, *matrix):
        return lax.full(shape, 0, out_dtype)
    dot = _dot(rows.dtype, w.dtype, 1, k_axis, precision)
    if experts * count * matrix[0] * matrix[1] <= _SMALL_WORK:
        return _small_dot(rows, w, group_sizes, dot, out_dtype)
    size = min(dot_block(count, experts), count)
    out = _zeros(shape, out_dtype, rows, group_sizes)
    rows, w = _bits(rows), _bits(w)

    def over_expert(expert: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = state
        end, w_kn = _end(start, group_sizes, expert, count), _element(w, expert)

        def step(at: jax.Array, out: jax.Array) -> jax.Array:
            first = lax.min(at, np.int32(count - size))
            y = _bits(lax.convert_element_type(dot(_read(rows, first, size), w_kn), out_dtype))
            return _write(out, lax.select(_inside(y, first, at, end), y, _read(out, first, size)), first)

        return end, _stepping(start, end, size, step, out)

    return _floats(lax.fori_loop(0, experts, over_expert, (_first_row(group_sizes), out))[1], out_dtype)


def grouped_outer(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, *, out_dtype: Any, precision: Any = None
) -> jax.Array:
    """[E, m, n]: the product of each group's rows; see `moe_xla.ops.grouped_outer`."""
    count, experts = a.shape[0], group_sizes.size
    shape = (experts, a.shape[1], b.shape[1])
    if 0 in (count, *shape):
        return lax.full(shape, 0, out_dtype)
    dot = _dot(a.dtype, b.dtype, 0, 0, precision)
    if count * experts * a.shape[1] * b.shape[1] <= _SMALL_WORK:
        return _small_outer(a, b, group_sizes, dot, out_dtype)
    sizes = sorted({min(size, count) for size in outer_blocks(count, experts)})
    main = sizes[-1]
    total = _zeros(shape, checks.accumulator(a.dtype, b.dtype), a, group_sizes)
    a, b = _bits(a), _bits(b)

    def product(size: int, start: jax.Array, end: jax.Array) -> jax.Array:
        return dot(*(_read_masked(x, start, end, size) for x in (a, b)))

    def step(state: _OuterState) -> _OuterState:
        expert, start, end, total = state
        rest = end - start
        choice = sum(lax.convert_element_type(rest > np.int32(size), np.int32) for size in sizes[:-1])
        block = lax.switch(choice, [functools.partial(product, size) for size in sizes], start, end)
        total = _write(total, _read(total, expert, 1) + block[None], expert)
        start = start + lax.min(rest, np.int32(main))
        following = expert + lax.convert_element_type(rest <= np.int32(main), np.int32)
        return following, start, lax.select(following > expert, _end(end, group_sizes, following, count), end), total

    first = _first_row(group_sizes)
    state = (first, first, _end(first, group_sizes, first, count), total)
    total = lax.while_loop(lambda state: state[0] < np.int32(experts), step, state)[3]
    return lax.convert_element_type(total, out_dtype)


def reduce_groups(
    rows: jax.Array,
    group_sizes: jax.Array,
    initial: jax.Array,
    reduce_block: Callable[[jax.Array], jax.Array],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """[E, n]: rows [A, n] reduced over each group; rows outside read as `initial`.

    `reduce_block` reduces [rows, n] to [n] and `join` joins two of its results, both in float32 at least, the dtype of
    the result.
    """
    count, experts = rows.shape[0], group_sizes.size
    dtype, wide = rows.dtype, checks.accumulator(rows.dtype)
    out = lax.broadcast(lax.convert_element_type(initial, wide), (experts, rows.shape[1]))
    if 0 in (count, *out.shape):
        return out
    if experts * rows.size <= _SMALL_WORK:
        own = _own_rows(rows, group_sizes, initial)
        return jax.vmap(lambda group: reduce_block(lax.convert_element_type(group, wide)))(own)
    size = min(_REDUCED_ROWS, count)
    out, rows, fill = varying.like(out, rows), _bits(rows), _bits(lax.convert_element_type(initial, dtype))

    def over_expert(expert: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = state
        end = _end(start, group_sizes, expert, count)

        def step(at: jax.Array, total: jax.Array) -> jax.Array:
            block = _floats(_read_masked(rows, at, end, size, fill), dtype)
            return join(total, reduce_block(lax.convert_element_type(block, wide)))

        return end, _write(out, _stepping(start, end, size, step, _element(out, expert))[None], expert)

    return lax.fori_loop(0, experts, over_expert, (_first_row(group_sizes), out))[1]


def _small_dot(rows: jax.Array, w: jax.Array, group_sizes: jax.Array, dot: _Product, out_dtype: Any) -> jax.Array:
    every = lax.convert_element_type(jax.vmap(dot, (None, 0))(rows, w), out_dtype)  # [E, A, n]
    experts, count, n = every.shape
    expert = expert_of_row(group_sizes, count)
    chosen = lax.min(expert, np.int32(experts - 1)) * np.int32(count) + lax.iota(np.int32, count)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    flat = lax.reshape(every, (experts * count, n))
    out = lax.gather(flat, chosen[:, None], numbers, (1, n), mode="promise_in_bounds")
    present = lax.broadcast_in_dim(expert < np.int32(experts), out.shape, (0,))
    return lax.select(present, out, lax.full_like(out, 0))


def _small_outer(a: jax.Array, b: jax.Array, group_sizes: jax.Array, dot: _Product, out_dtype: Any) -> jax.Array:
    own = (_own_rows(x, group_sizes, 0) for x in (a, b))
    return lax.convert_element_type(jax.vmap(dot)(*own), out_dtype)


def _own_rows(rows: jax.Array, group_sizes: jax.Array, fill: Any) -> jax.Array:
    """[E, A, n]: all rows for each expert, those of others as `fill`."""
    shape = (group_sizes.size, *rows.shape)
    expert = lax.broadcast_in_dim(expert_of_row(group_sizes, rows.shape[0]), shape, (1,))
    own = lax.eq(expert, lax.broadcasted_iota(np.int32, shape, 0))
    filling = lax.broadcast(lax.convert_element_type(fill, rows.dtype), shape)
    return lax.select(own, lax.broadcast_in_dim(rows, shape, (1, 2)), filling)


def dot_block(count: int, experts: int) -> int:
    """Rows of a block of `grouped_dot`: about half a mean group."""
    half = max(count / experts / 2, 1)
    return int(min(max(2 ** round(math.log2(half)), _LEAST_BLOCK), _MOST_BLOCK))


def outer_blocks(count: int, experts: int) -> tuple[int, int]:
    """Rows of the possible last blocks of a group in `grouped_outer`; the larger is that of the other blocks."""
    half = math.ceil(min(0.75 * count / experts, _MOST_OUTER_BLOCK) / 2 / _LEAST_BLOCK) * _LEAST_BLOCK
    return half, 2 * half


def _first_row(group_sizes: jax.Array) -> jax.Array:
    """Row 0, where the first group starts, varying over devices as `group_sizes` does."""
    return lax.full_like(group_sizes, 0, shape=())


def _end(start: jax.Array, group_sizes: jax.Array, expert: jax.Array, count: int) -> jax.Array:
    """The row after the last one of an expert's group, which begins at row `start`; at most `count`."""
    size = lax.max(_element(group_sizes, expert), np.int32(0))
    return start + lax.min(size, np.int32(count) - start)


def _stepping(
    start: jax.Array, stop: jax.Array, size: int, step: Callable[..., jax.Array], carry: jax.Array
) -> jax.Array:
    """`carry = step(at, carry)` for `at` from `start` to before `stop` by `size`."""

    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at, carry = state
        return at + np.int32(size), step(at, carry)

    return lax.while_loop(lambda state: state[0] < stop, body, (start, carry))[1]


def _dot(a_dtype: Any, b_dtype: Any, a_axis: int, b_axis: int, precision: Any) -> _Product:
    """Product of two matrices, given as bits, over one axis each, in their common dtype, with a wide result."""
    common = jnp.promote_types(a_dtype, b_dtype)

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(
            lax.convert_element_type(_floats(a, a_dtype), common),
            lax.convert_element_type(_floats(b, b_dtype), common),
            (((a_axis,), (b_axis,)), ((), ())),
            precision=precision,
            preferred_element_type=checks.accumulator(common),
        )

    return dot


def _bits(x: jax.Array) -> jax.Array:
    """`x` as integers if it has 16 bits (see the head of this module)."""
    return lax.bitcast_convert_type(x, np.uint16) if x.dtype.itemsize == 2 else x


def _floats(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_bits`."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Zeros of `dtype` as bits, to carry through a loop over blocks of `like`.

    The zero is computed from the operands: XLA makes equal constants one array, which it then has to copy for every
    loop that writes into it, and keeps alive from the start of the program.
    """
    element = lax.reshape(lax.slice(like, (0,) * like.ndim, (1,) * like.ndim), ())
    size = lax.convert_element_type(lax.index_in_dim(group_sizes, 0, keepdims=False), element.dtype)
    product = lax.mul(lax.add(element, size), lax.full_like(element, 0))
    zero = lax.select(lax.eq(product, product), lax.abs(product), lax.full_like(product, 0))
    return varying.like(_bits(lax.broadcast(lax.convert_element_type(zero, dtype), shape)), like)


def _read(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """`x[first : first + size]`."""
    return lax.dynamic_slice_in_dim(x, first, size, 0, allow_negative_indices=False)


def _write(x: jax.Array, block: jax.Array, first: jax.Array) -> jax.Array:
    """`x` with `block` from row `first` on."""
    return lax.dynamic_update_slice_in_dim(x, block, first, 0, allow_negative_indices=False)


def _element(x: jax.Array, i: jax.Array) -> jax.Array:
    """`x[i]`."""
    return lax.reshape(_read(x, i, 1), x.shape[1:])


def _inside(block: jax.Array, first: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """Where the rows of `block`, which begins at row `first`, are from `start` to before `end`."""
    row = first + lax.broadcasted_iota(np.int32, block.shape, 0)
    return (row >= start) & (row < end)


def _read_masked(x: jax.Array, start: jax.Array, end: jax.Array, size: int, fill: Any = 0) -> jax.Array:
    """`size` rows of `x` from `start` on, or its last ones; those outside `start` to `end` as `fill`."""
    first = lax.min(start, np.int32(x.shape[0] - size))
    block = _read(x, first, size)
    filling = lax.broadcast(lax.convert_element_type(fill, x.dtype), block.shape)
    return lax.select(_inside(block, first, start, end), block, filling)
