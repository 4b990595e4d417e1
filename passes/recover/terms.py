"""Index terms: what stands on an axis of an array in index notation.

`out[i, j, …] = f(op[…])` is written with *terms* in the brackets.  A term is a variable (`Var`), a fixed place
(`Const`), several terms flattened into one axis in row-major order (`Flat`), or a data-dependent index (`Idx`): the
value of an integer node at some arguments, e.g. the expert of token t and choice k.  `Flat` makes every chain of
transposes and reshapes symbolic.

In: nothing.  Out: immutable values with structural equality, and substitution over them.  Terms are tuples, which
Python compares and hashes fastest; their last field tells the kinds apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from moe_xla.passes.recover.nodes import Node

FIRST_FRESH_ID = 1_000_000
_fresh_ids = itertools.count(FIRST_FRESH_ID)


class Var(NamedTuple):
    """An index variable that runs over `range(size)`."""

    id: int
    size: int
    kind: int = 0

    def __repr__(self) -> str:
        return f"v{self.id - FIRST_FRESH_ID if self.id >= FIRST_FRESH_ID else self.id}"


class Const(NamedTuple):
    """The fixed place `value` on an axis of length `size`."""

    value: int
    size: int
    kind: int = 1

    def __repr__(self) -> str:
        return f"#{self.value}"


class Flat(NamedTuple):
    """Several terms flattened into one axis, the last one fastest.  Never nested, never of one part."""

    parts: tuple[Term, ...]
    kind: int = 2

    @property
    def size(self) -> int:
        return math.prod(p.size for p in self.parts)

    def __repr__(self) -> str:
        return "<" + "*".join(map(repr, self.parts)) + ">"


class Idx(NamedTuple):
    """The value of an integer-valued node at `args`, as a place on an axis of length `size`.

    A value outside `range(size)` is no place at all: the cell does not exist.
    """

    node: Node
    args: tuple[Term, ...]
    size: int
    kind: int = 3

    def __repr__(self) -> str:
        return f"{self.node!r}({','.join(map(repr, self.args))})"

    @property
    def factor(self) -> Factor:
        return Factor(self.node, self.args)


Term: TypeAlias = "Var | Const | Flat | Idx"
Substitution = Mapping[Var, Term]

UNIT = Const(0, 1)


class Factor(NamedTuple):
    """A node read at index terms: `node[args]`."""

    node: Node
    args: tuple[Term, ...]

    def __repr__(self) -> str:
        return f"{self.node!r}({','.join(map(repr, self.args))})"


class IndexKey(NamedTuple):
    """Which part of an index is meant, whatever its variables are called: `places` has what is fixed, else None."""

    node: Node
    places: tuple[int | None, ...]

    def may_be(self, other: IndexKey) -> bool:
        """Whether the two have assignments in common."""
        pairs = zip(self.places, other.places, strict=True)
        return self.node is other.node and all(a is None or b is None or a == b for a, b in pairs)


def key_of(index: Idx) -> IndexKey:
    """The part of an index that is read."""
    return IndexKey(index.node, tuple(a.value if isinstance(a, Const) else None for a in index.args))


def fresh(size: int) -> Var:
    """A variable that occurs nowhere else."""
    return Var(next(_fresh_ids), int(size))


def fresh_axis(size: int) -> Term:
    """A fresh variable, or the only place of an axis of length 1."""
    return UNIT if size == 1 else fresh(size)


def term_vars(term: Term) -> tuple[Var, ...]:
    """The variables of a term in order of first occurrence."""
    return (term,) if isinstance(term, Var) else vars_of((term,))


def vars_of(terms: Iterable[Term]) -> tuple[Var, ...]:
    """The variables of several terms in order of first occurrence."""
    seen: dict[Var, None] = {}
    _note_vars(terms, seen)
    return tuple(seen)


def factor_vars(factors: Iterable[Factor]) -> tuple[Var, ...]:
    """The variables of several factors in order of first occurrence."""
    seen: dict[Var, None] = {}
    for factor in factors:
        _note_vars(factor.args, seen)
    return tuple(seen)


def _note_vars(terms: Iterable[Term], seen: dict[Var, None]) -> None:
    for term in terms:
        if isinstance(term, Var):
            seen[term] = None
        elif isinstance(term, Idx):
            _note_vars(term.args, seen)
        elif isinstance(term, Flat):
            _note_vars(term.parts, seen)


def has_idx(term: Term) -> bool:
    """Whether the place depends on data."""
    return isinstance(term, Idx) or (isinstance(term, Flat) and any(isinstance(p, Idx) for p in term.parts))


def parts_of(term: Term) -> tuple[Term, ...]:
    """The term's parts; an axis of length 1 has none."""
    if isinstance(term, Flat):
        return term.parts
    return () if term.size == 1 and isinstance(term, Const) else (term,)


def flatten(terms: Iterable[Term]) -> Term:
    """One term for several, row-major."""
    parts: list[Term] = []
    for term in terms:
        for part in parts_of(term):
            merged = _merge(parts[-1], part) if parts else None
            if merged is None:
                parts.append(part)
            else:
                parts[-1] = merged
    if not parts:
        return UNIT
    return parts[0] if len(parts) == 1 else Flat(tuple(parts))


def _merge(high: Term, low: Term) -> Term | None:
    """Quotient and remainder of one index, side by side, are that index."""
    if isinstance(high, Const) and isinstance(low, Const):
        return Const(high.value * low.size + low.value, high.size * low.size)
    if isinstance(high, Idx) and isinstance(low, Idx):
        whole = high.node.split_of(low.node)
        if whole is not None and high.args == low.args and whole[1] == low.size:
            return Idx(whole[0].node, substitute_all(whole[0].args, _bind(high.args)), high.size * low.size)
    return None


def _bind(args: tuple[Term, ...]) -> dict[Var, Term]:
    return {Var(i, a.size): a for i, a in enumerate(args)}


def substitute(term: Term, mapping: Substitution) -> Term:
    """Replaces variables, all at once."""
    if isinstance(term, Var):
        return mapping.get(term, term)
    if isinstance(term, Const):
        return term
    if isinstance(term, Flat):
        return flatten(substitute(p, mapping) for p in term.parts)
    return place_of(term.node, substitute_all(term.args, mapping), term.size)


def place_of(node: Node, args: tuple[Term, ...], size: int) -> Term:
    """The place that an index gives at `args`, or the term that it is known to be there."""
    known = _undone(node, args) or _expert_of_occupant(node, args)
    return Idx(node, args, size) if known is None else known


def _undone(node: Node, args: tuple[Term, ...]) -> Term | None:
    """What a permutation gives of an index that its inverse gives: the place that the inverse is read at."""
    if node.inverse is None:
        return None
    other, axis = node.inverse
    place = args[axis]
    if not isinstance(place, Idx) or place.node is not other:
        return None
    rest = [i for i in range(len(args)) if i != axis]
    return place.args[axis] if all(args[i] == place.args[i] for i in rest) else None


def _expert_of_occupant(node: Node, args: tuple[Term, ...]) -> Term | None:
    """What an index gives of the assignment that stands in an expert's queue: that expert."""
    if not node.is_queued:
        return None
    for place in args:
        queue = place.node.queue if isinstance(place, Idx) else None
        if queue is not None and queue.rank.index.node is node:
            assert isinstance(place, Idx)
            there = substitute_all(queue.rank.index.args, queue.at(place.args))
            return place.args[-2] if there == args else None
    return None


def with_indices(term: Term, change: Callable[[Factor], Factor]) -> Term:
    """A term whose data-dependent indices are what `change` makes of them."""
    if isinstance(term, Idx):
        factor = change(term.factor)
        return Idx(factor.node, factor.args, term.size)
    return flatten(with_indices(p, change) for p in term.parts) if isinstance(term, Flat) else term


def substitute_all(terms: Iterable[Term], mapping: Substitution) -> tuple[Term, ...]:
    return tuple([substitute(t, mapping) for t in terms])


def substitute_factor(factor: Factor, mapping: Substitution) -> Factor:
    return Factor(factor.node, substitute_all(factor.args, mapping)) if mapping else factor
