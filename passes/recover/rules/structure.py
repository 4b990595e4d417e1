"""Rules that only rename places: broadcast, transpose, reshape, squeeze, slice, pad, concatenate, stack,
split, unstack, iota."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np

from moe_xla.passes.recover.facts import depends_on_rank
from moe_xla.passes.recover.nodes import Ends, Graph, Slice, is_boolean, is_floating, is_integer
from moe_xla.passes.recover.rules.elementwise import apply
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import (
    UNIT,
    Const,
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    flatten,
    fresh,
    fresh_axis,
    parts_of,
    vars_of,
)
from moe_xla.passes.recover.values import (
    NoRule,
    Piece,
    Value,
    held_factors,
    in_range,
    is_slot,
    literal_of,
    materialised,
    normalised,
    of_literal,
    peeled,
    plain,
    resolve,
    unflattened,
    unit_guards,
)


@rule("broadcast_in_dim")
def broadcast(context: Context, eqn: Any, value: Value, *dynamic: Value) -> Value:
    if dynamic:
        raise NoRule("dynamic shapes")
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def change(piece: Piece) -> Piece:
        axes = [fresh_axis(n) for n in shape]
        for i, d in enumerate(dims):
            if value.shape[i] == shape[d]:
                axes[d] = piece.axes[i]
        spread = [piece.axes[i] for i, d in enumerate(dims) if value.shape[i] != shape[d]]
        return piece.replace(axes=tuple(axes), guards=(*piece.guards, *unit_guards(context.graph, spread)))

    return value.map_pieces(shape, change)


@rule("sharding_constraint", "optimization_barrier")
def same(context: Context, eqn: Any, *values: Value) -> list[Value]:
    """What is asked of a buffer that is not built any more is asked of nobody; ordinary arrays keep their equation.

    Experts and positions are still known for what they are where it is asked of them how they are laid out.
    """
    placed = [v.factor.node for v in values if v.is_plain]
    is_index = eqn.primitive.name == "sharding_constraint" and all(
        is_integer(n.dtype) or is_boolean(n.dtype) or depends_on_rank(context.graph, n) for n in placed
    )
    if len(placed) == len(values) and not is_index:
        raise NoRule(f"{eqn.primitive.name} of ordinary arrays")
    return list(values)


@rule("transpose")
def transpose(context: Context, eqn: Any, value: Value) -> Value:
    order = eqn.params["permutation"]
    return value.map_pieces([value.shape[i] for i in order], lambda p: p.replace(axes=tuple(p.axes[i] for i in order)))


@rule("squeeze")
def squeeze(context: Context, eqn: Any, value: Value) -> Value:
    return _without(context, value, {d % len(value.shape) for d in eqn.params["dimensions"]})


def _without(context: Context, value: Value, gone: set[int]) -> Value:
    """The value without some axes of length 1."""
    kept = [i for i in range(len(value.shape)) if i not in gone]
    result = value.map_pieces([value.shape[i] for i in kept], lambda p: _drop_unit_axes(context.graph, p, gone))
    return normalised(context.graph, result)


def _drop_unit_axes(graph: Graph, piece: Piece, gone: set[int]) -> Piece:
    guards = (*piece.guards, *unit_guards(graph, [piece.axes[i] for i in gone]))
    return piece.replace(axes=tuple(a for i, a in enumerate(piece.axes) if i not in gone), guards=guards)


@rule("reshape")
def reshape(context: Context, eqn: Any, value: Value) -> Value:
    shape = eqn.params["new_sizes"]
    if math.prod(shape) == 0:
        raise NoRule("an empty array")
    return value.map_pieces(shape, lambda piece: _reshaped(context.graph, piece, shape))


def _reshaped(graph: Graph, piece: Piece, shape: Sequence[int]) -> Piece:
    solved: dict[Var, Term] = {}
    held = held_factors(graph, [piece])
    pending = [p for a in piece.axes for p in (parts_of(a) if a.size != 1 else ())]
    guards = [*piece.guards, *unit_guards(graph, piece.axes)]
    axes: list[Term] = []
    for size in shape:
        chosen: list[Term] = []
        have = 1
        while have < size:
            part = resolve(pending.pop(0), solved)
            parts = parts_of(part)
            if len(parts) != 1:
                pending = [*parts, *pending]
                continue
            if size % (have * part.size) == 0:
                chosen.append(part)
                have *= part.size
            else:
                pending = [*_split(graph, part, size // have, size % have, solved, held), *pending]
        axes.append(flatten(chosen))
    result = piece.replace(axes=tuple(axes), guards=tuple(guards))
    return result.substitute({v: resolve(v, solved) for v in solved})


def _split(
    graph: Graph, part: Term, high: int, remainder: int, solved: dict[Var, Term], held: frozenset[Factor]
) -> list[Term]:
    """One place as two, `high` places of the slower one."""
    if remainder or high == 0 or part.size % high:
        raise NoRule(f"a reshape cuts through the axis of length {part.size}")
    low = part.size // high
    if isinstance(part, Var):
        pair = [fresh(high), fresh(low)]
        solved[part] = flatten(pair)
        return list(pair)
    if isinstance(part, Const):
        return [Const(part.value // low, high), Const(part.value % low, low)]
    assert isinstance(part, Idx)
    known = unflattened(graph, part, held, low)
    if known is not None:
        return list(known)
    divisor = graph.lit(low, part.node.dtype)
    if np.dtype(part.node.dtype).kind not in "iu":
        raise NoRule("a reshape splits an axis that is indexed by a float")
    quotient = graph.map(prims.div_p, {}, [part.factor, divisor], part.node.dtype)
    rest = graph.map(prims.rem_p, {}, [part.factor, divisor], part.node.dtype)
    return [Idx(quotient.node, quotient.args, high), Idx(rest.node, rest.args, low)]


def read_along(graph: Graph, piece: Piece, axis: int, index: Idx) -> Piece:
    """A piece with what stands on one of its axes read at an index; that axis itself is then whatever it was."""
    place, others = piece.axes[axis], [a for i, a in enumerate(piece.axes) if i != axis]
    parts = parts_of(place)
    pinned = {p for a in others for p in parts_of(a)}
    if not parts or not all(isinstance(p, Var) and p not in pinned for p in parts) or len(set(parts)) != len(parts):
        raise NoRule("a gather along an axis that has structure")
    mapping: dict[Var, Term] = {}
    rest: Term = index
    for k, part in enumerate(parts):
        assert isinstance(part, Var)
        if k == len(parts) - 1:
            mapping[part] = rest
        else:
            high, rest = _split(graph, rest, part.size, rest.size % part.size, {}, frozenset())
            mapping[part] = high
    return piece.substitute(mapping)


@rule("slice")
def slice_rule(context: Context, eqn: Any, value: Value) -> Value:
    starts, stops, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    if strides is not None and any(s != 1 for s in strides):
        raise NoRule("a slice with strides")
    ranges = list(zip(starts, stops, strict=True))
    return _sliced(context, value, ranges)


def _sliced(context: Context, value: Value, ranges: Sequence[tuple[int, int]]) -> Value:
    shape = [b - a for a, b in ranges]
    background = None if value.background is None else _sliced(context, value.background, ranges)
    pieces = [q for p in value.pieces if (q := _sliced_piece(context.graph, p, ranges, value.shape)) is not None]
    return normalised(context.graph, Value(tuple(shape), value.dtype, tuple(pieces), background))


def _sliced_piece(graph: Graph, piece: Piece, ranges: Sequence[tuple[int, int]], shape: Sequence[int]) -> Piece | None:
    for i, (start, stop) in enumerate(ranges):
        if (start, stop) == (0, shape[i]):
            continue
        axis = piece.axes[i]
        replaced: Piece | None
        if isinstance(axis, Idx):
            factor = axis.factor
            if start:
                factor = graph.map(prims.sub_p, {}, [factor, graph.lit(start, axis.node.dtype)], axis.node.dtype)
            factor, guards = peeled(graph, factor, stop - start)
            guarded = piece.replace(guards=(*piece.guards, *guards))
            replaced = _with_axis(guarded, i, Idx(factor.node, factor.args, stop - start))
        elif isinstance(axis, Const):
            inside = start <= axis.value < stop
            replaced = _with_axis(piece, i, Const(axis.value - start, stop - start)) if inside else None
        elif isinstance(axis, Var):
            replaced = _sliced_var(graph, piece, i, axis, start, stop)
        else:
            raise NoRule("a slice of a flattened axis")
        if replaced is None:
            return None
        piece = replaced
    return piece


def _with_axis(piece: Piece, i: int, term: Term) -> Piece:
    return piece.replace(axes=(*piece.axes[:i], term, *piece.axes[i + 1 :]))


def _sliced_var(graph: Graph, piece: Piece, i: int, axis: Var, start: int, stop: int) -> Piece:
    elsewhere = vars_of([*piece.axes[:i], *piece.axes[i + 1 :]])
    if axis in elsewhere or piece.equalities or axis in factor_vars(piece.guards):
        if stop - start == 1:
            return _with_axis(piece, i, UNIT).substitute({axis: Const(start, axis.size)})
        raise NoRule("a slice of an axis that other places depend on")
    if stop - start == 1:
        only = _with_axis(piece, i, UNIT).substitute({axis: Const(start, axis.size)})
        return only.replace(factors=tuple(graph.block(f) for f in only.factors))
    window = fresh(stop - start)
    factors = []
    for factor in piece.factors:
        if axis not in factor_vars([factor]):
            factors.append(factor)
            continue
        if factor.args.count(axis) != 1 or any(axis in vars_of([a]) for a in factor.args if a != axis):
            raise NoRule("a slice of an axis that is part of another place")
        k = factor.args.index(axis)
        factors.append(
            Factor(graph.slice(factor.node, k, start, stop), (*factor.args[:k], window, *factor.args[k + 1 :]))
        )
    return _with_axis(piece.replace(factors=tuple(factors)), i, window)


@rule("pad")
def pad(context: Context, eqn: Any, value: Value, padding: Value) -> Value:
    config = eqn.params["padding_config"]
    if literal_of(padding) is None or literal_of(padding) != 0:
        raise NoRule("padding with something else than zeros")
    if any(low < 0 or high < 0 for low, high, _ in config):
        ranges = [(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(value.shape, config, strict=True)]
        value = _sliced(context, value, ranges)
        config = [(max(low, 0), max(high, 0), interior) for low, high, interior in config]
    return normalised(context.graph, _padded(context.graph, value, config))


def _padded(graph: Graph, value: Value, config: Sequence[tuple[int, int, int]]) -> Value:
    shape = tuple(n + low + high for n, (low, high, _) in zip(value.shape, config, strict=True))
    pieces = []
    for piece in value.pieces:
        for i, (low, high, interior) in enumerate(config):
            if (low, high, interior) == (0, 0, 0):
                continue
            if interior:
                raise NoRule("padding between elements")
            piece = _padded_axis(graph, piece, i, low, high, value.dtype)
        pieces.append(piece)
    return Value(shape, value.dtype, tuple(pieces), value.background and _padded_background(graph, value, config))


def _padded_background(graph: Graph, value: Value, config: Sequence[tuple[int, int, int]]) -> Value:
    """What stands where nothing hits: also on an axis of length 1 it is an array, with zeros around it."""
    assert value.background is not None
    (piece,) = value.background.pieces
    wide = [fresh(1) if a == UNIT and config[i] != (0, 0, 0) else a for i, a in enumerate(piece.axes)]
    padded = _padded(graph, Value(value.shape, value.dtype, (piece.replace(axes=tuple(wide)),)), config)
    (piece,) = padded.pieces
    return plain(padded.shape, piece.axes, materialised(graph, piece, value.dtype))


def _padded_axis(graph: Graph, piece: Piece, i: int, low: int, high: int, dtype: Any) -> Piece:
    axis = piece.axes[i]
    size = axis.size + low + high
    if isinstance(axis, Const):
        return _with_axis(piece, i, Const(axis.value + low, size))
    if isinstance(axis, Idx):
        factor = axis.factor
        if low:
            factor = graph.map(prims.add_p, {}, [factor, graph.lit(low, axis.node.dtype)], axis.node.dtype)
        guarded = piece.replace(guards=piece.guards + tuple(in_range(graph, axis)))
        return _with_axis(guarded, i, Idx(factor.node, factor.args, size))
    if not isinstance(axis, Var) or axis in vars_of([*piece.axes[:i], *piece.axes[i + 1 :]]):
        raise NoRule("padding of an axis that other places depend on")
    if axis not in piece.variables_of_data:
        wide = fresh(size)
        place = Factor(graph.iota(size, np.int32), (wide,))
        tests = [graph.compare(prims.ge_p, place, low)] if low else []
        tests += [graph.compare(prims.lt_p, place, size - high)] if high else []
        return _with_axis(piece.replace(guards=(*piece.guards, *tests)), i, wide)
    data = materialised(graph, piece, dtype)
    if data.args.count(axis) != 1:
        raise NoRule("padding of an axis that a value depends on in several ways")
    k, wide = data.args.index(axis), fresh(size)
    node = graph.pad(data.node, k, low, high)
    return Piece(
        (*piece.axes[:i], wide, *piece.axes[i + 1 :]), (Factor(node, (*data.args[:k], wide, *data.args[k + 1 :])),)
    )


def _constant(context: Context, values: Sequence[Value], shape: Sequence[int]) -> Value | None:
    """What parts become that hold the same number everywhere."""
    first, *rest = (literal_of(v) for v in values)
    if first is None or any(other is None or other != first for other in rest):
        return None
    return of_literal(context.graph, first, shape, values[0].dtype)


@rule("concatenate")
def concatenate(context: Context, eqn: Any, *values: Value) -> Value:
    axis, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    if (constant := _constant(context, values, shape)) is not None:
        return constant
    if any(v.background is not None for v in values) and (joined := _index_of_lists(context, values, axis, shape)):
        return joined
    _check_parts(context, values)
    if all(_has_features(context, v, axis) for v in values):
        return _side_by_side(context, eqn, values)
    pieces: list[Piece] = []
    offset = 0
    sizes = {v.shape[axis] for v in values}
    for k, value in enumerate(values):
        if _is_zero(value):
            pass
        elif len(sizes) == 1:
            pieces += [_with_axis(p, axis, flatten((Const(k, len(values)), p.axes[axis]))) for p in value.pieces]
        else:
            pieces += _shifted(context, value, axis, offset, shape[axis]).pieces
        offset += value.shape[axis]
    return _joined(context, values, shape, pieces)


@rule("stack")
def stack(context: Context, eqn: Any, *values: Value) -> Value:
    axis, shape = eqn.params["axis"], eqn.outvars[0].aval.shape
    if (constant := _constant(context, values, shape)) is not None:
        return constant
    _check_parts(context, values)
    pieces = [
        p.replace(axes=(*p.axes[:axis], Const(k, len(values)), *p.axes[axis:]))
        for k, value in enumerate(values)
        if not _is_zero(value)
        for p in value.pieces
    ]
    return _joined(context, values, shape, pieces)


def _index_of_lists(context: Context, values: Sequence[Value], axis: int, shape: Sequence[int]) -> Value | None:
    """Columns of an index array side by side; those that are lists hold the same number in all other cells."""
    rest = [literal_of(v.background) for v in values if not v.is_plain]
    if axis != len(shape) - 1 or not all(is_integer(v.dtype) and v.shape[axis] == 1 for v in values):
        return None
    if any(r is None or r != rest[0] for r in rest):
        return None
    pieces = [p.replace(axes=(*p.axes[:axis], Const(k, len(values)))) for k, v in enumerate(values) for p in v.pieces]
    background = of_literal(context.graph, rest[0], shape, values[0].dtype)
    return Value(tuple(shape), values[0].dtype, tuple(pieces), background)


def _has_features(context: Context, value: Value, axis: int) -> bool:
    """Whether an axis of rows in slots is one that nothing depends on: their features."""
    return is_floating(value.dtype) and all(
        isinstance(p.axes[axis], Var)
        and p.axes[axis] not in p.points
        and any(is_slot(context.graph, a) for a in p.axes)
        for p in value.pieces
    )


def _side_by_side(context: Context, eqn: Any, values: Sequence[Value]) -> Value:
    """Features put side by side: rows stay whole, and what multiplies them one matmul."""
    axis, aval, offset = eqn.params["dimension"], eqn.outvars[0].aval, 0
    total: Value | None = None
    for value in values:
        wide = _shifted(context, value, axis, offset, aval.shape[axis])
        total = wide if total is None else apply(context, prims.add_p, {}, [total, wide], aval.shape, aval.dtype)
        offset += value.shape[axis]
    assert total is not None
    return normalised(context.graph, total)


def _shifted(context: Context, value: Value, axis: int, offset: int, length: int) -> Value:
    """The value from `offset` on along an axis of `length`, zero before and after it."""
    config = [(0, 0, 0)] * len(value.shape)
    config[axis] = (offset, length - offset - value.shape[axis], 0)
    return _padded(context.graph, value, config)


def _are_positions(context: Context, values: Sequence[Value]) -> bool:
    """Whether ordinary arrays are queue positions, or the columns of an index."""
    if not all(v.is_plain for v in values):
        return False
    columns = all(is_integer(v.dtype) and v.shape[-1:] == (1,) for v in values)
    return columns or any(depends_on_rank(context.graph, v.factor.node) for v in values)


def _check_parts(context: Context, values: Sequence[Value]) -> None:
    """Ordinary arrays stay one array, unless they are queue positions; nothing may have a background."""
    ordinary = all(v.is_plain for v in values) and not _are_positions(context, values) and not _are_offsets(values)
    if ordinary or any(v.background is not None for v in values):
        raise NoRule("arrays put side by side")


def _are_offsets(values: Sequence[Value]) -> bool:
    """Whether a zero stands in front of the places where experts' assignments end."""
    node = values[1].factor.node if len(values) == 2 and values[1].is_plain else None
    return _is_zero(values[0]) and isinstance(node, Slice) and isinstance(node.base, Ends)


def _is_zero(value: Value) -> bool:
    return literal_of(value) is not None and literal_of(value) == 0


def _joined(context: Context, values: Sequence[Value], shape: Sequence[int], pieces: Sequence[Piece]) -> Value:
    result = Value(tuple(shape), values[0].dtype, tuple(pieces))
    # Masked positions are 0 where the mask fails, and that must stay said in their factors: they fill every cell.
    return result if _are_positions(context, values) else normalised(context.graph, result)


def entry(context: Context, value: Value, axis: int, k: int) -> Value:
    """The value at place `k` of an axis."""
    ranges = [(k, k + 1) if i == axis else (0, n) for i, n in enumerate(value.shape)]
    return _without(context, _sliced(context, value, ranges), {axis})


@rule("split")
def split(context: Context, eqn: Any, value: Value) -> list[Value]:
    axis, results, start = eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        ranges = [(start, start + size) if i == axis else (0, n) for i, n in enumerate(value.shape)]
        results.append(_sliced(context, value, ranges))
        start += size
    return results


@rule("iota")
def iota(context: Context, eqn: Any) -> Value:
    shape, dim, dtype = eqn.params["shape"], eqn.params["dimension"], np.dtype(eqn.params["dtype"])
    axes = tuple(fresh_axis(n) for n in shape)
    if shape[dim] == 1:
        return plain(shape, axes, context.graph.lit(0, dtype))
    return plain(shape, axes, Factor(context.graph.iota(shape[dim], dtype), (axes[dim],)))


@rule("unstack")
def unstack(context: Context, eqn: Any, value: Value) -> list[Value]:
    axis = eqn.params["axis"]
    return [entry(context, value, axis, k) for k in range(value.shape[axis])]
