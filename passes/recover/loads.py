"""Numbers that may be the capacity, met by counts of rows: in dropless no such operation may be left.

A capacity that a program computes in Python is a literal in its jaxpr, like any other number.  Tests of queue positions
give it away (`Session.thresholds`).  Where a count of assignments, or a sum over slots, is then divided by it, compared
with it or taken away from it (a mean over slots, a rate of use, an overflow), the result depends on the capacity, and
the program with another one would give another number.

In: steps of the walk.  Out: `LiteralUse` records, and whether one of them is a use of a layer's capacity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.terms import Idx, parts_of
from moe_xla.passes.recover.values import Value, literal_of

_SCALING = frozenset({"mul", "div"})
_COMPARING = frozenset({"add", "sub", "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "rem"})
_REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "cumsum"})
_PASSING = frozenset(
    [
        *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "neg"),
        *("select_n", "sqrt", "rsqrt", "square", "integer_pow", "abs", "add_any", "copy", "stop_gradient"),
    ]
)


class LiteralUse(NamedTuple):
    """A number that meets counts of rows: those of the index nodes `indices`, in `step`."""

    indices: frozenset[Any]
    number: float
    is_mean: bool
    step: Step


def follow(step: Step) -> list[LiteralUse]:
    """Passes on which counts flow into the outputs of a step, and the numbers that they meet there."""
    name = step.name
    if any(w.tainted for w in step.outputs):
        return []  # positions have a rule of their own
    if name in _REDUCING and step.inputs[0].value is not None:
        counted = _indices(step.inputs[0].value) | step.inputs[0].loads
        for wire in step.outputs:
            wire.loads = counted
            wire.mean_of = _reduced_cells(step) if counted else None
        return []
    loads = frozenset().union(*(w.loads for w in step.inputs)) if step.inputs else frozenset()
    if not loads or name not in _SCALING | _COMPARING | _PASSING:
        return []
    numbers = [n for n in map(_number, step.inputs) if n is not None]
    for wire in step.outputs:
        wire.loads = loads
    if name in _PASSING or not numbers:
        return []
    means = [w.mean_of for w in step.inputs if w.mean_of is not None]
    return [LiteralUse(loads, n, name == "div" and n in means, step) for n in numbers]


def is_capacity(use: LiteralUse, capacities: Iterable[float], sizes: Iterable[int]) -> bool:
    """Whether a use is one of the capacity: a mean over slots, or a number that no other size explains."""
    capacities = {c for c in capacities if c > 0}
    if use.is_mean:
        return any(use.number % c == 0 for c in capacities)
    number = abs(use.number)
    if use.step.name in _SCALING and 0 < number < 1:
        number = round(1 / number) if math.isclose(1 / number, round(1 / number), rel_tol=1e-6) else 0
    if number in _products(sizes):
        return False
    if use.step.name in _SCALING:
        return any(number and number % c == 0 for c in capacities)
    return number in capacities


def _products(sizes: Iterable[int]) -> set[int]:
    distinct = sorted(set(sizes))
    chosen = itertools.chain.from_iterable(itertools.combinations(distinct, n) for n in range(len(distinct) + 1))
    return {math.prod(c) for c in chosen}


def _indices(value: Value) -> frozenset[Any]:
    """The index nodes of the places at which a value stands."""
    places = [p for piece in value.pieces for a in piece.axes for p in parts_of(a)]
    return frozenset(p.node for p in places if isinstance(p, Idx))


def _reduced_cells(step: Step) -> float:
    axes = step.eqn.params.get("axes", ())
    return float(math.prod(step.inputs[0].shape[i] for i in axes))


def _number(wire: Wire) -> float | None:
    value = literal_of(wire.value) if wire.value is not None and wire.value.is_plain else None
    return None if value is None or value.dtype.kind not in "iuf" else float(value)
