"""Bodies that are run a second time, but for what they choose.

Choices are not made again: numbers that another program rounds in another way could choose otherwise. A first run
notes them, those of scans inside too, and the second one is given them. Choices inside of a cond are made again, and
those that compare integers, which are not rounded. What reads a body's results may make some of them once more, as
under a policy of `checkpoint`: equations that are equal are run `Once`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import numpy as np
from jax import lax

from moe_xla.passes._jax import at_source, bind_equation, scan_counts
from moe_xla.passes.recover.nodes import freeze, is_floating, is_integer
from moe_xla.passes.roll.graph import body_of, is_helper

CHOOSING = frozenset({"top_k", "approx_top_k", "argmax", "argmin", "sort"})
_STATEFUL = frozenset({"rng_uniform"})

_REMATERIALISED = frozenset({"checkpoint", "remat", "remat2"})

_Bind = Callable[[Any, Sequence[Any]], Sequence[Any]]


class Type(NamedTuple):
    """The type of an array."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False


def run_noting(closed: Any, arrays: Sequence[Any], chosen: list[Any]) -> list[Any]:
    """The results of a body; `chosen` gets the results of the equations in it that choose."""

    def bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        if _chooses_in_scan(eqn):
            return _scan_noting(eqn, inputs, chosen)
        results = bind_equation(eqn, inputs)
        chosen.extend(results if _chooses(eqn) else ())
        return results

    return run_body(closed, arrays, bind)


class Once:
    """Runs equations; one that is equal to an earlier one, of the same arrays, has its results."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Sequence[Any], Sequence[Any]]] = {}

    def __call__(self, eqn: Any, inputs: Sequence[Any], bind: _Bind = bind_equation) -> Sequence[Any]:
        if eqn.effects:
            return bind(eqn, inputs)
        key = (eqn.primitive, freeze(eqn.params), str(eqn.ctx), tuple(map(_identity, inputs)))
        if key not in self._known:
            self._known[key] = bind(eqn, inputs), inputs  # inputs that are kept keep their identity
        return self._known[key][0]


def _identity(array: Any) -> Any:
    return id(array) if isinstance(array, jax.Array) else (type(array), freeze(np.asarray(array)))


def run_again(closed: Any, arrays: Sequence[Any], chosen: Sequence[Any], once: Once) -> list[Any]:
    """The results of a body for which another run has `chosen`."""
    left = iter(chosen)

    def bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        if _chooses_in_scan(eqn):
            return _scan_again(eqn, inputs, [next(left) for _ in chosen_types(eqn.params["jaxpr"].jaxpr)])
        if not _chooses(eqn):
            return once(eqn, inputs)
        results = [next(left) for _ in eqn.outvars]
        return once(eqn, inputs, lambda *_: results)

    return run_body(closed, arrays, bind)


def run_opened(closed: Any, arrays: Sequence[Any], once: Once) -> list[Any]:
    """The results of a body that comes after others; what a policy has it rematerialise in part is written out."""

    def bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        in_part = eqn.primitive.name in _REMATERIALISED and eqn.params.get("policy") is not None
        return run_body(body_of(eqn), inputs, bind) if in_part else once(eqn, inputs)

    return run_body(closed, arrays, bind)


def chosen_types(jaxpr: Any) -> list[Type]:
    """The types of what `run_noting` notes."""
    return list(_chosen_types(jaxpr))


def scan_like(eqn: Any, body: Callable[..., Any], carries: Sequence[Any], slices: Any) -> Any:
    """A scan like that of `eqn` with another body."""
    kept = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(body, list(carries), slices, **kept)


def traced(function: Callable[..., list[Any]], *groups: Sequence[Any]) -> jex.core.ClosedJaxpr:
    """A function of lists of arrays, of the types in each group, as a jaxpr."""
    return jax.make_jaxpr(function)(
        *([jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in group] for group in groups)
    )


def differs_each_time(eqn: Any) -> bool:
    """Whether an equation gives other results when it is run again."""
    return eqn.primitive.name in _STATEFUL


def run_body(closed: Any, arrays: Sequence[Any], bind: _Bind = bind_equation) -> list[Any]:
    """The results of a body whose equations `bind` runs, but for helpers, which are written out."""
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.core.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        inputs = [value(v) for v in eqn.invars]
        with at_source(eqn):
            results = run_body(body_of(eqn), inputs, bind) if is_helper(eqn) else bind(eqn, inputs)
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(v) for v in closed.jaxpr.outvars]


def _scan_noting(eqn: Any, inputs: Sequence[Any], chosen: list[Any]) -> list[Any]:
    consts, carries = scan_counts(eqn)

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        own: list[Any] = []
        results = run_noting(eqn.params["jaxpr"], [*inputs[:consts], *carry, *slices], own)
        return results[:carries], (results[carries:], own)

    first = consts + carries
    carried, (stacked, own) = scan_like(eqn, body, inputs[consts:first], list(inputs[first:]))
    chosen.extend(own)
    return [*carried, *stacked]


def _scan_again(eqn: Any, inputs: Sequence[Any], chosen: list[Any]) -> list[Any]:
    consts, carries = scan_counts(eqn)

    def body(carry: list[Any], slices: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        results = run_again(eqn.params["jaxpr"], [*inputs[:consts], *carry, *slices[0]], slices[1], Once())
        return results[:carries], results[carries:]

    first = consts + carries
    carried, stacked = scan_like(eqn, body, inputs[consts:first], (list(inputs[first:]), chosen))
    return [*carried, *stacked]


def _chosen_types(jaxpr: Any) -> Iterator[Type]:
    for eqn in jaxpr.eqns:
        if is_helper(eqn):
            yield from _chosen_types(body_of(eqn).jaxpr)
        elif _chooses(eqn):
            yield from (Type(v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in eqn.outvars)
        elif _chooses_in_scan(eqn):
            inner = _chosen_types(eqn.params["jaxpr"].jaxpr)
            yield from (t._replace(shape=(eqn.params["length"], *t.shape)) for t in inner)


def _chooses(eqn: Any) -> bool:
    """Whether integers come of an equation that compares numbers with each other."""
    if eqn.primitive.name not in CHOOSING:
        return False
    compared = eqn.invars[: eqn.params.get("num_keys", 1)]
    return any(is_integer(v.aval.dtype) for v in eqn.outvars) and any(is_floating(v.aval.dtype) for v in compared)


def _chooses_in_scan(eqn: Any) -> bool:
    return eqn.primitive.name == "scan" and not eqn.effects and bool(chosen_types(eqn.params["jaxpr"].jaxpr))
