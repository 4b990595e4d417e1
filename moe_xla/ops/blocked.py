"""Grouped matmuls in plain XLA: a loop over blocks of rows, each against its expert's matrix.

MegaBlocks' idea without its padding: rows stay compact and sorted, a block may start at any row, and loops with trip
counts from the device walk over the blocks, so nothing but the result and one block is ever allocated.  A dot needs a
static size, so a group is cut into equal main blocks and one last block of the smallest fitting size out of seven;
each size has a loop of its own over the experts that use it.  Why it looks like this, from measurements on XLA:CPU:

- A dot inside a loop runs on all threads, and a dot of B rows costs as much as B plus about 30 rows of a large one:
  a few large blocks that fit closely beat many small ones.
- A loop updates its carry in place; a `switch` in the loop copies the carry in every branch (4 times slower for 32
  experts), hence a loop a size.
- A last block of at least half its size is written as two overlapping parts that end exactly with the group, which
  needs no mask, no order between blocks and no read of the result.
- Compiling takes time in proportion to the number of loops; seven sizes are within a few percent of eighteen.  Small
  products have no loop at all: they run every expert on every row and select, which compiles seven times faster.
- XLA:CPU slices and updates 16-bit floats as float32, which converts the whole array in every step; so they are carried
  as integers.  The dot itself takes 16-bit blocks with a float32 result several times faster than one dense 16-bit dot.
- `grouped_outer` sums the blocks of a group before it writes: adding into the result in place would read and write it
  once more for every block.  For many experts its cost is that of writing E * m * n values for the first time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.ops import checks, varying
from moe_xla.ops.contract import Contract
from moe_xla.ops.routing import expert_of_row, group_ends

_Product = Callable[[jax.Array, jax.Array], jax.Array]

CONTRACT = Contract(
    platforms=("cpu", "cuda", "rocm", "tpu"),
    dtypes=("bfloat16", "float16", "float32", "float64"),
    temporaries="one block of rows, one matrix; for 16-bit dtypes also a copy of operands and result",
)

# Sizes of last blocks in units that grow with the mean group. Each is at most twice the one before (see grouped_dot).
_STEPS_LARGE, _STEPS_SMALL = (3, 6, 9), (2, 4, 8)
_LARGE_MEAN, _MAIN_STEP = 192, 8
_LEAST_UNIT, _MOST_UNIT = 8, 128
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
    sizes = _block_sizes(count, experts)
    blocks = _blocks(sizes, group_sizes, count)
    out = _zeros(shape, out_dtype, rows, group_sizes)
    rows, w = _bits(rows), _bits(w)

    def product(first: jax.Array, size: int, w_kn: jax.Array) -> jax.Array:
        return _bits(lax.convert_element_type(dot(_read(rows, first, size), w_kn), out_dtype))

    def over_main(expert: jax.Array, out: jax.Array) -> jax.Array:
        w_kn = _element(w, expert)

        def step(at: jax.Array, out: jax.Array) -> jax.Array:
            return _write(out, product(at, sizes.main, w_kn), at)

        return _over_main(blocks, sizes, expert, step, out)

    def over_last(choice: int, expert: jax.Array, out: jax.Array) -> jax.Array:
        size, start, end = sizes.last[choice], _element(blocks.last, expert), _element(blocks.end, expert)
        first = lax.min(start, np.int32(count - size))
        y = product(first, size, _element(w, expert))
        if choice == 0:
            y = lax.select(_inside(y, first, start, end), y, _read(out, first, size))
            return _write(out, y, first)
        head = sizes.last[choice - 1]
        out = _write(out, _read(y, start - first, head), start)
        return _write(out, _read(y, end - (size - head) - first, size - head), end - (size - head))

    if sizes.last[-1] < count:
        out = _over_experts(blocks.split, np.int32(0), blocks.splits, over_main, out)
    return _floats(_over_sizes(blocks, sizes, over_last, out), out_dtype)


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
    sizes = _block_sizes(count, experts)
    blocks = _blocks(sizes, group_sizes, count)
    out = _zeros(shape, out_dtype, a, group_sizes)
    a, b = _bits(a), _bits(b)

    def step(at: jax.Array, total: jax.Array) -> jax.Array:
        return total + dot(_read(a, at, sizes.main), _read(b, at, sizes.main))

    def over_last(choice: int, expert: jax.Array, out: jax.Array) -> jax.Array:
        size, start, end = sizes.last[choice], _element(blocks.last, expert), _element(blocks.end, expert)
        total = dot(*(_read_masked(x, start, end, size) for x in (a, b)))
        if sizes.last[-1] < count:
            total = _over_main(blocks, sizes, expert, step, total)
        return _write(out, _bits(lax.convert_element_type(total, out_dtype))[None], expert)

    return _floats(_over_sizes(blocks, sizes, over_last, out), out_dtype)


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
    ends = group_ends(group_sizes, count)
    out, rows, fill = varying.like(out, rows), _bits(rows), _bits(lax.convert_element_type(initial, dtype))

    def over_expert(expert: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = state
        end = _element(ends, expert)

        def step(at: jax.Array, total: jax.Array) -> jax.Array:
            block = _floats(_read_masked(rows, at, end, size, fill), dtype)
            return join(total, reduce_block(lax.convert_element_type(block, wide)))

        return end, _write(out, _stepping(start, end, size, step, _element(out, expert))[None], expert)

    return lax.fori_loop(0, experts, over_expert, (lax.full_like(ends, 0, shape=()), out))[1]


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


@dataclasses.dataclass(frozen=True)
class _BlockSizes:
    """Rows of a main block, and the possible sizes of the last block of a group, ascending."""

    main: int
    last: tuple[int, ...]


def _block_sizes(count: int, experts: int) -> _BlockSizes:
    mean = max(count / experts, 1)
    steps = _STEPS_LARGE if mean >= _LARGE_MEAN else _STEPS_SMALL
    units_per_mean = 8 if mean >= _LARGE_MEAN else 4
    unit = min(max(2 ** round(math.log2(mean / units_per_mean)), _LEAST_UNIT), _MOST_UNIT)
    last = [unit * step for step in steps]
    fitting = [size for size in last if size < count]
    return _BlockSizes(unit * _MAIN_STEP, tuple(last if fitting == last else (*fitting, count)))


class _Blocks(NamedTuple):
    """How groups are cut: main blocks from `start` on, then one last block from `last` to `end` ([E] each).

    `by_size` [E] holds the experts in the order of the sizes of their last blocks, those of size `i` from `edges[i]` to
    `edges[i + 1]`.  The first `splits` experts of `split` [E] are those with main blocks.
    """

    start: jax.Array
    last: jax.Array
    end: jax.Array
    by_size: jax.Array
    edges: jax.Array
    split: jax.Array
    splits: jax.Array


def _blocks(sizes: _BlockSizes, group_sizes: jax.Array, count: int) -> _Blocks:
    experts, choices = group_sizes.size, len(sizes.last)
    end = group_ends(group_sizes, count)
    start = lax.concatenate([lax.full((1,), 0, np.int32), lax.slice(end, (0,), (experts - 1,))], 0)
    # A group keeps at least one row for its last block.
    mains = lax.max(lax.div(end - start + np.int32(sizes.main - 1 - sizes.last[-1]), np.int32(sizes.main)), np.int32(0))
    last = start + mains * np.int32(sizes.main)
    larger = lax.gt((end - last)[:, None], np.array(sizes.last, np.int32)[None])
    choice = lax.reduce_sum(lax.convert_element_type(larger, np.int32), (1,))
    choice = lax.select(last < end, choice, lax.full_like(choice, choices))
    before = lax.lt(choice[:, None], np.arange(choices + 1, dtype=np.int32)[None])
    whole = lax.convert_element_type(lax.eq(mains, np.int32(0)), np.int32)
    return _Blocks(
        start,
        last,
        end,
        by_size=_argsort(choice),
        edges=lax.reduce_sum(lax.convert_element_type(before, np.int32), (0,)),
        split=_argsort(whole),
        splits=np.int32(experts) - lax.reduce_sum(whole, (0,)),
    )


def _argsort(keys: jax.Array) -> jax.Array:
    return lax.sort((keys, lax.iota(np.int32, keys.size)), num_keys=1)[1]


def _over_sizes(blocks: _Blocks, sizes: _BlockSizes, visit: Callable[..., jax.Array], out: jax.Array) -> jax.Array:
    for choice in range(len(sizes.last)):
        first, stop = (lax.index_in_dim(blocks.edges, choice + i, keepdims=False) for i in (0, 1))
        out = _over_experts(blocks.by_size, first, stop, functools.partial(visit, choice), out)
    return out


def _over_experts(
    order: jax.Array, first: jax.Array | np.int32, stop: jax.Array, visit: Callable[..., jax.Array], out: jax.Array
) -> jax.Array:
    return lax.fori_loop(first, stop, lambda i, out: visit(_element(order, i), out), out)


def _over_main(
    blocks: _Blocks, sizes: _BlockSizes, expert: jax.Array, step: Callable[..., jax.Array], carry: jax.Array
) -> jax.Array:
    return _stepping(_element(blocks.start, expert), _element(blocks.last, expert), sizes.main, step, carry)


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
