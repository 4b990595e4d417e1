"""Lists of the tokens of each expert, as `jnp.nonzero(mask, size=n)` makes them, and the masks of their used entries.

Entry c of a list is the token whose position in the expert's queue is c.  `jnp.nonzero` finds it as the number of
tokens up to which at most c were counted: after the last one of the queue that is the number of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax.extend.core.primitives as prims

from moe_xla.passes.recover.facts import AT_LEAST, BELOW, assignments_of, is_count, rank_of
from moe_xla.passes.recover.nodes import Ein, Graph, Iota, Rank, is_map, operands_at, represents_exactly
from moe_xla.passes.recover.queues import names_in_count
from moe_xla.passes.recover.terms import Factor, Idx, Substitution, Term, Var, flatten, fresh, substitute_factor
from moe_xla.passes.recover.values import Piece, Value, has_unique_cells, of_literal, unconverted


def token_lists(graph: Graph, value: Value, axis: int) -> Value | None:
    """The running sum along `axis` of how many tokens have each count: the token at each position of a queue."""
    if value.is_plain or value.background is not None or len(value.pieces) != 1:
        return None
    (piece,) = value.pieces
    counted = piece.axes[axis]
    if piece.factors or piece.guards or piece.equalities or piece.coef != 1 or not isinstance(counted, Idx):
        return None
    fact = rank_of(graph, counted.factor)
    others = [a for i, a in enumerate(piece.axes) if i != axis]
    if fact is None or fact.others or fact.constant != 0:
        return None
    tokens = math.prod(v.size for v in fact.rank.order)
    read = {*fact.batch, *fact.order, fact.expert}
    if not all(isinstance(t, Var) for t in read) or len(read) != len(fact.batch) + len(fact.order) + 1:
        return None
    if set(others) != {*fact.batch, fact.expert} or len(others) != len(fact.batch) + 1:
        return None
    if not represents_exactly(value.dtype, tokens):
        return None
    entry, names = _entry(graph, fact.rank, counted.size)
    here = {v: names[r] for v, r in zip(fact.batch, fact.rank.batch, strict=True)}
    axes = [entry[1] if i == axis else entry[0] if a == fact.expert else here[a] for i, a in enumerate(piece.axes)]
    order = flatten([names[v] for v in fact.rank.order])
    number = Factor(graph.iota(tokens, value.dtype), (order,))
    listed = Piece(tuple(axes), (number,), guards=entry[2])
    result = Value(value.shape, value.dtype, (listed,), of_literal(graph, tokens, value.shape, value.dtype))
    return result if has_unique_cells(graph, result) else None


def _entry(graph: Graph, rank: Rank, size: int) -> tuple[tuple[Idx, Idx, tuple[Factor, ...]], dict[Var, Term]]:
    """(expert, position, conditions) of an assignment in a queue, and the new names of the queue's variables."""
    names: dict[Var, Term] = {v: fresh(v.size) for v in (*rank.batch, *rank.order, *rank.many)}
    whole = Piece((rank.index,), guards=rank.guards).substitute(names)
    (expert,) = whole.axes
    assert isinstance(expert, Idx)
    places = tuple(names[v] for v in (*rank.batch, *rank.order))
    own = Factor(rank, (*places, expert))
    position = graph.map(prims.sub_p, {}, [own, graph.lit(1, rank.dtype)], rank.dtype)
    return (expert, Idx(position.node, position.args, size), whole.guards), names


def used_entries(graph: Graph, value: Value) -> tuple[Value, bool] | None:
    """(mask of the used entries, whether `value` is that mask or its opposite) for `arange(n) < count`, or None."""
    if not value.is_plain or not is_map(value.factor, *BELOW, *AT_LEAST):
        return None
    name: str = value.factor.node.name  # type: ignore[attr-defined]
    compared = operands_at(value.factor)
    place, count = (unconverted(compared[i]) for i in (BELOW | AT_LEAST)[name])
    if not isinstance(place.node, Iota) or not isinstance(count.node, Ein) or not is_count(count.node):
        return None
    axes, read = value.pieces[0].axes, (*place.args, *count.args)
    if not all(isinstance(a, Var) and a in axes for a in read) or len(set(read)) != len(read):
        return None
    found = next(((r, n) for r in graph.queues if (n := _counted_as(r, count.node)) is not None), None)
    if found is None or not _are_exact(compared, max(place.args[0].size, assignments_of(found[0]))):
        return None
    return _mask_of_entries(graph, *found, value, place, count), name in BELOW


def _are_exact(factors: Iterable[Factor], most: int) -> bool:
    """Whether whole numbers up to `most` have kept their values through all conversions."""
    for factor in factors:
        if not represents_exactly(factor.node.dtype, most):
            return False
        if is_map(factor, "convert_element_type") and not _are_exact(operands_at(factor), most):
            return False
    return True


def _counted_as(rank: Rank, count: Ein) -> Substitution | None:
    """The variables of a queue by those of a count of exactly what it queues, group by group; None of another count."""
    counted = [t for t in count.out if isinstance(t, Idx)]
    if len(counted) != 1 or counted[0].node is not rank.index.node:
        return None
    (index,) = counted
    pairs = zip(rank.index.args, index.args, strict=True)
    groups = {mine: theirs for mine, theirs in pairs if isinstance(mine, Var) and mine in rank.batch}
    names = names_in_count(rank, count, index, groups)
    if names is None or len(set(groups.values())) != len(rank.batch) or {*groups.values(), index} != set(count.out):
        return None
    return names if {substitute_factor(g, names) for g in rank.guards} == set(count.guards) else None


def _mask_of_entries(
    graph: Graph, rank: Rank, counted: Substitution, value: Value, place: Factor, count: Factor
) -> Value:
    """Ones at the entries of a queue, `counted` by a count, in a mask that reads `place` and `count` at its axes."""
    (expert, position, guards), names = _entry(graph, rank, place.args[0].size)
    assert isinstance(count.node, Ein)
    own = {theirs: names[mine] for mine, theirs in counted.items()}
    meant: dict[Term, Term] = {place.args[0]: position}
    for term, arg in zip(count.node.out, count.args, strict=True):
        meant[arg] = own.get(term, expert)
    axes = tuple(meant.get(a, a) for a in value.pieces[0].axes)
    return Value(value.shape, value.dtype, (Piece(axes, guards=guards),))
