"""What a `ragged_dot_general` computes, and the same by `moe_xla.ops`.

In: an equation.  Out: `product_of`: its `Product`, or why it has none, as a string; `emitted`: the equations that take
its place, which compute the same variable from the same variables.

The kinds are those of `jax.lax.ragged_dot`, of its two gradients, and of all three under `vmap`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jax import lax
from jax.sharding import AxisType

from moe_xla import ops

_PRIMITIVE = "ragged_dot_general"


@dataclasses.dataclass(frozen=True)
class Product:
    """A grouped matmul with all its sizes.

    Attributes:
      is_outer: whether it is the gradient of the weights, rows [A, k] and [A, n] to [E, k, n]; else rows [A, k] and
        weights to [A, n].
      transpose_w: whether the weights are [E, n, k].
      batch: sizes of the batch axes in front of every operand.
      rows, k, n, experts: A, k, n and E.
    """

    is_outer: bool
    transpose_w: bool
    batch: tuple[int, ...]
    rows: int
    k: int
    n: int
    experts: int

    @property
    def flops(self) -> int:
        """FLOPs on the rows of their own experts alone."""
        return 2 * math.prod(self.batch) * self.rows * self.k * self.n

    @property
    def copied(self) -> int:
        """Elements of the masked copies of rows, one for each expert, that XLA makes where it has no grouped matmul."""
        width = self.k + self.n if self.is_outer else self.k
        return math.prod(self.batch) * self.experts * self.rows * width


def is_product(eqn: Any) -> bool:
    """Whether an equation is a ragged dot of jax."""
    return bool(eqn.primitive.name == _PRIMITIVE)


def holds_products(jaxpr: Any) -> bool:
    """Whether there is a ragged dot in a jaxpr or in its bodies."""
    return any(is_product(eqn) for eqn in equations_in(jaxpr))


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all its bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.core.jaxprs_in_params(eqn.params):
            yield from equations_in(inner)


def product_of(eqn: Any) -> Product | str:
    """The product that a ragged dot computes, or why `moe_xla.ops` cannot compute it."""
    params = eqn.params
    if params["group_offset"] is not None:
        return "a group offset is given"
    if not _is_unsharded(params["out_sharding"]):
        return f"the result is laid out as {params['out_sharding'].spec}"
    if not _is_plain(params["precision"]):
        return f"the precision {params['precision']} is an algorithm"
    lhs, rhs, sizes, out = *(v.aval for v in eqn.invars), eqn.outvars[0].aval
    if out.dtype.itemsize > max(lhs.dtype.itemsize, rhs.dtype.itemsize, np.dtype(np.float32).itemsize):
        return f"the result is {out.dtype.name}, in which sums of {lhs.dtype.name} are not kept"
    if out.weak_type:
        return "the result is weakly typed"
    if not _is_narrow(sizes) and getattr(getattr(sizes, "manual_axis_type", None), "varying", None):
        return f"group sizes inside a shard_map are {sizes.dtype.name}, which int32 does not hold"
    return _laid_out(params["ragged_dot_dimension_numbers"], lhs, rhs, sizes) or (
        "the axes are not laid out as those of jax.lax.ragged_dot or its gradients"
    )


def backend_of(eqn: Any, product: Product, backend: str, platform: str) -> str:
    """The backend of `moe_xla.ops` that runs a product.

    Raises:
      ValueError: the contract of `backend` does not cover it.
    """
    dtypes = tuple(np.dtype(v.aval.dtype) for v in (*eqn.invars[:2], *eqn.outvars))
    return ops.resolve(backend, ops.Need(platform, dtypes, product.k, product.n))


def emitted(eqn: Any, backend: str) -> list[Any]:
    """The equations that take the place of a ragged dot that has a `Product`."""
    product = product_of(eqn)
    assert isinstance(product, Product)
    run = _batched(product, _run(eqn, product, backend), eqn.invars[2].aval.ndim > 1)
    with eqn.ctx.manager:
        traced = jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))
    assert not traced.consts
    atoms = dict(zip(traced.jaxpr.invars, eqn.invars, strict=True))
    atoms.update(zip(traced.jaxpr.outvars, eqn.outvars, strict=True))

    def outside(atom: Any) -> Any:
        return atom if isinstance(atom, jex.core.Literal) else atoms.get(atom, atom)

    return [
        inner.replace(
            invars=[*map(outside, inner.invars)],
            outvars=[*map(outside, inner.outvars)],
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for inner in traced.jaxpr.eqns
    ]


def _is_unsharded(sharding: Any) -> bool:
    """Whether a result is not split over explicit axes of a mesh; the gradients in a `shard_map` say so in words."""
    if sharding is None:
        return True
    return AxisType.Explicit not in sharding.mesh.axis_types and all(axes is None for axes in sharding.spec)


def _is_plain(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or isinstance(part, lax.Precision) for part in parts)


def _laid_out(numbers: Any, lhs: Any, rhs: Any, sizes: Any) -> Product | None:
    """The product if batch axes come first, and the others as `jax.lax.ragged_dot` and its gradients have them."""
    (contracted, (lhs_batch, rhs_batch)) = numbers.dot_dimension_numbers
    count = len(lhs_batch)
    if not tuple(lhs_batch) == tuple(rhs_batch) == tuple(range(count)) or sizes.ndim not in (1, 1 + count):
        return None
    places = tuple(
        tuple(int(axis) - count for axis in axes)
        for axes in (*contracted, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    )
    make = functools.partial(Product, batch=lhs.shape[:count], experts=sizes.shape[-1])
    if lhs.ndim - count != 2:
        return None
    rows, width = lhs.shape[count:]
    if places == ((0,), (0,), (0,), ()) and rhs.ndim - count == 2:
        return make(is_outer=True, transpose_w=False, rows=rows, k=width, n=rhs.shape[-1])
    if places in (((1,), (1,), (0,), (0,)), ((1,), (2,), (0,), (0,))) and rhs.ndim - count == 3:
        transpose_w = places[1] == (2,)
        n = rhs.shape[-2 if transpose_w else -1]
        return make(is_outer=False, transpose_w=transpose_w, rows=rows, k=width, n=n)
    return None


def _run(eqn: Any, product: Product, backend: str) -> Callable[..., jax.Array]:
    """One element of the batch."""
    keywords = {
        "backend": backend,
        "preferred_element_type": eqn.outvars[0].aval.dtype,
        "precision": eqn.params["precision"],
    }
    if not product.is_outer:
        keywords["transpose_w"] = product.transpose_w

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        operation = ops.grouped_outer if product.is_outer else ops.grouped_dot
        return operation(lhs, rhs, _narrow(sizes, product.rows), **keywords)

    return run


def _is_narrow(sizes: Any) -> bool:
    return np.can_cast(sizes.dtype, np.int32)


def _narrow(sizes: jax.Array, rows: int) -> jax.Array:
    """Group sizes that int32 holds: none needs more than all rows."""
    if _is_narrow(sizes):
        return sizes
    return lax.convert_element_type(lax.min(sizes, lax.full_like(sizes, rows)), np.int32)


def _batched(product: Product, run: Callable[..., jax.Array], has_own_sizes: bool) -> Callable[..., jax.Array]:
    count = len(product.batch)
    for _ in product.batch:
        run = jax.vmap(run, (0, 0, 0 if has_own_sizes else None))
    if not count or not product.is_outer:
        return run
    order = (count, *range(count), count + 1, count + 2)  # jax has the experts before the batch
    return lambda *operands: lax.transpose(run(*operands), order)
