"""Einsums that are grouped matmuls: rows times the matrix of the expert that each row chose.

In: a node.  Out: its `Grouping`, or None; the choices that a node or a factor reads, and the work it holds of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from moe_xla.passes.recover.facts import depends_on_rank, direct_operands
from moe_xla.passes.recover.nodes import Ein, Graph, Leaf, Node, is_floating
from moe_xla.passes.recover.terms import Const, Factor, Idx, Var, factor_vars, has_idx, parts_of, term_vars


class Grouping(NamedTuple):
    """How a node is a grouped matmul: `out[points, free] = Σ_inner left[points, inner] · w[index, inner, free]`.

    The weights may be read at fixed places of further axes, as where several matrices are stacked.
    """

    left: tuple[Factor, ...]
    weight: Factor
    place: Idx
    inner: tuple[Var, ...]
    free: tuple[Var, ...]


def grouping_of(node: Ein) -> Grouping | None:
    """How a node is a grouped matmul with all its assignments on its axes, or None."""
    if not node.gathers or not node.binders or node.equalities or not is_floating(node.dtype):
        return None
    for i, weight in enumerate(node.factors):
        places = [j for j, a in enumerate(weight.args) if isinstance(a, Idx)]
        if len(places) != 1 or not all(isinstance(a, (Var, Idx, Const)) for a in weight.args):
            continue
        index = weight.args[places[0]]
        assert isinstance(index, Idx)
        if index.node.queue is not None:
            continue
        points = set(term_vars(index))
        others = [a for j, a in enumerate(weight.args) if j != places[0] and not isinstance(a, Const)]
        if points & set(others) or len(set(others)) != len(others) or not points <= set(node.out):
            continue
        inner = tuple(a for a in others if a in node.binders)
        free = tuple(a for a in others if a not in node.binders)
        left = node.factors[:i] + node.factors[i + 1 :]
        if set(inner) != set(node.binders) or not inner or not left:
            continue
        if set(factor_vars(left)) - points - set(inner) or set(factor_vars(node.guards)) - points:
            continue
        if set(node.out) != points | set(free):
            continue
        return Grouping(left, weight, index, inner, free)  # type: ignore[arg-type]
    return None


def choices_in(graph: Graph, factor: Factor) -> list[Idx]:
    """The data-dependent place at which a factor is read; none where it is a slot, or where there are several."""
    places = [p for a in factor.args for p in parts_of(a) if isinstance(p, Idx) and p.size > 1]
    if any(p.node.queue is not None for p in places):
        return []  # another assignment, not an expert
    return places if len(places) == 1 and not depends_on_rank(graph, places[0].node) else []


def matmul_indices(graph: Graph, node: Node) -> frozenset[Idx]:
    """The indices of the grouped matmuls that a node is computed from, which save work over all experts."""
    key = ("matmuls", node)
    if key not in graph.memo:
        found = frozenset().union(*(matmul_indices(graph, f.node) for f in direct_operands(node)))
        grouping = grouping_of(node) if isinstance(node, Ein) else None
        if grouping is not None and _is_expert_work(graph, node, grouping):
            found |= {grouping.place}
        graph.memo[key] = found
    indices: frozenset[Idx] = graph.memo[key]
    return indices


def note_work(graph: Graph, rows: Node, indices: frozenset[Idx]) -> None:
    """Notes that an array holds the work of experts that indices choose, though it was done elsewhere."""
    graph.memo["matmuls", rows] = indices


def _is_expert_work(graph: Graph, node: Node, grouping: Grouping) -> bool:
    """Whether rows meet matrices, not vectors, of fewer experts than there are, which are not made of the choice."""
    place, features = grouping.place, math.prod(v.size for v in grouping.free)
    if features == 1 or not _saves_work(graph, place):
        return False
    return not any(_is_made_of(graph, array, place) for array in _picked_from(graph, node))


def _picked_from(graph: Graph, node: Node) -> frozenset[Leaf]:
    """The arrays that a node reads at data-dependent places, but for the scores by which a threshold chooses."""
    key = ("picked", node)
    if key not in graph.memo:
        read = direct_operands(node)
        here = [leaves_of(graph, f.node) for f in read if any(map(has_idx, f.args)) and not _is_of_pairs(graph, f)]
        graph.memo[key] = frozenset().union(*here, *(_picked_from(graph, f.node) for f in read))
    arrays: frozenset[Leaf] = graph.memo[key]
    return arrays


def _is_of_pairs(graph: Graph, factor: Factor) -> bool:
    """Whether a factor is one number for each pair of token and expert, read where a threshold chooses the expert."""
    index = next((a for a in factor.args if isinstance(a, Idx)), None)
    if index is None or index.node not in graph.kept:
        return False
    return set(factor.args) <= {index, *index.args}


# Weights are inputs of a program, or a few equations away from one: casts, reshapes, slices of stacked layers.
_MOST_STEPS = 64


def _is_made_of(graph: Graph, array: Leaf, index: Idx) -> bool:
    """Whether an array may have been computed from the choice that it is read by, as rows in slots are."""
    chosen = {leaf.wire for leaf in leaves_of(graph, index.node)}
    pending = [array.wire]
    seen: set[Any] = set()
    while pending:
        wire = pending.pop()
        if wire in chosen or len(seen) > _MOST_STEPS:
            return True
        if wire not in seen:
            seen.add(wire)
            pending += getattr(wire.step, "inputs", ())
    return False


def leaves_of(graph: Graph, node: Node) -> frozenset[Leaf]:
    """The arrays that a node is computed from."""
    if isinstance(node, Leaf):
        return frozenset({node})
    key = ("leaves", node)
    if key not in graph.memo:
        graph.memo[key] = frozenset().union(*(leaves_of(graph, f.node) for f in direct_operands(node)))
    leaves: frozenset[Leaf] = graph.memo[key]
    return leaves


def _saves_work(graph: Graph, place: Idx) -> bool:
    """Whether a place is a choice of fewer experts than there are."""
    if depends_on_rank(graph, place.node) or np.dtype(place.node.dtype).kind not in "iu":
        return False
    if place.node in graph.expected:
        return graph.expected[place.node] < place.size
    axis = graph.distinct.get(place.node)
    chosen = place.args[axis] if axis is not None else None
    return not isinstance(chosen, Var) or chosen.size < place.size or not term_vars(place)
