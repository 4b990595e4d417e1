"""Loops over experts become programs with an expert axis.

In: a closed jaxpr.  Out: `rolled(closed)`: one of the same inputs and outputs in which unrolled and scanned loops over
experts are batched operations, equal up to the order of additions; None if it holds no such loop.  Whatever is not
understood stays as it is written.  With `again`, backward bodies run all forward bodies again that may hold a layer,
whether there is a loop in it or not.  `over_tokens(closed, is_layer)`: one in which scans over tokens, of which each
picks an expert by a number of its own, are operations on all tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
from absl import logging

from moe_xla.passes._jax import array_type
from moe_xla.passes.roll.again import CHOOSING
from moe_xla.passes.roll.graph import holds, inner_jaxprs, is_helper
from moe_xla.passes.roll.picks import may_pick
from moe_xla.passes.roll.recomputed import recomputed
from moe_xla.passes.roll.scans import IsLayer, uncut, unmapped, unscanned
from moe_xla.passes.roll.unrolled import unrolled

__all__ = ["may_hold_loops", "over_tokens", "rolled"]

_Step = Callable[[jex.core.ClosedJaxpr], jex.core.ClosedJaxpr | None]
_Change = Callable[[Any], Callable[[Sequence[Any]], list[Any]] | None]
_BODIES = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "checkpoint", "remat", "remat2"}
)


def may_hold_loops(closed: jex.core.ClosedJaxpr) -> bool:
    """Whether a program may hold a loop over experts: it chooses something, or compares integers, and contracts."""
    return _may_hold_layer(_names(closed.jaxpr)) or _holds_token_scan(closed.jaxpr)


def _may_hold_layer(names: set[str]) -> bool:
    """Whether there is what picks an expert for a token, unless the program is given the choice, and contractions."""
    return "dot_general" in names and bool(names & CHOOSING or "eq" in names)


def _names(jaxpr: Any) -> set[str]:
    """The names of the primitives in a jaxpr and in its bodies."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    return names.union(*(_names(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)))


def rolled(closed: jex.core.ClosedJaxpr, again: bool = False) -> jex.core.ClosedJaxpr | None:
    """The program with its loops over experts rolled, or None if there are none; never raises for a valid program."""
    return _attempted(functools.partial(_rolled, again=again), closed)


def over_tokens(closed: jex.core.ClosedJaxpr, is_layer: IsLayer) -> jex.core.ClosedJaxpr | None:
    """The program with its scans over tokens as operations on all, where `is_layer` holds of what becomes of a scan.

    None if there are none; never raises for a valid program.
    """
    if not _holds_token_scan(closed.jaxpr):
        return None
    found: list[bool] = []

    def noted(program: jex.core.ClosedJaxpr) -> bool:
        found.append(is_layer(program))
        return found[-1]

    result = _attempted(functools.partial(_over_tokens, is_layer=noted), closed)
    return result if any(found) else None


def _attempted(step: _Step, closed: jex.core.ClosedJaxpr) -> jex.core.ClosedJaxpr | None:
    try:
        return step(closed)
    except Exception as error:  # a fault of ours must never reach the user's step: its loops stay as written
        logging.warning("moe_xla: loops over experts stay as written: %s: %s", type(error).__name__, error)
        return None


def _holds_token_scan(jaxpr: Any) -> bool:
    return any(
        (eqn.primitive.name == "scan" and holds(eqn, may_pick)) or any(map(_holds_token_scan, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _rolled(closed: jex.core.ClosedJaxpr, again: bool) -> jex.core.ClosedJaxpr | None:
    recompute = functools.partial(_recomputed, again=again)
    return _stepped(closed, functools.partial(_rolled, again=again), (uncut, recompute), (unscanned, unrolled))


def _over_tokens(closed: jex.core.ClosedJaxpr, is_layer: IsLayer) -> jex.core.ClosedJaxpr | None:
    step = functools.partial(_over_tokens, is_layer=is_layer)
    return _stepped(closed, step, (uncut, _picked_again), (functools.partial(unmapped, is_layer=is_layer),))


def _picked_again(jaxpr: Any) -> Callable[[Sequence[Any]], list[Any]] | None:
    return recomputed(jaxpr, lambda forward, _: holds(forward, may_pick))


def _stepped(
    closed: jex.core.ClosedJaxpr, in_bodies: _Step, before: Sequence[_Change], after: Sequence[_Change]
) -> jex.core.ClosedJaxpr | None:
    """The program after changes to its own level, `before` and `after` those `in_bodies`; None if there are none."""
    result = closed
    first, last = ([functools.partial(_traced, change=change) for change in changes] for changes in (before, after))
    steps: tuple[_Step, ...] = (*first, functools.partial(_with_bodies, step=in_bodies), *last)
    for step in steps:
        result = step(result) or result
    return None if result is closed else result


def _recomputed(jaxpr: Any, again: bool) -> Callable[[Sequence[Any]], list[Any]] | None:
    def wanted(forward: Any, bodies: Callable[[], Sequence[Any]]) -> bool:
        if again and _may_hold_layer(set().union(*map(_names, inner_jaxprs(forward)))):
            return True
        return any(holds_loop(body) for body in bodies())

    def holds_loop(body: Any) -> bool:
        return unrolled(body) is not None or unscanned(body) is not None or recomputed(body, wanted) is not None

    return recomputed(jaxpr, wanted)


def _traced(closed: jex.core.ClosedJaxpr, change: _Change) -> jex.core.ClosedJaxpr | None:
    """The program as a change of this pass runs it."""
    run = change(closed.jaxpr)
    if run is None:
        return None
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in closed.jaxpr.invars]
    result = jax.make_jaxpr(lambda *arrays: run([*closed.consts, *arrays]))(*inputs)
    return result if _types(result.jaxpr) == _types(closed.jaxpr) else None


def _types(jaxpr: Any) -> list[Any]:
    return [(*array_type(v.aval), getattr(v.aval, "weak_type", False)) for v in (*jaxpr.invars, *jaxpr.outvars)]


# --- bodies of control flow


def _with_bodies(closed: jex.core.ClosedJaxpr, step: _Step) -> jex.core.ClosedJaxpr | None:
    """The program with a step taken in its bodies; each keeps its inputs and outputs."""
    eqns = [_with_body(eqn, step) for eqn in closed.jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, closed.jaxpr.eqns, strict=True)):
        return None
    return jex.core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def _with_body(eqn: Any, step: _Step) -> Any:
    if eqn.primitive.name not in _BODIES:
        return eqn
    # a helper is rolled together with what surrounds it
    inside = functools.partial(_with_bodies, step=step) if is_helper(eqn) else step
    params = {name: _with_param(param, inside) for name, param in eqn.params.items()}
    changed = any(params[name] is not param for name, param in eqn.params.items())
    return eqn.replace(params=params) if changed else eqn


def _with_param(param: Any, step: _Step) -> Any:
    if isinstance(param, jex.core.ClosedJaxpr):
        return _same_signature(param, step)
    if isinstance(param, jex.core.Jaxpr) and not param.constvars:
        closed = jex.core.ClosedJaxpr(param, ())
        result = _same_signature(closed, step)
        return param if result is closed else result.jaxpr
    if isinstance(param, tuple) and any(isinstance(p, jex.core.ClosedJaxpr) for p in param):
        branches = tuple(_with_param(p, step) for p in param)
        return param if all(new is old for new, old in zip(branches, param, strict=True)) else branches
    return param


def _same_signature(closed: jex.core.ClosedJaxpr, step: _Step) -> jex.core.ClosedJaxpr:
    """The rolled body if it needs no new constants, else the body."""
    result = step(closed)
    if result is None or len(result.consts) != len(closed.consts):
        return closed
    return jex.core.ClosedJaxpr(result.jaxpr.replace(debug_info=closed.jaxpr.debug_info), result.consts)
