"""Queues behind queues: whether the positions of one begin where those of another end.

A position is an own rank plus a *base*: the counts of earlier queues and constants.  Where the base depends on the
group and the expert only, a test against a literal keeps the first so many of each queue, and their positions are an
interval that begins at the base and is as long as what was kept.  A queue whose base holds the same counts and that
length too therefore begins behind it.

In: a graph and rank facts.  Out: proofs, or False where nothing is proved.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from moe_xla.passes.recover.facts import RankFact, is_count, rank_of, same_term
from moe_xla.passes.recover.nodes import Ein, Graph, Map, Node, Rank, literal, operands_at, represents_exactly
from moe_xla.passes.recover.terms import (
    UNIT,
    Const,
    Factor,
    Idx,
    Substitution,
    Term,
    Var,
    factor_vars,
    substitute,
    substitute_factor,
    vars_of,
)

# Where a count is read: a fixed place, one of the axes of the position's groups, or (-1) the position's expert.
Place: TypeAlias = "Const | int"
Base: TypeAlias = "dict[tuple[Node, tuple[Place, ...]], tuple[Factor, float]]"
_EXPERT = -1


def base_of(graph: Graph, fact: RankFact) -> Base | None:
    """The counts that a position adds to its rank, by where they are read; None where they are not the same for all
    assignments of a group that queue for one expert."""
    base: Base = {}
    for atom, coefficient in fact.others:
        places = [_place(graph, fact, t) for t in atom.args]
        known = tuple(p for p in places if p is not None)
        if len(known) != len(places) or (atom.node, known) in base:
            return None
        base[atom.node, known] = atom, coefficient
    return base


def _place(graph: Graph, fact: RankFact, term: Term) -> Place | None:
    if any(same_term(graph, term, t) for t in (fact.expert, fact.own_index)):
        return _EXPERT
    group = next((i for i, t in enumerate(fact.batch) if same_term(graph, term, t)), None)
    return group if group is not None else term if isinstance(term, Const) else None


def is_same_base(a: Base, b: Base) -> bool:
    """Whether two positions in the queues of one expert and group begin at the same place, their constants aside."""
    return {k: c for k, (_, c) in a.items()} == {k: c for k, (_, c) in b.items()}


def is_behind(graph: Graph, high: RankFact, low: RankFact, held: frozenset[Factor]) -> bool:
    """Whether a position is beyond all those of another queue of its group and expert that `held` lets pass."""
    below, above = base_of(graph, low), base_of(graph, high)
    if below is None or above is None or high.constant < low.constant:
        return False
    shared = all(k in above and above[k][1] == c for k, (_, c) in below.items())
    more = [above[k] for k in above if k not in below]
    if not shared or not all(c > 0 and is_count(atom.node) for atom, c in more):
        return False
    return any(_counts_kept(graph, atom, high, low, held) for atom, _ in more)


def _counts_kept(graph: Graph, count: Factor, reader: RankFact, low: RankFact, held: frozenset[Factor]) -> bool:
    """Whether a count that `reader` adds is of all assignments that `low` queues, or of all that pass a capacity test.

    Ranks of those that pass are 1, 2, … up to the count, so the test must hold where `low` is read.
    """
    node, rank = count.node, low.rank
    assert isinstance(node, Ein)
    names = _names_in_count(graph, count, reader, rank)
    if names is None:
        return False
    if not represents_exactly(node.dtype, math.prod(v.size for v in node.binders)):
        return False
    required = {substitute_factor(g, names) for g in rank.guards}
    if not required <= set(node.guards):
        return False
    back: dict[Var, Term] = {new: old for old, new in names.items() if isinstance(new, Var)}
    here = _variables_at(low)
    for extra in set(node.guards) - required:
        test = substitute_factor(extra, back)
        if not set(factor_vars([extra])) <= set(back) or not is_prefix_test(graph, test, rank):
            return False
        if not set(factor_vars([test])) <= set(here) or substitute_factor(test, here) not in held:
            return False
    return True


def _variables_at(fact: RankFact) -> dict[Var, Term]:
    """What the variables of a rank are where it is read; several choices at once are those of the expert there."""
    rank, expert = fact.rank, fact.expert
    here: dict[Var, Term] = dict(zip((*rank.batch, *rank.order), (*fact.batch, *fact.order), strict=True))
    if isinstance(expert, Idx) and expert.node is rank.index.node:
        for mine, theirs in zip(rank.index.args, expert.args, strict=True):
            if isinstance(mine, Var):
                here.setdefault(mine, theirs)
    return here


def _names_in_count(graph: Graph, count: Factor, reader: RankFact, rank: Rank) -> Substitution | None:
    """The variables of a rank by those of a count that is read in the reader's group and at its expert.

    None unless it counts, there, every assignment of the rank's index once, guards aside.
    """
    node = count.node
    assert isinstance(node, Ein)
    experts = [(t, a) for t, a in zip(node.out, count.args, strict=True) if isinstance(t, Idx)]
    plain = [(t, a) for t, a in zip(node.out, count.args, strict=True) if isinstance(t, Var)]
    if len(experts) != 1 or len(plain) + 1 + node.out.count(UNIT) != len(node.out):
        return None
    ((index, read_at),) = experts
    if index.node is not rank.index.node or _place(graph, reader, read_at) != _EXPERT:
        return None
    if len(reader.batch) != len(rank.batch):
        return None
    groups: dict[Var, Term] = {}
    for mine, group in zip(rank.batch, reader.batch, strict=True):
        theirs = next((t for t, a in plain if same_term(graph, a, group)), None)
        if theirs is not None:
            groups[mine] = theirs
    return names_in_count(rank, node, index, groups)


def names_in_count(rank: Rank, node: Ein, index: Idx, groups: Substitution) -> Substitution | None:
    """The variables of a rank by those of a count at `index`, whose `groups` are known.

    None unless it counts, there, every assignment of the rank's index once, guards aside.
    """
    names = dict(groups)
    for mine, theirs in zip(rank.index.args, index.args, strict=True):
        if isinstance(mine, Var) and mine not in rank.batch:
            names[mine] = theirs
    inside = [names.get(v) for v in (*rank.order, *rank.many)]
    used = {*vars_of([rank.index]), *factor_vars(rank.guards)}
    is_whole = len(inside) == len(node.binders) and set(inside) == set(node.binders)
    if not is_whole or not used <= set(names) or substitute(rank.index, names) != index:
        return None
    return names


def is_prefix_test(graph: Graph, test: Factor, rank: Rank) -> bool:
    """Whether `test`, over the rank's variables, is true exactly for the first so many of each queue: own position
    below a literal, where positions begin at the same place for a whole queue."""
    if not isinstance(test.node, Map) or test.node.name not in ("lt", "le", "gt", "ge"):
        return False
    left, right = operands_at(test)
    if test.node.name in ("gt", "ge"):
        left, right = right, left
    fact = rank_of(graph, left) if literal(right) is not None else None
    if fact is None or fact.rank is not rank or not fact.is_own(graph):
        return False
    return (fact.batch, fact.order) == (rank.batch, rank.order) and base_of(graph, fact) is not None
