"""Masks `scores >= limit` whose limit is a maximum of the same scores over the experts; what is zero outside of them.

`p >= p.max(-1, keepdims=True)` holds for the best expert of a token, and for each that ties with it; the maximum of
what that mask leaves, or the last value of `top_k`, is the limit of more.  Other comparisons are no choice.

In: comparisons as they are walked, later any array.  Out: `Mask` of a comparison; the condition, made of masks, without
which an array is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.extend.core.primitives as prims
import numpy as np

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
from moe_xla.passes.recover.terms import UNIT, Factor, Var, factor_vars, substitute_factor
from moe_xla.passes.recover.values import Value

# Comparisons that hold for chosen experts, and those that hold for the others: which operand has the scores.
_HOLD, _FAIL = {"ge": (0,), "le": (1,), "eq": (0, 1)}, {"lt": (0,), "gt": (1,)}
COMPARISONS = frozenset({*_HOLD, *_FAIL})
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
    return len(frozenset().union(*(mask.levels for mask in masks_in(graph, factor.node))))


def masks_in(graph: Graph, node: Node) -> frozenset[Mask]:
    """The masks that an array is made with."""
    if node in graph.masks:
        return frozenset({graph.masks[node]})
    if not isinstance(node, Map) or not graph.masks:
        return frozenset()
    key = ("masks", node)
    if key not in graph.memo:
        graph.memo[key] = frozenset().union(*(masks_in(graph, op.node) for op in node.operands))
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
def where_true(graph: Graph, factor: Factor) -> Factor | None:
    """A choice by thresholds without which a truth value is false."""
    mask = graph.masks.get(factor.node)
    if mask is not None and not mask.fails:
        return factor
    ops = operands_at(factor)
    if is_map(factor, "not"):
        mask = graph.masks.get(ops[0].node)
        return factor if mask is not None and mask.fails else None
    if is_map(factor, "or"):
        return _either(graph, where_true(graph, ops[0]), where_true(graph, ops[1]))
    if is_map(factor, "and"):
        return where_true(graph, ops[0]) or where_true(graph, ops[1])
    if is_map(factor, "gt", "ne") and literal(ops[1]) is not None and literal(ops[1]) == 0:
        return where_not_zero(graph, ops[0])
    return None


@_by_node
def where_not_zero(graph: Graph, factor: Factor) -> Factor | None:
    """A choice by thresholds without which a number is zero."""
    if is_boolean(factor.node.dtype):
        return where_true(graph, factor)
    ops = operands_at(factor)
    if is_map(factor, *_KEEP_ZERO):
        return where_not_zero(graph, ops[0])
    if is_map(factor, "mul"):
        return where_not_zero(graph, ops[0]) or where_not_zero(graph, ops[1])
    if is_map(factor, "div"):
        return _if_alike(graph, where_not_zero(graph, ops[0]), ops[1])
    if is_map(factor, *_SUMS):
        return _either(graph, where_not_zero(graph, ops[0]), where_not_zero(graph, ops[1]))
    if is_map(factor, *_ZERO_AT_LOWEST):
        return _where_finite(graph, ops[0])
    return _where_selected(graph, ops, 0, where_not_zero) if is_map(factor, "select_n") else None


@_by_node
def _where_finite(graph: Graph, factor: Factor) -> Factor | None:
    """A choice by thresholds without which a number is −∞."""
    ops = operands_at(factor)
    if is_map(factor, "convert_element_type") and is_floating(ops[0].node.dtype):
        return _where_finite(graph, ops[0])
    if is_map(factor, "sub"):
        return _if_alike(graph, _where_finite(graph, ops[0]), ops[1])
    if is_map(factor, "mul", "div") and (scale := literal(ops[1])) is not None and 0 < scale < np.inf:
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
            return where_true(graph, held) or inside(graph, data)
    return None


def _if_alike(graph: Graph, condition: Factor | None, other: Factor) -> Factor | None:
    """The condition, if another operand is the same for all experts: it is zero or infinite for none alone."""
    if condition is None or literal(other) is not None:
        return condition
    masks = [mask_at(graph, c) for c in disjuncts(condition)]
    experts = {mask.scores.args[mask.axis] for mask in masks}
    return None if experts & set(factor_vars([other])) else condition


def _either(graph: Graph, one: Factor | None, other: Factor | None) -> Factor | None:
    return None if one is None or other is None else graph.map(prims.or_p, {}, [one, other], np.dtype(bool))


def mask_at(graph: Graph, condition: Factor) -> Mask:
    """The mask that a condition without `or` is, read where it is read."""
    whole = operands_at(condition)[0] if is_map(condition, "not") else condition
    mask, names = graph.masks[whole.node], dict(zip(whole.node.variables, whole.args, strict=True))
    return mask._replace(scores=substitute_factor(mask.scores, names), limit=substitute_factor(mask.limit, names))


def disjuncts(condition: Factor) -> list[Factor]:
    if is_map(condition, "or"):
        return [c for op in operands_at(condition) for c in disjuncts(op)]
    return [condition]
