"""Rules where queue counts come from: `cumsum` of a one-hot mask, and the expert that a mask names."""

from __future__ import annotations

from typing import Any

import jax.extend.core.primitives as prims

from moe_xla.passes.recover.facts import is_count, sorted_range, sorted_rank
from moe_xla.passes.recover.nodes import Ein, Graph, Node, represents_exactly
from moe_xla.passes.recover.rules.structure import read_along
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import Factor, Idx, Var, fresh, has_idx, parts_of, term_vars, vars_of
from moe_xla.passes.recover.values import NoRule, Piece, Value, in_range, masks_to_guards, plain, unconverted


@rule("cumsum")
def cumsum(context: Context, eqn: Any, value: Value) -> Value:
    if eqn.params["reverse"]:
        raise NoRule("a cumulative sum from the end")
    if value.is_plain and is_count(value.factor.node) and value.factor.args == value.pieces[0].axes:
        node, axis = value.factor.node, eqn.params["axis"]
        if isinstance(node, Ein) and isinstance(node.out[axis], Idx):
            return plain(value.shape, value.factor.args, Factor(context.graph.ends(node, axis), value.factor.args))
    return queue_counts(context, value, eqn.params["axis"], site=eqn)


def queue_counts(context: Context, value: Value, axis: int, site: Any) -> Value:
    """The inclusive count along `axis` of a one-hot mask, as a rank node."""
    if value.is_plain or len(value.pieces) != 1 or value.background is not None:
        raise NoRule("a cumulative sum of something else than one mask of one-hot rows")
    piece = masks_to_guards(context.graph, value.pieces[0])
    if piece is None:
        raise NoRule("a cumulative sum of an empty mask")
    experts = [i for i, a in enumerate(piece.axes) if has_idx(a)]
    if len(experts) != 1 or not isinstance(piece.axes[experts[0]], Idx) or axis in experts:
        raise NoRule("a cumulative sum of a mask without one expert axis")
    if piece.factors or piece.coef != 1 or piece.equalities:
        raise NoRule("a cumulative sum of weighted rows")
    if not all(isinstance(p, Var) for a in piece.axes if not has_idx(a) for p in parts_of(a)):
        raise NoRule("a cumulative sum of part of a mask")
    index = piece.axes[experts[0]]
    assert isinstance(index, Idx)
    order = tuple(term_vars(piece.axes[axis]))
    batch = tuple(v for i, a in enumerate(piece.axes) if i != axis and not has_idx(a) for v in term_vars(a))
    many = tuple(v for v in piece.variables if v not in order and v not in batch)
    used = set(vars_of([index])) | {v for g in piece.guards for v in vars_of(g.args)}
    if not order or len({*order, *batch}) != len(order) + len(batch) or not set(many) <= used:
        raise NoRule("a cumulative sum along an axis that is not the queue's")
    counts = context.count(index, batch, order, many, piece.guards, value.dtype, site)
    expert = fresh(index.size)
    axes = tuple(expert if i == experts[0] else a for i, a in enumerate(piece.axes))
    return plain(value.shape, axes, Factor(counts.node, (*counts.args, expert)))


def sorted_position(context: Context, eqn: Any, value: Value) -> Value | None:
    """A position in an order by expert, less where the expert's assignments begin, as the queue count that it is."""
    graph = context.graph
    found = sorted_rank(graph, value.factor) if value.is_plain else None
    if found is None or not represents_exactly(value.dtype, value.shape[-1]):
        return None
    count, expert, place, constant = found
    if not any(_is_sorted(graph, order, count, expert, place) for order in graph.orders):
        return None
    counts = context.count(expert, (), (place,), (), (), value.dtype, eqn)
    rank = Factor(counts.node, (place, expert))
    shift = graph.lit(constant - 1, value.dtype)
    position = graph.map(prims.add_p, {}, [rank, shift], value.dtype)
    return plain(value.shape, value.pieces[0].axes, position)


def sorted_mask(context: Context, value: Value) -> Value | None:
    """The mask of each expert's places in an order by expert, as ones at the expert of each place."""
    graph = context.graph
    found = sorted_range(graph, value.factor) if value.is_plain else None
    if found is None:
        return None
    count, expert, place = found
    axes = value.pieces[0].axes
    for order in graph.orders:
        there = _sorted_expert(graph, order, count, place)
        if there is not None and set(axes) == {expert, place}:
            chosen = Idx(there.node, there.args, expert.size)
            return Value(value.shape, value.dtype, (Piece(tuple(chosen if a == expert else a for a in axes)),))
    return None


def _is_sorted(graph: Graph, order: Node, count: Ein, expert: Idx, place: Var) -> bool:
    """Whether `expert` at `place` is what is counted by `count`, all of it, in the order that sorts it."""
    there = _sorted_expert(graph, order, count, place)
    return there is not None and there == unconverted(expert.factor)


def _sorted_expert(graph: Graph, order: Node, count: Ein, place: Var) -> Factor | None:
    """The expert at a place of an order, if the order sorts exactly what `count` counts."""
    key, axis = graph.orders[order]
    counted = [t for t in count.out if isinstance(t, Idx)]
    if order.shape != (place.size,) or count.guards or len(counted) != 1 or len(count.out) != 1:
        return None
    every, whole = unconverted(counted[0].factor), unconverted(key.factor)
    if every.node is not whole.node or set(count.binders) != set(every.args) or len(set(every.args)) != len(every.args):
        return None
    if set(whole.args) != set(term_vars(key.pieces[0].axes[axis])) or len(set(whole.args)) != len(whole.args):
        return None
    return unconverted(read_along(graph, key.pieces[0], axis, Idx(order, (place,), place.size)).factors[0])


@rule("argmax")
def argmax(context: Context, eqn: Any, value: Value) -> Value:
    """The expert of each row of a one-hot mask; 0 where a row is empty."""
    graph, (axis,) = context.graph, eqn.params["axes"]
    if value.is_plain or len(value.pieces) != 1 or value.background is not None:
        raise NoRule("argmax of something else than one mask of one-hot rows")
    piece = masks_to_guards(graph, value.pieces[0])
    if piece is None or piece.factors or piece.equalities or piece.hidden or piece.coef <= 0:
        raise NoRule("argmax of weighted rows")
    index, rest = piece.axes[axis], [a for i, a in enumerate(piece.axes) if i != axis]
    places = [p for a in rest for p in parts_of(a)]
    if not isinstance(index, Idx) or not all(isinstance(p, Var) for p in places) or len(set(places)) != len(places):
        raise NoRule("argmax along an axis that is not the expert axis")
    if not set(piece.variables) <= set(places):
        raise NoRule("argmax of a mask with several experts in a row")
    dtype = eqn.outvars[0].aval.dtype
    expert, conditions = graph.convert(index.factor, dtype), [*in_range(graph, index), *piece.guards]
    if conditions:
        expert = graph.select(graph.logical_and(conditions), expert, graph.lit(0, dtype))
    graph.bounds[expert.node] = index.size
    return plain(eqn.outvars[0].aval.shape, rest, expert)
