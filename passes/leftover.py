"""Finds the work of every expert that a rewritten program still does.

A layer counts as rewritten once its forward pass is.  A backward pass that is not understood, but computes the forward
one again, asks for nothing of it; then the program does more than before.

In: the wires of a walk that hold the work of every expert or slot, and the program that was made of it.  Out: whether
there is a contraction in it whose result has the sizes of one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax.extend as jex

_LEAST_AXES = 3  # tokens, experts and features


def does_work_of_every_expert(program: jex.core.ClosedJaxpr, wires: Iterable[Any]) -> bool:
    """Whether a program contracts to arrays of the sizes of some `wires`, in any order."""
    sizes = {found for wire in wires if len(found := _sizes(wire.shape)) >= _LEAST_AXES}
    return any(_sizes(eqn.outvars[0].aval.shape) in sizes for eqn in _dots(program.jaxpr))


def does_work_by_expert(program: jex.core.ClosedJaxpr, experts: int) -> bool:
    """Whether a program multiplies matrices of so many experts, each with rows of its own."""
    return any(experts in eqn.outvars[0].aval.shape[: len(_batch(eqn))] for eqn in _dots(program.jaxpr))


def _batch(eqn: Any) -> tuple[int, ...]:
    _, (batch, _) = eqn.params["dimension_numbers"]
    return tuple(batch)


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))


def _dots(jaxpr: Any) -> Iterator[Any]:
    """The equations that contract; a product of two arrays without a sum is less work than that."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][0][0]:
            yield eqn
        for inner in jex.core.jaxprs_in_params(eqn.params):
            yield from _dots(inner)
