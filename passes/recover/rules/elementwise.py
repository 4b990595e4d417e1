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

from moe_xla.passes.recover.attachments import ATTACHMENTS
from moe_xla.passes.recover.facts import bound_of
from moe_xla.passes.recover.nodes import (
    Graph,
    Iota,
    Leaf,
    is_boolean,
    is_floating,
    is_integer,
)
from moe_xla.passes.recover.rules.cells import celled, on_cells, spread
from moe_xla.passes.recover.rules.contractions import multiplied
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import Factor, Idx, Var, factor_vars, fresh_axis, vars_of
from moe_xla.passes.recover.values import (
    NoRule,
    Piece,
    Value,
    additive,
    cancelled,
    cast,
    components,
    fills_all,
    has_unique_cells,
    literal_of,
    materialised,
    normalised,
    of_literal,
    peeled,
    plain_map,
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
    values = [spread(v, shape) for v in values]
    if name in ("eq", "ne"):
        delta = _delta(context, values, shape)
        if delta is not None:
            return delta if name == "eq" else apply(context, prims.not_p, {}, [delta], shape, dtype)
    if name == "clamp" and _is_within(context.graph, *values):
        return values[1]
    if all(v.is_plain for v in values):
        return plain_map(context.graph, prim, params, values, shape, dtype)
    if name == "select_n" and _are_same_literal(values[1:]):
        return values[1]
    linear = _linear(context, prim, params, values, shape, dtype)
    if linear is not None:
        return linear
    result = on_cells(context, prim, params, values, shape, dtype)
    empty = literal_of(values[0].background)
    by_maximum = name == "sub" and empty == -np.inf and _is_own(values[0], values[1], "reduce_max")
    by_sum = name == "div" and empty == 0 and _is_own(values[0], values[1], "reduce_sum")
    return dataclasses.replace(result, background=values[0].background) if by_maximum or by_sum else result


def _is_own(value: Value, other: Value, reduction: str) -> bool:
    """Whether `other` is the maximum or the sum of a value, by which softmax reduces and divides it.

    Cells that are empty at −∞ and at 0 then stay what they are, unless the maximum is −∞ or NaN, or the sum 0 or NaN;
    then they are NaN, but so is every cell of the same sum that is not empty.
    """
    wires = [other.factor.node.wire] if other.is_plain and isinstance(other.factor.node, Leaf) else []
    while wires:
        step = getattr(wires.pop(), "step", None)
        if getattr(step, "name", None) == reduction:
            return bool(step.inputs[0].value == value)  # type: ignore[union-attr]
        if getattr(step, "name", None) in ("max", "stop_gradient", "broadcast_in_dim", "reshape"):
            wires += step.inputs  # type: ignore[union-attr]
    return False


def _is_within(graph: Graph, low: Value, value: Value, high: Value) -> bool:
    """Whether an index is proved to lie where it is clamped to, as one of a `switch` is."""
    least, most = literal_of(low), literal_of(high)
    if least is None or most is None or not value.is_plain or not is_integer(value.dtype):
        return False
    bound = bound_of(graph, value.factor)
    return bound is not None and least <= 0 and bound <= most + 1


def _are_same_literal(values: Sequence[Value]) -> bool:
    first = literal_of(values[0])
    return first is not None and all(literal_of(v) is not None and literal_of(v) == first for v in values)


# ------------------------------------------------------------------------------------------------ deltas


def iota_axis(value: Value) -> int | None:
    """The axis along which a plain value counts 0, 1, 2, …, or None."""
    if not value.is_plain or not isinstance(value.factor.node, Iota):
        return None
    places = [i for i, a in enumerate(value.pieces[0].axes) if a == value.factor.args[0]]
    return places[0] if len(places) == 1 else None


def _delta(context: Context, values: list[Value], shape: Sequence[int]) -> Value | None:
    """`index == iota` as a value whose pieces stand at `index`."""
    for counter, index in ((values[0], values[1]), (values[1], values[0])):
        axis = iota_axis(counter)
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
    if not (index.is_plain or fills_all(index)) and (base is None or 0 <= base < shape[axis]):
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
    if name == "select_n" and len(values) == 3 and all(sparse) and (_is_deferred(values[2]) or _is_outer(values[2])):
        if is_boolean(values[0].dtype) and literal_of(values[1]) is not None and literal_of(values[1]) == 0:
            # A product that is better left a product, where a mask holds, is its product with the mask.
            return multiplied(context, cast(graph, values[0], dtype), values[2], shape, dtype)
    if name in ATTACHMENTS and sparse[0]:
        return values[0].map_pieces(shape, lambda p: p.replace(factors=_each(graph, prim, params, p.factors)))
    if name == "neg" and sparse[0]:
        return Value(tuple(shape), dtype, tuple(p.replace(coef=-p.coef) for p in values[0].pieces))
    filled = values[1].is_plain or celled(graph, values[1]).background is not None if name == "div" else False
    if filled and sparse[0] and not values[0].is_plain and is_floating(dtype):
        if not has_unique_cells(graph, values[0]):
            inverse = on_cells(context, prims.div_p, {}, [of_literal(graph, 1, (), dtype), values[1]], shape, dtype)
            return multiplied(context, values[0], additive(graph, inverse), shape, dtype)
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


def _each(graph: Graph, prim: Any, params: dict[str, Any], factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """What is a product but for its derivative: the product of its factors, each without theirs."""
    return tuple(graph.map(prim, params, [f], f.node.dtype) for f in factors)


def _is_deferred(value: Value) -> bool:
    return any(
        p.hidden or p.equalities or components(p, frozenset(p.hidden)) > 1 for p in value.pieces if not value.is_plain
    )


def _is_outer(value: Value) -> bool:
    """Whether rows are multiplied into matrices, as in the gradients of weights, before these are summed."""
    return not value.is_plain and any(_is_outer_product(p) for p in value.pieces)


def _is_outer_product(piece: Piece) -> bool:
    """Whether several factors hold features, and none of them holds all."""
    features = [set(factor_vars([f])) - piece.points for f in piece.factors]
    whole = set(vars_of(piece.axes)) - piece.points
    return sum(map(bool, features)) > 1 and not any(whole <= held for held in features)


def _masked(
    context: Context, prim: Any, params: dict[str, Any], values: list[Value], shape: Sequence[int], dtype: Any
) -> Value:
    """A product with a value that is not zero elsewhere: only the cells of the other one matter."""
    sparse = next(v for v in values if v.background is None)
    if not has_unique_cells(context.graph, sparse) and not sparse.is_plain:
        left, right = (additive(context.graph, v) for v in values)
        return multiplied(context, left, right, shape, dtype)
    return on_cells(context, prim, params, values, shape, dtype)
