"""What all parts of the lowering share: its state, its words, and how it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from moe_xla import ops
from moe_xla.passes.recover.branches import Switch
from moe_xla.passes.recover.grouping import Grouping
from moe_xla.passes.recover.interpret import Recovery
from moe_xla.passes.recover.loads import Numbers, is_capacity, numbers_of_layers
from moe_xla.passes.recover.nodes import (
    Ein,
    Graph,
    Node,
)
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.scopes import Feed, Scope
from moe_xla.passes.recover.terms import (
    Factor,
    Idx,
    IndexKey,
    Term,
    Var,
    factor_vars,
    key_of,
    substitute,
    substitute_factor,
    term_vars,
)
from moe_xla.passes.recover.thresholds import kept_at

# Operations through which a queue position may pass in dropless: they do not ask whether it exceeds a capacity.
POSITION_SAFE = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "neg",
        "div",
        "convert_element_type",
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "cumsum",
        "integer_pow",
        "square",
        "sqrt",
        "dot_general",
        "concatenate",
        "stack",
        "unstack",
        "slice",
        "stop_gradient",
        "copy",
        "reduce_precision",
    ]
)


class Refusal(Exception):
    """A site cannot be rewritten as asked."""

    def __init__(self, sites: frozenset[Any], reason: str, step: Step | Scope | Switch | None):
        super().__init__(reason)
        self.sites = sites
        self.reason = reason
        self.step = step


@dataclasses.dataclass(frozen=True)
class Routing:
    """What decides in which row an assignment sits: its expert, and the conditions without which it has none.

    Both are over the variables 0, 1, …, so that equal routings are equal.  Assignments that fail a condition go to the
    tail: grouped matmuls make their rows zero and sums over an expert's rows leave them out.
    """

    index: Idx
    held: frozenset[Factor]


class Layout(NamedTuple):
    """The rows that a node lives on, and the node's axes that are the variables of their routing."""

    routing: Routing
    axes: tuple[int, ...]


class Emitter:
    """The state of one emission, and what its parts ask of each other."""

    def __init__(self, recovery: Recovery, arrays: dict[Wire, Any], backend: str, within: Scope | None = None):
        self.recovery = recovery
        self.graph = recovery.graph
        self.backend = backend
        self.arrays = arrays
        self.kept: dict[Wire, bool] = {}
        self.nodes: dict[Node, Any] = {}
        # Nodes whose array the program's own equation is just about to give.
        self.pending: set[Node] = set()
        self.rows: dict[Any, Any] = {}
        self.plans: dict[Routing, ops.Plan] = {}
        self.layouts: dict[Any, Layout | None] = {}
        self.groupings: dict[Node, Grouping | None] = {}
        self.stack: list[Step | Scope | Switch] = [] if within is None else [within]
        self.tokens: list[tuple[IndexKey, int]] = []
        self._latest: Any = None
        self._known_numbers: dict[Any, Numbers] | None = None
        self.flops: list[tuple[IndexKey, int]] = []
        self.backends: list[tuple[IndexKey, str]] = []
        self._fed: dict[Scope, list[Feed]] = {}

    def array(self, wire: Wire) -> Any:
        """The array of a wire in the rewritten program."""
        raise NotImplementedError

    def keeps(self, wire: Wire) -> bool:
        """Whether the equation that computes a wire can run as written."""
        raise NotImplementedError

    def layout(self, node: Node) -> Layout | None:
        """The rows a node lives on, when its work is done on rows; None for an ordinary array."""
        raise NotImplementedError

    def unsorted(self, node: Node, layout: Layout) -> Any:
        """A node that lives on rows, as an array over its own axes."""
        raise NotImplementedError

    def ein(self, node: Ein) -> Any:
        """An einsum node as an array over its own axes."""
        raise NotImplementedError

    def refuse(self, indices: Sequence[Idx], reason: str) -> None:
        """Refuses the sites whose queues are counted by the indices, if there are any."""
        session = self.recovery.session
        sites = frozenset().union(*(session.sites_of(key_of(i)) for i in indices))
        if sites:
            raise Refusal(sites, reason, self.asker())

    def is_position_safe(self, name: str, numbers: Iterable[float | None], sites: frozenset[Any]) -> bool:
        """Whether an operation may see the queue positions of `sites` beside the literals `numbers`.

        In dropless none may ask whether a position exceeds the capacity, or measure it by what may be the capacity.
        """
        session = self.recovery.session
        roots = {session.root(s) for s in sites if session.is_dropless(s)}
        if not roots:
            return True
        if self._known_numbers is None:
            self._known_numbers = numbers_of_layers(session)
        known = [self._known_numbers[root] for root in roots if root in self._known_numbers]
        met = any(is_capacity(name, n, layer) for n in numbers if n is not None for layer in known)
        return name in POSITION_SAFE and not met

    def asker(self) -> Step | Scope | Switch | None:
        """The equation or body that is being emitted."""
        return self.stack[-1] if self.stack else None


def routing_by(graph: Graph, index: Idx, conditions: Sequence[Factor]) -> Routing:
    """The routing by an index; conditions that read more than its variables do not count.

    All work of experts that a threshold chooses is on the same rows, whatever else is asked of them.
    """
    names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(term_vars(index))}
    place = substitute(index, names)
    assert isinstance(place, Idx)
    if place.node in graph.kept:
        return Routing(place, frozenset({kept_at(graph, place)}))
    return Routing(
        place, frozenset(substitute_factor(c, names) for c in conditions if set(factor_vars([c])) <= set(names))
    )


def unheld(guards: Sequence[Factor], routing: Routing, points: Sequence[Var]) -> list[Factor]:
    """The guards that rows outside the tail may fail; `points` are the routing's variables here."""
    names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(points)}
    return [g for g in guards if substitute_factor(g, names) not in routing.held]
