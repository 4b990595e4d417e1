"""Rules where queue counts come from: `cumsum` of a one-hot mask, and the expert that a mask names."""

from __future__ import annotations

import math
from typing import Any

import jax.extend.core.primitives as prims

from moe_xla.passes.recover.facts import Start, is_count, sorted_range, sorted_rank
from moe_xla.passes.recover.nodes import Ein, Graph, Node, represents_exactly
from moe_xla.passes.recover.rules.lists import token_lists
from moe_xla.passes.recover.rules.structure import read_along
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import Factor, Idx, Term, Var, fresh, has_idx, parts_of, term_vars, vars_of
from moe_xla.passes.recover.values import NoRule, Piece, Value, in_range, masks_to_guards, plain, unconverted


class WeightedRows(NoRule):
    """One-hot rows are counted times numbers."""

    def __init__(self, index: Term, rows: int):
        super().__init__("a cumulative sum of weighted rows: their weights may be other numbers than 0 and 1")
        self.index = index
        self.rows = rows


@rule("cumsum")
def cumsum(context: Context, eqn: Any, value: Value) -> Value:
    if eqn.params["reverse"]:
        raise NoRule("a cumulative sum from the end")
    if value.is_plain and is_count(value.factor.node) and value.factor.args == value.pieces[0].axes:
        node, axis = value.factor.node, eqn.params["axis"]
        if isinstance(node, Ein) and isinstance(node.out[axis], Idx):
            return plain(value.shape, value.factor.args, Factor(context.graph.ends(node, axis), value.factor.args))
    listed = token_lists(context.graph, value, eqn.params["axis"])
    return listed or queue_counts(context, value, eqn.params["axis"], site=eqn)


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
        raise WeightedRows(piece.axes[experts[0]], math.prod(v.size for v in piece.variables))
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
    start, place, constant = found
    assert isinstance(start.expert, Idx)
    if not any(
        _sorted_expert(graph, order, start, place) == unconverted(start.expert.factor) for order in graph.orders
    ):
        return None
    counts = context.count(start.expert, tuple(start.batch.values()), (place,), (), (), value.dtype, eqn)
    rank = Factor(counts.node, (*counts.args, start.expert))
    shift = graph.lit(constant - 1, value.dtype)
    position = graph.map(prims.add_p, {}, [rank, shift], value.dtype)
    return plain(value.shape, value.pieces[0].axes, position)


def sorted_mask(context: Context, value: Value) -> Value | None:
    """The mask of each expert's places in an order by expert, as ones at the expert of each place."""
    graph = context.graph
    found = sorted_range(graph, value.factor) if value.is_plain else None
    if found is None:
        return None
    start, place = found
    axes, expert = value.pieces[0].axes, start.expert
    for order in graph.orders:
        there = _sorted_expert(graph, order, start, place)
        if there is not None and set(axes) == {expert, place, *start.batch.values()}:
            chosen = Idx(there.node, there.args, expert.size)
            return Value(value.shape, value.dtype, (Piece(tuple(chosen if a == expert else a for a in axes)),))
    return None


def _sorted_expert(graph: Graph, order: Node, start: Start, place: Var) -> Factor | None:
    """The expert at a place of an order, if the order sorts exactly what is counted, batch by batch."""
    key, axis = graph.orders[order]
    count, batch = start.node, start.batch
    counted = count.out[start.axis]
    if count.guards or order.shape[axis] != place.size or not isinstance(counted, Idx):
        return None
    if not all(isinstance(v, Var) and isinstance(a, Var) and a != place for v, a in batch.items()):
        return None
    axes = _axes_of_batch(key.pieces[0], axis, counted, count)
    if axes is None:
        axes = _axes_in_order(graph, order, counted, start)
    return None if axes is None else key_in_order(graph, order, place, {i: batch[v] for i, v in axes.items()})


def key_in_order(graph: Graph, order: Node, place: Var, batch: dict[int, Term]) -> Factor:
    """What an order sorts, at a place of the order; `batch` are the places on the other axes."""
    key, axis = graph.orders[order]
    piece = key.pieces[0]
    places = tuple(place if i == axis else batch[i] for i in range(len(order.shape)))
    sorted_piece = read_along(graph, piece, axis, Idx(order, places, place.size))
    names = {a: batch[i] for i, a in enumerate(piece.axes) if i != axis}
    return unconverted(sorted_piece.substitute(names).factors[0])


def _axes_in_order(graph: Graph, order: Node, counted: Idx, start: Start) -> dict[int, Term] | None:
    """The same as `_axes_of_batch` where what is counted is read in the order already: each place of it once."""
    key, axis = graph.orders[order]
    others = [i for i in range(len(order.shape)) if i != axis]
    if len(start.node.binders) != 1 or len(others) != len(start.batch):
        return None
    axes: dict[int, Term] = dict(zip(others, start.batch, strict=True))
    (place,) = start.node.binders
    if not all(isinstance(key.pieces[0].axes[i], Var) for i in others) or place.size != order.shape[axis]:
        return None
    return axes if key_in_order(graph, order, place, axes) == unconverted(counted.factor) else None


def _axes_of_batch(key: Piece, sorted_axis: int, counted: Idx, count: Ein) -> dict[int, Term] | None:
    """Which variable of a count each axis of a sorted key but the sorted one is; None unless all is counted once."""
    every, whole = unconverted(counted.factor), unconverted(key.factors[0])
    if (
        every.node is not whole.node
        or len(set(every.args)) != len(every.args)
        or len(set(whole.args)) != len(whole.args)
    ):
        return None
    inner = set(term_vars(key.axes[sorted_axis]))
    pairs = list(zip(whole.args, every.args, strict=True))
    if {w for w, e in pairs if e in count.binders} != inner or len(count.binders) != len(inner):
        return None
    meant = {w: e for w, e in pairs if w not in inner}
    outer = {i: meant.pop(a) for i, a in enumerate(key.axes) if i != sorted_axis and a in meant}
    is_whole = not meant and len(outer) == len(key.axes) - 1
    return outer if is_whole and all(v in count.out for v in outer.values()) else None


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
