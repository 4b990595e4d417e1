"""Rules that put rows into slots by index and take them out again: `scatter`, `scatter-add`, `gather`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np
from jax.lax import GatherScatterMode

from moe_xla.passes.recover.attachments import forward_only_p
from moe_xla.passes.recover.facts import bound_of, conjuncts, depends_on_rank, is_nonnegative
from moe_xla.passes.recover.grouping import choices_in, matmul_indices
from moe_xla.passes.recover.nodes import (
    Graph,
    Iota,
    Leaf,
    is_floating,
    is_inexact,
    is_integer,
    is_map,
    literal,
    operands_at,
)
from moe_xla.passes.recover.rules.contractions import Contraction, existence
from moe_xla.passes.recover.rules.dots import contract
from moe_xla.passes.recover.rules.indices import (
    aligned,
    cells_of,
    columns_of,
    elsewhere,
    fill_all,
    is_listed,
    other_cells,
    sole_piece,
)
from moe_xla.passes.recover.rules.structure import read_along
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import UNIT, Const, Factor, Idx, Term, Var, flatten, fresh
from moe_xla.passes.recover.values import (
    NoRule,
    Piece,
    Value,
    align,
    cancelled,
    has_slots,
    has_unique_cells,
    literal_of,
    materialised,
    normalised,
    peeled,
    plain,
    read,
    scattered,
    unconverted,
    under_guards,
    unflattened,
)


@rule("scatter", "scatter-add")
def scatter(context: Context, eqn: Any, operand: Value, indices: Value, updates: Value) -> Value:
    """Rows at data-dependent places: those out of range have no place, as scatters drop them."""
    shape = operand.shape
    columns = columns_of(context, indices)
    if operand.background is not None or not _only_pieces_land(context.graph, eqn, shape, columns, updates):
        raise NoRule("a scatter of values that are not zero elsewhere")
    pieces = [_placed(context, eqn, shape, columns, p.renamed()) for p in updates.pieces]
    if updates.is_plain:
        pieces = [_in_order(context.graph, _taken_apart(context.graph, p)) for p in pieces]
    rows = Value(shape, operand.dtype, tuple(pieces))
    empty = literal_of(operand) is not None and literal_of(operand) == 0
    if eqn.primitive.name == "scatter-add":
        return normalised(context.graph, rows if empty else _sum(operand, rows))
    if not empty and operand.is_plain:
        raise NoRule("a scatter into an array that is not zero")
    whole = rows if empty else _sum(operand, rows)
    if not has_unique_cells(context.graph, whole):
        raise NoRule("slots that are not provably unique in a scatter")
    return normalised(context.graph, whole)


def _only_pieces_land(graph: Graph, eqn: Any, shape: Sequence[int], columns: Sequence[Value], updates: Value) -> bool:
    """Whether updates leave what the operand holds, in all cells but those that their pieces hit."""
    numbers, adds = eqn.params["dimension_numbers"], eqn.primitive.name == "scatter-add"
    if not any(is_listed(c) for c in columns):
        return updates.background is None
    if adds and updates.background is None:
        return True
    sizes = [shape[d] for d in numbers.scatter_dims_to_operand_dims]
    places = zip(map(elsewhere, columns), sizes, strict=True)
    lost = any(place is not None and not 0 <= place < size for place, size in places)
    cells = [i for i in range(len(updates.shape)) if i not in numbers.update_window_dims]
    drops = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP
    return lost and drops and fill_all(graph, updates, columns, cells)


def _sum(operand: Value, rows: Value) -> Value:
    return Value(rows.shape, rows.dtype, cancelled(operand.pieces + rows.pieces))


def _placed(context: Context, eqn: Any, shape: Sequence[int], columns: Sequence[Value], update: Piece) -> Piece:
    """A piece of the updates at its places in the operand."""
    numbers, clips = eqn.params["dimension_numbers"], eqn.params["mode"] == GatherScatterMode.CLIP
    graph, window = context.graph, list(numbers.update_window_dims)
    free = [i for i in range(len(update.axes)) if i not in window]
    update, found = aligned(graph, update, free, columns)
    indexed = dict(zip(numbers.scatter_dims_to_operand_dims, found, strict=True))
    batched = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    axes: list[Term] = []
    left = [update.axes[a] for i, a in enumerate(free) if i not in batched.values()]
    guards = [*update.guards, *(g for term in left for g in existence(context, term, update.guards))]
    for d, size in enumerate(shape):
        own = update.axes[window.pop(0)] if d not in (*numbers.inserted_window_dims, *batched) else None
        if d in indexed and own is not None and own.size == size and _is_start(indexed[d], eqn):
            axes.append(own)
        elif d in indexed:
            if own is not None and own.size > 1:
                raise NoRule("a scatter of windows")
            place, conditions = (_nearest(graph, indexed[d], size), []) if clips else peeled(graph, indexed[d], size)
            guards += conditions
            axes.append(_place(graph, place, size, frozenset(guards)))
        elif d in batched:
            axes.append(update.axes[free[batched[d]]])
        else:
            axes.append(UNIT if own is None else own)
        if axes[-1].size != size:
            raise NoRule("a scatter of windows that are not whole")
    return update.replace(axes=tuple(axes), guards=tuple(dict.fromkeys(guards)))


def _taken_apart(graph: Graph, piece: Piece) -> Piece:
    """A piece with a matrix for each assignment as the outer product that it is of."""
    indices, (factor, *others) = [a for a in piece.axes if isinstance(a, Idx)], piece.factors
    dense = [a for a in piece.axes if isinstance(a, Var) and a not in piece.points]
    if graph.reader is None or others or len(indices) != 1 or len(dense) < 2:
        return piece
    factors = graph.reader.product(factor, indices[0])
    return piece if factors is None else piece.replace(factors=factors)


def _in_order(graph: Graph, piece: Piece) -> Piece:
    """A piece whose places are a permutation, over those places: what stands there is read by the inverse."""
    for i, term in enumerate(piece.axes):
        index = unconverted(term.factor) if isinstance(term, Idx) else None
        if index is None or index.node.inverse is None or index.node.shape != (term.size,):
            continue
        place, order = fresh(term.size), index.node.inverse[0]
        lone = piece.replace(axes=(*piece.axes[:i], index.args[0], *piece.axes[i + 1 :]))
        try:
            moved = read_along(graph, lone, i, Idx(order, (place,), term.size))
        except NoRule:
            continue
        return moved.replace(axes=(*moved.axes[:i], place, *moved.axes[i + 1 :]))
    return piece


@rule("gather")
def gather(context: Context, eqn: Any, operand: Value, indices: Value) -> Value:
    graph = context.graph
    try:
        read = _along_axis(context, eqn, operand, indices)
    except NoRule:
        read = None
    is_index = operand.is_plain and (not is_floating(operand.dtype) or depends_on_rank(graph, operand.factor.node))
    if read is not None and (is_index or not operand.is_plain):
        return read
    if not operand.is_plain or not indices.is_plain:
        return _rows_at(context, eqn, operand, indices)
    if is_index:
        return _position_at(context, eqn, operand, indices)
    chosen = _rows_at(context, eqn, operand, indices)
    if not chosen.is_plain or not _is_work_of_experts(graph, chosen.factor):
        raise NoRule("a gather of something else than the work or the matrices of experts")
    return chosen


def _along_axis(context: Context, eqn: Any, operand: Value, indices: Value) -> Value:
    """What stands along one axis, in the order that an index gives: the axis is read at the index."""
    numbers, shape, sizes = eqn.params["dimension_numbers"], operand.shape, eqn.params["slice_sizes"]
    if has_slots(context.graph, operand) or len(numbers.start_index_map) != 1:
        raise NoRule("a gather along several axes")
    (axis,) = numbers.start_index_map
    whole = [d for d in range(len(shape)) if d != axis and d not in numbers.operand_batching_dims]
    if numbers.collapsed_slice_dims != (axis,) or any(sizes[d] != shape[d] for d in whole):
        raise NoRule("a gather of slices")
    column = sole_piece(columns_of(context, indices)[0])
    out = eqn.outvars[0].aval.shape

    def change(piece: Piece) -> Piece:
        return _read_along(context.graph, numbers, piece.renamed(), column.renamed(), shape[axis], len(out))

    result = operand.map_pieces(out, change)
    return normalised(context.graph, result)


def _read_along(graph: Graph, numbers: Any, piece: Piece, column: Piece, size: int, rank: int) -> Piece:
    (axis,) = numbers.start_index_map
    batched = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    solved, rest = align(graph, [piece, column], [[(0, a), (1, b)] for a, b in batched])
    piece, column = piece.substitute(solved), column.substitute(solved)
    index = unconverted(materialised(graph, column, np.dtype(np.int32)))
    bound = bound_of(graph, index)
    if rest or bound is None or bound > size:
        raise NoRule("a gather whose index is not proved in range")
    taken = read_along(graph, piece, axis, Idx(index.node, index.args, size))
    kept, free = iter(a for i, a in enumerate(taken.axes) if i != axis and i not in dict(batched)), iter(column.axes)
    axes = [next(kept) if i in numbers.offset_dims else next(free) for i in range(rank)]
    return taken.replace(axes=tuple(axes))


def _is_work_of_experts(graph: Graph, factor: Factor) -> bool:
    """Whether a factor is the work of chosen experts or a matrix of theirs, or an array read where it stands."""
    if matmul_indices(graph, factor.node) or all(isinstance(a, Var) for a in factor.args):
        return True
    free = [a for a in factor.args if isinstance(a, Var)]
    return bool(choices_in(graph, factor)) and isinstance(factor.node, Leaf) and len(free) > 1


def _position_at(context: Context, eqn: Any, operand: Value, indices: Value) -> Value:
    """`take_along_axis` of a queue count: one index, the other axes batched."""
    if not indices.is_plain or not is_integer(indices.dtype):
        raise NoRule("a gather from a structured value")
    numbers = eqn.params["dimension_numbers"]
    rank = len(operand.shape)
    batched = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if numbers.offset_dims or len(numbers.start_index_map) != 1 or tuple(eqn.params["slice_sizes"]) != (1,) * rank:
        raise NoRule("a gather of slices")
    axis = numbers.start_index_map[0]
    if set(batched) | {axis} != set(range(rank)) or numbers.collapsed_slice_dims != (axis,):
        raise NoRule("a gather with several indices")
    piece = indices.pieces[0].renamed()
    index = piece.factors[0]
    bound = bound_of(context.graph, index)
    if bound is None or bound > operand.shape[axis]:
        raise NoRule("a gather whose index is not proved in range")
    places: list[Term] = []
    for d in range(rank):
        if d == axis:
            places.append(Idx(index.node, index.args, operand.shape[axis]))
        else:
            places.append(piece.axes[batched[d]])
    data = read(context.graph, operand, places)
    return plain(indices.shape[:-1], piece.axes[:-1], data)


def _rows_at(context: Context, eqn: Any, operand: Value, indices: Value) -> Value:
    """What stands in the slots that indices name: a contraction with ones at these places."""
    columns = _indexed(context, eqn, operand, indices)
    batch, found = indices.shape[:-1], list(columns.values())

    def taken(cells: Sequence[tuple[Piece, Sequence[Factor]]]) -> Value:
        rows = _taken(context, eqn, operand, batch, list(columns), cells)
        inside = _inside(context.graph, eqn, operand, batch, list(columns), cells)
        return _without_cotangents(context.graph, eqn, rows, inside) if inside else rows

    rows, other = taken(cells_of(context.graph, batch, found)), other_cells(context.graph, batch, found)
    return rows if other is None else _over(context.graph, rows, taken([other]))


def _inside(
    graph: Graph,
    eqn: Any,
    operand: Value,
    batch: Sequence[int],
    indexed: Sequence[int],
    cells: Sequence[tuple[Piece, Sequence[Factor]]],
) -> list[Value]:
    """Where cotangents of what a gather reads reach its operand, as tests of the index; none where all of them do."""
    if eqn.params["mode"] != GatherScatterMode.PROMISE_IN_BOUNDS or not is_inexact(operand.dtype):
        return []
    tests = []
    for base, found in cells:
        sizes = [operand.shape[d] for d in indexed]
        moved = [t for index, size in zip(found, sizes, strict=True) for t in _tests_of_range(graph, base, index, size)]
        values = [Value(tuple(batch), np.dtype(bool), (base.replace(factors=(test,)),)) for test in moved]
        if not all(v.is_plain for v in values):
            raise NoRule("an entry of a list that is not proved in range")
        tests += values
    return tests


def _tests_of_range(graph: Graph, base: Piece, index: Factor, size: int) -> list[Factor]:
    """Whether an index lies on its axis, in each case in which that is not known."""
    tests = []
    for option, conditions in _options(graph, index, size):
        held = frozenset((*base.guards, *conditions))
        inside = under_guards(graph, option, held)
        place, more = peeled(graph, inside, size)
        if isinstance(_place(graph, place, size, held | set(more)), Idx):
            within = graph.logical_and([graph.lit(True, bool), *_range(graph, inside, size)])
            elsewhere = graph.logical_not(graph.logical_and([graph.lit(True, bool), *conditions]))
            tests.append(graph.map(prims.or_p, {}, [elsewhere, within], np.dtype(bool)))
    return [t for t in tests if literal(t) is None or not literal(t)]


def _range(graph: Graph, index: Factor, size: int) -> list[Factor]:
    bound = bound_of(graph, index)
    low = [] if is_nonnegative(graph, index) else [graph.compare(prims.ge_p, index, 0)]
    return low if bound is not None and bound <= size else [*low, graph.compare(prims.lt_p, index, size)]


def _without_cotangents(graph: Graph, eqn: Any, rows: Value, inside: Sequence[Value]) -> Value:
    """Rows of which those have no cotangents that stand for places out of range, as jax defines it."""
    cells = [i for i in range(len(rows.shape)) if i not in eqn.params["dimension_numbers"].offset_dims]

    def change(piece: Piece) -> Piece:
        held = graph.logical_and([read(graph, test, [piece.axes[i] for i in cells]) for test in inside])
        factors = (graph.select(held, f, graph.map(forward_only_p, {}, [f], f.node.dtype)) for f in piece.factors)
        return piece.replace(factors=tuple(factors))

    return rows.map_pieces(rows.shape, change)


def _indexed(context: Context, eqn: Any, operand: Value, indices: Value) -> dict[int, Value]:
    """The columns of an index array by the axes of which they name one place; all of every other axis is read."""
    numbers, sizes, graph = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], context.graph
    columns = dict(zip(numbers.start_index_map, columns_of(context, indices), strict=True))
    factors = [f for c in columns.values() for p in c.pieces for f in p.factors]
    if has_slots(graph, operand) and not any(depends_on_rank(graph, f.node) for f in factors):
        raise NoRule("an index that is no queue position")
    for d in [d for d in columns if d not in numbers.collapsed_slice_dims and sizes[d] == operand.shape[d]]:
        start = columns.pop(d)
        if not start.is_plain or not _is_start(start.factor, eqn):
            raise NoRule("a gather of slices")
    whole = [d for d in range(len(operand.shape)) if d not in columns and d not in numbers.operand_batching_dims]
    if any(sizes[d] != 1 for d in columns) or any(sizes[d] != operand.shape[d] for d in whole):
        raise NoRule("a gather of slices")
    return columns


def _taken(
    context: Context,
    eqn: Any,
    operand: Value,
    batch: Sequence[int],
    indexed: Sequence[int],
    cells: Sequence[tuple[Piece, Sequence[Factor]]],
) -> Value:
    """What stands at the places that an index names in some of its cells, zero in the others."""
    numbers, aval, dtype = eqn.params["dimension_numbers"], eqn.outvars[0].aval, operand.dtype
    batched = numbers.operand_batching_dims
    cases: list[Piece] = []
    for base, found in cells:
        here = [base]
        for d, index in zip(indexed, found, strict=True):
            here = [c for case in here for c in _with_place(context.graph, case, eqn, index, operand.shape[d])]
        cases += here
    ones = Value((*batch, *(operand.shape[d] for d in indexed)), dtype, tuple(cases))
    joined = [(d, len(batch) + k) for k, d in enumerate(indexed)]
    joined += zip(batched, numbers.start_indices_batching_dims, strict=True)
    kept = [d for d in range(len(operand.shape)) if d not in numbers.collapsed_slice_dims and d not in batched]
    rows, others = iter(kept), iter(range(len(batch)))
    axes = [
        ("left", next(rows)) if i in numbers.offset_dims else ("right", next(others)) for i in range(len(aval.shape))
    ]
    out = [a for a in axes if a[0] == "right" or a[1] not in indexed]
    shape = [n for n, a in zip(aval.shape, axes, strict=True) if a in out]
    result = contract(context, operand, ones, Contraction(joined, out, shape, dtype))
    return result.map_pieces(aval.shape, lambda p: _with_units(p, [a in out for a in axes]))


def _over(graph: Graph, rows: Value, value: Value) -> Value:
    """Rows in the entries of lists, over what is read in all other cells."""
    background = value if value.is_plain else scattered(graph, value)
    is_zero = literal_of(background) is not None and literal_of(background) == 0
    if rows.background is not None or not has_unique_cells(graph, rows):
        raise NoRule("rows of lists that are not provably unique")
    return rows if is_zero else Value(rows.shape, rows.dtype, rows.pieces, background)


def _is_start(index: Factor, eqn: Any) -> bool:
    """Whether whole slices begin at an index: it is zero, or the equation moves it there."""
    value = literal(index)
    return eqn.params["mode"] == GatherScatterMode.CLIP or (value is not None and value == 0)


def _with_units(piece: Piece, kept: Sequence[bool]) -> Piece:
    """The piece with axes of length 1 where none is kept."""
    axes = iter(piece.axes)
    return piece.replace(axes=tuple(next(axes) if k else UNIT for k in kept))


def _options(graph: Graph, index: Factor, size: int) -> list[tuple[Factor, list[Factor]]]:
    """An index, or the two that a condition chooses between, each with when it is that one."""
    choice = unconverted(index)
    if is_map(choice, "select_n") and len(operands_at(choice)) == 3:
        condition, if_false, if_true = operands_at(choice)
        fixed = [literal(i) for i in (if_false, if_true)]
        if any(value is not None and 0 <= value < size for value in fixed):
            return [(if_false, [graph.logical_not(condition)]), (if_true, conjuncts(condition))]
    return [(index, [])]


def _with_place(graph: Graph, case: Piece, eqn: Any, index: Factor, size: int) -> list[Piece]:
    """A case with one more place: where a condition chooses between two, two cases."""
    cases = []
    for option, conditions in _options(graph, index, size):
        held = frozenset((*case.guards, *conditions))
        inside = under_guards(graph, option, held)
        value = literal(inside)
        place, more = peeled(graph, inside, size)
        term = _place(graph, place, size, held | set(more))
        if value is not None and 0 <= value < size:
            term = Const(int(value), size)
        elif isinstance(term, Idx):
            place, more = peeled(graph, _in_mode(graph, eqn, inside, size), size)
            term = Idx(place.node, place.args, size)
        conditions = [*conditions, *more]
        cases.append(case.replace(axes=(*case.axes, term), guards=tuple(dict.fromkeys((*case.guards, *conditions)))))
    return cases


def _place(graph: Graph, index: Factor, size: int, held: frozenset[Factor]) -> Term:
    """The place of an index; of one that is an expert and a position in one number, both."""
    place = Idx(index.node, index.args, size)
    if isinstance(index.node, Iota) and index.args[0].size == size:
        return index.args[0]
    pair = unflattened(graph, place, held)
    return place if pair is None else flatten(pair)


def _in_mode(graph: Graph, eqn: Any, index: Factor, size: int) -> Factor:
    """The place that a gather reads for an index: out of range is no place, or the nearest one."""
    bound = bound_of(graph, index)
    mode, dtype = eqn.params["mode"], eqn.outvars[0].aval.dtype
    if bound is not None and bound <= size:
        return index
    if mode == GatherScatterMode.FILL_OR_DROP:
        if eqn.params["fill_value"] != 0:
            raise NoRule("a gather that is not zero out of range")
        return index
    if mode == GatherScatterMode.PROMISE_IN_BOUNDS and np.dtype(dtype).kind == "u":
        return index  # the numbers by which the gradient of `.at[].set` finds out whose row was written last
    return _nearest(graph, index, size)


def _nearest(graph: Graph, index: Factor, size: int) -> Factor:
    """The place on an axis that is nearest to an index."""
    bound, dtype = bound_of(graph, index), index.node.dtype
    if bound is not None and bound <= size:
        return index
    if not is_nonnegative(graph, index):
        index = graph.map(prims.max_p, {}, [index, graph.lit(0, dtype)], dtype)
    return graph.map(prims.min_p, {}, [index, graph.lit(size - 1, dtype)], dtype)
