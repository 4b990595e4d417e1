"""Choices by a threshold: experts that a mask of scores chooses for a token, as many as reach its limit.

Nobody knows how many experts a token gets, so each pair of token and expert is an assignment of its own: choice j of a
token is expert j, and only those are kept that the mask holds for.  The others have no row in an expert's group.

An array is looked at so only where it pays: it is zero (or, before an exponential, −∞) outside of such a mask, and
meets the work of every expert.  Masks and weights themselves stay the arrays that the program computes.

Where the limit of a token is NaN no score reaches it.  Its assignments are kept all the same, because a weight that was
divided by a sum of its scores is then NaN for every expert.

In: arrays that may be zero for experts that are not chosen.  Out: these arrays as pieces that stand at the experts, or
None; masks and indices brought to other scopes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives as prims
import numpy as np
from jax import lax

from moe_xla.passes.recover.masks import disjuncts, mask_at, masks_in, where_not_zero, where_true
from moe_xla.passes.recover.nodes import (
    Graph,
    Leaf,
    Map,
    Mask,
    Node,
    is_boolean,
    is_floating,
    is_map,
    operands_at,
)
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.terms import (
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    fresh,
    parts_of,
    substitute_factor,
)
from moe_xla.passes.recover.values import Piece, Value, as_condition, of_literal, of_node

# Operations in which an array that is zero for most experts may meet the work of all of them.
MEETINGS = frozenset({"mul", "select_n", "dot_general"})


class _Choice(NamedTuple):
    """The experts that masks choose: the variable of all experts, the place of a chosen one, what keeps it."""

    expert: Var
    place: Idx
    kept: Factor


class Thresholds:
    """Arrays that are zero outside of a mask as pieces at the experts, in one scope, whose `steps` get one of ours."""

    def __init__(self, graph: Graph, session: Any, steps: list[Any]):
        self._graph = graph
        self._session = session
        self._steps = steps

    def at_experts(self, value: Value | None, source: Any) -> Value | None:
        """A value as pieces at the experts that it is not zero for, a condition at those where it may hold."""
        if value is None or not value.is_plain or not isinstance(value.factor.node, Map):
            return None
        graph, factor = self._graph, value.factor
        condition, background = where_not_zero(graph, factor), None
        if condition is None and is_boolean(value.dtype):
            condition = where_true(graph, graph.logical_not(factor))
            background = of_literal(graph, True, value.shape, value.dtype)
        choice = self._choice(condition, source) if condition is not None else None
        if choice is None:
            return None
        pairs = {choice.expert, *factor_vars([choice.kept])}
        factors, guards = _multiplied(graph, factor, pairs)
        factors = [self._as_it_is(f, choice.expert, pairs) for f in factors]
        piece = Piece(value.pieces[0].axes, tuple(factors), guards=tuple(guards))
        piece = piece.substitute({choice.expert: choice.place})
        kept = piece.replace(guards=(choice.kept, *piece.guards))
        return Value(value.shape, value.dtype, (kept,), background)

    def are_used(self, indices: frozenset[Idx]) -> bool:
        """Whether a choice by a threshold is among the indices of some work, which is then noted."""
        found = {i.node for i in indices} & self._graph.expected.keys()
        self._session.masked |= found
        return bool(found)

    def _as_it_is(self, factor: Factor, expert: Var, pairs: set[Var]) -> Factor:
        """A weight or mask as the array that the program computes: read on rows, not computed there again."""
        wire, used = factor.node.origin, set(factor_vars([factor]))
        if wire is None or wire.shape != factor.node.shape or expert not in used or not used <= pairs:
            return factor
        if where_not_zero(self._graph, factor) is None:
            return factor
        return Factor(self._graph.leaf(wire, wire.shape, wire.dtype), factor.args)

    def _choice(self, condition: Factor, source: Any) -> _Choice | None:
        """The assignments that a condition keeps: those of a known index, if it keeps no others than that one."""
        masks = {c: mask_at(self._graph, c) for c in disjuncts(condition)}
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

    def _index(self, scores: Node, axis: int, wanted: set[Factor], source: Any) -> Node:
        """An index of experts by token and choice that keeps what one of some conditions, over its variables, wants."""
        known = self._graph.choosing.setdefault((scores, axis), [])
        wider = [i for i in known if wanted <= set(disjuncts(self._graph.kept[i]))]
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
    if not graph.kept or not is_floating(value.dtype) or value.background is not None:
        return False
    return bool(value.pieces) and all(_is_pair(graph, p) for p in value.pieces)


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
    masks = masks_in(graph, node)
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
        conditions = [_carried(target, c, translated) for c in disjuncts(kept_at(source, place))]
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


def _multiplied(graph: Graph, factor: Factor, pairs: set[Var]) -> tuple[list[Factor], list[Factor]]:
    """The factors of a product, and the conditions over pairs of tokens and experts under which it is not zero."""
    if set(factor_vars([factor])) <= pairs:
        return [factor], []
    if is_map(factor, "mul"):
        parts = [_multiplied(graph, op, pairs) for op in operands_at(factor)]
        return [f for factors, _ in parts for f in factors], [g for _, guards in parts for g in guards]
    if is_map(factor, "select_n") and is_floating(factor.node.dtype):
        condition, rest = as_condition(graph, factor)
        if condition is not None and rest is not None and set(factor_vars([condition])) <= pairs:
            factors, guards = _multiplied(graph, rest, pairs)
            return factors, [condition, *guards]
    return [factor], []
