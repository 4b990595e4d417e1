"""What a value means, computed the slow way: every variable of every piece runs over its whole range.

This is the definition in `values.py` turned into numpy, independent of the lowering; checked mode and the tests of
rules compare it with plain evaluation of the program.

In: a value and a function that gives the arrays of the program's wires.  Out: a numpy array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from moe_xla.passes.recover.nodes import Ein, Iota, Leaf, Lit, Map, Node, Occupant, Pad, Rank, Slice, is_boolean
from moe_xla.passes.recover.terms import Const, Factor, Flat, Idx, Term, Var, has_idx
from moe_xla.passes.recover.values import Piece, Value

LARGEST_GRID = 20_000_000


class TooLarge(Exception):
    """A value ranges over more points than are worth running through."""


class Reference:
    """Evaluates values and nodes; `array` gives the array of a wire."""

    def __init__(self, array: Callable[[Any], Any]):
        self._array = array
        self._nodes: dict[Node, np.ndarray] = {}

    def value(self, value: Value) -> np.ndarray:
        """The array that a value stands for."""
        kind = np.int64 if is_boolean(value.dtype) else np.asarray(jnp.zeros((), value.dtype)).dtype
        total = np.zeros(value.shape, kind)
        hit = np.zeros(value.shape, bool)
        for piece in value.pieces:
            cells, data, held = self._cells(piece, value.shape)
            np.add.at(total.reshape(-1), cells, data.astype(kind))
            np.logical_or.at(hit.reshape(-1), cells, held)
        if value.background is not None:
            total = np.where(hit, total, self.value(value.background).astype(kind))
        return (total != 0) if is_boolean(value.dtype) else total.astype(value.dtype)

    def _cells(self, piece: Piece, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Point by point: the flat cell that a piece hits, what it adds there, and whether its guards hold."""
        variables = piece.variables
        sizes = [v.size for v in variables]
        if math.prod(sizes) > LARGEST_GRID:
            raise TooLarge
        data: Any = np.ones(sizes) * 1
        for factor in piece.factors:
            data = data * self.read(factor, variables)
        data = np.broadcast_to(data * piece.coef, sizes)
        mask = self._inside(piece)
        held = self._held(piece, variables)[mask]
        places = tuple(np.broadcast_to(self.place(a, variables), sizes)[mask] for a in piece.axes)
        cells = np.ravel_multi_index(places, tuple(shape)) if shape else np.zeros(held.shape, np.int64)
        return cells, np.where(held, data[mask], 0), held

    def _inside(self, piece: Piece) -> np.ndarray:
        """The points of a piece whose places all lie on their axes."""
        inside = np.ones([v.size for v in piece.variables], bool)
        for axis in piece.axes:
            inside = inside & self.in_range(axis, piece.variables)
        return inside

    def _held(self, piece: Piece, variables: Sequence[Var]) -> np.ndarray:
        held = np.ones([v.size for v in variables], bool)
        for guard in piece.guards:
            held = held & self.read(guard, variables).astype(bool)
        for a, b in piece.equalities:
            held = held & (self.place(a, variables) == self.place(b, variables))
        return held

    def place(self, term: Term, variables: Sequence[Var]) -> np.ndarray:
        """A term's place over a grid of variables; data-dependent places may be out of range."""
        if isinstance(term, Const):
            return np.full([1] * len(variables), term.value)
        if isinstance(term, Var):
            shape = [term.size if v == term else 1 for v in variables]
            return np.arange(term.size).reshape(shape)
        if isinstance(term, Idx):
            return self.read(term.factor, variables).astype(np.int64)
        total: Any = 0
        for part in term.parts:
            total = total * part.size + self.place(part, variables)
        return np.asarray(total)

    def in_range(self, term: Term, variables: Sequence[Var]) -> np.ndarray:
        if isinstance(term, Flat):
            inside: Any = True
            for part in term.parts:
                inside = inside & self.in_range(part, variables)
            return np.asarray(inside)
        if not has_idx(term):
            return np.ones([1] * len(variables), bool)
        place = self.place(term, variables)
        return (place >= 0) & (place < term.size)

    def read(self, factor: Factor, variables: Sequence[Var]) -> np.ndarray:
        """A factor over a grid of variables; places out of range read the nearest one (guards exclude them)."""
        data = self.node(factor.node)
        if not factor.args:
            return data.reshape([1] * len(variables))
        places = [np.clip(self.place(a, variables), 0, n - 1) for a, n in zip(factor.args, data.shape, strict=True)]
        return data[tuple(np.broadcast_arrays(*places))]

    def node(self, node: Node) -> np.ndarray:
        if node not in self._nodes:
            self._nodes[node] = self._node(node)
        return self._nodes[node]

    def _node(self, node: Node) -> np.ndarray:
        if isinstance(node, Lit):
            return np.asarray(node.value)
        if isinstance(node, Leaf):
            return np.asarray(self._array(node.wire))
        if isinstance(node, Iota):
            return np.arange(node.shape[0], dtype=node.dtype)
        if isinstance(node, Map):
            operands = [np.broadcast_to(self.read(op, node.variables), node.shape) for op in node.operands]
            return np.asarray(node.prim.bind(*[jnp.asarray(x) for x in operands], **node.params))
        if isinstance(node, (Slice, Pad)):
            return self._window(node)
        if isinstance(node, Rank):
            return self._rank(node)
        if isinstance(node, Occupant):
            return self._occupant(node)
        assert isinstance(node, Ein)
        piece = Piece(node.out, node.factors, node.coef, node.equalities, node.guards)
        if node.reducer == "max":
            return self._maximum(node, piece)
        return self.value(Value(node.shape, node.dtype, (piece,)))

    def _maximum(self, node: Ein, piece: Piece) -> np.ndarray:
        cells, data, held = self._cells(piece, node.shape)
        largest = np.full(node.shape, node.initial, node.dtype)
        np.maximum.at(largest.reshape(-1), cells[held], data[held].astype(node.dtype))
        return largest

    def _window(self, node: Slice | Pad) -> np.ndarray:
        base = self.node(node.base)
        if isinstance(node, Slice):
            return base.take(range(node.start, node.stop), axis=node.axis)
        return np.pad(base, [(node.low, node.high) if i == node.axis else (0, 0) for i in range(base.ndim)])

    def _rank(self, node: Rank) -> np.ndarray:
        variables = node.batch + node.order + node.many
        index = np.broadcast_to(self.read(node.index.factor, variables), [v.size for v in variables])
        mask = index[..., None] == np.arange(node.index.size)
        for guard in node.guards:
            mask = mask & self.read(guard, variables).astype(bool)[..., None]
        counts = mask.astype(np.int64).sum(axis=tuple(range(len(node.batch) + len(node.order), len(variables))))
        flat = counts.reshape(*(v.size for v in node.batch), -1, node.index.size)
        return flat.cumsum(axis=len(node.batch)).reshape(node.shape).astype(node.dtype)

    def _occupant(self, node: Occupant) -> np.ndarray:
        assert node.queue is not None
        rank, places = node.queue.rank, np.zeros(node.shape, node.dtype)
        variables = rank.batch + rank.order
        counts = self.read(Factor(rank, (*variables, rank.index)), variables)
        expert = np.broadcast_to(self.read(rank.index.factor, variables), counts.shape)
        for point in np.ndindex(*counts.shape):
            held = all(np.broadcast_to(self.read(g, variables), counts.shape)[point] for g in rank.guards)
            position = int(counts[point]) - 1
            if held and 0 <= expert[point] < rank.index.size and position < node.shape[-1]:
                places[(*point[: len(rank.batch)], expert[point], position)] = point[len(rank.batch) + node.axis]
        return places
