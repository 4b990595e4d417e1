"""Choices by a threshold: masks `scores >= limit`, where the limit is a maximum of the same scores over the experts.

`p >= p.max(-1, keepdims=True)` chooses the best expert of a token, and each that ties with it; the maximum of what that
mask leaves, or the last value of `top_k`, chooses more.  Nobody knows how many experts a token gets, so each pair of
token and expert is an assignment of its own: choice j of a token is expert j, and only those are kept that the mask
holds for.  The others have no row in an expert's group.

An array is looked at so only where it pays: it is zero (or, before an exponential, −∞) outside of such a mask, and
meets the work of every expert.  Masks and weights themselves stay the arrays that the program computes.

Where the limit of a token is NaN no score reaches it.  Its assignments are kept all the same, because a weight that was
divided by a sum of its scores is then NaN for every expert.

In: comparisons, and arrays that may be zero for experts that are not chosen.  Out: these arrays as pieces that stand at
the experts, or None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives as prims
import numpy as np
from jax import lax

from moe_xla.passes.recover.nodes import (
    Graph,
    Leaf,
    Map,
    Mask,
    Node,
    is_boolean,
    is_floating,
    is_map,
    literal,
    operands_at,
)
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.terms import (
    UNIT,
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    fresh,
    parts_of,
    substitute_factor,
)
from moe_xla.passes.recover.values import Piece, Value, of_literal, of_node

# Comparisons that hold for chosen experts, and those that hold for the others: which operand has the scores.
_HOLD, _FAIL = {"ge": (0,), "le": (1,), "eq": (0, 1)}, {"lt": (0,), "gt": (1,)}
COMPARISONS = frozenset({*_HOLD, *_FAIL})
# Operations in which an array that is zero for most experts may meet the work of all of them.
MEETINGS = frozenset({"mul", "select_n", "dot_general"})
# Operations that give zero for zero.
_KEEP_ZERO = frozenset(
    ["neg", "abs", "sign", "sqrt", "square", "tanh", "sin", "convert_element_type", "reduce_precision"]
)
_SUMS = frozenset({"add", "add_any", "sub"})
_ZERO_AT_LOWEST = frozenset({"exp", "exp2", "logistic"})


# ------------------------------------------------------------------------------------------------- masks


def note_mask(graph: Graph, value: Value) -> None:
    """Notes a comparison that chooses experts by a threshold."""
    node = value.factor.node if value.is_plain else None
    if not isinstance(node, Map) or node in graph.masks or not is_floating(node.operands[0].node.dtype):
        return
    for place in _HOLD.get(node.name, ()) or _FAIL.get(node.name, ()):
        mask = _mask(graph, node.operands[place], node.operands[1 - place])
        if mask is not None:
            graph.masks[node] = mask._replace(fails=node.name in _FAIL)
            return


def _mask(graph: Graph, score: Factor, limit: Factor) -> Mask | None:
    scores, bound = _scores_in(score), _bound_of(graph, limit)
    if scores is None or bound is None or bound.scores is not scores.node:
        return None
    expert = scores.args[bound.axis]
    if not isinstance(expert, Var) or not set(factor_vars([limit])) <= set(factor_vars([scores])) - {expert}:
        return None
    levels = frozenset(range(_excluded(graph, score), bound.last))
    return Mask(scores, limit, bound.axis, levels) if 0 < len(levels) < expert.size else None


def _scores_in(factor: Factor) -> Factor | None:
    """The only array of numbers that a factor is made of, beside masks, if it is read along its axes as they are."""
    (scores, *others) = dict.fromkeys(_numbers_in(factor)) or (None,)
    if scores is None or others or not isinstance(scores.node, Leaf):
        return None
    places = [a for a in scores.args if a != UNIT]
    return scores if all(isinstance(a, Var) for a in places) and len(set(places)) == len(places) else None


def _numbers_in(factor: Factor) -> list[Factor]:
    if is_boolean(factor.node.dtype) or literal(factor) is not None:
        return []
    if isinstance(factor.node, Map):
        return [found for op in operands_at(factor) for found in _numbers_in(op)]
    return [factor]


class _Bound(NamedTuple):
    """What a limit is of: an axis of scores, of which it is the value at place `last` from above, counted from 1."""

    scores: Node
    axis: int
    last: int


def _bound_of(graph: Graph, limit: Factor) -> _Bound | None:
    found = _extreme(limit.node.wire) if isinstance(limit.node, Leaf) else None
    if found is None:
        return None
    wire, axis, last = found
    value = wire.value
    if value is None or not value.is_plain:
        return None
    scores, along = _scores_in(value.factor), value.pieces[0].axes[axis]
    if scores is None or along not in scores.args:
        return None
    return _Bound(scores.node, scores.args.index(along), last + _excluded(graph, value.factor))


def _extreme(wire: Wire) -> tuple[Wire, int, int] | None:
    """(array, axis, k) where a wire is the k-th largest value of an array along an axis."""
    step = wire.step
    if not isinstance(step, Step) or not step.outputs:
        return None
    if step.name == "reduce_max" and len(step.eqn.params["axes"]) == 1:
        return step.inputs[0], step.eqn.params["axes"][0], 1
    best = _best(wire)
    if best is not None:
        return best if best[2] == 1 else None
    if step.name not in ("reduce_min", "slice"):
        return None
    best = _best(step.inputs[0])
    if best is None:
        return None
    array, axis, count = best
    if step.name == "reduce_min":
        return best if tuple(step.eqn.params["axes"]) == (axis,) else None
    start, width = step.eqn.params["start_indices"][axis], wire.shape[axis]
    whole = all(n == m for i, (n, m) in enumerate(zip(wire.shape, step.inputs[0].shape, strict=True)) if i != axis)
    if width != 1 or not whole:
        return None
    return array, axis, start + 1 if step.inputs[0].step.name == "top_k" else count - start


def _best(wire: Wire) -> tuple[Wire, int, int] | None:
    """(array, axis, n) where a wire is the n largest values of an array along an axis, in order."""
    step = wire.step
    if not isinstance(step, Step) or not step.outputs or wire.index != 0:
        return None
    array = step.inputs[0] if step.inputs else None
    if step.name == "top_k" and array is not None:
        return array, step.eqn.params.get("axis", len(array.shape) - 1) % len(array.shape), step.eqn.params["k"]
    if step.name == "sort" and array is not None and step.eqn.params["num_keys"] == 1:
        axis = step.eqn.params["dimension"]
        return array, axis, array.shape[axis]
    return None


def _excluded(graph: Graph, factor: Factor) -> int:
    """How many of the best experts masks leave out of an array."""
    return len(frozenset().union(*(mask.levels for mask in _masks_in(graph, factor.node))))


def _masks_in(graph: Graph, node: Node) -> frozenset[Mask]:
    """The masks that an array is made with."""
    if node in graph.masks:
        return frozenset({graph.masks[node]})
    if not isinstance(node, Map) or not graph.masks:
        return frozenset()
    key = ("masks", node)
    if key not in graph.memo:
        graph.memo[key] = frozenset().union(*(_masks_in(graph, op.node) for op in node.operands))
    masks: frozenset[Mask] = graph.memo[key]
    return masks


# ------------------------------------------------------------------------------- what is zero outside of a mask


_Find = Callable[[Graph, Factor], Factor | None]


def _by_node(find: _Find) -> _Find:
    """A search that is made once for each node, over the node's own variables."""

    @functools.wraps(find)
    def found(graph: Graph, factor: Factor) -> Factor | None:
        node, key = factor.node, (find, factor.node)
        if not isinstance(node, Map):
            return None
        if key not in graph.memo:
            graph.memo[key] = find(graph, Factor(node, node.variables))
        condition: Factor | None = graph.memo[key]
        return None if condition is None else substitute_factor(condition, node.bind(factor.args))

    return found


@_by_node
def _where_true(graph: Graph, factor: Factor) -> Factor | None:
    """A choice by thresholds without which a truth value is false."""
    mask = graph.masks.get(factor.node)
    if mask is not None and not mask.fails:
        return factor
    ops = operands_at(factor)
    if is_map(factor, "not"):
        mask = graph.masks.get(ops[0].node)
        return factor if mask is not None and mask.fails else None
    if is_map(factor, "or"):
        return _either(graph, _where_true(graph, ops[0]), _where_true(graph, ops[1]))
    if is_map(factor, "and"):
        return _where_true(graph, ops[0]) or _where_true(graph, ops[1])
    if is_map(factor, "gt", "ne") and literal(ops[1]) is not None and literal(ops[1]) == 0:
        return _where_not_zero(graph, ops[0])
    return None


@_by_node
def _where_not_zero(graph: Graph, factor: Factor) -> Factor | None:
    """A choice by thresholds without which a number is zero."""
    if is_boolean(factor.node.dtype):
        return _where_true(graph, factor)
    ops = operands_at(factor)
    if is_map(factor, *_KEEP_ZERO):
        return _where_not_zero(graph, ops[0])
    if is_map(factor, "mul"):
        return _where_not_zero(graph, ops[0]) or _where_not_zero(graph, ops[1])
    if is_map(factor, "div"):
        return _where_not_zero(graph, ops[0])
    if is_map(factor, *_SUMS):
        return _either(graph, _where_not_zero(graph, ops[0]), _where_not_zero(graph, ops[1]))
    if is_map(factor, *_ZERO_AT_LOWEST):
        return _where_finite(graph, ops[0])
    return _where_selected(graph, ops, 0, _where_not_zero) if is_map(factor, "select_n") else None


@_by_node
def _where_finite(graph: Graph, factor: Factor) -> Factor | None:
    """A choice by thresholds without which a number is −∞."""
    ops = operands_at(factor)
    if is_map(factor, "convert_element_type", "sub") and is_floating(ops[0].node.dtype):
        return _where_finite(graph, ops[0])
    return _where_selected(graph, ops, -np.inf, _where_finite) if is_map(factor, "select_n") else None


def _where_selected(graph: Graph, ops: Sequence[Factor], other: float, inside: _Find) -> Factor | None:
    """The same for a selection of what is `other` where the condition fails, or where it holds."""
    if len(ops) != 3 or not is_boolean(ops[0].node.dtype):
        return None
    condition, if_false, if_true = ops
    cases = (if_false, condition, if_true), (if_true, graph.logical_not(condition), if_false)
    for empty, held, data in cases:
        if literal(empty) is not None and literal(empty) == other:
            return _where_true(graph, held) or inside(graph, data)
    return None


def _either(graph: Graph, one: Factor | None, other: Factor | None) -> Factor | None:
    return None if one is None or other is None else graph.map(prims.or_p, {}, [one, other], np.dtype(bool))


def _disjuncts(condition: Factor) -> list[Factor]:
    if is_map(condition, "or"):
        return [c for op in operands_at(condition) for c in _disjuncts(op)]
    return [condition]


# ---------------------------------------------------------------------------------------------- assignments


class _Choice(NamedTuple):
    """The experts that masks choose: the place of the expert `axis` stands for, and the condition that keeps it."""

    expert: Var
    place: Idx
    kept: Factor


class Thresholds:
    """Arrays that are zero outside of a mask as pieces at the experts, in one scope.

    `array` gives the array of a scope that a step of ours computes.
    """

    def __init__(self, graph: Graph, session: Any, steps: list[Any]):
        self._graph = graph
        self._session = session
        self._steps = steps

    def at_experts(self, value: Value | None, source: Any) -> Value | None:
        """A value as pieces at the experts that it is not zero for, a condition at those where it may hold."""
        if value is None or not value.is_plain or not isinstance(value.factor.node, Map):
            return None
        graph, factor = self._graph, value.factor
        condition, background = _where_not_zero(graph, factor), None
        if condition is None and is_boolean(value.dtype):
            condition = _where_true(graph, graph.logical_not(factor))
            background = of_literal(graph, True, value.shape, value.dtype)
        choice = self._choice(condition, source) if condition is not None else None
        if choice is None:
            return None
        factors = tuple(self._as_it_is(f, choice) for f in _multiplied(factor))
        piece = Piece(value.pieces[0].axes, factors).substitute({choice.expert: choice.place})
        return Value(value.shape, value.dtype, (piece.replace(guards=(choice.kept,)),), background)

    def are_used(self, indices: frozenset[Idx]) -> bool:
        """Whether a choice by a threshold is among the indices of some work, which is then noted."""
        found = {i.node for i in indices} & self._graph.expected.keys()
        self._session.masked |= found
        return bool(found)

    def _as_it_is(self, factor: Factor, choice: _Choice) -> Factor:
        """A weight or mask as the array that the program computes: read on rows, not computed there again."""
        wire, places = factor.node.origin, {choice.expert, *factor_vars([choice.kept])}
        if wire is None or wire.shape != factor.node.shape or not set(factor_vars([factor])) <= places:
            return factor
        if choice.expert not in factor_vars([factor]) or _where_not_zero(self._graph, factor) is None:
            return factor
        return Factor(self._graph.leaf(wire, wire.shape, wire.dtype), factor.args)

    def _choice(self, condition: Factor, source: Any) -> _Choice | None:
        """The assignments that a condition keeps: those of a known index, if it keeps no others than that one."""
        masks = {c: self._mask_of(c) for c in _disjuncts(condition)}
        (scores, axis), *others = {(m.scores, m.axis) for m in masks.values()}
        expert = scores.args[axis]
        if others or not isinstance(expert, Var) or set(factor_vars([condition])) - set(factor_vars([scores])):
            return None
        tokens = tuple(a for i, a in enumerate(scores.args) if i != axis)
        names: dict[Var, Term] = {a: Var(i, a.size) for i, a in enumerate((*tokens, expert)) if isinstance(a, Var)}
        wanted = {substitute_factor(f, names) for c, m in masks.items() for f in (c, _is_nan(self._graph, m))}
        index = self._index(scores.node, axis, wanted, source)
        levels = frozenset().union(*(m.levels for m in masks.values()))
        self._graph.expected[index] = max(self._graph.expected.get(index, 0), len(levels))
        place = Idx(index, (*tokens, fresh(expert.size)), expert.size)
        return _Choice(expert, place, kept_at(self._graph, place))

    def _mask_of(self, condition: Factor) -> Mask:
        """The mask that a condition without `or` is, read where it is read."""
        whole = operands_at(condition)[0] if is_map(condition, "not") else condition
        mask = self._graph.masks[whole.node]
        names = whole.node.bind(whole.args)
        return mask._replace(scores=substitute_factor(mask.scores, names), limit=substitute_factor(mask.limit, names))

    def _index(self, scores: Node, axis: int, wanted: set[Factor], source: Any) -> Node:
        """An index of experts by token and choice that keeps what one of some conditions, over its variables, wants."""
        known = self._graph.choosing.setdefault((scores, axis), [])
        wider = [i for i in known if wanted <= set(_disjuncts(self._graph.kept[i]))]
        index = next((i for i in wider if i in self._session.masked), wider[0] if wider else None)
        if index is None:
            index = self._new_index(scores, axis, len(known), source)
            self._graph.kept[index] = _any_of(self._graph, wanted)
            known.append(index)
        return index

    def _new_index(self, scores: Node, axis: int, turn: int, source: Any) -> Leaf:
        """An array 0, 1, … along the choices, which a step of ours makes."""
        assert isinstance(scores, Leaf)
        shape = (*(n for i, n in enumerate(scores.shape) if i != axis), scores.shape[axis])
        made = jax.make_jaxpr(lambda: lax.broadcasted_iota(np.int32, shape, len(shape) - 1))()
        step = Step(made.jaxpr.eqns[0], (), source=source)
        number = self._session.number(("experts by threshold", scores.wire.number, axis, turn))
        wire = Wire(shape, np.dtype(np.int32), step, number=number)
        step.outputs = (wire,)
        self._steps.append(step)
        leaf = self._graph.leaf(wire, shape, wire.dtype)
        wire.value = of_node(leaf)
        self._graph.bounds[leaf], self._graph.distinct[leaf] = shape[-1], len(shape) - 1
        return leaf


def is_over_pairs(graph: Graph, value: Value) -> bool:
    """Whether a value has one number for each pair of token and expert, as gradients of weights do."""
    return is_floating(value.dtype) and value.background is None and all(_is_pair(graph, p) for p in value.pieces)


def _is_pair(graph: Graph, piece: Piece) -> bool:
    parts = [part for a in piece.axes for part in parts_of(a)]
    indices = [p for p in parts if isinstance(p, Idx)]
    if len(indices) != 1 or indices[0].node not in graph.kept or piece.hidden or piece.equalities:
        return False
    return {p for p in parts if isinstance(p, Var)} <= set(indices[0].args)


def kept_at(graph: Graph, place: Idx) -> Factor:
    """The condition under which an assignment of a choice by a threshold is kept."""
    return substitute_factor(graph.kept[place.node], dict(zip(place.node.variables, place.args, strict=True)))


def is_made_by_choice(graph: Graph, session: Any, node: Node) -> bool:
    """Whether an array is made with masks by which a layer chooses its experts."""
    if not graph.choosing:
        return False
    masks = _masks_in(graph, node)
    return any(index in session.masked for m in masks for index in graph.choosing.get((m.scores.node, m.axis), ()))


def carry_mask(
    session: Any,
    source: Graph,
    factor: Factor,
    target: Graph,
    rebuilt: Factor,
    translated: Callable[[Factor], Factor],
) -> None:
    """Notes a mask of another scope, and the indices of the experts that it chooses, where it was rebuilt."""
    mask = source.masks.get(factor.node)
    if mask is None or rebuilt.node in target.masks:
        return
    indices = [i for i in source.choosing.get((mask.scores.node, mask.axis), ()) if i in session.masked]
    names = dict(zip(factor.node.variables, factor.args, strict=True))
    here = substitute_factor(mask.scores, names)
    expert = here.args[mask.axis]
    scores, limit = translated(here), translated(substitute_factor(mask.limit, names))
    back = _own_variables(rebuilt.args)
    if not indices or expert not in scores.args or not set(factor_vars([scores, limit])) <= set(back):
        return
    axis = scores.args.index(expert)
    target.masks[rebuilt.node] = mask._replace(
        scores=substitute_factor(scores, back), limit=substitute_factor(limit, back), axis=axis
    )
    known = target.choosing.setdefault((scores.node, axis), [])
    tokens = [a for i, a in enumerate(here.args) if i != mask.axis]
    for index in indices:
        place = Idx(index, (*tokens, fresh(expert.size)), expert.size)
        inner = translated(place.factor)
        if inner.node in target.kept:
            continue
        own = _own_variables(inner.args)
        conditions = [_carried(target, c, translated) for c in _disjuncts(kept_at(source, place))]
        if not set(factor_vars(conditions)) <= set(own):
            continue
        target.kept[inner.node] = _any_of(target, {substitute_factor(c, own) for c in conditions})
        target.expected[inner.node] = source.expected[index]
        session.masked.add(inner.node)
        known.append(inner.node)


def _carried(target: Graph, condition: Factor, translated: Callable[[Factor], Factor]) -> Factor:
    """A mask, or the test whether a limit is NaN, in another scope."""
    if not is_map(condition, "ne"):
        return translated(condition)
    limit, itself = operands_at(condition)
    return target.compare(prims.ne_p, translated(limit), translated(itself))


def _any_of(graph: Graph, conditions: set[Factor]) -> Factor:
    return functools.reduce(
        lambda a, b: graph.map(prims.or_p, {}, [a, b], np.dtype(bool)), sorted(conditions, key=repr)
    )


def _own_variables(args: Sequence[Term]) -> dict[Var, Term]:
    """The places at which a node is read as the node's own variables."""
    return {a: Var(i, a.size) for i, a in enumerate(args) if isinstance(a, Var)}


def _is_nan(graph: Graph, mask: Mask) -> Factor:
    return graph.compare(prims.ne_p, mask.limit, mask.limit)


def _multiplied(factor: Factor) -> list[Factor]:
    return [f for op in operands_at(factor) for f in _multiplied(op)] if is_map(factor, "mul") else [factor]
