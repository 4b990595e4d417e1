"""Operations on values cell by cell: on the data of the cells that pieces hit, and on the backgrounds elsewhere.

In: values whose pieces never share a cell, or can be brought to that.  Out: one more such value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np

from moe_xla.passes.recover.nodes import Graph
from moe_xla.passes.recover.rules.lists import used_entries
from moe_xla.passes.recover.rules.table import Context
from moe_xla.passes.recover.terms import (
    UNIT,
    Const,
    Factor,
    Idx,
    Term,
    Var,
    fresh,
    fresh_axis,
    has_idx,
    substitute,
    vars_of,
)
from moe_xla.passes.recover.values import (
    Contradiction,
    Equalities,
    NoRule,
    Piece,
    Value,
    align,
    at_places_of,
    fills_all,
    has_unique_cells,
    is_dead,
    literal_of,
    materialised,
    normalised,
    of_literal,
    only_renames,
    plain,
    plain_map,
    read,
)

# A piece over all choices meets pieces over one choice each: it is taken apart if there are not too many.
_MOST_CASES = 16


def on_cells(
    context: Context, prim: Any, params: dict[str, Any], values: list[Value], shape: Sequence[int], dtype: Any
) -> Value:
    """The operation on every cell: on the data of the cells that pieces hit, and on the backgrounds elsewhere."""
    graph = context.graph
    values = [_entries(graph, celled(graph, v)) for v in values]
    structured = [i for i, v in enumerate(values) if not v.is_plain]
    for i in structured:
        if not has_unique_cells(graph, values[i]):
            raise NoRule(f"slots that are not provably unique in an operand of {prim.name}")
    values = _cut(graph, values, structured) if len(structured) > 1 else values
    backgrounds = [_background(graph, v, shape) for v in values]
    pieces: list[Piece] = []
    done: set[tuple[int, int]] = set()
    for i in structured:
        for k in range(len(values[i].pieces)):
            if (i, k) not in done:
                pieces.append(_joint(context, prim, params, values, backgrounds, structured, (i, k), done, dtype))
    return _with_background(context, prim, params, backgrounds, pieces, shape, dtype)


def _entries(graph: Graph, value: Value) -> Value:
    """A mask of the entries of lists that hold a token, or of those that hold none, as places in queues."""
    found = used_entries(graph, value)
    if found is None:
        return value
    used, is_mask = found
    if not has_unique_cells(graph, used):
        return value
    if is_mask:
        return used
    unused = tuple(p.replace(factors=(graph.lit(False, bool),)) for p in used.pieces)
    return Value(value.shape, value.dtype, unused, of_literal(graph, True, value.shape, value.dtype))


def celled(graph: Graph, value: Value) -> Value:
    """A sum of an ordinary array and pieces, as pieces over a background; other values as they are."""
    if value.is_plain or value.background is not None or has_unique_cells(graph, value):
        return value
    dense = [p for p in value.pieces if not any(has_idx(a) for a in p.axes)]
    background = normalised(graph, Value(value.shape, value.dtype, tuple(dense))) if dense else None
    if background is None or not background.is_plain or len(dense) == len(value.pieces):
        return value
    pieces: list[Piece] = []
    for piece in value.pieces:
        if piece not in dense:
            _collect(graph, pieces, piece, value.dtype)
    full = [
        p.replace(factors=(_sum(graph, materialised(graph, p.replace(guards=()), value.dtype), p, background),), coef=1)
        for p in pieces
    ]
    return Value(value.shape, value.dtype, tuple(full), background)


def _collect(graph: Graph, pieces: list[Piece], piece: Piece, dtype: Any) -> None:
    """Adds a piece to a sum of pieces, to the data of one that stands at the same places if there is one."""
    for i, other in enumerate(pieces):
        moved = at_places_of(graph, other, piece)
        if moved is not None and set(moved.guards) == set(other.guards):
            data = [materialised(graph, p.replace(guards=()), dtype) for p in (other, moved)]
            pieces[i] = other.replace(factors=(graph.map(prims.add_p, {}, data, dtype),), coef=1)
            return
    pieces.append(piece)


def _sum(graph: Graph, data: Factor, piece: Piece, background: Value) -> Factor:
    return graph.map(prims.add_p, {}, [data, read(graph, background, piece.axes)], background.dtype)


def _cut(graph: Graph, values: list[Value], structured: list[int]) -> list[Value]:
    """Pieces that reach beyond a piece of another operand, in two: the cells of that one, and the others."""
    pieces = {i: list(values[i].pieces) for i in structured}
    for i in structured:
        for j in structured:
            if i != j:
                pieces[j] = [q for piece in pieces[j] for q in _parts(graph, pieces[i], piece)]
    return [dataclasses.replace(v, pieces=tuple(pieces[i])) if i in pieces else v for i, v in enumerate(values)]


def _parts(graph: Graph, others: Sequence[Piece], piece: Piece) -> list[Piece]:
    if any(at_places_of(graph, other, piece) is not None for other in others):
        return [piece]
    for other in others:
        whole = piece.renamed()
        try:
            solved, rest = align(graph, [other, whole], [[(0, a), (1, a)] for a in range(len(piece.axes))])
        except (Contradiction, NoRule):
            continue
        fixed = [v for v in whole.variables if isinstance(solved.get(v), Const)]
        if not rest and len(fixed) == 1 and fixed[0].size <= _MOST_CASES:
            cases = [whole.substitute({fixed[0]: Const(c, fixed[0].size)}) for c in range(fixed[0].size)]
            return [q for case in cases for q in _parts(graph, others, case)]
        merged = _merged(whole, solved) if not rest and only_renames(other, solved) else None
        if merged is not None:
            a, b = (Factor(graph.iota(v.size, np.int32), (v,)) for v in merged)
            return [whole.substitute(solved), whole.replace(guards=(*whole.guards, graph.compare(prims.ne_p, a, b)))]
    return [piece]


def _merged(piece: Piece, solved: dict[Var, Any]) -> tuple[Var, Var] | None:
    """The two variables of a piece that unification made one, if it did nothing else to it."""
    images: dict[Any, list[Var]] = {}
    for v in piece.variables:
        images.setdefault(solved.get(v, v), []).append(v)
    joined = [vs for vs in images.values() if len(vs) > 1]
    if not all(isinstance(t, Var) for t in images) or [len(vs) for vs in joined] != [2]:
        return None
    return joined[0][0], joined[0][1]


def _background(graph: Graph, value: Value, shape: Sequence[int]) -> Value:
    if value.is_plain:
        return value
    return value.background if value.background is not None else of_literal(graph, 0, shape, value.dtype)


def _joint(
    context: Context,
    prim: Any,
    params: dict[str, Any],
    values: list[Value],
    backgrounds: list[Value],
    structured: list[int],
    start: tuple[int, int],
    done: set[tuple[int, int]],
    dtype: Any,
) -> Piece:
    """The result on the cells of one operand's piece, joined with the other operands' pieces on the same cells."""
    graph = context.graph
    chosen = {start[0]: values[start[0]].pieces[start[1]]}
    done.add(start)
    for j in structured:
        if j in chosen:
            continue
        for k, candidate in enumerate(values[j].pieces):
            same = at_places_of(graph, chosen[start[0]], candidate)
            if same is not None:
                chosen[j] = same
                done.add((j, k))
                break
            order = sorted(chosen)
            others = [chosen[i] for i in order]
            renamed = candidate.renamed()
            try:
                others, renamed, solved, rest = _aligned(graph, others, renamed)
            except Contradiction:
                continue
            moved = renamed.substitute(solved)
            anchor = others[0].substitute(solved)
            if is_dead(moved) or any(is_dead(p.substitute(solved)) for p in others):
                continue
            if (
                rest
                or set(vars_of(anchor.axes)) != set(vars_of(moved.axes))
                or not all(only_renames(p, solved) for p in (*others, renamed))
            ):
                raise NoRule(f"operands of {prim.name} that fill different cells")
            chosen = {i: p.substitute(solved) for i, p in zip(order, others, strict=True)}
            chosen[j] = moved
            done.add((j, k))
            break
    anchor = chosen[start[0]]
    common = tuple(g for g in anchor.guards if all(g in p.guards for p in chosen.values()))
    factors = []
    for j, value in enumerate(values):
        if j not in chosen:
            factors.append(read(graph, backgrounds[j], anchor.axes))
            continue
        data = materialised(graph, chosen[j].replace(guards=()), value.dtype)
        extra = [g for g in chosen[j].guards if g not in common]
        if extra:
            data = graph.select(graph.logical_and(extra), data, read(graph, backgrounds[j], anchor.axes))
        factors.append(data)
    return Piece(anchor.axes, (graph.map(prim, params, factors, dtype),), 1, frozenset(), common)


def _aligned(graph: Graph, others: list[Piece], piece: Piece) -> tuple[list[Piece], Piece, dict[Var, Term], Equalities]:
    """Pieces, in the same variables, and one at the same places, with what unification makes of their variables.

    Where it is a permutation of another one, as for tokens in an order of priority and tokens, the cells are counted in
    that order instead.
    """
    groups = [[(0, a), (len(others), a)] for a in range(len(piece.axes))]
    solved, rest = align(graph, [*others, piece], groups)
    for _ in piece.variables:
        counted = _in_order(solved)
        if counted is None or not all(_stay_apart(p.variables, counted) for p in (*others, piece)):
            break
        others, piece = [p.substitute(counted) for p in others], piece.substitute(counted)
        solved, rest = align(graph, [*others, piece], groups)
    return others, piece, solved, rest


def _in_order(solved: dict[Var, Term]) -> dict[Var, Term] | None:
    """A variable that a permutation is read at, as what the inverse permutation gives of another variable.

    Variables that are one are given one name, so that a permutation of each group is read in its own.
    """
    for image in solved.values():
        if isinstance(image, Idx) and image.node.inverse is not None:
            inverse, axis = image.node.inverse
            place = image.args[axis]
            if isinstance(place, Var):
                args = (*image.args[:axis], fresh(place.size), *image.args[axis + 1 :])
                counted: dict[Var, Term] = {place: Idx(inverse, args, place.size)}
                return {**{v: substitute(t, counted) for v, t in solved.items() if isinstance(t, Var)}, **counted}
    return None


def _stay_apart(variables: Sequence[Var], names: dict[Var, Term]) -> bool:
    return len({names.get(v, v) for v in variables}) == len(variables)


def _with_background(
    context: Context,
    prim: Any,
    params: dict[str, Any],
    backgrounds: list[Value],
    pieces: list[Piece],
    shape: Sequence[int],
    dtype: Any,
) -> Value:
    graph = context.graph
    zeros = [literal_of(b) is not None and literal_of(b) == 0 for b in backgrounds]
    vanishes = (prim.name in ("mul", "and") and any(zeros)) or (prim.name == "select_n" and all(zeros[1:]))
    background: Value | None = None
    if not vanishes:
        background = plain_map(graph, prim, params, backgrounds, shape, dtype)
        if background.shape != tuple(shape):
            background = spread(background, shape)
        if literal_of(background) is not None and literal_of(background) == 0:
            background = None
    result = Value(tuple(shape), dtype, tuple(pieces), background)
    return normalised(graph, result) if background is None or fills_all(result) else result


def spread(value: Value, shape: Sequence[int]) -> Value:
    """An operand over all cells: scalars and axes of length 1 are repeated."""
    if value.shape == tuple(shape):
        return value
    if value.shape == () and value.is_plain:
        return plain(shape, tuple(fresh_axis(n) for n in shape), value.factor)
    if len(value.shape) != len(shape):
        raise NoRule(f"operands of shapes {value.shape} and {tuple(shape)}")

    def change(piece: Piece) -> Piece:
        axes = []
        for term, n in zip(piece.axes, shape, strict=True):
            if term.size != n and term != UNIT:
                raise NoRule("a data-dependent place on an axis of length 1")
            axes.append(term if term.size == n else fresh_axis(n))
        return piece.replace(axes=tuple(axes))

    return value.map_pieces(shape, change)
