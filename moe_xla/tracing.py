"""Traces a call of a Python function to a closed jaxpr whose inputs and outputs are flat arrays.

In: a function, its arguments, and which leaves of them are traced.  Out: a `Capture`: the jaxpr, the flat inputs that
belong to it, and how to rebuild the function's result from flat outputs.  Leaves that are not traced (Python numbers,
strings, None, static arguments) reach the function as they are, and what it returns that is no traced value comes
back as it is, so that the call keeps its pytrees, dtypes and weak types.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from moe_xla.options import function_name
from moe_xla.passes._jax import hide_frames

hide_frames(__file__)


@dataclasses.dataclass(frozen=True)
class Capture:
    """A traced call: `rebuild(evaluate(closed, *inputs))` is what the call returns."""

    closed: jex.core.ClosedJaxpr
    inputs: tuple[jax.Array, ...]
    rebuild: Callable[[Sequence[jax.Array]], Any]

    @property
    def is_concrete(self) -> bool:
        """Whether the inputs and the values closed over are known, so that equations can be run on them."""
        return not any(map(is_tracer, (*self.inputs, *self.closed.consts)))


def is_tracer(leaf: Any) -> bool:
    """Whether an enclosing transformation traces `leaf`; inside `jax.jit`: whether it is a dynamic argument."""
    return isinstance(leaf, jax.core.Tracer)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array of jax, traced or not, or an array of numpy that jax can hold."""
    if isinstance(leaf, np.ndarray):
        return bool(jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_)
    return isinstance(leaf, jax.Array)


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_traced: Callable[[Any], bool],
) -> Capture:
    """Traces `fn(*args, **kwargs)` over the leaves for which `is_traced` holds; runs its Python body once."""
    leaves, tree = _flatten_call(args, kwargs, is_traced)
    traced = [is_traced(leaf) for leaf in leaves]
    rebuilds: list[Callable[[Sequence[jax.Array]], Any]] = []

    def call_with(new_leaves: Sequence[Any], others: Sequence[Any]) -> Any:
        return jax.tree.unflatten(tree, _choose(traced, new_leaves, others))

    @like(fn)
    def flat_result(*traced_args: Any, **traced_kwargs: Any) -> list[jax.Array]:
        full_args, full_kwargs = call_with(tree.flatten_up_to((traced_args, traced_kwargs)), leaves)
        result = fn(*full_args, **full_kwargs)
        rebuilds.append(_rebuilder(result))
        return [leaf for leaf in jax.tree.leaves(result) if is_tracer(leaf)]

    # What is not traced is given as None, an empty pytree.
    traced_args, traced_kwargs = call_with(leaves, [None] * len(leaves))
    closed = jax.make_jaxpr(flat_result)(*traced_args, **traced_kwargs)
    inputs = tuple(jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves if is_traced(leaf))
    return Capture(closed, inputs, rebuilds[0])


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit()` asks for Python to run as written."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def with_weak_types(values: Sequence[jax.Array], closed: jex.core.ClosedJaxpr) -> list[jax.Array]:
    """`values`, each as weakly or strongly typed as the output of `closed` that it stands for; others as they are."""
    return [_with_weak_type(value, _is_weak(aval)) for value, aval in zip(values, closed.out_avals, strict=True)]


def like(fn: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a wrapper the name, docstring and signature of `fn`, which may be any callable."""

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = functools.wraps(fn, updated=())(wrapper)
        wrapper.__name__ = function_name(fn)
        return wrapper

    return decorate


def _flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_traced: Callable[[Any], bool]
) -> tuple[list[Any], jax.tree_util.PyTreeDef]:
    """Leaves and tree of `(args, kwargs)`, where an argument that holds nothing traced is one leaf, not taken apart."""

    def whole_if_untraced(argument: Any) -> Any:
        return argument if any(map(is_traced, jax.tree.leaves(argument))) else _Whole(argument)

    call = tuple(map(whole_if_untraced, args)), {name: whole_if_untraced(kwargs[name]) for name in kwargs}
    leaves, tree = jax.tree.flatten(call)
    return [leaf.argument if isinstance(leaf, _Whole) else leaf for leaf in leaves], tree


@dataclasses.dataclass(frozen=True)
class _Whole:
    """An argument as a leaf of a pytree, whatever it is."""

    argument: Any


def _rebuilder(result: Any) -> Callable[[Sequence[jax.Array]], Any]:
    leaves, tree = jax.tree.flatten(result)
    # No reference to the tracers is kept: they belong to a trace that is about to end.
    kept = [None if is_tracer(leaf) else leaf for leaf in leaves]
    traced = [is_tracer(leaf) for leaf in leaves]

    def rebuild(flat_outputs: Sequence[jax.Array]) -> Any:
        outputs = iter(flat_outputs)
        leaves = [next(outputs) if is_out else leaf for leaf, is_out in zip(kept, traced, strict=True)]
        return jax.tree.unflatten(tree, leaves)

    return rebuild


def _choose(mask: Sequence[bool], where_true: Sequence[Any], where_false: Sequence[Any]) -> list[Any]:
    return [yes if chosen else no for chosen, yes, no in zip(mask, where_true, where_false, strict=True)]


def _is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def _with_weak_type(value: jax.Array, weak: bool) -> jax.Array:
    if _is_weak(jax.typeof(value)) == weak:
        return value
    return convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=weak, sharding=None)
