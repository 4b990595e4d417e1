"""What a backward body reads of every expert's work, read where the forward body did it.

In: a factor over arrays that a forward scan stacks, or a forward branch hands on, for the body that is being entered.
Out: the same on the chosen experts' rows, which the forward body then hands on instead; or None.
"""

from __future__ import annotations

from moe_xla.passes.recover.branches import BranchEntrance, Switch
from moe_xla.passes.recover.nodes import Leaf, Map, Node, operands_at
from moe_xla.passes.recover.scopes import Entrance, Exit, Scope
from moe_xla.passes.recover.terms import Factor, Term, Var, fresh, with_indices
from moe_xla.passes.recover.values import NoRule, read


class Passage:
    """Reads in a forward scan or branch what it hands to the backward one that is entered."""

    def __init__(self, entrance: Entrance):
        self._entrance = entrance
        self._exit: Exit | None = None

    def read(self, factor: Factor) -> Factor | None:
        """The factor as an array that the forward body hands on instead: the work of chosen experts on their rows."""
        try:
            there = self._factor(factor)
        except NoRule:
            return None
        exit_ = self._forward()
        scope = exit_.scope
        reader = scope.recovery.graph.reader
        rows = there if reader is None else reader(there)
        if isinstance(rows.node, Leaf) or not all(isinstance(a, Var) for a in rows.args):
            return None
        outer = exit_.leaf(rows.node, fresh(scope.eqn.params["length"]) if scope.is_scan else None)
        return Factor(self._entrance.leaf(outer, 0 if scope.is_scan else None), rows.args)

    def _factor(self, factor: Factor) -> Factor:
        node = factor.node
        if isinstance(node, Map):
            operands = [self._factor(op) for op in operands_at(factor)]
            graph = self._forward().scope.recovery.graph
            return graph.map(node.prim, node.params, operands, node.dtype)
        return self._inside(node, tuple(with_indices(a, self._factor) for a in factor.args))

    def _inside(self, node: Node, args: tuple[Term, ...]) -> Factor:
        """A node, read at `args`, in the forward body."""
        outer, axis = self._entrance.source_of(node) or (None, None)
        step = outer.wire.step if isinstance(outer, Leaf) else None
        exit_, there = None, None
        if isinstance(step, Scope) and step.is_scan and axis == 0:
            exit_ = step.exit
        elif isinstance(step, Switch) and isinstance(self._entrance, BranchEntrance):
            exit_, there = self._entrance.forward(step, outer)  # type: ignore[arg-type]
        if exit_ is None or outer is None:
            raise NoRule("an array that no forward body hands on")
        self._exit = self._exit or exit_
        inside = exit_.inside(outer) if exit_ is self._exit else None
        if there is not None and exit_ is self._exit:
            return read(self._forward().scope.recovery.graph, there, args)
        if inside is None:
            raise NoRule("arrays of several bodies")
        return Factor(inside, args)

    def _forward(self) -> Exit:
        if self._exit is None:
            raise NoRule("an array that no forward body hands on")
        return self._exit
