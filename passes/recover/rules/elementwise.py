"""Rules for elementwise operations on structured values.

Plain operands give a map node; `x == iota` is where places come from: a Kronecker delta.  Products multiply pieces,
sums collect them, and everything else acts on the pieces' data and on the background, which needs unique cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np

from moe_xla.passes.recover.nodes import (
    Graph,
    Iota,
    is_boolean,
    is_floating,
)
from moe_xla.passes.recover.rules.contractions import multiplied
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import UNIT, Factor, Idx, Var, fresh_axis, vars_of
from moe_xla.passes.recover.values import (
    Contradiction,
    NoRule,
    Piece,
    Value,
    align,
    at_places_of,
    cancelled,
    cast,
    components,
    has_unique_cells,
    literal_of,
    materialised,
    normalised,
    of_literal,
    only_renames,
    peeled,
    plain,
    plain_map,
    read,
    renormalised,
)

NAMES = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "max",
        "min",
        "pow",
        "atan2",
        "rem",
        "and",
        "or",
        "xor",
        "not",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "neg",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "logistic",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "sqrt",
        "rsqrt",
        "cbrt",
        "square",
        "integer_pow",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "erf",
        "erfc",
        "erf_inv",
        "is_finite",
        "convert_element_type",
        "select_n",
        "clamp",
        "copy",
        "copy_p",
        "stop_gradient",
        "nextafter",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        "reduce_precision",
        "lgamma",
        "digamma",
        "population_count",
        "log2",
        "name",
        "one_minus_square",
        "clz",
        "real",
        "imag",
    ]
)


@rule(*NAMES)
def elementwise(context: Context, eqn: Any, *values: Value) -> Value:
    aval = eqn.outvars[0].aval
    return apply(context, eqn.primitive, eqn.params, list(values), aval.shape, aval.dtype)


def apply(
    context: Context, prim: Any, params: dict[str, Any], values: list[Value], shape: Sequence[int], dtype: Any
) -> Value:
    """An elementwise primitive on values."""
    name = prim.name
    values = [_spread(v, shape) for v in values]
    if name in ("eq", "ne"):
        delta = _delta(context, values, shape)
        if delta is not None:
            return delta if name == "eq" else apply(context, prims.not_p, {}, [delta], shape, dtype)
    if all(v.is_plain for v in values):
        return plain_map(context.graph, prim, params, values, shape, dtype)
    linear = _linear(context, prim, params, values, shape, dtype)
    return linear if linear is not None else on_cells(context, prim, params, values, shape, dtype)


def _spread(value: Value, shape: Sequence[int]) -> Value:
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


# ------------------------------------------------------------------------------------------------ deltas


def _iota_axis(value: Value) -> int | None:
    """The axis along which a plain value counts 0, 1, 2, …, or None."""
    if not value.is_plain or not isinstance(value.factor.node, Iota):
        return None
    places = [i for i, a in enumerate(value.pieces[0].axes) if a == value.factor.args[0]]
    return places[0] if len(places) == 1 else None


def _delta(context: Context, values: list[Value], shape: Sequence[int]) -> Value | None:
    """`index == iota` as a value whose pieces stand at `index`."""
    for counter, index in ((values[0], values[1]), (values[1], values[0])):
        axis = _iota_axis(counter)
        if axis is None:
            continue
        if index.is_plain and isinstance(index.factor.node, Iota):
            continue
        return _delta_along(context, index, axis, shape)
    return None


def _delta_along(context: Context, index: Value, axis: int, shape: Sequence[int]) -> Value | None:
    graph = context.graph
    if not _constant_along(index, axis) or not (index.is_plain or has_unique_cells(graph, index)):
        return None
    base = 0 if index.background is None else literal_of(index.background)
    pieces = []
    for piece in index.pieces:
        data = materialised(graph, piece.replace(guards=()) if not index.is_plain else piece, index.dtype)
        pieces.append(_standing_at(graph, piece, data, axis, shape[axis]))
    if not index.is_plain and (base is None or 0 <= base < shape[axis]):
        # Cells that the index leaves at its background stand at that place too.
        if base is None:
            return None
        spot = graph.lit(base, index.dtype)
        rest = Piece(tuple(fresh_axis(n) for n in shape))
        pieces.append(_standing_at(graph, rest, spot, axis, shape[axis]))
        pieces += [_standing_at(graph, p, spot, axis, shape[axis]).replace(coef=-1) for p in index.pieces]
    kept = tuple(q for p in pieces if (q := renormalised(graph, p)) is not None)
    return Value(tuple(shape), np.dtype(bool), kept)


def _constant_along(value: Value, axis: int) -> bool:
    for piece in value.pieces:
        term = piece.axes[axis]
        others = vars_of([a for i, a in enumerate(piece.axes) if i != axis])
        used = vars_of([a for f in (*piece.factors, *piece.guards) for a in f.args])
        if not (term.size == 1 or isinstance(term, Var)) or any(v in others or v in used for v in vars_of([term])):
            return False
    return value.background is None or _constant_along(value.background, axis)


def _standing_at(graph: Graph, piece: Piece, index: Factor, axis: int, size: int) -> Piece:
    """A piece of ones at the place `index`, its out-of-range cases turned into guards."""
    index, guards = peeled(graph, index, size)
    axes = (*piece.axes[:axis], Idx(index.node, index.args, size), *piece.axes[axis + 1 :])
    return Piece(axes, (), 1, piece.equalities, (*piece.guards, *guards))


# ---------------------------------------------------------------------------------- products and sums


def _linear(
    context: Context, prim: Any, params: dict[str, Any], values: list[Value], shape: Sequence[int], dtype: Any
) -> Value | None:
    """Operations that commute with the sum over pieces, or None."""
    graph, name = context.graph, prim.name
    sparse = [v.background is None for v in values]
    if (name == "mul" or (name == "and" and is_boolean(dtype))) and any(sparse):
        if all(sparse):
            return multiplied(context, values[0], values[1], shape, dtype)
        return _masked(context, prim, params, values, shape, dtype)
    if name == "neg" and sparse[0]:
        return Value(tuple(shape), dtype, tuple(p.replace(coef=-p.coef) for p in values[0].pieces))
    if name == "div" and sparse[0] and values[1].is_plain and not values[0].is_plain and is_floating(dtype):
        if not has_unique_cells(graph, values[0]):
            inverse = plain_map(graph, prims.div_p, {}, [of_literal(graph, 1, (), dtype), values[1]], shape, dtype)
            return multiplied(context, values[0], inverse, shape, dtype)
    if name == "convert_element_type" and sparse[0] and is_floating(dtype):
        exact = is_boolean(values[0].dtype) or _is_deferred(values[0]) or not has_unique_cells(graph, values[0])
        if exact:
            return cast(graph, values[0], dtype)
    if name == "convert_element_type" and sparse[0] and is_boolean(values[0].dtype):
        return cast(graph, values[0], dtype)
    if name in ("add", "add_any", "sub") and all(sparse) and not is_boolean(dtype):
        if not any(_is_deferred(v) for v in values) and all(v.is_plain or has_unique_cells(graph, v) for v in values):
            try:
                return on_cells(context, prim, params, values, shape, dtype)
            except NoRule:
                pass
        right = values[1].pieces if name != "sub" else tuple(p.replace(coef=-p.coef) for p in values[1].pieces)
        pieces = values[0].pieces + tuple(p.renamed() for p in right)
        return normalised(graph, Value(tuple(shape), dtype, cancelled(pieces)))
    if name == "or" and is_boolean(dtype) and all(sparse) and not any(v.is_plain for v in values):
        joined = Value(tuple(shape), dtype, values[0].pieces + tuple(p.renamed() for p in values[1].pieces))
        if has_unique_cells(graph, joined):
            return joined
    return None


def _is_deferred(value: Value) -> bool:
    return any(
        p.hidden or p.equalities or components(p, frozenset(p.hidden)) > 1 for p in value.pieces if not value.is_plain
    )


def _masked(
    context: Context, prim: Any, params: dict[str, Any], values: list[Value], shape: Sequence[int], dtype: Any
) -> Value:
    """A product with a value that is not zero elsewhere: only the cells of the other one matter."""
    sparse = next(v for v in values if v.background is None)
    if not has_unique_cells(context.graph, sparse) and not sparse.is_plain:
        raise NoRule("a product of a value with overlapping cells and one with a background")
    return on_cells(context, prim, params, values, shape, dtype)


# ------------------------------------------------------------------------------------------- cell by cell


def on_cells(
    context: Context, prim: Any, params: dict[str, Any], values: list[Value], shape: Sequence[int], dtype: Any
) -> Value:
    """The operation on every cell: on the data of the cells that pieces hit, and on the backgrounds elsewhere."""
    graph = context.graph
    structured = [i for i, v in enumerate(values) if not v.is_plain]
    for i in structured:
        if not has_unique_cells(graph, values[i]):
            raise NoRule(f"slots that are not provably unique in an operand of {prim.name}")
    backgrounds = [_background(graph, v, shape) for v in values]
    pieces: list[Piece] = []
    done: set[tuple[int, int]] = set()
    for i in structured:
        for k in range(len(values[i].pieces)):
            if (i, k) not in done:
                pieces.append(_joint(context, prim, params, values, backgrounds, structured, (i, k), done, dtype))
    return _with_background(context, prim, params, backgrounds, pieces, shape, dtype)


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
            groups = [[(0, a), (len(others), a)] for a in range(len(renamed.axes))]
            try:
                solved, rest = align(graph, [*others, renamed], groups)
            except Contradiction:
                continue
            moved = renamed.substitute(solved)
            anchor = others[0].substitute(solved)
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
            background = _spread(background, shape)
        if literal_of(background) is not None and literal_of(background) == 0:
            background = None
    result = Value(tuple(shape), dtype, tuple(pieces), background)
    return normalised(graph, result) if background is None else dataclasses.replace(result)
