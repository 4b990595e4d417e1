"""Rules that multiply and sum: products of values, `reduce_sum`, `reduce_max` and its kin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core.primitives as prims
import numpy as np
from jax import numpy as jnp

from moe_xla.passes.recover.facts import conjuncts, lower_bound, rank_of
from moe_xla.passes.recover.nodes import is_boolean, is_floating, literal
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import (
    UNIT,
    Const,
    Factor,
    Flat,
    Idx,
    Term,
    Var,
    fresh_axis,
    has_idx,
    parts_of,
    substitute_factor,
    term_vars,
    vars_of,
)
from moe_xla.passes.recover.values import (
    Contradiction,
    NoRule,
    Piece,
    Value,
    additive,
    align,
    at_places_of,
    cancelled,
    cast,
    contracted,
    has_unique_cells,
    in_range,
    is_slot,
    literal_of,
    materialised,
    normalised,
    of_literal,
    of_node,
    plain,
    plain_map,
    renormalised,
)

AxisPairs = Sequence[tuple[int, int]]  # axes of two values that are one


class Contraction(NamedTuple):
    """What a product of two values is: which of their axes are one, which are the result's, and its shape and dtype."""

    joined: AxisPairs
    out: Sequence[tuple[str, int]]
    shape: Sequence[int]
    dtype: Any


# Masks of 11 choices that a program adds up one by one have 121 products in the gradient of their weights; what needs
# more would take minutes to work out.
_MOST_PRODUCTS = 128


def multiplied(context: Context, left: Value, right: Value, shape: Sequence[int], dtype: Any) -> Value:
    """The elementwise product of two values without background."""
    for one, other in ((left, right), (right, left)):
        scale = literal_of(one) if not is_boolean(dtype) else None
        if scale is not None and scale != 0 and not other.is_plain:
            scaled = cast(context.graph, other, dtype)
            return scaled.map_pieces(shape, lambda p, scale=scale: p.replace(coef=p.coef * scale.item()))  # type: ignore[misc]
    axes = range(len(shape))
    cellwise = Contraction([(i, i) for i in axes], [("left", i) for i in axes], shape, dtype)
    return product(context, left, right, cellwise)


def product(context: Context, left: Value, right: Value, contraction: Contraction) -> Value:
    """Σ over joined axes that are not in `out` of left · right; both without background."""
    joined, out, shape, dtype = contraction
    if len(left.pieces) * len(right.pieces) > _MOST_PRODUCTS:
        raise NoRule(f"a product of sums of {len(left.pieces)} and {len(right.pieces)} terms")
    left, right = cast(context.graph, left, dtype), cast(context.graph, right, dtype)
    endless = [
        (a, b)
        for a, b in joined
        if (("left", a) not in out and ("right", b) not in out)
        and (
            any(context.is_unbounded(p.axes[a]) for p in left.pieces)
            or any(context.is_unbounded(q.axes[b]) for q in right.pieces)
        )
    ]
    pieces = []
    for p in left.pieces:
        for q in right.pieces:
            if any(not has_idx(p.axes[a]) and not has_idx(q.axes[b]) for a, b in endless):
                raise NoRule("a sum over all cells of a slot axis without bound")
            piece = _product_piece(context, p, q.renamed(), contraction)
            if piece is not None:
                dense = not any(has_idx(a) for a in p.axes + q.axes) and not p.equalities and not q.equalities
                pieces.append(contracted(context.graph, piece, dtype, allow_outer=dense))
    return normalised(context.graph, Value(tuple(shape), dtype, cancelled(pieces)))


def _product_piece(context: Context, p: Piece, q: Piece, contraction: Contraction) -> Piece | None:
    graph, (joined, out, _, dtype) = context.graph, contraction
    every = range(len(p.axes))
    if list(joined) == [(i, i) for i in every] and list(out) == [("left", i) for i in every]:
        moved = at_places_of(graph, p, q)
        if moved is not None:
            held = tuple(dict.fromkeys((*p.guards, *moved.guards)))
            joint = Piece(p.axes, _factors(p, moved, dtype), p.coef * moved.coef, frozenset(), held)
            return renormalised(graph, joint)
    try:
        solved, rest = align(graph, [p, q], [[(0, a), (1, b)] for a, b in joined])
    except Contradiction:
        return None
    p, q = p.substitute(solved), q.substitute(solved)
    sides = {"left": p, "right": q}
    axes = tuple(sides[side].axes[i] for side, i in out)
    guards = [*p.guards, *q.guards]
    summed = [(a, b) for a, b in joined if ("left", a) not in out and ("right", b) not in out]
    for a, b in summed:
        guards += existence(context, p.axes[a], guards)
        if q.axes[b] != p.axes[a]:
            guards += existence(context, q.axes[b], guards)
    piece = Piece(axes, _factors(p, q, dtype), p.coef * q.coef, rest, tuple(dict.fromkeys(guards)))
    lost = [v for a, _ in summed for v in term_vars(p.axes[a])]
    return renormalised(graph, _count_lost(piece, lost))


def _factors(p: Piece, q: Piece, dtype: Any) -> tuple[Factor, ...]:
    factors = (*p.factors, *q.factors)
    return tuple(dict.fromkeys(factors)) if is_boolean(dtype) else factors


def existence(context: Context, term: Any, held: Sequence[Factor]) -> list[Factor]:
    """The conditions under which a place is on its axis, beyond those that are `held`.

    On a slot axis without bound there are no places below 0: what is not counted may have no position.
    """
    if isinstance(term, Flat):
        return [g for part in term.parts for g in existence(context, part, held)]
    if not context.is_unbounded(term):
        return in_range(context.graph, term)
    graph, fact = context.graph, rank_of(context.graph, term.factor)
    if fact is not None and lower_bound(graph, fact, frozenset(c for g in held for c in conjuncts(g))) >= 0:
        return []
    counted = graph.compare(prims.ge_p, term.factor, 0)
    return [] if literal(counted) else [counted]


def _count_lost(piece: Piece, variables: Sequence[Var]) -> Piece:
    """A summed variable that occurs nowhere any more multiplies by its size."""
    seen = set(piece.variables)
    for variable in variables:
        if variable not in seen:
            piece = piece.replace(coef=piece.coef * variable.size)
            seen.add(variable)
    return piece


@rule("reduce_sum")
def reduce_sum(context: Context, eqn: Any, value: Value) -> Value:
    axes = eqn.params["axes"]
    graph = context.graph
    if value.background is not None and any(context.is_unbounded(p.axes[i]) for p in value.pieces for i in axes):
        raise NoRule("a sum over empty cells of a slot axis without bound")
    was_plain = value.is_plain
    value = additive(graph, value)
    shape = tuple(n for i, n in enumerate(value.shape) if i not in axes)
    pieces = []
    for piece in value.pieces:
        guards = list(piece.guards)
        for i in axes:
            guards += existence(context, piece.axes[i], guards)
        kept = Piece(
            tuple(a for i, a in enumerate(piece.axes) if i not in axes),
            piece.factors,
            piece.coef,
            piece.equalities,
            tuple(dict.fromkeys(guards)),
        )
        kept = _count_lost(kept, [v for i in axes for v in term_vars(piece.axes[i])])
        clean = renormalised(graph, kept)
        if clean is not None:
            pieces.append(contracted(graph, clean, value.dtype, allow_outer=was_plain))
    return normalised(graph, Value(shape, value.dtype, tuple(pieces)))


@rule("reduce_max", "reduce_or")
def reduce_max(context: Context, eqn: Any, value: Value) -> Value:
    """A maximum over places that other places determine: max(piece, background)."""
    graph, axes = context.graph, eqn.params["axes"]
    name = "reduce_or" if is_boolean(value.dtype) else "reduce_max"
    if value.is_plain:
        raise NoRule("a maximum over an array")
    if not has_unique_cells(graph, value):
        raise NoRule("a maximum over cells that are not provably unique")
    base = literal_of(value.background)
    if base is None:
        raise NoRule("a maximum over a background that varies")
    over_slots = any(is_slot(graph, p.axes[i]) for p in value.pieces for i in axes)
    several = name == "reduce_max" or any(_hidden_by(p, axes)[1] for p in value.pieces)
    if over_slots and several and all(_is_small(p, axes) for p in value.pieces):
        return _token_maximum(context, value, axes, base)
    if over_slots and name == "reduce_max":
        return _group_maximum(context, value, axes, base)
    prim = prims.max_p if name == "reduce_max" else prims.or_p
    shape = tuple(n for i, n in enumerate(value.shape) if i not in axes)
    pieces = []
    for piece in value.pieces:
        kept = tuple(a for i, a in enumerate(piece.axes) if i not in axes)
        gone = [piece.axes[i] for i in axes]
        if not set(vars_of(gone)) <= set(vars_of(kept)) or not all(
            isinstance(a, (Idx, Var)) or a.size == 1 for a in gone
        ):
            raise NoRule("a maximum over cells of several assignments")
        data = materialised(graph, piece.replace(guards=()), value.dtype)
        for guard in [g for a in gone for g in existence(context, a, piece.guards)]:
            data = graph.select(guard, data, graph.lit(base, value.dtype))
        if any(a.size > 1 for a in gone):
            data = graph.map(prim, {}, [data, graph.lit(base, value.dtype)], value.dtype)
        pieces.append(Piece(kept, (data,), 1, frozenset(), piece.guards))
    result = Value(
        shape, value.dtype, tuple(pieces), value.background and _reduced_background(value.background, axes, shape)
    )
    if not has_unique_cells(graph, result):
        if over_slots:
            return _group_any(context, value, axes, base)
        raise NoRule("a maximum over cells of several pieces")
    return normalised(graph, result)


# Choices of a token over which a maximum is taken one by one.
_MOST_CHOICES = 16


def _hidden_by(piece: Piece, axes: Sequence[int]) -> tuple[list[Term], list[Var]]:
    """The places that are left when axes are reduced, and the variables that then stand on none of them."""
    kept = [a for i, a in enumerate(piece.axes) if i not in axes]
    seen = set(vars_of(kept))
    return kept, [v for v in piece.variables if v not in seen]


def _is_small(piece: Piece, axes: Sequence[int]) -> bool:
    """Whether a piece hits only a few of the cells that are reduced to one, which is at fixed places or a token's."""
    kept, hidden = _hidden_by(piece, axes)
    parts = [p for a in kept for p in parts_of(a) if p != UNIT]
    is_token = all(isinstance(p, Var) for p in parts) and len(set(parts)) == len(parts)
    gone = [piece.axes[i] for i in axes]
    return is_token and any(map(has_idx, gone)) and math.prod(v.size for v in hidden) <= _MOST_CHOICES


def _token_maximum(context: Context, value: Value, axes: Sequence[int], base: Any) -> Value:
    """A maximum over all cells of a token: those of its choices, and the others, which hold the background."""
    graph, dtype = context.graph, value.dtype
    shape = tuple(n for i, n in enumerate(value.shape) if i not in axes)
    prim = prims.or_p if is_boolean(dtype) else prims.max_p
    empty = graph.lit(base, dtype)
    total = of_literal(graph, base, shape, dtype)
    hits = 0
    for piece in value.pieces:
        kept, hidden = _hidden_by(piece, axes)
        there = [g for i in axes for g in existence(context, piece.axes[i], piece.guards)]
        guards = list(dict.fromkeys([*piece.guards, *there]))
        data = materialised(graph, piece.replace(guards=()), dtype)
        if guards:
            data = graph.select(graph.logical_and(guards), data, empty)
        for places in itertools.product(*(range(v.size) for v in hidden)):
            chosen = {v: Const(c, v.size) for v, c in zip(hidden, places, strict=True)}
            case = plain(shape, kept, substitute_factor(data, chosen))
            total = plain_map(graph, prim, {}, [total, case], shape, dtype)
            hits += 1
    if hits >= math.prod(value.shape[i] for i in axes) and not any(
        context.is_unbounded(p.axes[i]) for p in value.pieces for i in axes
    ):
        raise NoRule("a maximum over cells of which none may be empty")
    return total


def _group_maximum(context: Context, value: Value, axes: Sequence[int], base: Any) -> Value:
    """A maximum over the slots of each expert: over its rows, and over the background where a slot is left empty."""
    graph, dtype = context.graph, value.dtype
    slots = math.prod(value.shape[i] for i in axes)
    kept = [i for i in range(len(value.shape)) if i not in axes]
    shape = tuple(value.shape[i] for i in kept)
    if not is_floating(dtype):
        raise NoRule("a maximum over slots of integers")
    lowest = -jnp.inf
    endless = any(context.is_unbounded(p.axes[i]) for p in value.pieces for i in axes)
    largest: Value | None = None
    filled: Value | None = None
    for piece in value.pieces:
        out = tuple(piece.axes[i] for i in kept)
        guards = list(
            dict.fromkeys([*piece.guards, *(g for i in axes for g in existence(context, piece.axes[i], piece.guards))])
        )
        indexed = [i for i, a in enumerate(out) if has_idx(a)]
        points = vars_of([out[i] for i in indexed])
        if len(indexed) != 1 or any(v in points for i, a in enumerate(out) if i not in indexed for v in term_vars(a)):
            raise NoRule("a maximum over slots of something else than experts")
        data = materialised(graph, piece.replace(guards=()), dtype)
        rows = of_node(graph.ein(out, (data,), guards, frozenset(), 1, dtype, reducer="max", initial=lowest))
        largest = rows if largest is None else plain_map(graph, prims.max_p, {}, [largest, rows], shape, dtype)
        count = of_node(graph.ein((out[indexed[0]],), (), guards, frozenset(), 1, np.dtype(np.int32)))
        spread = plain(shape, tuple(fresh_axis(n) for n in shape), graph.lit(0, np.int32))
        axis_factor = count.factor
        axes_of = tuple(axis_factor.args[0] if i == indexed[0] else a for i, a in enumerate(spread.pieces[0].axes))
        here = plain(shape, axes_of, axis_factor)
        filled = (
            here if filled is None else plain_map(graph, prims.add_p, {}, [filled, here], shape, np.dtype(np.int32))
        )
    assert largest is not None and filled is not None
    base_value = of_literal(graph, base, (), dtype)
    with_base = plain_map(graph, prims.max_p, {}, [largest, base_value], shape, dtype)
    if endless:
        return with_base
    full = plain_map(graph, prims.ge_p, {}, [filled, of_literal(graph, slots, (), np.int32)], shape, np.dtype(bool))
    return plain_map(graph, prims.select_n_p, {}, [full, with_base, largest], shape, dtype)


def _group_any(context: Context, value: Value, axes: Sequence[int], base: Any) -> Value:
    """Whether a condition holds in a slot of each expert."""
    graph, number = context.graph, np.dtype(np.float32)
    largest = _group_maximum(context, cast(graph, value, number), axes, number.type(bool(base)))
    zero = of_literal(graph, 0, (), number)
    return plain_map(graph, prims.gt_p, {}, [largest, zero], largest.shape, np.dtype(bool))


def _reduced_background(background: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
    return background.map_pieces(
        shape, lambda p: p.replace(axes=tuple(a for i, a in enumerate(p.axes) if i not in axes))
    )
