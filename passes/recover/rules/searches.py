"""Where each expert's assignments begin, found by `jnp.searchsorted` in the experts in order.

jax has no primitive for it: the call is known by its name and by its body, which must be the one that
`jnp.searchsorted` itself has for arrays of these types.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from moe_xla.passes.recover.facts import bound_of
from moe_xla.passes.recover.nodes import Graph, Iota, Node
from moe_xla.passes.recover.rules.ranks import key_in_order
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.terms import Factor, Idx, Var
from moe_xla.passes.recover.values import NoRule, Value, plain, unconverted

NAME = "searchsorted"
_SIDES = ("left", "right")
_METHODS = ("scan", "scan_unrolled", "sort", "compare_all")


def is_search(eqn: Any) -> bool:
    """Whether an equation is a call of `jnp.searchsorted`."""
    return eqn.params.get("name") == NAME and len(eqn.invars) == 2 and _side(eqn) is not None


def _side(eqn: Any) -> str | None:
    """The side on which a call searches."""
    types = [(v.aval.shape, np.dtype(v.aval.dtype), v.aval.weak_type) for v in eqn.invars]
    return _bodies(*types).get(str(eqn.params["jaxpr"]))


@functools.cache
def _bodies(*types: tuple[tuple[int, ...], np.dtype[Any], bool]) -> dict[str, str]:
    """The sides by the bodies that `jnp.searchsorted` has for arrays of the given types."""
    avals = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in types]
    sides = {}
    for side in _SIDES:
        for method in _METHODS:
            search = functools.partial(jnp.searchsorted, side=side, method=method)
            (call,) = jax.make_jaxpr(search)(*avals).eqns
            sides[str(call.params["jaxpr"])] = side
    return sides


@rule(NAME)
def searchsorted(context: Context, eqn: Any, experts: Value, queries: Value) -> Value:
    """Searching the experts in order for 0, 1, … counts the assignments of all experts before."""
    graph, side = context.graph, _side(eqn)
    if not queries.is_plain or not isinstance(queries.factor.node, Iota) or len(queries.shape) != 1:
        raise NoRule("a search for something else than each expert")
    (size,) = queries.shape
    counted = _counted(graph, experts, size)
    if counted is None:
        raise NoRule("a search in something else than the experts in order")
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    ends = graph.ends(graph.ein((counted,), (), (), frozenset(), 1, dtype), 0)
    node = ends if side == "right" else graph.pad(graph.slice(ends, 0, 0, size - 1), 0, 1, 0)
    axes = queries.pieces[0].axes
    return plain(queries.shape, axes, Factor(node, axes))


def _counted(graph: Graph, experts: Value, size: int) -> Idx | None:
    """The index that an array has in order, if all of it is there and below `size`."""
    if not experts.is_plain or len(experts.shape) != 1 or not isinstance(experts.pieces[0].axes[0], Var):
        return None
    (place,) = experts.pieces[0].axes
    assert isinstance(place, Var)
    for order in graph.orders:
        if order.shape == experts.shape and key_in_order(graph, order, place, {}) == unconverted(experts.factor):
            return _whole(graph, order, size)
    return None


def _whole(graph: Graph, order: Node, size: int) -> Idx | None:
    """The index that an order sorts, over all its own variables."""
    key, _ = graph.orders[order]
    factor = unconverted(key.factor)
    if not all(isinstance(a, Var) for a in factor.args) or len(set(factor.args)) != len(factor.args):
        return None
    return Idx(factor.node, factor.args, size) if bound_of(graph, factor) == size else None
