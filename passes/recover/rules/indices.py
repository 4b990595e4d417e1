"""What an index array holds: one array for each axis that is indexed, known in all cells or in the entries of lists.

In: the index array of a gather or scatter.  Out: its columns, aligned with the cells that they are wanted in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_xla.passes.recover.nodes import Graph, is_integer
from moe_xla.passes.recover.rules.structure import entry
from moe_xla.passes.recover.rules.table import Context
from moe_xla.passes.recover.terms import Factor, fresh_axis
from moe_xla.passes.recover.values import (
    Contradiction,
    NoRule,
    Piece,
    Value,
    align,
    at_places_of,
    fills_all,
    has_unique_cells,
    literal_of,
    materialised,
    of_literal,
    only_renames,
    sampled,
)

_INDEX = np.dtype(np.int32)


def columns_of(context: Context, indices: Value) -> list[Value]:
    """The components of an index array, each over the array's other axes."""
    if not is_integer(indices.dtype):
        raise NoRule("an index array that is not known")
    columns = [entry(context, indices, len(indices.shape) - 1, k) for k in range(indices.shape[-1])]
    if not all(c.is_plain or fills_all(c) or has_unique_cells(context.graph, c) for c in columns):
        raise NoRule("an index array that is a sum")
    return columns


def sole_piece(column: Value) -> Piece:
    """The only piece of a column that is known in all cells."""
    if len(column.pieces) != 1 or column.background is not None:
        raise NoRule("an index array put together from several parts")
    return column.pieces[0].renamed()


def is_listed(column: Value) -> bool:
    """Whether a column is known in some cells, and the same number in all others."""
    return not column.is_plain and not fills_all(column) and literal_of(column.background) is not None


def aligned(graph: Graph, base: Piece, axes: Sequence[int], columns: Sequence[Value]) -> tuple[Piece, list[Factor]]:
    """`base`, and the index that each column holds there; `axes` are those of `base` that the columns are over."""
    pieces = [_entries_at(graph, base, axes, c) if is_listed(c) else sole_piece(c) for c in columns]
    groups = [[(0, axis), *((1 + k, b) for k in range(len(pieces)))] for b, axis in enumerate(axes)]
    solved, rest = align(graph, [base, *pieces], groups)
    base, pieces = base.substitute(solved), [p.substitute(solved) for p in pieces]
    if rest or any(not _is_known_in(base, p) for p, c in zip(pieces, columns, strict=True) if is_listed(c)):
        raise NoRule("rows and indices that are not provably of the same assignments")
    data = (p.replace(guards=()) if is_listed(c) else p for p, c in zip(pieces, columns, strict=True))
    return base, [sampled(graph, materialised(graph, p, _INDEX)) for p in data]


def _entries_at(graph: Graph, base: Piece, axes: Sequence[int], column: Value) -> Piece:
    """The entries of lists that stand where `base` stands."""
    for piece in column.pieces:
        moved = piece.renamed()
        try:
            solved, rest = align(graph, [base, moved], [[(0, axis), (1, b)] for b, axis in enumerate(axes)])
        except Contradiction:
            continue
        if not rest and only_renames(base, solved) and only_renames(moved, solved):
            return moved
    raise NoRule("rows and lists that are not provably of the same assignments")


def _is_known_in(base: Piece, entries: Piece) -> bool:
    """Whether entries of lists are there wherever `base` is."""
    return set(entries.variables) <= set(base.variables) and set(entries.guards) <= set(base.guards)


def cells_of(graph: Graph, shape: Sequence[int], columns: Sequence[Value]) -> list[tuple[Piece, list[Factor]]]:
    """The cells of an index array in which it is known, as pieces of ones, with the index of each column there."""
    listed = [c for c in columns if is_listed(c)]
    if not listed:
        return [aligned(graph, Piece(tuple(fresh_axis(n) for n in shape)), range(len(shape)), columns)]
    bases = [Piece(p.axes, guards=p.guards) for p in listed[0].pieces]
    if not all(_are_known_in(graph, c, bases) for c in listed[1:]):
        raise NoRule("lists of different assignments")
    return [aligned(graph, base, range(len(shape)), columns) for base in bases]


def _are_known_in(graph: Graph, column: Value, bases: Sequence[Piece]) -> bool:
    """Whether a column of lists is known in exactly the cells of `bases`."""
    found = [next((m for p in column.pieces if (m := at_places_of(graph, b, p)) is not None), None) for b in bases]
    same = all(m is not None and set(m.guards) == set(b.guards) for m, b in zip(found, bases, strict=True))
    return same and len(column.pieces) == len(bases)


def other_cells(graph: Graph, shape: Sequence[int], columns: Sequence[Value]) -> tuple[Piece, list[Factor]] | None:
    """The same as `cells_of` for the cells in which an index array is not known, as if they were all; None if none."""
    if not any(is_listed(c) for c in columns):
        return None
    known = [of_literal(graph, elsewhere(c), shape, c.dtype) if is_listed(c) else c for c in columns]
    return aligned(graph, Piece(tuple(fresh_axis(n) for n in shape)), range(len(shape)), known)


def elsewhere(column: Value) -> Any:
    """The number in the cells in which a column is not known; None for a column that is known in all cells."""
    return literal_of(column.background) if is_listed(column) else None


def fill_all(graph: Graph, rows: Value, columns: Sequence[Value], axes: Sequence[int]) -> bool:
    """Whether rows stand in all cells in which the lists of an index array are known; `axes` are those of the cells."""
    cells = [Piece(tuple(row.axes[a] for a in axes), guards=row.guards) for row in rows.pieces]

    def is_filled(piece: Piece) -> bool:
        found = [m for cell in cells if (m := at_places_of(graph, piece, cell)) is not None]
        return any(set(m.guards) <= set(piece.guards) for m in found)

    return all(is_filled(p.replace(factors=())) for c in columns if is_listed(c) for p in c.pieces)
