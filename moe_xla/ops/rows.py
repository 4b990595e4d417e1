"""Moves values between tokens, assignments and rows.

`dispatch`, `sort_rows` and `unsort_rows` are one linear primitive, `gather_sum`: `out[i] = sum_j x[index[i, j]]`,
which carries the index of its own transpose.  So every derivative is again a gather with a sum in fixed order, never
a scatter-add.  `combine` is its bilinear sibling, one pass without a [T, K, d] temporary.  Tail rows are zero in and
out: an index out of range contributes nothing, by selection and not by a product with zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import batching

from moe_xla.ops import checks
from moe_xla.ops.primitive import LinearOp, bind, primitive
from moe_xla.ops.routing import Plan, checked, kept_rows

_UNROLLED_CHOICES = 16


def dispatch(x: Any, plan: Plan) -> jax.Array:
    """Copies each token to the rows of its assignments.

    Args:
      x: [T, ...] floating point.
      plan: of A = T * K assignments, those of one token adjacent; K is inferred.

    Returns:
      [A, ...], `x[plan.permutation[r] // K]` in row `r`, zero in tail rows.  The transpose sums a token's K rows in
      the order of its choices, in float32 at least.

    Raises:
      TypeError: `x` is not floating point.
      ValueError: A is not a multiple of T.
    """
    x_td = checks.float_array("x", x)
    permutation, inverse = _guarded(plan)
    tokens = x_td.shape[0]
    return _to_rows(x_td, permutation, lax.reshape(inverse, (tokens, _choices(tokens, inverse.size))))


def sort_rows(values: Any, plan: Plan) -> jax.Array:
    """Puts values given per assignment into rows.

    Args:
      values: [A, ...] floating point, in the order of the assignments.
      plan: of A assignments.

    Returns:
      [A, ...] in the order of the rows, zero in tail rows.  The transpose is `unsort_rows`.

    Raises:
      TypeError: `values` is not floating point.
      ValueError: its leading size is not A.
    """
    values_ad = checks.float_array("values", values)
    permutation, inverse = _guarded(plan)
    checks.equal("the leading size of values", values_ad.shape[0], "the plan's number of rows", inverse.size)
    return bind(gather_sum_p, values_ad, permutation[:, None], inverse[:, None])


def unsort_rows(rows: Any, plan: Plan) -> jax.Array:
    """Puts rows back into the order of the assignments.

    Args:
      rows: [A, ...] floating point, in the order of the rows; tail rows are not read.
      plan: of A assignments.

    Returns:
      [A, ...] in the order of the assignments, zero for assignments to no expert.  The transpose is `sort_rows`.

    Raises:
      TypeError: `rows` is not floating point.
      ValueError: its leading size is not A.
    """
    rows_ad = checks.float_array("rows", rows)
    permutation, inverse = _guarded(plan)
    checks.equal("the leading size of rows", rows_ad.shape[0], "the plan's number of rows", inverse.size)
    return bind(gather_sum_p, rows_ad, inverse[:, None], permutation[:, None])


def combine(rows: Any, weights: Any, plan: Plan) -> jax.Array:
    """Sums the rows of each token, weighted.

    Args:
      rows: [A, ...] floating point; tail rows are not read.
      weights: [T, K] floating point, A = T * K; the weights of assignments to no expert are not read.
      plan: of A assignments.

    Returns:
      [T, ...], `sum_k weights[t, k] * rows[plan.inverse[t * K + k]]`, of the promoted dtype of both, summed in
      float32 at least.  An assignment to no expert adds nothing, even if its row or weight is NaN.

    Raises:
      TypeError: `rows` or `weights` is not floating point.
      ValueError: the leading size of `rows`, the size of `weights` and A are not the same.
    """
    rows_ad = checks.float_array("rows", rows)
    weights_tk = checks.float_array("weights", weights, 2)
    permutation, inverse = _guarded(plan)
    checks.equal("the leading size of rows", rows_ad.shape[0], "the plan's number of rows", inverse.size)
    checks.equal("the size of weights", weights_tk.size, "the plan's number of rows", inverse.size)
    return bind(combine_p, rows_ad, weights_tk, permutation, lax.reshape(inverse, weights_tk.shape))


def row_dot(a: Any, b: Any, *, preferred_element_type: Any = None) -> jax.Array:
    """Inner product of each row of `a` with the same row of `b`.

    Args:
      a, b: [A, n] floating point.
      preferred_element_type: dtype of the result, the promoted dtype of `a` and `b` if None.

    Returns:
      [A], summed in float32 at least.

    Raises:
      TypeError: `a` or `b` is not floating point.
      ValueError: their shapes differ.
    """
    a_an, b_an = checks.float_array("a", a, 2), checks.float_array("b", b, 2)
    if a_an.shape != b_an.shape:
        raise ValueError(f"a has shape {a_an.shape}, but b has shape {b_an.shape}; they must be equal")
    out = checks.float_dtype("preferred_element_type", preferred_element_type, jnp.result_type(a_an, b_an))
    wide = checks.accumulator(a_an.dtype, b_an.dtype)
    product = lax.convert_element_type(a_an, wide) * lax.convert_element_type(b_an, wide)
    return lax.convert_element_type(lax.reduce_sum(product, (1,)), out)


def _choices(tokens: int, assignments: int) -> int:
    if tokens == 0 and assignments == 0:
        return 0
    if tokens == 0 or assignments % tokens:
        raise ValueError(
            f"x has {tokens} tokens, but the plan has {assignments} assignments; they must be a multiple of the tokens"
        )
    return assignments // tokens


def _guarded(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Permutation and inverse, out of range (A) at tail rows and at the assignments in them."""
    permutation, inverse, group_sizes = checked(plan)
    kept = kept_rows(group_sizes)
    none = lax.full_like(permutation, permutation.size)
    row = lax.iota(np.int32, permutation.size)
    return lax.select(row < kept, permutation, none), lax.select(inverse < kept, inverse, none)


def _to_rows(x: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows [A, ...] of x [T, ...], from the guarded indices; A, which stands for none, becomes T, out of range too."""
    token = lax.div(permutation, np.int32(max(inverse.shape[1], 1)))
    return bind(gather_sum_p, x, token[:, None], inverse)


def _take(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x[index]` for indices in range, any row for the others, and where they are in range (over all axes)."""
    bounded = lax.clamp(np.int32(0), index, np.int32(max(x.shape[0] - 1, 0)))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = lax.gather(x, bounded[:, None], numbers, (1, *x.shape[1:]), mode="promise_in_bounds")
    present = (index >= 0) & (index < x.shape[0])
    return rows, lax.broadcast_in_dim(present, rows.shape, (0,))


def _sum_over_choices(term: Callable[[Any], jax.Array], choices: int) -> jax.Array:
    if choices > _UNROLLED_CHOICES:
        return lax.fori_loop(1, choices, lambda j, total: total + term(j), term(0))
    total = term(0)
    for j in range(1, choices):
        total = total + term(j)
    return total


def _column(x: jax.Array, j: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, j, 1, keepdims=False)


def _gather_sum(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    del inverse
    (count, choices), wide = index.shape, checks.accumulator(x.dtype)
    shape = (count, *x.shape[1:])
    if 0 in shape or choices == 0 or x.shape[0] == 0:
        return lax.full(shape, 0, x.dtype)

    def term(j: Any, dtype: Any) -> jax.Array:
        rows, present = _take(x, _column(index, j))
        return lax.convert_element_type(lax.select(present, rows, lax.full_like(rows, 0)), dtype)

    if choices == 1:
        return term(0, x.dtype)
    total = _sum_over_choices(lambda j: term(j, wide), choices)
    return lax.convert_element_type(total, x.dtype)


def _flat_index(index: jax.Array, size: int) -> jax.Array:
    """[B, M, J] indices into B arrays of `size` rows as [B * M, J] indices into the arrays put end to end."""
    batch, rows, choices = index.shape
    offset = size * lax.broadcasted_iota(np.int32, index.shape, 0)
    shifted = lax.select((index >= 0) & (index < size), index + offset, lax.full_like(index, batch * size))
    return lax.reshape(shifted, (batch * rows, choices))


def _end_to_end(x: jax.Array) -> jax.Array:
    return lax.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _split(x: jax.Array, batch: int) -> jax.Array:
    return lax.reshape(x, (batch, x.shape[0] // batch, *x.shape[1:]))


def _batch_gather_sum(prim: Any, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int]:
    x, index, inverse = _batched(operands, dims)
    batch = x.shape[0]
    flat = prim.bind(_end_to_end(x), _flat_index(index, x.shape[1]), _flat_index(inverse, index.shape[1]))
    return _split(flat, batch), 0


def _batched(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    return [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands, dims, strict=True)]


gather_sum_p: core.Primitive = primitive(
    LinearOp(
        name="moe_gather_sum",
        shape=lambda x, index, inverse: ((index.shape[0], *x.shape[1:]), x.dtype),
        implementation=_gather_sum,
        transposes={0: lambda ct, x, index, inverse: bind(gather_sum_p, ct, inverse, index)},
        batch=_batch_gather_sum,
    )
)


def _combine(rows: jax.Array, weights: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    del permutation
    out = jnp.promote_types(rows.dtype, weights.dtype)
    wide = checks.accumulator(out)
    tokens, choices = inverse.shape
    shape = (tokens, *rows.shape[1:])
    if 0 in shape or choices == 0:
        return lax.full(shape, 0, out)

    def term(k: Any) -> jax.Array:
        row, present = _take(rows, _column(inverse, k))
        weight = lax.broadcast_in_dim(lax.convert_element_type(_column(weights, k), wide), row.shape, (0,))
        product = lax.convert_element_type(row, wide) * weight
        return lax.select(present, product, lax.full_like(product, 0))

    return lax.convert_element_type(_sum_over_choices(term, choices), out)


def _combine_rows_ct(ct: jax.Array, rows: Any, weights: jax.Array, permutation: jax.Array, inverse: jax.Array) -> Any:
    flat = lax.reshape(weights, (weights.size,))
    weight = bind(gather_sum_p, flat, permutation[:, None], lax.reshape(inverse, (inverse.size, 1)))
    ct_rows = _to_rows(ct, permutation, inverse)
    weight = lax.broadcast_in_dim(lax.convert_element_type(weight, ct_rows.dtype), ct_rows.shape, (0,))
    return lax.convert_element_type(ct_rows * weight, rows.dtype)


def _combine_weights_ct(
    ct: jax.Array, rows: jax.Array, weights: Any, permutation: jax.Array, inverse: jax.Array
) -> Any:
    flat = (rows.shape[0], rows.size // max(rows.shape[0], 1))
    dot = row_dot(
        lax.reshape(_to_rows(ct, permutation, inverse), flat),
        lax.reshape(rows, flat),
        preferred_element_type=weights.dtype,
    )
    dot = bind(gather_sum_p, dot, lax.reshape(inverse, (inverse.size, 1)), permutation[:, None])
    return lax.reshape(dot, weights.shape)


def _batch_combine(prim: Any, operands: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int]:
    rows, weights, permutation, inverse = _batched(operands, dims)
    batch, size = permutation.shape
    flat = prim.bind(
        _end_to_end(rows),
        _end_to_end(weights),
        lax.reshape(_flat_index(permutation[:, :, None], size), (batch * size,)),
        _flat_index(inverse, size),
    )
    return _split(flat, batch), 0


combine_p = primitive(
    LinearOp(
        name="moe_combine",
        shape=lambda rows, weights, permutation, inverse: (
            (inverse.shape[0], *rows.shape[1:]),
            jnp.promote_types(rows.dtype, weights.dtype),
        ),
        implementation=_combine,
        transposes={0: _combine_rows_ct, 1: _combine_weights_ct},
        batch=_batch_combine,
    )
)
