"""The rule for `dot_general`, and how contractions act on the cells and on the backgrounds of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_xla.passes.recover.nodes import Graph
from moe_xla.passes.recover.rules.contractions import AxisPairs, Contraction, product
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import UNIT, Var, has_idx, parts_of, substitute_factor, vars_of
from moe_xla.passes.recover.values import (
    Contradiction,
    NoRule,
    Piece,
    Value,
    additive,
    align,
    at_places_of,
    has_unique_cells,
    literal_of,
    materialised,
    normalised,
    only_renames,
    read,
)


@rule("dot_general")
def dot_general(context: Context, eqn: Any, left: Value, right: Value) -> Value:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    dtype = eqn.outvars[0].aval.dtype
    free_l = [i for i in range(len(left.shape)) if i not in (*contract_l, *batch_l)]
    free_r = [i for i in range(len(right.shape)) if i not in (*contract_r, *batch_r)]
    joined = [*zip(batch_l, batch_r, strict=True), *zip(contract_l, contract_r, strict=True)]
    out = [("left", i) for i in (*batch_l, *free_l)] + [("right", i) for i in free_r]
    return contract(context, left, right, Contraction(joined, out, eqn.outvars[0].aval.shape, dtype))


def contract(context: Context, left: Value, right: Value, contraction: Contraction) -> Value:
    """Σ over joined axes that are not in `out` of left · right."""
    joined, out = contraction.joined, contraction.out
    if left.background is None and right.background is None:
        return product(context, left, right, contraction)
    ways = [_dot_covered]
    contract_l = [a for a, _ in joined if ("left", a) not in out]
    contract_r = [b for a, b in joined if ("left", a) not in out and ("right", b) not in out]
    for value, other, axes in ((left, right, contract_l), (right, left, contract_r)):
        if value.background is not None and other.is_plain and _is_cellwise(context.graph, value, axes):
            ways.insert(0, _dot_with_background)
    if left.background is not None and right.background is not None:
        ways = [_dot_of_cells]
    for way in ways:
        try:
            return way(context, left, right, contraction)
        except NoRule:
            continue
    sums = additive(context.graph, left), additive(context.graph, right)
    return product(context, *sums, contraction)


def _is_cellwise(graph: Graph, value: Value, contracted_axes: Sequence[int]) -> bool:
    """Whether a contraction stays within the cells: pieces cover the contracted axes, whatever else they depend on."""
    return has_unique_cells(graph, value) and all(_covers(p, contracted_axes) for p in value.pieces)


def _covers(piece: Piece, axes: Sequence[int]) -> bool:
    """Whether a piece covers whole axes: no place on them is fixed, data-dependent, conditional or bound to another."""
    parts = [p for i in axes for p in parts_of(piece.axes[i]) if p != UNIT]
    others = [a for i, a in enumerate(piece.axes) if i not in axes]
    elsewhere = vars_of([*others, *(a for g in piece.guards for a in g.args)])
    return len(set(parts)) == len(parts) and all(isinstance(p, Var) and p not in elsewhere for p in parts)


def _dot_with_background(context: Context, left: Value, right: Value, contraction: Contraction) -> Value:
    structured, first = (left, True) if left.background is not None else (right, False)
    other = right if first else left

    def dot(value: Value) -> Value:
        return product(context, *((value, other) if first else (other, value)), contraction)

    rows = dot(Value(structured.shape, structured.dtype, structured.pieces))
    if any(p.hidden for p in rows.pieces):
        raise NoRule("rows that meet every token")
    assert structured.background is not None
    background = dot(structured.background)
    if not background.is_plain:
        raise NoRule("a background that does not stay an array")
    zero = literal_of(background) is not None and literal_of(background) == 0
    return Value(rows.shape, contraction.dtype, rows.pieces, None if zero else background)


def _dot_of_cells(context: Context, left: Value, right: Value, contraction: Contraction) -> Value:
    """Cells with cells and background with background, where the pieces of both stand at the same batch places."""
    joined, out, shape, dtype = contraction
    batch = [(a, b) for a, b in joined if ("left", a) in out]
    sides = (left, [a for a, _ in batch]), (right, [b for _, b in batch])
    for value, axes in sides:
        others = [i for i in range(len(value.shape)) if i not in axes]
        if value.background is None or not value.background.is_plain or not _is_cellwise(context.graph, value, others):
            raise NoRule("two operands with a background")
    pieces: list[Piece] = []
    for p, q in _same_cells(context.graph, *sides[0], *sides[1]):
        one, other = Value(left.shape, left.dtype, (p,)), Value(right.shape, right.dtype, (q,))
        pieces += product(context, one, other, contraction).pieces
    assert left.background is not None and right.background is not None
    background = product(context, left.background, right.background, contraction)
    if not background.is_plain or any(p.hidden or p.equalities for p in pieces):
        raise NoRule("a background that does not stay an array")
    return Value(tuple(shape), dtype, tuple(pieces), background)


def _same_cells(
    graph: Graph, left: Value, left_axes: Sequence[int], right: Value, right_axes: Sequence[int]
) -> list[tuple[Piece, Piece]]:
    """The pieces of two values, each with the one of the other that stands at the same places of the given axes."""
    pairs, rest = [], list(right.pieces)
    for p in left.pieces:
        partner = next((q for q in rest if _are_at_same_places(graph, p, left_axes, q, right_axes)), None)
        if partner is None:
            break
        pairs.append((p, partner))
        rest.remove(partner)
    if rest or len(pairs) < len(left.pieces):
        raise NoRule("two operands with a background on different cells")
    return pairs


def _are_at_same_places(graph: Graph, p: Piece, p_axes: Sequence[int], q: Piece, q_axes: Sequence[int]) -> bool:
    one = Piece(tuple(p.axes[i] for i in p_axes), guards=p.guards)
    other = Piece(tuple(q.axes[i] for i in q_axes), guards=q.guards)
    moved = at_places_of(graph, one, other)
    return moved is not None and set(moved.guards) == set(one.guards)


def _dot_covered(context: Context, left: Value, right: Value, contraction: Contraction) -> Value:
    """A contraction over cells of a value with a background: only the cells that the other operand hits are read."""
    joined, _, shape, dtype = contraction
    if (left.background is None) == (right.background is None):
        raise NoRule("two operands with a background")
    backed_left = left.background is not None
    backed, sparse = (left, right) if backed_left else (right, left)
    pairs = joined if backed_left else [(b, a) for a, b in joined]
    pieces: list[Piece] = []
    for q in sparse.pieces:
        source = _covering(context, backed, q, pairs)
        lone = Value(sparse.shape, sparse.dtype, (q,))
        operands = (source, lone) if backed_left else (lone, source)
        pieces += product(context, *operands, contraction).pieces
    return normalised(context.graph, Value(tuple(shape), dtype, tuple(pieces)))


def _covering(context: Context, backed: Value, q: Piece, pairs: AxisPairs) -> Value:
    """What `backed` holds on the cells of `q`: one of its pieces, its background where that one's conditions fail."""
    graph = context.graph
    assert backed.background is not None
    if not has_unique_cells(graph, backed):
        raise NoRule("slots that are not provably unique")
    partner = dict(pairs)
    for piece in backed.pieces:
        moved = piece.renamed()
        try:
            solved, rest = align(graph, [q, moved], [[(0, b), (1, a)] for a, b in pairs])
        except Contradiction:
            continue
        if not only_renames(q, solved):
            raise NoRule("a buffer with a background of which more than the rows is read")
        pinned = {w for v in q.variables for w in vars_of([solved.get(v, v)])}
        needed = {w for v in moved.points for w in vars_of([solved.get(v, v)])}
        indexed = [i for i, a in enumerate(moved.axes) if has_idx(a)]
        if rest or not needed <= pinned or any(i not in partner for i in indexed):
            raise NoRule("rows of a buffer with a background that are not provably those that are read")
        held = set(q.substitute(solved).guards)
        names = dict(zip(piece.variables, moved.variables, strict=True))
        unproved = [g for g in piece.guards if substitute_factor(substitute_factor(g, names), solved) not in held]
        data = materialised(graph, piece.replace(guards=()), backed.dtype)
        if unproved:
            data = graph.select(graph.logical_and(unproved), data, read(graph, backed.background, piece.axes))
        proved = tuple(g for g in piece.guards if g not in unproved)
        return Value(backed.shape, backed.dtype, (Piece(piece.axes, (data,), 1, frozenset(), proved),))
    if any(context.is_unbounded(a) for a in q.axes):
        raise NoRule("empty cells of a slot axis without bound")
    return backed.background
