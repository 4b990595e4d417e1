"""Facts that are proved about integer nodes, never assumed: where an index comes from and what that implies.

Three kinds carry everything: a position is a queue count plus counts of earlier queues (`rank_of`), an index is below a
bound (`bound_of`), the indices of one `top_k` differ from each other (`distinct_of`).

In: a graph and factors.  Out: facts, or None where nothing is proved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moe_xla.passes.recover.nodes import (
    Ein,
    Ends,
    Graph,
    Iota,
    Leaf,
    Map,
    Node,
    Occupant,
    Pad,
    Rank,
    Slice,
    is_boolean,
    is_extended,
    is_floating,
    is_integer,
    is_map,
    literal,
    operands_at,
    pinned,
    represents_exactly,
)
from moe_xla.passes.recover.terms import (
    Const,
    Factor,
    Idx,
    Substitution,
    Term,
    Var,
    substitute,
    substitute_factor,
)

Atoms = frozenset[tuple[Factor, float]]


class LinearForm(NamedTuple):
    """`Σ coefficient · factor + constant`."""

    atoms: Atoms
    constant: float


_IDENTITIES = ("copy", "stop_gradient", "reduce_precision")
_SIGNS = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1), "neg": (-1,)}


def linear_form(graph: Graph, factor: Factor) -> LinearForm:
    """`factor` as a linear combination of factors that are not sums themselves."""
    key = ("linear", factor)
    form = graph.memo.get(key)
    if form is None:
        form = graph.memo[key] = _linear_form(graph, factor)
    return form


def _atom(factor: Factor) -> LinearForm:
    return LinearForm(frozenset({(factor, 1)}), 0)


def _linear_form(graph: Graph, factor: Factor) -> LinearForm:
    node = factor.node
    value = literal(factor)
    if value is not None:
        numeric = is_integer(node.dtype) or is_floating(node.dtype) or is_boolean(node.dtype)
        return LinearForm(frozenset(), float(value)) if numeric else _atom(factor)
    if isinstance(node, Map):
        return _linear_map(graph, factor, node)
    if isinstance(node, Ein) and node.gathers and _is_renaming(node):
        return linear_form(graph, substitute_factor(node.factors[0], node.bind(factor.args)))
    return _atom(factor)


def _is_renaming(node: Ein) -> bool:
    """Whether an einsum only gives its one factor other axes."""
    conditions = node.binders or node.guards or node.equalities
    return not conditions and len(node.factors) == 1 and bool(node.coef == 1)


def _linear_map(graph: Graph, factor: Factor, node: Map) -> LinearForm:
    ops = operands_at(factor)
    if node.name == "convert_element_type":
        source = ops[0].node.dtype
        plain = (
            not is_boolean(source) and not is_extended(source) and (is_integer(node.dtype) or is_floating(node.dtype))
        )
        form = linear_form(graph, ops[0]) if plain else _atom(factor)
        return form if _survives(graph, form, node.dtype) else _atom(factor)
    if node.name in _IDENTITIES:
        return linear_form(graph, ops[0])
    if node.name == "mul":
        for i in (0, 1):
            scale = literal(ops[i])
            if scale is not None:
                form = _combine([(float(scale), linear_form(graph, ops[1 - i]))])
                return form if _survives(graph, form, node.dtype) else _atom(factor)
        return _atom(factor)
    signs = _SIGNS.get(node.name)
    if signs is None:
        return _atom(factor)
    form = _combine([(s, linear_form(graph, op)) for s, op in zip(signs, ops, strict=True)])
    return form if _survives(graph, form, node.dtype) else _atom(factor)


_WIDE = 2**15


def _survives(graph: Graph, form: LinearForm, dtype: Any) -> bool:
    """Whether whole numbers keep their value in a narrow type, as far as it is known how large they are."""
    if represents_exactly(dtype, _WIDE):
        return True
    largest = abs(form.constant)
    for atom, coefficient in form.atoms:
        node = atom.node
        if isinstance(node, Rank):
            most: int | None = math.prod(v.size for v in (*node.order, *node.many))
        elif isinstance(node, Ein) and is_count(node):
            most = math.prod(v.size for v in node.binders)
        else:
            most = node.shape[0] if isinstance(node, Iota) else graph.bounds.get(node)
        if most is None:
            return False
        largest += abs(coefficient) * most
    return represents_exactly(dtype, math.ceil(largest))


def _combine(parts: list[tuple[float, LinearForm]]) -> LinearForm:
    total: dict[Factor, float] = {}
    constant = 0.0
    for scale, form in parts:
        constant += scale * form.constant
        for atom, coefficient in form.atoms:
            total[atom] = total.get(atom, 0) + scale * coefficient
    return LinearForm(frozenset((a, c) for a, c in total.items() if c), constant)


def same_term(graph: Graph, a: Term, b: Term) -> bool:
    """Whether two terms are provably the same place."""
    if a == b:
        return True
    if not (isinstance(a, Idx) and isinstance(b, Idx)) or a.size != b.size:
        return False
    return linear_form(graph, a.factor) == linear_form(graph, b.factor)


class RankFact(NamedTuple):
    """A factor that equals `rank(batch, order, expert) + Σ others + constant`."""

    rank: Rank
    own_index: Term
    batch: tuple[Term, ...]
    order: tuple[Term, ...]
    expert: Term
    others: Atoms
    constant: float
    guards: tuple[Factor, ...]

    def is_own(self, graph: Graph) -> bool:
        """Whether the queue is that of the assignment's own expert."""
        return isinstance(self.expert, Idx) and same_term(graph, self.own_index, self.expert)


def rank_of(graph: Graph, factor: Factor) -> RankFact | None:
    """The fact that `factor` is a queue position, or None."""
    key = ("rank", factor)
    if key not in graph.memo:
        graph.memo[key] = _rank_of(graph, factor)
    fact: RankFact | None = graph.memo[key]
    return fact


def _rank_of(graph: Graph, factor: Factor) -> RankFact | None:
    form = linear_form(graph, factor)
    ranks = [(a, c) for a, c in form.atoms if isinstance(a.node, Rank)]
    if len(ranks) != 1 or ranks[0][1] != 1:
        return None
    atom = ranks[0][0]
    rank = atom.node
    assert isinstance(rank, Rank)
    if not represents_exactly(rank.dtype, math.prod(v.size for v in rank.order + rank.many) + 1):
        return None
    mapping = rank.bind(atom.args)
    return RankFact(
        rank=rank,
        own_index=_own_index(rank, mapping, atom.args[-1]),
        batch=tuple(mapping[v] for v in rank.batch),
        order=tuple(mapping[v] for v in rank.order),
        expert=atom.args[-1],
        others=frozenset((a, c) for a, c in form.atoms if a is not atom),
        constant=form.constant,
        guards=tuple(substitute_factor(g, mapping) for g in rank.guards),
    )


def _own_index(rank: Rank, mapping: Substitution, expert: Term) -> Term:
    """The rank's index where the rank is read; its `many` variables are those of the expert it is read at."""
    index = substitute(rank.index, mapping)
    if not rank.many or not isinstance(expert, Idx) or expert.node is not rank.index.node:
        return index
    chosen = {
        v: arg for v, arg in zip(rank.index.args, expert.args, strict=True) if isinstance(v, Var) and v in rank.many
    }
    return substitute(rank.index, {**mapping, **chosen})


class Start(NamedTuple):
    """Where the assignments of an expert begin in an order by expert: `node` counts them, `axis` is the expert's."""

    node: Ein
    args: tuple[Term, ...]
    axis: int

    @property
    def expert(self) -> Term:
        return self.args[self.axis]

    @property
    def batch(self) -> dict[Term, Term]:
        """The places on the other axes, by the count's own variables."""
        return {v: a for i, (v, a) in enumerate(zip(self.node.out, self.args, strict=True)) if i != self.axis}


def offset_of(factor: Factor) -> Start | None:
    """The start that a factor is, in an order by expert."""
    ends = factor.node
    if isinstance(ends, Pad) and (ends.low, ends.high) == (1, 0) and isinstance(ends.base, Slice):
        axis, base = ends.axis, ends.base
        whole = base.axis == axis and (base.start, base.stop) == (0, ends.shape[axis] - 1)
        if whole and isinstance(base.base, Ends) and base.base.axis == axis and isinstance(base.base.count, Ein):
            return Start(base.base.count, factor.args, axis)
    return None


def sorted_rank(graph: Graph, factor: Factor) -> tuple[Start, Var, float] | None:
    """(start, a, constant) where a factor is `a − start + constant` at the expert of `a`.

    It says nothing of the order: that `a` counts the places of one that is sorted by that expert is for the caller.
    """
    form = linear_form(graph, factor)
    places = [(f, c) for f, c in form.atoms if isinstance(f.node, Iota)]
    others = {f: c for f, c in form.atoms if not isinstance(f.node, Iota)}
    if len(places) != 1 or places[0][1] != 1 or not isinstance(places[0][0].args[0], Var):
        return None
    start = _start_in({f: -c for f, c in others.items()})
    if start is None or not isinstance(start.expert, Idx):
        return None
    return start, places[0][0].args[0], form.constant


def _start_in(atoms: dict[Factor, float]) -> Start | None:
    """The start that atoms add up to."""
    if len(atoms) == 1:
        ((start, coefficient),) = atoms.items()
        return offset_of(start) if coefficient == 1 else None
    for end, count in itertools.permutations(atoms, 2):
        ends = end.node
        if isinstance(ends, Ends) and ends.count is count.node and end.args == count.args and len(atoms) == 2:
            if (atoms[end], atoms[count]) == (1, -1) and isinstance(ends.count, Ein):
                return Start(ends.count, end.args, ends.axis)
    return None


# Comparisons that say that one operand is at least, or below, the other one: which operand is which.
AT_LEAST = {"ge": (0, 1), "le": (1, 0)}
BELOW = {"lt": (0, 1), "gt": (1, 0)}


def sorted_range(graph: Graph, factor: Factor) -> tuple[Start, Var] | None:
    """(start, a) where a condition says that `a` is a place of the expert's in an order by expert."""
    tests = {c.node.name: operands_at(c) for c in conjuncts(factor) if isinstance(c.node, Map)}
    low = next((tuple(tests[n][i] for i in where) for n, where in AT_LEAST.items() if n in tests), None)
    high = next((tuple(tests[n][i] for i in where) for n, where in BELOW.items() if n in tests), None)
    if len(conjuncts(factor)) != 2 or low is None or high is None or low[0] != high[0]:
        return None
    place, form, end = linear_form(graph, low[0]), linear_form(graph, low[1]), linear_form(graph, high[1])
    start = _start_in(dict(form.atoms)) if form.constant == 0 else None
    ((iota, one),) = place.atoms if len(place.atoms) == 1 else ((None, 0),)
    ((last, other),) = end.atoms if len(end.atoms) == 1 else ((None, 0),)
    if start is None or iota is None or last is None or (one, other, place.constant, end.constant) != (1, 1, 0, 0):
        return None
    same_end = isinstance(last.node, Ends) and last.node.count is start.node and last.args == start.args
    if not same_end or not isinstance(iota.node, Iota) or not isinstance(iota.args[0], Var):
        return None
    return (start, iota.args[0]) if isinstance(start.expert, Var) else None


def is_count(node: Node) -> bool:
    """Whether a node counts assignments per expert: a sum of ones scattered by an index."""
    return (
        isinstance(node, Ein)
        and not node.factors
        and not node.equalities
        and node.coef == 1
        and node.reducer == "sum"
        and any(isinstance(t, Idx) for t in node.out)
    )


class DistinctFact(NamedTuple):
    """An index that takes different values along `along`, the rest of its arguments fixed."""

    node: Node
    axis: int
    along: Term
    rest: tuple[Term, ...]


def distinct_of(graph: Graph, factor: Factor) -> DistinctFact | None:
    """The fact that `factor` is an index out of one `top_k` (values along its axis differ), or None."""
    form = linear_form(graph, factor)
    if len(form.atoms) != 1 or form.constant != 0:
        return None
    ((atom, coefficient),) = form.atoms
    if coefficient != 1:
        return None
    axis = graph.distinct.get(atom.node)
    if axis is None:
        return None
    return DistinctFact(atom.node, axis, atom.args[axis], atom.args[:axis] + atom.args[axis + 1 :])


def assignments_of(rank: Rank) -> int:
    """How many assignments a queue count is over, all queues together."""
    return math.prod(v.size for v in (*rank.batch, *rank.order, *rank.many))


def choices_of(graph: Graph, rank: Rank) -> int:
    """How many experts a token chooses in the index that is counted: proved, or the shorter of its axes."""
    fact = distinct_of(graph, rank.index.factor)
    if fact is not None:
        return 1 if isinstance(fact.along, Const) else fact.along.size
    axes = (*rank.order, *rank.many)
    return min(v.size for v in axes) if len(axes) > 1 else 1


def bound_of(graph: Graph, factor: Factor) -> int | None:
    """An n with 0 ≤ factor < n, or None."""
    form = linear_form(graph, factor)
    if len(form.atoms) != 1 or form.constant != 0:
        return None
    ((atom, coefficient),) = form.atoms
    if coefficient != 1:
        return None
    node = atom.node
    if node in graph.bounds:
        return graph.bounds[node]
    if isinstance(node, Iota):
        return node.shape[0]
    if isinstance(node, Map):
        return _bound_of_map(graph, atom, node)
    return None


def _bound_of_map(graph: Graph, atom: Factor, node: Map) -> int | None:
    ops = operands_at(atom)
    divisor = literal(ops[1]) if len(ops) == 2 else None
    if node.name in ("div", "rem") and is_integer(node.dtype) and divisor is not None and divisor > 0:
        whole = bound_of(graph, ops[0])
        if whole is None:
            return None
        return -(-whole // int(divisor)) if node.name == "div" else min(whole, int(divisor))
    if node.name == "min" and is_integer(node.dtype):
        limits = [literal(op) for op in ops if literal(op) is not None]
        if limits and limits[0] >= 0 and all(is_nonnegative(graph, op) for op in ops):
            return int(limits[0]) + 1
    if node.name == "clamp" and is_integer(node.dtype):
        least, most = literal(ops[0]), literal(ops[2])
        return int(most) + 1 if least is not None and most is not None and 0 <= least <= most else None
    if node.name == "max" and is_integer(node.dtype):
        bounds = [_bound_or_literal(graph, op) for op in ops]
        return None if any(b is None for b in bounds) else max(b for b in bounds if b is not None)
    if node.name == "select_n":
        bounds = [_bound_or_literal(graph, op) for op in ops[1:]]
        return None if any(b is None for b in bounds) else max(b for b in bounds if b is not None)
    return None


def _bound_or_literal(graph: Graph, factor: Factor) -> int | None:
    value = literal(factor)
    if value is not None:
        return int(value) + 1 if value >= 0 and value == int(value) else None
    return bound_of(graph, factor)


def is_outside(graph: Graph, factor: Factor, size: int) -> bool:
    """Whether a number is provably no place on an axis of length `size`."""
    form = linear_form(graph, factor)
    low = high = form.constant
    for atom, coefficient in form.atoms:
        bound = bound_of(graph, atom) if is_integer(atom.node.dtype) else None
        if bound is None:
            return False
        low, high = low + min(coefficient * (bound - 1), 0), high + max(coefficient * (bound - 1), 0)
    largest = max(abs(low), abs(high))
    exact = not form.atoms or represents_exactly(factor.node.dtype, math.ceil(largest))
    return exact and (high < 0 or low >= size)


def conjuncts(guard: Factor) -> list[Factor]:
    """The conditions that a condition is made of by `and`."""
    if is_map(guard, "and") and is_boolean(guard.node.dtype):
        return [c for op in operands_at(guard) for c in conjuncts(op)]
    return [guard]


def holds(graph: Graph, condition: Factor, held: frozenset[Factor]) -> bool:
    """Whether a condition is among those that hold."""
    if condition in held:
        return True
    there = pinned(graph, condition)
    return there in held or bool(literal(there))


def is_nonnegative(graph: Graph, factor: Factor) -> bool:
    """Whether an integer factor is provably ≥ 0."""
    value = literal(factor)
    if value is not None:
        return bool(value >= 0)
    if bound_of(graph, factor) is not None:
        return True
    fact = rank_of(graph, factor)
    if fact is not None and lower_bound(graph, fact) >= 0:
        return True
    node = factor.node
    if is_boolean(node.dtype) or isinstance(node, (Rank, Iota)) or is_count(node):
        return True
    if isinstance(node, Map):
        ops = operands_at(factor)
        if node.name in ("mul", "add", "add_any", "convert_element_type", "min"):
            return all(is_nonnegative(graph, op) for op in ops)
        if node.name == "max":
            return any(is_nonnegative(graph, op) for op in ops)
        if node.name == "select_n":
            return all(is_nonnegative(graph, op) for op in ops[1:]) or _is_masked_position(graph, ops)
    return False


def _is_masked_position(graph: Graph, ops: Sequence[Factor]) -> bool:
    """`where(valid, position, n)` of a queue in which only valid assignments are counted."""
    fact = rank_of(graph, ops[2]) if len(ops) == 3 else None
    if fact is None or not is_nonnegative(graph, ops[1]):
        return False
    return lower_bound(graph, fact, frozenset(conjuncts(ops[0]))) >= 0


def lower_bound(graph: Graph, fact: RankFact, held: frozenset[Factor] = frozenset()) -> float:
    """A proved lower bound of a position: counts are ≥ 0, and the own rank counts itself if its conditions hold."""
    if not all(is_count(a.node) and c > 0 for a, c in fact.others):
        return -math.inf
    own = fact.is_own(graph) and all(holds(graph, g, held) for g in fact.guards)
    return fact.constant + (1 if own else 0)


def rank_sites(graph: Graph, node: Node) -> frozenset[Any]:
    """The sites whose queue counts stand in a node's definition: such an index is a slot."""
    return _sites(graph, node, "sites", lambda leaf: frozenset())


def tainting_sites(graph: Graph, node: Node) -> frozenset[Any]:
    """The sites whose queue counts a value is computed from, also through arrays without a definition."""
    return _sites(graph, node, "taint", lambda leaf: leaf.wire.tainted)


def _sites(graph: Graph, node: Node, kind: str, of_leaf: Callable[[Leaf], frozenset[Any]]) -> frozenset[Any]:
    key = (kind, node)
    if key not in graph.memo:
        if isinstance(node, Rank):
            graph.memo[key] = frozenset({node.site})
        elif isinstance(node, Leaf):
            graph.memo[key] = of_leaf(node)
        elif isinstance(node, Occupant):  # it is no slot itself
            graph.memo[key] = frozenset({node.queue.rank.site}) if kind == "taint" and node.queue else frozenset()
        else:
            found = [_sites(graph, f.node, kind, of_leaf) for f in direct_operands(node)]
            graph.memo[key] = frozenset().union(*found)
    sites: frozenset[Any] = graph.memo[key]
    return sites


def depends_on_rank(graph: Graph, node: Node) -> bool:
    """Whether a queue count stands in a node's definition."""
    return bool(rank_sites(graph, node))


def direct_operands(node: Node) -> list[Factor]:
    """The factors that a node's definition reads, over the definition's own variables."""
    if isinstance(node, Map):
        return list(node.operands)
    if isinstance(node, Ein):
        indices = [t.factor for pair in node.equalities for t in pair]
        for term in node.out:
            indices += [p.factor for p in getattr(term, "parts", (term,)) if isinstance(p, Idx)]
        return [*node.factors, *node.guards, *indices]
    if isinstance(node, Rank):
        return [node.index.factor, *node.guards]
    if isinstance(node, Ends):
        return [Factor(node.count, node.variables)]
    base = getattr(node, "base", None)
    return [Factor(base, base.variables)] if base is not None else []
