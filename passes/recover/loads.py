"""Numbers that may be the capacity, met by counts of rows: in dropless no such operation may be left.

A capacity that a program computes in Python is a literal in its jaxpr, like any other number.  Tests of queue positions
give it away (`Session.thresholds`).  Where a count of assignments, or a sum over slots, is then divided by it, compared
with it or taken away from it (a mean over slots, a rate of use, an overflow), the result depends on the capacity, and
the program with another one would give another number.

In: steps of the walk.  Out: `LiteralUse` records, and whether one of them is a use of a layer's capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from moe_xla.passes.recover.nodes import Graph
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.terms import Idx, parts_of
from moe_xla.passes.recover.values import Value, is_slot, literal_of

_SCALING = frozenset({"mul", "div"})
_COMPARING = frozenset({"add", "sub", "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "rem"})
_REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "cumsum"})
_PASSING = frozenset(
    [
        *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "neg"),
        *("select_n", "sqrt", "rsqrt", "square", "integer_pow", "abs", "add_any", "copy", "stop_gradient"),
    ]
)


# Up to this, a number is taken for a weight or a small constant, unless it is a known size divided by the capacity.
_SMALL = 2
_LEAST = 1e-12


class LiteralUse(NamedTuple):
    """A number that meets counts of rows, those of the index nodes `indices`, in `step`.

    `mean` says whether it makes a mean of what was summed: "slots" over slots too, "other" over other axes only.
    """

    indices: frozenset[Any]
    number: float
    mean: str | None
    step: Step


def follow(graph: Graph, step: Step) -> list[LiteralUse]:
    """Passes on which counts flow into the outputs of a step, and the numbers that they meet there."""
    name = step.name
    if any(w.tainted for w in step.outputs):
        return []  # positions have a rule of their own
    if name in _REDUCING and step.inputs[0].value is not None:
        counted = _indices(step.inputs[0].value) | step.inputs[0].loads
        for wire in step.outputs:
            wire.loads = counted
            wire.mean_of = _reduced_cells(graph, step) if counted else None
        return []
    if name == "dot_general" and any(_number(w) is not None for w in step.inputs):
        for wire in step.outputs:
            wire.loads = frozenset().union(*(_indices(w.value) for w in step.inputs if w.value is not None))
        return []
    loads = frozenset().union(*(w.loads for w in step.inputs)) if step.inputs else frozenset()
    if not loads or name not in _SCALING | _COMPARING | _PASSING:
        return []
    numbers = [n for n in map(_number, step.inputs) if n is not None]
    for wire in step.outputs:
        wire.loads = loads
    if name in _PASSING or not numbers:
        return []
    means = dict(w.mean_of for w in step.inputs if w.mean_of is not None)
    return [LiteralUse(loads, n, means.get(n) if name == "div" else None, step) for n in numbers]


def is_capacity(use: LiteralUse, capacities: Iterable[float], sizes: Iterable[int]) -> bool:
    """Whether a use may be one of the capacity: a mean over slots, or a number that no other size explains."""
    if use.mean is not None:
        return use.mean == "slots"
    number = abs(use.number)
    explained = _products(sizes)
    if number > _SMALL:
        percent = math.log10(number).is_integer() and not any(c > 0 and number % c == 0 for c in capacities)
        return number not in explained and not percent
    if use.step.name not in _SCALING or number == 0:
        return any(number == c for c in capacities) and number not in explained
    if number < _LEAST or math.isclose(number, float(f"{number:.2g}"), rel_tol=1e-6):
        return False  # a weight as people write it: 0.01, 0.25
    inverse = round(1 / number)
    exact = math.isclose(1 / number, inverse, rel_tol=1e-6)
    return exact and inverse not in explained and any(c > 0 and inverse % c == 0 for c in capacities)


def _products(sizes: Iterable[int]) -> set[int]:
    """All products of sizes, each taken twice at most."""
    products = {1}
    for size in sorted({n for n in sizes if n > 1}) * 2:
        products |= {p * size for p in products}
    return products


def _indices(value: Value) -> frozenset[Any]:
    """The index nodes of the places at which a value stands."""
    places = [p for piece in value.pieces for a in piece.axes for p in parts_of(a)]
    return frozenset(p.node for p in places if isinstance(p, Idx))


def _reduced_cells(graph: Graph, step: Step) -> tuple[float, str]:
    """How many cells are summed into one, and whether slots are among them."""
    axes, summed = step.eqn.params.get("axes", ()), step.inputs[0]
    assert summed.value is not None
    over_slots = any(is_slot(graph, p.axes[i]) for p in summed.value.pieces for i in axes)
    return float(math.prod(summed.shape[i] for i in axes)), "slots" if over_slots else "other"


def _number(wire: Wire) -> float | None:
    value = literal_of(wire.value) if wire.value is not None and wire.value.is_plain else None
    return None if value is None or value.dtype.kind not in "iuf" else float(value)
