"""Shapes of arrays that stand for index notation: axes named by variables, of length 1 where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.passes.recover.terms import (
    Var,
)


def spread(data: Any, shape: Sequence[int]) -> Any:
    """An array with axes of length 1, or without axes, broadcast to `shape`."""
    if tuple(data.shape) == tuple(shape):
        return data
    return lax.broadcast_in_dim(data, tuple(shape), range(data.ndim))


def matched(a: Any, b: Any) -> tuple[Any, Any]:
    """Two arrays with as many axes each, axes of length 1 broadcast to those of the other, in their common dtype."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    kind = a.dtype if a.dtype == b.dtype else jnp.promote_types(a.dtype, b.dtype)
    return spread(lax.convert_element_type(a, kind), shape), spread(lax.convert_element_type(b, kind), shape)


def where(held: Any, data: Any, other: Any = 0) -> Any:
    """`data` where `held`, which may have axes of length 1, `other` elsewhere."""
    shape = np.broadcast_shapes(held.shape, data.shape)
    return lax.select(spread(jnp.asarray(held), shape), spread(data, shape), lax.full(shape, other, data.dtype))


def column(data: Any, k: int, axes: int) -> Any:
    """Column `k` of a matrix [T, K] as [T, 1, …] with `axes` axes."""
    return lax.reshape(lax.index_in_dim(data, k, 1), (data.shape[0], *(1,) * (axes - 1)))


def arranged(data: Any, names: Sequence[Var], variables: Sequence[Var]) -> Any:
    """Axes `names` as axes `variables`, length 1 where absent."""
    order = sorted(range(len(names)), key=lambda i: list(variables).index(names[i]))
    if order != list(range(len(names))):
        data = lax.transpose(data, order)
    if len(names) == len(variables):
        return data
    sizes = dict(zip([names[i] for i in order], data.shape, strict=True))
    return lax.reshape(data, [sizes.get(v, 1) for v in variables])


def take_rows(table: jax.Array, index: jax.Array, unique: bool = False) -> jax.Array:
    """`table[index]` along the first axis; `unique` promises that no place is read twice."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + table.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    return lax.gather(
        table,
        index[..., None],
        numbers,
        slice_sizes=(1, *table.shape[1:]),
        unique_indices=unique,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


@jax.jit
def ordered_after(sizes: jax.Array, latest: jax.Array) -> jax.Array:
    """`sizes`, known only after the floating-point array `latest`."""
    element = lax.reshape(lax.slice(latest, (0,) * latest.ndim, (1,) * latest.ndim), ())
    product = lax.mul(element, lax.full_like(element, 0))  # zero, or NaN: nothing that XLA may take for a constant
    zero = lax.select(lax.eq(product, product), product, lax.full_like(product, 0))
    return sizes + lax.convert_element_type(zero, sizes.dtype)


def pad(data: Any, axis: int, low: int, high: int) -> Any:
    config = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(data.ndim)]
    return lax.pad(data, np.zeros((), data.dtype), config)
