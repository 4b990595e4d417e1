"""Values: what the algebra knows about one array of the program.

A value of shape `[n0, n1, …]` is a sum of *pieces* over a *background*.  A piece

    coef · Σ_vars Π_axes δ(i, term) · Π factors · [guards] · Π [a = b]

sums over all its variables; a variable that stands on an axis as it is, is pinned by that axis.  With no background
(None) cells that no piece hits hold zero and pieces add up.  With a background the pieces are proved not to overlap
(`has_unique_cells`): a cell that a piece hits holds the piece, every other cell the background.

Guards say "this cell does not exist otherwise", factors that are masks say "the value is zero otherwise"; without a
background the two are the same and masks are kept as guards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np
from jax import lax

from moe_xla.passes._jax import parameters_of
from moe_xla.passes.recover.facts import (
    bound_of,
    conjuncts,
    depends_on_rank,
    distinct_of,
    holds,
    is_nonnegative,
    is_outside,
    linear_form,
    lower_bound,
    rank_of,
    same_term,
)
from moe_xla.passes.recover.nodes import (
    Graph,
    Iota,
    Leaf,
    Lit,
    Map,
    Node,
    is_boolean,
    is_integer,
    is_map,
    literal,
    operands_at,
    pinned,
)
from moe_xla.passes.recover.queues import base_of, is_behind, is_same_base
from moe_xla.passes.recover.terms import (
    UNIT,
    Const,
    Factor,
    Flat,
    Idx,
    Term,
    Var,
    factor_vars,
    flatten,
    fresh,
    fresh_axis,
    has_idx,
    parts_of,
    place_of,
    substitute,
    substitute_all,
    substitute_factor,
    term_vars,
    vars_of,
    with_indices,
)

Equalities = frozenset[tuple[Idx, Idx]]


class NoRule(Exception):
    """A rule does not apply; the operation is then done on arrays, exactly as written."""


class Contradiction(Exception):
    """Two places provably differ: the product of the two pieces is zero."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One term of a value's sum: see the module's first words."""

    axes: tuple[Term, ...]
    factors: tuple[Factor, ...] = ()
    coef: Any = 1
    equalities: Equalities = frozenset()
    guards: tuple[Factor, ...] = ()

    @functools.cached_property
    def variables(self) -> tuple[Var, ...]:
        pairs = [t for pair in self.equalities for t in pair]
        return vars_of([*self.axes, *(a for f in (*self.factors, *self.guards) for a in f.args), *pairs])

    @property
    def variables_of_data(self) -> frozenset[Var]:
        """Variables that anything but the axes that they are depends on."""
        places = [a for a in self.axes if not isinstance(a, Var)]
        return frozenset(self.replace(axes=tuple(places)).variables)

    @functools.cached_property
    def hidden(self) -> tuple[Var, ...]:
        """Variables that occur on no axis, not even inside an index."""
        visible = set(vars_of(self.axes))
        return tuple(v for v in self.variables if v not in visible)

    @functools.cached_property
    def points(self) -> frozenset[Var]:
        """Variables that data-dependent places are made of."""
        pairs = [t for pair in self.equalities for t in pair]
        return frozenset(vars_of([p for a in self.axes for p in parts_of(a) if isinstance(p, Idx)] + pairs))

    @functools.cached_property
    def assignments(self) -> frozenset[Var]:
        """Variables that data-dependent places are made of, also those at which factors are read."""
        read = [p for f in self.factors for a in f.args for p in parts_of(a) if isinstance(p, Idx)]
        return self.points | frozenset(vars_of(read))

    def substitute(self, mapping: dict[Var, Term]) -> Piece:
        if not mapping:
            return self
        return Piece(
            substitute_all(self.axes, mapping),
            tuple(substitute_factor(f, mapping) for f in self.factors),
            self.coef,
            frozenset((substitute(a, mapping), substitute(b, mapping)) for a, b in self.equalities),  # type: ignore[misc]
            tuple(dict.fromkeys(substitute_factor(g, mapping) for g in self.guards)),
        )

    def renamed(self) -> Piece:
        return self.substitute({v: fresh(v.size) for v in self.variables})

    def replace(self, **changes: Any) -> Piece:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Value:
    """An array as a sum of pieces over a background: see the module's first words."""

    shape: tuple[int, ...]
    dtype: Any
    pieces: tuple[Piece, ...]
    background: Value | None = None

    @functools.cached_property
    def is_plain(self) -> bool:
        """One factor read at variables: an ordinary array, up to the order of its axes."""
        if self.background is not None or len(self.pieces) != 1:
            return False
        piece = self.pieces[0]
        if len(piece.factors) != 1 or piece.coef != 1 or piece.guards or piece.equalities:
            return False
        places = [part for a in piece.axes for part in parts_of(a) if part != UNIT]
        return all(isinstance(p, Var) for p in places) and len(set(places)) == len(places) and not piece.hidden

    @property
    def factor(self) -> Factor:
        """The only factor of a plain value."""
        return self.pieces[0].factors[0]

    def map_pieces(self, shape: Sequence[int], change: Callable[[Piece], Piece]) -> Value:
        background = None if self.background is None else self.background.map_pieces(shape, change)
        return Value(tuple(shape), self.dtype, tuple(change(p) for p in self.pieces), background)


def plain(shape: Sequence[int], axes: Sequence[Term], factor: Factor) -> Value:
    return Value(tuple(shape), factor.node.dtype, (Piece(tuple(axes), (factor,)),))


def of_node(node: Node) -> Value:
    """The value of a node over its own axes."""
    axes = tuple(fresh_axis(n) for n in node.shape)
    return plain(node.shape, axes, Factor(node, axes))


def of_literal(graph: Graph, value: Any, shape: Sequence[int], dtype: Any) -> Value:
    return plain(shape, tuple(fresh_axis(n) for n in shape), graph.lit(value, dtype))


def literal_of(value: Value | None) -> Any:
    """The scalar that a value holds in every cell, or None; 0 where there is no background value."""
    if value is None:
        return 0
    return literal(value.factor) if value.is_plain else None


def is_boring(value: Value | None) -> bool:
    """Whether nothing but the array itself is known."""
    if value is None or not value.is_plain or not isinstance(value.factor.node, (Leaf, Lit)):
        return False
    return not any(has_idx(a) for a in value.factor.args)


# ------------------------------------------------------------------------------------------- unification


def resolve(term: Term, solved: dict[Var, Term]) -> Term:
    """Replaces variables by what they were unified with, to the end."""
    if isinstance(term, Var):
        while isinstance(term, Var) and term in solved:
            term = solved[term]
        return term if isinstance(term, (Var, Const)) else resolve(term, solved)
    if isinstance(term, Const):
        return term
    if isinstance(term, Flat):
        return flatten(resolve(p, solved) for p in term.parts)
    return place_of(term.node, tuple(resolve(a, solved) for a in term.args), term.size)


def unify(a: Term, b: Term, solved: dict[Var, Term], equal: set[tuple[Idx, Term]]) -> None:
    """Makes two places the same: binds variables, or records an equality between data-dependent places."""
    a, b = resolve(a, solved), resolve(b, solved)
    if a == b:
        return
    if isinstance(a, Var) and a not in term_vars(b):
        solved[a] = b
    elif isinstance(b, Var) and b not in term_vars(a):
        solved[b] = a
    elif isinstance(a, Const) and isinstance(b, Const):
        raise Contradiction
    elif isinstance(a, Flat) or isinstance(b, Flat):
        for x, y in _refine(parts_of(a), parts_of(b), solved):
            unify(x, y, solved, equal)
    elif isinstance(a, Idx) and isinstance(b, (Idx, Const)):
        equal.add((a, b))
    elif isinstance(a, Const) and isinstance(b, Idx):
        equal.add((b, a))
    else:
        raise NoRule(f"cannot compare the places {a} and {b}")


def _refine(left: Sequence[Term], right: Sequence[Term], solved: dict[Var, Term]) -> list[tuple[Term, Term]]:
    """Cuts two row-major lists of parts into pairs of equal size, splitting variables where needed."""
    a_parts, b_parts, pairs = list(left), list(right), []
    while a_parts and b_parts:
        a, b = a_parts.pop(0), b_parts.pop(0)
        if isinstance(resolve(a, solved), Flat):
            a_parts = [*parts_of(resolve(a, solved)), *a_parts]
            b_parts.insert(0, b)
        elif isinstance(resolve(b, solved), Flat):
            b_parts = [*parts_of(resolve(b, solved)), *b_parts]
            a_parts.insert(0, a)
        elif a.size == b.size:
            pairs.append((a, b))
        else:
            big, small = (a, b) if a.size > b.size else (b, a)
            big_parts, small_parts = (a_parts, b_parts) if big is a else (b_parts, a_parts)
            if small.size == 0 or big.size % small.size or not isinstance(big, (Var, Const)):
                raise NoRule(f"cannot align the flattened axes {a} and {b}")
            rest = big.size // small.size
            high: Term
            low: Term
            if isinstance(big, Const):
                high, low = Const(big.value // rest, small.size), Const(big.value % rest, rest)
            else:
                high, low = fresh(small.size), fresh(rest)
                solved[big] = flatten((high, low))
            big_parts[:0] = [high, low]
            small_parts.insert(0, small)
    if a_parts or b_parts:
        raise NoRule("cannot align flattened axes")
    return pairs


def held_factors(graph: Graph, pieces: Iterable[Piece]) -> frozenset[Factor]:
    """Conditions that hold wherever the pieces contribute: their guards and what these imply."""
    held: set[Factor] = set()
    pending = [f for p in pieces for f in (*p.guards, *p.factors)]
    pending += [g for p in pieces for a in p.axes if not is_slot(graph, a) for g in in_range(graph, a)]
    while pending:
        factor = pending.pop()
        if factor in held:
            continue
        held |= {factor, pinned(graph, factor)}
        if is_map(factor, "convert_element_type", "and", "mul"):
            pending += operands_at(factor)
        elif is_map(factor, "select_n") and len(operands_at(factor)) == 3:
            condition, if_false, _ = operands_at(factor)
            if literal(if_false) is not None and literal(if_false) == 0:
                pending.append(condition)
    return frozenset(f for f in held if is_boolean(f.node.dtype))


def solve(graph: Graph, solved: dict[Var, Term], equal: set[tuple[Idx, Term]], pieces: Sequence[Piece]) -> Equalities:
    """Discharges equalities by provenance; extends `solved`, returns the equalities left."""
    while True:
        equal = {(resolve(a, solved), resolve(b, solved)) for a, b in equal}  # type: ignore[misc]
        equal = _whole({(a, b) for a, b in equal if not same_term(graph, a, b)})
        if not equal:
            return frozenset()
        held = held_factors(graph, [p.substitute({v: resolve(v, solved) for v in p.variables}) for p in pieces])
        for pair in sorted(equal, key=repr):
            if _discharge(graph, pair, equal, held, solved):
                break
        else:
            return frozenset((a, _as_index(graph, a, b)) for a, b in equal)


def _as_index(graph: Graph, index: Idx, place: Term) -> Idx:
    """A fixed place that an index is compared with, as an index."""
    if isinstance(place, Const):
        factor = graph.lit(place.value, index.node.dtype)
        return Idx(factor.node, (), place.size)
    assert isinstance(place, Idx)
    return place


def _is_never(graph: Graph, index: Idx, place: Term) -> bool:
    """Whether a position provably lies beyond a fixed place."""
    value = place.value if isinstance(place, Const) else literal(place.factor) if isinstance(place, Idx) else None
    fact = rank_of(graph, index.factor)
    return value is not None and fact is not None and lower_bound(graph, fact) > value


def _whole(equal: set[tuple[Idx, Term]]) -> set[tuple[Idx, Term]]:
    """Equal quotients and equal remainders are one equality of the index that was split."""
    for (a_high, b_high), (a_low, b_low) in itertools.permutations(equal, 2):
        for x_low, y_low in ((a_low, b_low), (b_low, a_low)):
            if not all(isinstance(t, Idx) for t in (a_high, b_high, x_low, y_low)):
                continue
            a, b = flatten((a_high, x_low)), flatten((b_high, y_low))
            if isinstance(a, Idx) and isinstance(b, Idx):
                return _whole((equal - {(a_high, b_high), (a_low, b_low)}) | {(a, b)})
    return equal


def _known_equal(graph: Graph, a: Term, b: Term, equal: set[tuple[Idx, Term]]) -> bool:
    return same_term(graph, a, b) or any(
        (same_term(graph, a, x) and same_term(graph, b, y)) or (same_term(graph, a, y) and same_term(graph, b, x))
        for x, y in equal
    )


def _discharge(
    graph: Graph,
    pair: tuple[Idx, Term],
    equal: set[tuple[Idx, Term]],
    held: frozenset[Factor],
    solved: dict[Var, Term],
) -> bool:
    """Tries to replace one equality by what it implies."""
    a, b = pair
    if _is_never(graph, a, b):
        raise Contradiction
    if not isinstance(b, Idx):
        return False
    below = _below_limit(graph, a, b, held) or _below_limit(graph, b, a, held)
    if below is not None:
        equal.discard(pair)
        equal.add(below)
        return True
    if _discharge_rank(graph, a, b, equal, held, solved):
        equal.discard(pair)
        return True
    if _discharge_clamped(graph, a, b, equal, held, solved) or _discharge_clamped(graph, b, a, equal, held, solved):
        equal.discard(pair)
        return True
    return _are_equal_choices(graph, a, b, solved)


def _are_equal_choices(graph: Graph, a: Idx, b: Idx, solved: dict[Var, Term]) -> bool:
    """Whether two indices that are equal must be read at the same place, which is then made one."""
    da, db = distinct_of(graph, a.factor), distinct_of(graph, b.factor)
    if da is None or db is None or da.node is not db.node or len(da.rest) != len(db.rest):
        return False
    rest = zip(da.rest, db.rest, strict=True)
    if not all(same_term(graph, resolve(x, solved), resolve(y, solved)) for x, y in rest):
        return False
    trial: dict[Var, Term] = dict(solved)
    extra: set[tuple[Idx, Term]] = set()
    unify(da.along, db.along, trial, extra)
    if not extra:
        solved.update(trial)
    return not extra


def _below_limit(graph: Graph, a: Idx, b: Idx, held: frozenset[Factor]) -> tuple[Idx, Idx] | None:
    """`a = min(b, limit)` is `a = b` where `a` is below the limit."""
    least = unconverted(b.factor)
    if not is_map(least, "min"):
        return None
    for limit, other in (operands_at(least), operands_at(least)[::-1]):
        if literal(limit) is not None and _is_below(graph, a.factor, graph.lit(literal(limit) - 1, np.int64), held):
            return a, Idx(other.node, other.args, b.size)
    return None


def _discharge_rank(
    graph: Graph,
    a: Idx,
    b: Idx,
    equal: set[tuple[Idx, Term]],
    held: frozenset[Factor],
    solved: dict[Var, Term],
) -> bool:
    """Equal own positions in the same queue are the same assignment; positions of disjoint queues never meet."""
    ra, rb = rank_of(graph, a.factor), rank_of(graph, b.factor)
    if ra is None or rb is None:
        return False
    for fact in (ra, rb):
        if not fact.is_own(graph) or not all(holds(graph, g, held) for g in fact.guards):
            return False
    if len(ra.batch) != len(rb.batch) or not all(
        same_term(graph, x, y) for x, y in zip(ra.batch, rb.batch, strict=True)
    ):
        return False
    if not _known_equal(graph, ra.expert, rb.expert, equal):
        return False
    if is_behind(graph, ra, rb, held) or is_behind(graph, rb, ra, held):
        raise Contradiction
    if ra.rank is not rb.rank or ra.constant != rb.constant:
        return False
    base_a, base_b = base_of(graph, ra), base_of(graph, rb)
    if base_a is None or base_b is None or not is_same_base(base_a, base_b):
        return False
    extra: set[tuple[Idx, Term]] = set()
    trial = dict(solved)
    for x, y in zip(ra.order, rb.order, strict=True):
        unify(x, y, trial, extra)
    if not all(isinstance(y, Idx) and _are_equal_choices(graph, x, y, trial) for x, y in extra):
        return False
    solved.update(trial)
    return True


def _discharge_clamped(
    graph: Graph,
    own: Idx,
    place: Idx,
    equal: set[tuple[Idx, Term]],
    held: frozenset[Factor],
    solved: dict[Var, Term],
) -> bool:
    """An own position that equals one of the same queue brought below a limit: it is that of who stands there.

    Positions of a queue are 0, 1, … up to that of its last assignment, so somebody stands at each one below another.
    """
    clamped = _limited(place)
    mine = rank_of(graph, own.factor) if clamped is not None else None
    if clamped is None or mine is None or mine.rank.many:
        return False
    limit, other = clamped
    theirs = rank_of(graph, other)
    if theirs is None or mine.rank is not theirs.rank or not _known_equal(graph, mine.expert, theirs.expert, equal):
        return False
    for fact in (mine, theirs):
        counted = fact.is_own(graph) and all(holds(graph, g, held) for g in fact.guards)
        if not counted or fact.others or fact.constant != -1:
            return False
    if not all(same_term(graph, x, y) for x, y in zip(mine.batch, theirs.batch, strict=True)):
        return False
    queue, position = graph.queue(mine.rank, limit + 1), Idx(place.node, place.args, limit + 1)
    there = queue.at((*theirs.batch, theirs.expert, position))
    extra: set[tuple[Idx, Term]] = set()
    trial = dict(solved)
    for mine_there, v in zip(mine.order, mine.rank.order, strict=True):
        unify(mine_there, there[v], trial, extra)
    if not extra:
        solved.update(trial)
    return not extra


def _limited(place: Idx) -> tuple[int, Factor] | None:
    """(limit, position) of `min(position, limit)`, a whole number that is not below zero."""
    least = unconverted(place.factor)
    if not is_map(least, "min"):
        return None
    for bound, other in (operands_at(least), operands_at(least)[::-1]):
        value = literal(bound)
        if value is not None and value >= 0 and value == int(value):
            return int(value), other
    return None


def align(
    graph: Graph, pieces: Sequence[Piece], groups: Iterable[Sequence[tuple[int, int]]]
) -> tuple[dict[Var, Term], Equalities]:
    """Unifies axes of several pieces.  `groups` lists the (piece, axis) pairs that are one place."""
    solved: dict[Var, Term] = {}
    equal: set[tuple[Idx, Term]] = {pair for p in pieces for pair in p.equalities}
    for group in groups:
        terms = [pieces[i].axes[a] for i, a in group]
        for term in terms[1:]:
            unify(terms[0], term, solved, equal)
    rest = solve(graph, solved, equal, pieces)
    return {v: resolve(v, solved) for v in solved}, rest


def only_renames(piece: Piece, solved: dict[Var, Term]) -> bool:
    """Whether unification left a piece's places free: each variable is another one, no two are the same."""
    images = [resolve(v, solved) for v in piece.variables]
    return all(isinstance(t, Var) for t in images) and len(set(images)) == len(images)


def in_range(graph: Graph, term: Term) -> list[Factor]:
    """The conditions under which a place lies on its axis, beyond what is proved or unbounded."""
    if isinstance(term, Flat):
        return [g for p in term.parts for g in in_range(graph, p)]
    if not isinstance(term, Idx):
        return []
    bound = bound_of(graph, term.factor)
    if bound is not None and bound <= term.size:
        return []
    tests = [graph.compare(prims.ge_p, term.factor, 0), graph.compare(prims.lt_p, term.factor, term.size)]
    return [t for t in tests if literal(t) is None or not literal(t)]


def unit_guards(graph: Graph, axes: Iterable[Term]) -> list[Factor]:
    """The conditions under which data-dependent places lie on axes of length 1, which have one place only."""
    return [graph.compare(prims.eq_p, a.factor, 0) for a in axes if isinstance(a, Idx) and a.size == 1]


def is_slot(graph: Graph, term: Term) -> bool:
    """Whether a place is a slot: a queue position."""
    return any(isinstance(p, Idx) and depends_on_rank(graph, p.node) for p in parts_of(term))


def has_slots(graph: Graph, value: Value) -> bool:
    return any(is_slot(graph, a) for p in value.pieces for a in p.axes) or (
        value.background is not None and has_slots(graph, value.background)
    )


def is_injective(graph: Graph, piece: Piece) -> bool:
    """Whether different assignments of the piece's variables hit different cells."""
    if piece.hidden or piece.equalities:
        return False
    # The places and guards alone prove it for most pieces, and many pieces share them.
    names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(vars_of(piece.axes))}
    places = Piece(piece.axes, guards=piece.guards).substitute(names)
    key = ("injective", places.axes, places.guards)
    if key not in graph.memo:
        graph.memo[key] = _never_meets_itself(graph, places)
    return bool(graph.memo[key]) or (bool(piece.factors) and _never_meets_itself(graph, piece))


def _never_meets_itself(graph: Graph, piece: Piece) -> bool:
    first, second = piece, piece.renamed()
    try:
        solved, _ = align(graph, [first, second], [[(0, i), (1, i)] for i in range(len(piece.axes))])
    except Contradiction:
        return True
    except NoRule:
        return False
    image = [resolve(v, solved) for v in first.variables]
    other = [resolve(v, solved) for v in second.variables]
    return image == other


def at_places_of(graph: Graph, piece: Piece, candidate: Piece) -> Piece | None:
    """The candidate in the variables of a piece that stands at the same places; None where that is not known.

    The conditions that both have must prove that no two assignments share a cell: then a cell that both hit is hit by
    the same assignment.
    """
    if candidate.hidden or candidate.equalities or piece.hidden or piece.equalities:
        return None
    mine, others = vars_of(piece.axes), vars_of(candidate.axes)
    if [v.size for v in mine] != [v.size for v in others]:
        return None
    moved = candidate.substitute(dict(zip(others, mine, strict=True)))
    if moved.axes != piece.axes:
        return None
    common = tuple(g for g in piece.guards if g in moved.guards)
    return moved if is_injective(graph, Piece(piece.axes, guards=common)) else None


def are_disjoint(graph: Graph, a: Piece, b: Piece) -> bool:
    b = b.renamed()
    try:
        solved, _ = align(graph, [a, b], [[(0, i), (1, i)] for i in range(len(a.axes))])
    except Contradiction:
        return True
    except NoRule:
        return False
    return is_dead(a.substitute(solved)) or is_dead(b.substitute(solved))


def is_dead(piece: Piece) -> bool:
    """Whether a guard compares an integer with itself and fails."""
    return any(settled(g) is False for g in piece.guards)


def settled(guard: Factor) -> bool | None:
    """What a comparison of an integer with itself says; None for other conditions."""
    if not is_map(guard, "ne", "lt", "gt", "eq", "le", "ge"):
        return None
    left, right = operands_at(guard)
    if left != right or not is_integer(left.node.dtype):
        return None
    return guard.node.name in ("eq", "le", "ge")  # type: ignore[attr-defined]


def has_unique_cells(graph: Graph, value: Value) -> bool:
    """Whether no cell is hit twice."""
    key = ("unique", tuple(value.pieces))
    if key not in graph.memo:
        graph.memo[key] = all(is_injective(graph, p) for p in value.pieces) and all(
            are_disjoint(graph, p, q) for i, p in enumerate(value.pieces) for q in value.pieces[:i]
        )
    return bool(graph.memo[key])


# ------------------------------------------------------------------------------------- canonical pieces


def _times(graph: Graph, a: Factor, b: Factor) -> Factor:
    return graph.map(prims.mul_p, parameters_of(lax.mul), [a, b], a.node.dtype)


def as_condition(graph: Graph, factor: Factor) -> tuple[Factor | None, Factor | None]:
    """(guard, rest) for a factor that is zero unless a condition holds; rest None stands for one."""
    if is_boolean(factor.node.dtype):
        return factor, None
    if is_map(factor, "convert_element_type"):
        inner = operands_at(factor)[0]
        guard, rest = as_condition(graph, inner)
        if guard is not None:
            return guard, None if rest is None else graph.convert(rest, factor.node.dtype)
    if is_map(factor, "select_n") and len(operands_at(factor)) == 3:
        condition, if_false, if_true = operands_at(factor)
        if is_boolean(condition.node.dtype):
            if literal(if_false) is not None and literal(if_false) == 0:
                return condition, None if literal(if_true) is not None and literal(if_true) == 1 else if_true
            if literal(if_true) is not None and literal(if_true) == 0:
                rest = None if literal(if_false) is not None and literal(if_false) == 1 else if_false
                return graph.logical_not(condition), rest
    if is_map(factor, "mul") and not is_boolean(factor.node.dtype):
        for mask, other in (operands_at(factor), operands_at(factor)[::-1]):
            guard, rest = as_condition(graph, mask)
            if guard is not None:
                return guard, other if rest is None else _times(graph, rest, other)
    return None, None


def sampled(graph: Graph, factor: Factor) -> Factor:
    """A factor read at data-dependent places: a position or a test of one as the operation on what its operands are
    there, the work of every expert as that of the chosen one."""
    node = factor.node
    if not any(has_idx(a) for a in factor.args):
        return factor
    if isinstance(node, Iota) and isinstance(factor.args[0], Idx):
        return graph.convert(factor.args[0].factor, node.dtype)
    if isinstance(node, Map) and (depends_on_rank(graph, node) or any(is_slot(graph, a) for a in factor.args)):
        return graph.map(node.prim, node.params, [sampled(graph, op) for op in operands_at(factor)], node.dtype)
    return factor if graph.reader is None else graph.reader(factor)


def masks_to_guards(graph: Graph, piece: Piece) -> Piece | None:
    """Masks among the factors as guards, literals as the coefficient; None where a guard is false.

    A mask over more than the assignments (where a hidden unit is positive) is data of the rows and stays a factor.
    """
    piece = piece.replace(
        factors=tuple(sampled(graph, f) for f in piece.factors), guards=tuple(sampled(graph, g) for g in piece.guards)
    )
    factors: list[Factor] = []
    guards: dict[Factor, None] = {}
    conditions: set[Factor] = set(piece.guards)
    coef = piece.coef
    pending = list(piece.factors)
    while pending:
        factor = pending.pop(0)
        value = literal(factor)
        if value is not None and not is_boolean(factor.node.dtype):
            coef = coef * value.item()
            continue
        guard, rest = as_condition(graph, factor)
        if guard is None:
            factors.append(factor)
            continue
        conditions.update(conjuncts(guard))
        points = piece.assignments
        if points and not set(factor_vars([guard])) <= points:
            factors.append(factor)
            guards.update({c: None for c in conjuncts(guard) if set(factor_vars([c])) <= points})
            continue
        guards[guard] = None
        if rest is not None:
            pending.insert(0, rest)
    split = [g for guard in (*piece.guards, *guards) for g in conjuncts(guard) if settled(g) is not True]
    if any(settled(g) is False or (literal(g) is not None and not literal(g)) for g in split) or coef == 0:
        return None
    kept = tuple(dict.fromkeys(g for g in split if literal(g) is None))
    if any(graph.logical_not(g) in conditions for g in conditions.union(kept) if literal(g) is None):
        return None
    return _data_masks_as_factors(graph, piece.replace(factors=tuple(factors), guards=kept, coef=coef))


def host_of(factors: Sequence[Factor], mask: Factor) -> int | None:
    """The first factor that depends on all that a mask depends on."""
    used = set(factor_vars([mask]))
    return next((i for i, f in enumerate(factors) if used <= set(factor_vars([f]))), None)


def masked(graph: Graph, factor: Factor, mask: Factor) -> Factor:
    """A factor where a mask holds, zero elsewhere."""
    return graph.select(mask, factor, graph.lit(0, factor.node.dtype))


def _data_masks_as_factors(graph: Graph, piece: Piece) -> Piece:
    """Guards over more than the assignments as masks of the data that they belong to."""
    factors, guards = list(piece.factors), []
    for guard in piece.guards:
        used = set(factor_vars([guard]))
        host = host_of(factors, guard)
        if not piece.assignments or used <= piece.assignments or host is None or is_boolean(factors[host].node.dtype):
            guards.append(guard)
        else:
            factors[host] = masked(graph, factors[host], guard)
    return piece.replace(factors=tuple(factors), guards=tuple(guards))


def under_guards(graph: Graph, factor: Factor, held: frozenset[Factor]) -> Factor:
    """An index as it is where the conditions hold: `p·keep` and `where(keep, p, …)` are p under keep."""
    if not isinstance(factor.node, Map):
        return factor
    ops = operands_at(factor)
    node = factor.node
    if node.name == "select_n" and len(ops) == 3:
        if all(holds(graph, c, held) for c in conjuncts(ops[0])):
            return under_guards(graph, ops[2], held)
        if is_boolean(ops[0].node.dtype) and holds(graph, graph.logical_not(ops[0]), held):
            return under_guards(graph, ops[1], held)
        return factor
    if node.name == "mul":
        for mask, other in ((ops[0], ops[1]), (ops[1], ops[0])):
            guard, rest = as_condition(graph, mask)
            if guard is not None and rest is None and holds(graph, guard, held):
                return under_guards(graph, other, held)
    if node.name == "min" and any(_is_below(graph, op, ops[1 - i], held) for i, op in enumerate(ops)):
        return under_guards(graph, next(op for i, op in enumerate(ops) if _is_below(graph, op, ops[1 - i], held)), held)
    if node.name in ("convert_element_type", "add", "sub", "add_any", "mul", "min", "max"):
        changed = [under_guards(graph, op, held) for op in ops]
        if changed != ops:
            return graph.map(node.prim, node.params, changed, node.dtype)
    return factor


def peeled(graph: Graph, index: Factor, size: int) -> tuple[Factor, list[Factor]]:
    """An index into an axis of length `size` without its out-of-range cases, which become guards."""
    if is_map(index, "convert_element_type") and not is_boolean(operands_at(index)[0].node.dtype):
        inner, guards = peeled(graph, operands_at(index)[0], size)
        return (graph.convert(inner, index.node.dtype), guards) if inner != operands_at(index)[0] else (index, [])
    if is_map(index, "min"):
        for limit, other in (operands_at(index), operands_at(index)[::-1]):
            value = literal(limit)
            if value is not None and value >= size:
                return peeled(graph, other, size)
    if is_map(index, "select_n") and len(operands_at(index)) == 3:
        condition, if_false, if_true = operands_at(index)
        if is_boolean(condition.node.dtype):
            for dead, live, guard in (
                (if_false, if_true, condition),
                (if_true, if_false, graph.logical_not(condition)),
            ):
                if is_outside(graph, dead, size):
                    inner, guards = peeled(graph, live, size)
                    return inner, [guard, *guards]
    return index, []


def _literal_places(piece: Piece) -> Piece | None:
    """Indices that are literals as fixed places; None where one is off its axis."""
    axes = []
    for axis in piece.axes:
        value = literal(axis.factor) if isinstance(axis, Idx) else None
        if value is not None and not (0 <= value < axis.size and value == int(value)):
            return None
        axes.append(axis if value is None else Const(int(value), axis.size))
    return piece.replace(axes=tuple(axes))


def _is_below(graph: Graph, factor: Factor, limit: Factor, held: frozenset[Factor]) -> bool:
    """Whether a condition that holds keeps an integer at or below a literal limit."""
    most = literal(limit)
    if most is None or not is_integer(factor.node.dtype):
        return False
    for test in held:
        if is_map(test, "lt", "le"):
            left, right = operands_at(test)
            bound = literal(right)
            if bound is None or bound > most + (1 if is_map(test, "lt") else 0):
                continue
            if left == factor or (unconverted(left) == unconverted(factor) and is_nonnegative(graph, left)):
                return True
            if rank_of(graph, left) is not None and linear_form(graph, left) == linear_form(graph, factor):
                return True  # a position and its cast to another type, which holds all positions
    return False


def unflattened(graph: Graph, place: Idx, held: frozenset[Factor], length: int | None = None) -> tuple[Idx, Idx] | None:
    """`index * low + position` as the two places that it stands for, if the position is proved to be below `low`.

    `length` asks for one `low`; by default any that divides the axis will do.
    """
    factor = unconverted(place.factor)
    if not is_map(factor, "add"):
        return None
    for product, rest in (operands_at(factor), operands_at(factor)[::-1]):
        if not is_map(unconverted(product), "mul"):
            continue
        for scale, index in (operands_at(unconverted(product)), operands_at(unconverted(product))[::-1]):
            low = 0 if literal(scale) is None else int(literal(scale))
            if low < 2 or length not in (None, low) or place.size % low or not is_nonnegative(graph, rest):
                continue
            size, high = bound_of(graph, index), place.size // low
            if size is not None and size <= high and holds(graph, graph.compare(prims.lt_p, rest, low), held):
                return Idx(index.node, index.args, high), Idx(rest.node, rest.args, low)
    return None


def unconverted(factor: Factor) -> Factor:
    """An integer as it was before it was converted to other integers, which keep what is below a literal."""
    while is_map(factor, "convert_element_type") and is_integer(operands_at(factor)[0].node.dtype):
        factor = operands_at(factor)[0]
    return factor


def renormalised(graph: Graph, piece: Piece) -> Piece | None:
    """The piece with its places simplified by its own guards; None where it is empty."""
    fixed = _literal_places(piece)
    result = masks_to_guards(graph, fixed) if fixed is not None else None
    if result is None:
        return None
    if _places_key(result) in graph.memo:
        return result
    result = _simplified_places(graph, result)
    if result is not None:
        graph.memo[_places_key(result)] = True
    return result


def _places_key(piece: Piece) -> tuple[Any, ...]:
    """What it is noted under that the places of pieces like this one are as simple as they get."""
    return "simplest", piece.axes, piece.guards, piece.equalities


def _simplified_places(graph: Graph, result: Piece) -> Piece | None:
    """The piece with what its guards imply for its places; None where they contradict each other."""
    held = held_factors(graph, [result])
    if not held or not (result.equalities or any(has_idx(a) for a in result.axes)):
        return result

    def simplify(term: Term) -> Term:
        return with_indices(term, lambda factor: under_guards(graph, factor, held))

    axes = tuple(simplify(a) for a in result.axes)
    equalities = frozenset((simplify(a), simplify(b)) for a, b in result.equalities)
    if equalities == result.equalities:
        return result.replace(axes=axes)
    solved: dict[Var, Term] = {}
    try:
        rest = solve(graph, solved, set(equalities), [result])  # type: ignore[arg-type]
    except Contradiction:
        return None
    mapping = {v: resolve(v, solved) for v in solved}
    return result.replace(axes=axes, equalities=frozenset()).substitute(mapping).replace(equalities=rest)


def materialised(graph: Graph, piece: Piece, dtype: Any) -> Factor:
    """One factor that holds the piece's data over its variables, zero where a guard fails."""
    if piece.hidden:
        raise NoRule("the value is a product that is not contracted yet")
    factors = [graph.convert(f, dtype) for f in piece.factors]
    if piece.coef != 1 or not factors:
        factors.append(graph.lit(piece.coef, dtype))
    data = factors[0]
    for factor in factors[1:]:
        data = _times(graph, data, factor) if not is_boolean(dtype) else graph.logical_and([data, factor])
    guards = list(piece.guards)
    guards += [graph.compare(prims.eq_p, a.factor, b.factor) for a, b in sorted(piece.equalities, key=repr)]
    if guards:
        data = graph.select(graph.logical_and(guards), data, graph.lit(0, dtype))
    return data


def cancelled(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces that differ in their coefficient only, added up."""
    total: dict[Any, Piece] = {}
    for piece in pieces:
        names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(piece.variables)}
        canonical = piece.substitute(names)
        key = (canonical.axes, canonical.factors, canonical.equalities, frozenset(canonical.guards))
        seen = total.get(key)
        total[key] = piece if seen is None else seen.replace(coef=seen.coef + piece.coef)
    return tuple(p for p in total.values() if p.coef != 0)


def components(piece: Piece, ignored: frozenset[Var]) -> int:
    """How many independent groups the piece's parts fall into when some variables do not count as links."""
    items = [set(factor_vars([f])) - ignored for f in (*piece.factors, *piece.guards)]
    items += [set(vars_of(pair)) - ignored for pair in piece.equalities]
    items += [set(term_vars(a)) - ignored for a in piece.axes if has_idx(a)]
    groups: list[set[Var]] = []
    for item in filter(None, items):
        linked = [g for g in groups if g & item]
        for group in linked:
            groups.remove(group)
            item = item | group
        groups.append(item)
    return len(groups)


def contracted(graph: Graph, piece: Piece, dtype: Any, allow_outer: bool = False) -> Piece:
    """The piece with hidden variables summed into einsum nodes, wherever the factors they join belong together.

    A contraction that would join two independent sets of assignments (the naive gradient of the combine weights) is
    left as a product until something picks the assignments.
    """
    piece = _presummed(graph, piece, dtype)
    while True:
        candidates = [v for v in piece.hidden if v not in piece.points]
        step = next((s for v in candidates if (s := _contraction(piece, v, candidates, allow_outer)) is not None), None)
        if step is None:
            return piece
        factors, guards, variables = step
        out = tuple(v for v in factor_vars([*factors, *guards]) if v not in variables)
        node = graph.ein(out, factors, guards, frozenset(), 1, dtype, domain=piece.guards)
        piece = piece.replace(
            factors=(*(f for f in piece.factors if f not in factors), Factor(node, out)),
            guards=tuple(g for g in piece.guards if g not in guards),
        )


def _presummed(graph: Graph, piece: Piece, dtype: Any) -> Piece:
    """Arrays read at data-dependent places, summed first over axes that nothing else reads: a matrix times ones."""
    elsewhere = [t for pair in piece.equalities for t in pair] + [a for g in piece.guards for a in g.args]
    factors = list(piece.factors)
    for i, factor in enumerate(factors):
        others = [a for f in factors[:i] + factors[i + 1 :] for a in f.args]
        read = set(vars_of([*others, *elsewhere, *piece.axes, *(a for a in factor.args if not isinstance(a, Var))]))
        lone = [a for a in factor.args if isinstance(a, Var) and a not in read and factor.args.count(a) == 1]
        if lone and any(has_idx(a) for a in factor.args) and not is_boolean(dtype):
            axes = factor.node.variables
            kept = [k for k, a in enumerate(factor.args) if a not in lone]
            out = tuple(axes[k] for k in kept)
            total = graph.ein(out, [Factor(factor.node, axes)], (), frozenset(), 1, dtype)
            factors[i] = Factor(total, tuple(factor.args[k] for k in kept))
    return piece.replace(factors=tuple(factors))


def _contraction(
    piece: Piece, variable: Var, candidates: Sequence[Var], allow_outer: bool
) -> tuple[list[Factor], list[Factor], set[Var]] | None:
    joined = {variable}
    read = {f: factor_vars([f]) for f in (*piece.factors, *piece.guards)}
    while True:
        factors = [f for f in piece.factors if not joined.isdisjoint(read[f])]
        guards = [g for g in piece.guards if not joined.isdisjoint(read[g])]
        more = {v for f in (*factors, *guards) for v in read[f] if v in candidates}
        if more <= joined:
            break
        joined |= more
    group = Piece((), tuple(factors), 1, frozenset(), tuple(guards))
    if len(set(factors)) != len(factors) or (not allow_outer and components(group, frozenset(joined)) > 1):
        return None
    return factors, guards, joined


def scattered(graph: Graph, value: Value) -> Value:
    """A value without slots as one array: a sum of einsum nodes that scatter by their indices."""
    value = additive(graph, value)
    total: Value | None = None
    for piece in value.pieces:
        there = unit_guards(graph, piece.axes)
        piece = piece.replace(axes=tuple(a if a.size != 1 else UNIT for a in piece.axes))
        parts = (piece.factors, (*piece.guards, *there), piece.equalities, piece.coef, value.dtype)
        if _fixed_places(piece.axes):
            term = _placed(graph, value.shape, piece.axes, *parts)
        else:
            term = of_node(graph.ein(piece.axes, *parts))
        total = term if total is None else plain_map(graph, prims.add_p, {}, [total, term], value.shape, value.dtype)
    return total if total is not None else of_literal(graph, 0, value.shape, value.dtype)


def plain_map(
    graph: Graph, prim: Any, params: dict[str, Any], values: Sequence[Value], shape: Sequence[int], dtype: Any
) -> Value:
    """An elementwise operation on plain values of one shape (scalars allowed)."""
    full = [i for i, v in enumerate(values) if v.shape == tuple(shape)]
    simple = _over_same_axes([values[i].pieces[0] for i in full])
    if simple is not None:
        arrays = dict(zip(full, simple, strict=True))
        factors = [arrays.get(i, v.factor) for i, v in enumerate(values)]
        return plain(shape, values[full[0]].pieces[0].axes, graph.map(prim, params, factors, dtype))
    pieces = [v.pieces[0].renamed() for v in values]
    try:
        solved, rest = align(graph, pieces, [[(i, a) for i in full] for a in range(len(shape))])
    except Contradiction:
        raise NoRule("an array put together from different fixed places") from None
    if rest:
        raise NoRule("plain operands whose places differ")
    factors = [substitute_factor(p.factors[0], solved) for p in pieces]
    axes = tuple(substitute(pieces[full[0]].axes[a], solved) for a in range(len(shape))) if full else ()
    return plain(shape, axes, graph.map(prim, params, factors, dtype))


def _over_same_axes(pieces: Sequence[Piece]) -> list[Factor] | None:
    """The factors of plain pieces over the axes of the first one, where these are variables or of length 1."""
    if not pieces:
        return None
    factors = []
    for piece in pieces:
        mapping: dict[Var, Term] = {}
        for term, target in zip(piece.axes, pieces[0].axes, strict=True):
            if isinstance(term, Var) and isinstance(target, Var) and term not in mapping:
                mapping[term] = target
            elif not term == target == UNIT:
                return None
        if len(set(mapping.values())) != len(mapping):
            return None
        factors.append(substitute_factor(piece.factors[0], mapping))
    return factors


def read(graph: Graph, value: Value, axes: Sequence[Term]) -> Factor:
    """A plain value read at the given places."""
    if not value.factor.args:
        return value.factor
    piece = value.pieces[0].renamed()
    solved, rest = align(graph, [Piece(tuple(axes)), piece], [[(1, i), (0, i)] for i in range(len(axes))])
    target = substitute_all(axes, solved)
    if rest or target != tuple(axes):
        raise NoRule("cannot read an array at these places")
    return sampled(graph, substitute_factor(piece.factors[0], solved))


def additive(graph: Graph, value: Value) -> Value:
    """The same array without background: background plus (piece − background) at the cells hit."""
    if value.background is None:
        return value
    if is_boolean(value.dtype):
        raise NoRule("a truth value with a background cannot be summed")
    base = literal_of(value.background)
    if base is not None and not np.isfinite(base):
        raise NoRule("a sum of cells that are empty at infinity")
    pieces = list(value.background.pieces)
    for piece in value.pieces:
        base = read(graph, value.background, piece.axes)
        data = graph.map(
            prims.sub_p, {}, [materialised(graph, piece.replace(guards=()), value.dtype), base], value.dtype
        )
        pieces.append(Piece(piece.axes, (data,), 1, piece.equalities, piece.guards))
    return normalised(graph, Value(value.shape, value.dtype, tuple(pieces)))


def normalised(graph: Graph, value: Value) -> Value:
    """The simplest form of a value: plain where it can be, one array where only its index structure is left."""
    if value.is_plain:
        return value
    if value.background is not None and fills_all(value):
        value = dataclasses.replace(value, background=None)
    if value.background is not None:
        if all(literal(g) is None for p in value.pieces for g in p.guards):
            return value
        kept = tuple(p for p in value.pieces if not any(literal(g) is not None and not literal(g) for g in p.guards))
        return dataclasses.replace(
            value, pieces=tuple(p.replace(guards=tuple(g for g in p.guards if literal(g) is None)) for p in kept)
        )
    pieces = tuple(r for p in value.pieces if (r := renormalised(graph, p)) is not None)
    if not pieces:
        return of_literal(graph, 0, value.shape, value.dtype)
    value = Value(value.shape, value.dtype, pieces)
    if not any(has_idx(a) for p in pieces for a in p.axes):
        return value if len(pieces) > 1 and _is_patched(graph, value) else _as_plain(graph, value)
    if has_slots(graph, value) or is_boolean(value.dtype):
        return value
    if any(p.equalities or _is_outer(p) for p in pieces) or has_unique_cells(graph, value):
        return value
    return value if all(_is_choice(p) for p in pieces) else scattered(graph, value)


def _is_choice(piece: Piece) -> bool:
    """Whether a piece stands at a few chosen places for each token, rather than adding up over tokens."""
    pinned = {v for a in piece.axes if not has_idx(a) for v in term_vars(a)}
    free = piece.points - pinned
    experts = math.prod(p.size for a in piece.axes for p in parts_of(a) if isinstance(p, Idx))
    return bool(piece.points & pinned) and math.prod(v.size for v in free) < experts


def fills_all(value: Value) -> bool:
    """Whether pieces that never share a cell hit every cell, so that nothing is left to the background."""
    hit = 0
    for piece in value.pieces:
        parts = [part for a in piece.axes for part in parts_of(a) if part != UNIT]
        variables = [part for part in parts if isinstance(part, Var)]
        if piece.guards or piece.equalities or piece.hidden or piece.points or len(set(variables)) != len(variables):
            return False
        hit += math.prod(v.size for v in variables)
    return hit == cells(value)


def _is_patched(graph: Graph, value: Value) -> bool:
    """Whether queue positions stand side by side at fixed places, as `stack` puts them."""
    fixed = all(_fixed_places(p.axes) for p in value.pieces)
    return fixed and any(depends_on_rank(graph, f.node) for p in value.pieces for f in p.factors)


def _as_plain(graph: Graph, value: Value) -> Value:
    if any(p.equalities or _is_outer(p) for p in value.pieces):
        return value
    if is_boolean(value.dtype) and any(p.coef != 1 for p in value.pieces):
        return value
    prim = prims.or_p if is_boolean(value.dtype) else prims.add_p
    total: Value | None = None
    for piece in value.pieces:
        if piece.hidden:
            used = tuple(v for v in piece.variables if v not in piece.hidden)
            node = graph.ein(used, piece.factors, piece.guards, frozenset(), piece.coef, value.dtype)
            piece = Piece(piece.axes, (Factor(node, used),))
        data = materialised(graph, piece, value.dtype)
        if _fixed_places(piece.axes):
            term = _placed(graph, value.shape, piece.axes, [data], (), frozenset(), 1, value.dtype)
        else:
            term = plain(value.shape, piece.axes, data)
        total = term if total is None else plain_map(graph, prim, {}, [total, term], value.shape, value.dtype)
    assert total is not None
    return total


def _fixed_places(axes: Sequence[Term]) -> bool:
    """Whether an axis, or a part of one, is a fixed place."""
    return any(isinstance(t, Const) and t.size != 1 for a in axes for t in parts_of(a))


def _placed(
    graph: Graph,
    shape: Sequence[int],
    axes: Sequence[Term],
    factors: Sequence[Factor],
    guards: Sequence[Factor],
    equalities: Equalities,
    coef: Any,
    dtype: Any,
) -> Value:
    """A sum as one array; where an axis is a fixed place, it is zero in the others."""
    parts = [list(parts_of(a)) for a in axes]
    flat = [t for ts in parts for t in ts]
    node = graph.ein([UNIT if isinstance(t, Const) else t for t in flat], factors, guards, equalities, coef, dtype)
    for i, term in enumerate(flat):
        if isinstance(term, Const) and term.size != 1:
            node = graph.pad(node, i, term.value, term.size - term.value - 1)
    whole = [[fresh_axis(t.size) for t in ts] for ts in parts]
    return plain(shape, [flatten(ts) for ts in whole], Factor(node, tuple(t for ts in whole for t in ts)))


def _is_outer(piece: Piece) -> bool:
    return bool(piece.hidden) and components(piece, frozenset(piece.hidden)) > 1


def cast(graph: Graph, value: Value, dtype: Any) -> Value:
    """The pieces with every factor converted: for products whose factors are not multiplied yet."""
    if value.dtype == dtype:
        return value
    return Value(
        value.shape,
        dtype,
        tuple(p.replace(factors=tuple(graph.convert(f, dtype) for f in p.factors)) for p in value.pieces),
        None if value.background is None else cast(graph, value.background, dtype),
    )


def cells(value: Value) -> int:
    return math.prod(value.shape)
