"""Numbers that may be the capacity, met by counts of rows: in dropless no such operation may be left.

A capacity that a program computes in Python is a literal in its jaxpr, like any other number.  Tests of queue positions
give it away (`Session.thresholds`).  Where a count of assignments, or a sum over slots, is then divided by it, compared
with it or taken away from it (a mean over slots, a rate of use, an overflow), the result depends on the capacity, and
the program with another one would give another number.

In: steps of the walk.  Out: `LiteralUse` records, and whether one of them is a use of a layer's capacity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moe_xla.passes.recover.facts import assignments_of, choices_of, distinct_of
from moe_xla.passes.recover.nodes import Graph, Leaf, Map, literal, operands_at
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.session import Path, Session
from moe_xla.passes.recover.terms import Factor, Idx, IndexKey, Var, factor_vars, key_of, parts_of, term_vars
from moe_xla.passes.recover.values import Value, is_slot

_SCALING = frozenset({"mul", "div"})
_COMPARING = frozenset({"add", "sub", "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "rem"})
_REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "cumsum"})
_PASSING = frozenset(
    [
        *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "neg"),
        *("stack", "unstack", "split", "pad", "rev", "dynamic_slice", "gather"),
        *("select_n", "sqrt", "rsqrt", "square", "integer_pow", "abs", "add_any", "copy", "stop_gradient"),
    ]
)
_MASKING = frozenset({"and", "or", "not", "xor", "mul"})
_ANY = frozenset({"reduce_or", "reduce_and"})
_TESTING = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

# Up to this, a number is taken for a weight or a small constant, unless it is a known size divided by the capacity.
_SMALL = 2
_LEAST = 1e-12


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers that are known of one layer.

    `capacities` are the bounds that its queue positions are compared with, `scales` the products of numbers of experts,
    tokens and groups that capacities are multiplied with; `sizes` are those of its axes, each of which explains a
    number, and `layers` is how many layers like it the program has, over which it may take means.
    """

    capacities: frozenset[float]
    scales: frozenset[int]
    sizes: frozenset[int]
    layers: int

    def name(self, number: float) -> bool:
        """Whether a number is a size, or one for all layers."""
        return number in self.sizes or (number % self.layers == 0 and number / self.layers in {1, *self.sizes})

    def explain(self, number: float) -> bool:
        """Whether a number is a size, or a product of sizes and the number of layers that is not one of a capacity.

        Each size counts twice at most.
        """
        return self.name(number) or (number in _products([*self.sizes, self.layers] * 2) and not self.hold(number))

    def hold(self, number: float) -> bool:
        """Whether a number is a capacity, or that of all experts, groups or tokens."""
        return any(c > 1 and number in {c * scale for scale in self.scales} for c in self.capacities)


def numbers_of_layers(session: Session) -> dict[Path, Numbers]:
    """What is known of each layer that is asked to be dropless."""
    sizes: dict[Path, set[int]] = {}
    scales: dict[Path, set[int]] = {}
    queues: dict[Path, set[Path]] = {}
    for graph, rank in session.ranks:
        root, choices, batch = session.root(rank.site), choices_of(graph, rank), [v.size for v in rank.batch]
        tokens, queued = assignments_of(rank) // choices, math.prod(v.size for v in (*rank.order, *rank.many))
        found = sizes.setdefault(root, set())
        found |= {v.size for v in (*rank.order, *rank.many)} | {*batch, rank.index.size, choices, tokens, queued}
        scales.setdefault(root, set()).update(_products([rank.index.size, tokens, *batch]))
        queues.setdefault(root, set()).add(rank.site)
    return {
        root: Numbers(
            frozenset(t.bound for t in thresholds),
            frozenset(scales.get(root, {1})),
            frozenset({*sizes.get(root, ()), len(queues.get(root, ()))}) - {0},
            len(sizes),
        )
        for root, thresholds in session.dropless_thresholds().items()
    }


def _products(sizes: Sequence[int]) -> set[int]:
    """All products of some of the sizes."""
    products = {1}
    for size in sorted(n for n in sizes if n > 1):
        products |= {p * size for p in products}
    return products


class LiteralUse(NamedTuple):
    """A number that meets counts of rows, those counted by `indices`, in `step`.

    `mean` says whether it makes a mean of what was summed: "slots" over slots too, "other" over other axes only;
    `is_direct` whether it meets a count as it is.
    """

    indices: frozenset[IndexKey]
    number: float
    mean: str | None
    step: Step
    is_direct: bool


def follow(graph: Graph, step: Step, is_dropless: Callable[[Any], bool]) -> list[LiteralUse]:
    """Passes on which counts flow into the outputs of a step, and the numbers that they meet there."""
    name = step.name
    _follow_told(graph, step)
    if any(is_dropless(site) for w in step.outputs for site in w.tainted):
        return []  # positions have a rule of their own, where they are computed
    if name in _REDUCING and step.inputs[0].value is not None:
        counted = _counted(graph, step.inputs[0].value, step.eqn.params) | step.inputs[0].loads
        counted |= _told_counted(step)
        for wire in step.outputs:
            wire.loads = counted
            wire.mean_of = _reduced_cells(graph, step) if counted else None
            wire.is_count = bool(counted)
        return []
    if name == "dot_general" and any(number_of(w) is not None for w in step.inputs):
        for wire in step.outputs:
            wire.loads = frozenset().union(*(_indices(w.value) for w in step.inputs if w.value is not None))
        return []
    loads = frozenset().union(*(w.loads for w in step.inputs)) if step.inputs else frozenset()
    if not loads or name not in _SCALING | _COMPARING | _PASSING:
        return []
    numbers = [n for n in map(number_of, step.inputs) if n is not None]
    direct = any(w.is_count for w in step.inputs)
    for wire in step.outputs:
        wire.loads, wire.is_count = loads, direct and name in _PASSING
    if name in _PASSING or not numbers:
        return []
    means = dict(w.mean_of for w in step.inputs if w.mean_of is not None)
    return [LiteralUse(loads, n, means.get(n) if name == "div" else None, step, direct) for n in numbers]


def _follow_told(graph: Graph, step: Step) -> None:
    """Passes on what tells something of each assignment: a value for each of them, not a row, nor a count of them."""
    compared, reduces = _compared(graph, step), step.name in _REDUCING | _ANY
    if step.name not in _MASKING | _PASSING and not reduces and not compared:
        return
    told = compared.union(*(w.told for w in step.inputs))
    if not told:
        return
    size = max((math.prod(w.shape) for w in step.inputs if w.told), default=math.inf)
    for wire in step.outputs:
        if math.prod(wire.shape) <= size:
            wire.told |= told - {t for t in told if reduces and _reduced(step) > t[1]}


def _reduced(step: Step) -> int:
    """How many cells a reduction makes one of."""
    return math.prod(step.inputs[0].shape[i] for i in _reduced_axes(step.eqn.params))


def _reduced_axes(params: dict[str, Any]) -> Sequence[int]:
    """The axes of a reduction, or the one of a cumulative sum."""
    return params.get("axes", (params.get("axis"),))


def _told_counted(step: Step) -> frozenset[IndexKey]:
    """The indices of which a reduction counts what is told of more than one token."""
    return frozenset(key for key, choices in step.inputs[0].told if _reduced(step) > choices)


def _compared(graph: Graph, step: Step) -> frozenset[tuple[IndexKey, int]]:
    """Arrays of experts that are compared with the number of one, and how many choices a token has in them."""
    factors = [w.value.factor for w in step.inputs if w.value is not None and w.value.is_plain]
    if step.name not in _TESTING or not any(literal(f) is not None for f in factors):
        return frozenset()
    indices = [index for f in factors for index in _indices_in(graph, f)]
    return frozenset((key_of(Idx(f.node, f.args, graph.bounds[f.node])), _choices_in(graph, f)) for f in indices)


def _indices_in(graph: Graph, factor: Factor) -> list[Factor]:
    """The arrays of experts that a factor is made of."""
    if isinstance(factor.node, Map):
        return [index for op in operands_at(factor) for index in _indices_in(graph, op)]
    return [factor] if isinstance(factor.node, Leaf) and factor.node in graph.bounds else []


def _choices_in(graph: Graph, index: Factor) -> int:
    fact, sizes = distinct_of(graph, index), [v.size for v in factor_vars([index])]
    if fact is not None:
        return fact.along.size if isinstance(fact.along, Var) else 1
    return min(sizes) if len(sizes) > 1 else 1


def is_use_of_capacity(use: LiteralUse, known: Numbers) -> bool:
    """Whether a use may be one of the capacity: a mean over slots, or a number that no other size explains."""
    if use.mean is not None:
        return use.mean == "slots"
    # Another size does not explain a number by which counts are divided as they are: it may be both.
    shared = use.is_direct and use.step.name == "div" and use.number > _SMALL and known.hold(use.number)
    return shared or is_capacity(use.step.name, use.number, known)


def is_capacity(operation: str, number: float, known: Numbers) -> bool:
    """Whether a number that counts or positions meet in an operation may come from the capacity."""
    number = abs(number)
    if operation not in _SCALING | _COMPARING:
        return False
    if number > _SMALL:
        percent = math.log10(number).is_integer() and not known.hold(number)
        return not known.explain(number) and not percent
    if operation not in _SCALING or number == 0:
        return number in known.capacities and not known.name(number)
    if number < _LEAST:
        return False
    inverse = 1 / number
    weight = math.isclose(number, float(f"{number:.2g}"), rel_tol=1e-6)  # as people write it: 0.01, 0.25
    if any(abs(inverse - c) < (1e-6 * c if weight else 1) for c in known.capacities if c > _SMALL):
        return not known.name(round(inverse))
    if weight:
        return False
    exact = math.isclose(inverse, round(inverse), rel_tol=1e-6)
    return exact and known.hold(round(inverse)) and not known.name(round(inverse))


def _indices(value: Value) -> frozenset[IndexKey]:
    """The indices of the places at which a value stands."""
    places = [p for piece in value.pieces for a in piece.axes for p in parts_of(a)]
    return frozenset(key_of(p) for p in places if isinstance(p, Idx))


def _counted(graph: Graph, value: Value, params: dict[str, Any]) -> frozenset[IndexKey]:
    """The indices of which a reduction adds up tokens: what is reduced for each token by itself counts no rows."""
    counted: set[IndexKey] = set()
    for piece in value.pieces:
        left = [a for i, a in enumerate(piece.axes) if i not in _reduced_axes(params)]
        pinned = {v for a in left for v in parts_of(a) if isinstance(v, Var)}
        for place in [p for a in piece.axes for p in parts_of(a) if isinstance(p, Idx)]:
            fact = distinct_of(graph, place.factor)
            choice = {fact.along} if fact is not None else set()
            if not set(term_vars(place)) - choice <= pinned:
                counted.add(key_of(place))
    return frozenset(counted)


def _reduced_cells(graph: Graph, step: Step) -> tuple[float, str]:
    """How many cells are summed into one, and whether slots are among them."""
    axes, summed = step.eqn.params.get("axes", ()), step.inputs[0]
    assert summed.value is not None
    over_slots = any(is_slot(graph, p.axes[i]) for p in summed.value.pieces for i in axes)
    return float(math.prod(summed.shape[i] for i in axes)), "slots" if over_slots else "other"


def number_of(wire: Wire) -> float | None:
    """The number that a wire holds, if it is a literal."""
    return literal_number(wire.value.factor) if wire.value is not None and wire.value.is_plain else None


def literal_number(factor: Factor) -> float | None:
    """The number that a factor is, if it is a literal."""
    value = literal(factor)
    return None if value is None or value.dtype.kind not in "iuf" else float(value)
