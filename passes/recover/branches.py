"""The branches of `lax.cond` and `lax.switch`, each a scope of its own.

What a branch leaves structured has the condition outside that the branch was taken.  The branch of a backward cond that
is taken with it sees it without, and the arrays that only it reads are no results of the forward cond but exports of
its branch.

In: a cond equation and its input wires.  Out: a `Switch`, and the values of its outputs outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core.primitives as prims

from moe_xla.passes.recover.facts import depends_on_rank
from moe_xla.passes.recover.nodes import (
    Graph,
    Leaf,
    Lit,
    Map,
    Node,
    is_extended,
    is_floating,
    is_map,
    operands_at,
)
from moe_xla.passes.recover.program import Wire
from moe_xla.passes.recover.scopes import Entrance, Exit, Scope
from moe_xla.passes.recover.terms import Factor, has_idx
from moe_xla.passes.recover.values import NoRule, Piece, Value, literal_of, of_node

CONDS = frozenset({"cond"})
# What jax hands on from a branch that was not taken.
_VOIDS = frozenset({"empty2"})


class Result(NamedTuple):
    """An output of a cond that is an ordinary array: in each branch, and outside."""

    inner: tuple[Wire, ...]
    outer: Wire


@dataclasses.dataclass(eq=False)
class Switch:
    """A cond: the branch that `index` names is taken.

    What any branch may yield are `results`; the exports of a branch are arrays that only the same branch of another
    cond reads, and zeros where another branch was taken.  `given` and `returned` are all wires outside, in the order of
    the equation's.
    """

    eqn: Any
    index: Wire
    branches: list[Scope] = dataclasses.field(default_factory=list)
    results: list[Result] = dataclasses.field(default_factory=list)
    required: dict[Result, None] = dataclasses.field(default_factory=dict)
    source: Any = None
    refusal: str | None = None
    exit: SwitchExit | None = None
    given: tuple[Wire, ...] = ()
    returned: tuple[Wire, ...] = ()

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)

    @property
    def taken(self) -> Factor:
        """What names the branch that is taken, as a factor outside."""
        assert self.index.value is not None
        return self.index.value.factor

    @property
    def inputs(self) -> tuple[Wire, ...]:
        return (self.index,)

    @property
    def outputs(self) -> tuple[Wire, ...]:
        return (*(r.outer for r in self.results), *(e.outer for b in self.branches for e in b.exports))


class BranchEntrance(Entrance):
    """Brings outer values into a branch, in which it is known which branch was taken."""

    def __init__(self, scope: Scope, outer: Graph, index: Factor, branch: int):
        super().__init__(scope, outer)
        self._index = index
        self._branch = branch

    def _value(self, value: Value, axis: int | None, shape: Sequence[int]) -> Value:
        return super()._value(self._within(value), axis, shape)

    def _within(self, value: Value) -> Value:
        """A value as it is in this branch."""
        pieces = tuple(p for p in map(self._taken, value.pieces) if p is not None)
        background = None if value.background is None else self._within(value.background)
        if background is not None and not background.pieces:
            background = None
        return Value(value.shape, value.dtype, pieces, background)

    def _taken(self, piece: Piece) -> Piece | None:
        """A piece without what it asks of the branch; None where it is that of another branch."""
        asked = {g: branch for g in piece.guards if (branch := self._asked(g)) is not None}
        if any(branch != self._branch for branch in asked.values()):
            return None
        return piece.replace(guards=tuple(g for g in piece.guards if g not in asked))

    def _asked(self, guard: Factor) -> int | None:
        """The branch that a guard asks for."""
        if not is_map(guard, "eq"):
            return None
        index, branch = operands_at(guard)
        return int(branch.node.value) if index == self._index and isinstance(branch.node, Lit) else None

    def forward(self, switch: Switch, outer: Node) -> tuple[Exit | None, Value | None]:
        """The exit of the same branch of a cond that is taken with this one, and what `outer` is there, if a result."""
        if switch.taken != self._index or switch.exit is None:
            return None, None
        result = next((r for r in switch.results if isinstance(outer, Leaf) and r.outer is outer.wire), None)
        inner = None if result is None else result.inner[self._branch].value
        return switch.exit.of_branch(self._branch), inner if inner is not None and inner.is_plain else None


class SwitchExit:
    """Takes the outputs of branches out of a cond."""

    def __init__(self, switch: Switch, outer: Any):
        self.switch = switch
        self._exits = [Exit(scope, outer) for scope in switch.branches]
        self._outer = outer

    def of_branch(self, branch: int) -> Exit:
        """The exit of one branch."""
        return self._exits[branch]

    def value(self, inner: Sequence[Wire], wire: Wire) -> Value:
        """The value outside of what the branches hold in `inner`; `wire` is the outer wire."""
        try:
            graphs = [scope.recovery.graph for scope in self.switch.branches]
            if _is_residual(inner) or any(map(_stands_by_definition, graphs, inner)):
                return self._joined([w.value for w in inner], wire)
        except NoRule:
            pass
        self.switch.results.append(Result(tuple(inner), wire))
        return of_node(self._outer.graph.leaf(wire, wire.shape, wire.dtype))

    def _joined(self, values: Sequence[Value | None], wire: Wire) -> Value:
        """One value of all branches, each under the condition that it was taken."""
        pieces, backgrounds = [], []
        for branch, inner in enumerate(values):
            assert inner is not None
            if _is_void(inner) or literal_of(inner) == 0:
                continue
            value = self._exits[branch].defined(inner, wire.shape)
            pieces += self._conditional(branch, value)
            if value.background is not None:
                if value.background.background is not None:
                    raise NoRule("a background that has one itself")
                backgrounds += self._conditional(branch, value.background)
        background = Value(wire.shape, wire.dtype, tuple(backgrounds)) if backgrounds else None
        return Value(wire.shape, wire.dtype, tuple(pieces), background)

    def _conditional(self, branch: int, value: Value) -> list[Piece]:
        taken = self._taken(branch)
        return [p.replace(guards=(*p.guards, taken)) for p in value.pieces]

    def _taken(self, branch: int) -> Factor:
        return self._outer.graph.compare(prims.eq_p, self.switch.taken, branch)


def _is_residual(inner: Sequence[Wire]) -> bool:
    """Whether one branch alone has an array, for the same branch of a backward cond."""
    return sum(not _is_void(wire.value) for wire in inner) == 1


def _is_void(value: Value | None) -> bool:
    if value is None or not value.is_plain or value.factor.args:
        return False
    node = value.factor.node
    return isinstance(node, Leaf) and node.wire.step is not None and node.wire.step.name in _VOIDS


def _stands_by_definition(graph: Graph, wire: Wire) -> bool:
    """Whether an array is made of places that depend on data, which need not be stored to be known again."""
    value = wire.value
    if value is None or wire.layers or not value.is_plain:
        return value is not None
    node = value.factor.node
    if any(has_idx(a) for a in value.factor.args):
        return True
    if isinstance(node, Map) and not is_extended(node.dtype) and not is_floating(node.dtype):
        return True
    return depends_on_rank(graph, node)
