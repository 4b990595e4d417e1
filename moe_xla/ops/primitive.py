"""Defines multilinear JAX primitives from a shape rule, an implementation and transposes.

The ops are primitives, not plain functions, for two reasons: later passes find them in a jaxpr and choose their
backend there, and their transposes must be gathers and grouped matmuls, where autodiff of the `lax` code they run
would give scatter-adds.  In: `LinearOp`.  Out: a `jax.extend.core.Primitive` with evaluation, lowering, derivatives
of any order and batching.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from moe_xla.ops import varying

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Transpose = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class LinearOp:
    """What makes a primitive that is linear in some of its operands, each taken alone.

    Attributes:
      name: the primitive's name in a jaxpr.
      shape: `shape(*avals, **params) -> (shape, dtype)` of the one result.
      implementation: `implementation(*arrays, **params)`; also gets `platform=` if `per_platform`.
      transposes: operand position to `rule(cotangent, *operands, **params)`; the operand itself is abstract there.
        None for an operation that is not linear and gets its derivative elsewhere.
      per_platform: the implementation depends on the platform that the program is lowered for.
      batch: `batch(primitive, operands, dims, **params) -> (result, dim)`; by default a scan over the batch.
    """

    name: str
    shape: Callable[..., tuple[tuple[int, ...], Any]]
    implementation: Callable[..., jax.Array]
    transposes: Mapping[int, Transpose]
    per_platform: bool = False
    batch: Callable[..., tuple[jax.Array, int]] | None = None


def primitive(op: LinearOp) -> core.Primitive:
    """The primitive that `op` describes."""
    prim = core.Primitive(op.name)
    prim.def_impl(functools.partial(_evaluate, prim))
    prim.def_abstract_eval(functools.partial(_abstract, op.shape))
    _register_lowerings(prim, op)
    ad.primitive_jvps[prim] = functools.partial(_jvp, prim, tuple(op.transposes))
    ad.primitive_transposes[prim] = functools.partial(_transpose, op)
    batching.primitive_batchers[prim] = functools.partial(op.batch or batch_by_scan, prim)
    return prim


def bind(prim: core.Primitive, *operands: Any, **params: Any) -> jax.Array:
    """`prim.bind`, after all operands were made to vary over the same `shard_map` axes."""
    return prim.bind(*varying.aligned(operands), **params)


def _evaluate(prim: core.Primitive, *operands: Any, **params: Any) -> jax.Array:
    with jax.disable_jit(False):
        return _jitted(prim, tuple(sorted(params.items())))(*operands)


@functools.cache
def _jitted(prim: core.Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., jax.Array]:
    def evaluate(*operands: jax.Array) -> jax.Array:
        return prim.bind(*operands, **dict(params))

    evaluate.__name__ = prim.name
    return jax.jit(evaluate)


def _abstract(shape_rule: Callable[..., Any], *avals: Any, **params: Any) -> Any:
    shape, dtype = shape_rule(*avals, **params)
    sharding = jax.sharding.NamedSharding(avals[0].sharding.mesh, jax.sharding.PartitionSpec(*(None,) * len(shape)))
    return avals[0].update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def _register_lowerings(prim: core.Primitive, op: LinearOp) -> None:
    if not op.per_platform:
        mlir.register_lowering(prim, mlir.lower_fun(op.implementation, multiple_results=False))
        return
    for platform in PLATFORMS:
        implementation = functools.partial(op.implementation, platform=platform)
        mlir.register_lowering(prim, mlir.lower_fun(implementation, multiple_results=False), platform=platform)


def _jvp(
    prim: core.Primitive, linear: tuple[int, ...], primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[jax.Array, Any]:
    result = prim.bind(*primals, **params)
    terms = [
        prim.bind(*primals[:i], tangents[i], *primals[i + 1 :], **params)
        for i in linear
        if not isinstance(tangents[i], ad.Zero)
    ]
    zero = ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, functools.reduce(ad.add_tangents, terms, zero)


def _transpose(op: LinearOp, cotangent: Any, *operands: Any, **params: Any) -> list[jax.Array | None]:
    results: list[jax.Array | None] = [None] * len(operands)
    if isinstance(cotangent, ad.Zero):
        return results
    (position,) = (i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    visible = [x.aval if ad.is_undefined_primal(x) else x for x in operands]
    results[position] = op.transposes[position](cotangent, *visible, **params)
    return results


def batch_by_scan(
    prim: core.Primitive, operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int]:
    """Batches `prim` by a scan that applies it to one element of the batch after the other."""
    mapped = [
        x if dim is None else batching.bdim_at_front(x, dim, x.shape[dim])
        for x, dim in zip(operands, dims, strict=True)
    ]

    def body(carry: None, elements: Sequence[jax.Array]) -> tuple[None, jax.Array]:
        rest = iter(elements)
        return carry, prim.bind(
            *(x if dim is None else next(rest) for x, dim in zip(mapped, dims, strict=True)), **params
        )

    _, result = lax.scan(body, None, [x for x, dim in zip(mapped, dims, strict=True) if dim is not None])
    return result, 0
