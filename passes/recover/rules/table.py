"""The table of rules, and what a rule is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from moe_xla.passes.recover.facts import rank_of
from moe_xla.passes.recover.nodes import Graph
from moe_xla.passes.recover.terms import Factor, Flat, Idx, Term
from moe_xla.passes.recover.values import Value

Rule = Callable[..., Value | list[Value]]
TABLE: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives by name."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in TABLE, name
            TABLE[name] = function
        return function

    return register


@dataclasses.dataclass
class Context:
    """What a rule may ask: the graph, and which sites are dropless (their slot axis has no bound)."""

    graph: Graph
    is_dropless: Callable[[Any], bool]
    site_of: Callable[[Any, Idx], Any]
    on_rank: Callable[[Graph, Any, Any], None] = lambda graph, rank, site: None

    def count(
        self,
        index: Idx,
        batch: Sequence[Any],
        order: Sequence[Any],
        many: Sequence[Any],
        guards: Any,
        dtype: Any,
        eqn: Any,
    ) -> Factor:
        """A queue count that an equation of the program makes."""
        site = self.site_of(eqn, index)
        factor = self.graph.rank(index, batch, order, many, guards, dtype, site)
        self.on_rank(self.graph, factor.node, site)
        return factor

    def is_unbounded(self, term: Term) -> bool:
        """Whether a place stands on a slot axis without a bound."""
        if isinstance(term, Flat):
            return any(self.is_unbounded(p) for p in term.parts)
        if not isinstance(term, Idx):
            return False
        fact = rank_of(self.graph, term.factor)
        return fact is not None and self.is_dropless(fact.rank.site)
