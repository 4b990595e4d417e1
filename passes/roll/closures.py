"""Where the members of a group come together again: sums, selects, scatters, stacks.

In: the `Places` of a graph.  Out: `closures_of`: for operations that join members of groups, a `Closure` that gives
their result from the rolled arrays.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from moe_xla.passes.recover.nodes import is_floating, is_integer
from moe_xla.passes.roll.graph import Graph, Op, Value
from moe_xla.passes.roll.groups import Group, Place, Places
from moe_xla.passes.roll.guards import ADDS, is_zero
from moe_xla.passes.roll.scattered import adds_rows, scatter_all


@dataclasses.dataclass(frozen=True)
class Run:
    """Members `first` … `first + count - 1` of result `result` of a group."""

    group: Group
    result: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True)
class Closure:
    """A result made of runs of members and of other values: `emit(rolled arrays, arrays)`."""

    runs: tuple[Run, ...]
    values: tuple[Value, ...]
    emit: Callable[[Sequence[Any], Sequence[Any]], Any]


def closures_of(graph: Graph, places: Places) -> dict[Op, Closure]:
    """The closures of a graph, by the operation whose result they give."""
    found: dict[Op, Closure] = {}
    inner: set[Op] = set()  # parts of chains that were closed further down
    for op in reversed(graph.ops):
        if op in inner or op.key is None or places.member(op.outputs[0]) is not None:
            continue
        if op.name in ADDS:
            closure = _sum(op, places, inner)
        elif op.name == "select_n":
            closure = _switch(op, places) or _selects(op, graph, places, inner)
        elif op.name in ("stack", "concatenate"):
            closure = _joined(op, places)
        elif adds_rows(op):
            closure = _scatters(op, places, inner)
        else:
            closure = None
        if closure is not None:
            found[op] = closure
    return found


# --- sums


def _sum(root: Op, places: Places, inner: set[Op]) -> Closure | None:
    """A tree of additions.  Members of one group become a sum over them; entries padded to an axis, that axis."""
    interior: set[Op] = set()
    leaves = _leaves(root, places, interior)
    if not all(v.aval.shape in (root.outputs[0].aval.shape, ()) for v in leaves):
        return None
    gathered: dict[Any, dict[int, Value]] = collections.defaultdict(dict)
    rest: list[Value] = []
    for leaf in leaves:
        place, axis = places.member(leaf), None
        if place is None:
            place, axis = _padded(leaf, places) or (None, None)
        if (
            place is None
            or leaf.aval.shape != root.outputs[0].aval.shape
            or place.entry in gathered[place.group, place.result, axis]
        ):
            rest.append(leaf)
        else:
            gathered[place.group, place.result, axis][place.entry] = leaf
    runs: list[Run] = []
    axes: list[int | None] = []
    for (group, result, axis), members in gathered.items():
        first, count = min(members, default=0), len(members)
        if count < 2 or max(members) - first + 1 != count:
            rest.extend(members.values())
        else:
            runs.append(Run(group, result, first, count))
            axes.append(axis)
    if not runs:
        return None
    inner |= interior
    values = tuple(v for v in rest if not is_zero(v))

    def emit(rolled: Sequence[Any], arrays: Sequence[Any]) -> Any:
        shape = root.outputs[0].aval.shape
        total: Any = None
        for run, axis, array in zip(runs, axes, rolled, strict=True):
            term = lax.reduce_sum(array, axes=(0,)) if axis is None else _unpadded(array, axis, run.first, shape[axis])
            total = term if total is None else lax.add(total, term)
        for array in arrays:
            total = lax.add(total, array if np.shape(array) == shape else lax.full(shape, array, total.dtype))
        return total

    return Closure(tuple(runs), values, emit)


def _leaves(root: Op, places: Places, interior: set[Op]) -> list[Value]:
    shape = root.outputs[0].aval.shape
    leaves: list[Value] = []
    pending = list(reversed(root.inputs))
    while pending:
        value = pending.pop()
        op = value.op
        if op is not None and op.name in ADDS and _is_interior(value, shape) and places.member(value) is None:
            interior.add(op)
            pending.extend(reversed(op.inputs))
        else:
            leaves.append(value)
    return leaves


def _is_interior(value: Value, shape: Sequence[int]) -> bool:
    return len(value.users) == 1 and not value.is_output and value.aval.shape == shape


def _padded(value: Value, places: Places) -> tuple[Place, int] | None:
    """(place, axis) of a member of size 1 along an axis, padded with zeros so that member e stands at e there."""
    op = value.op
    if op is None or op.name != "pad" or not is_zero(op.inputs[1]):
        return None
    place = places.member(op.inputs[0])
    config = op.params["padding_config"]
    padded = [i for i, (low, high, _) in enumerate(config) if low or high]
    if place is None or len(padded) != 1 or any(inside for _, _, inside in config):
        return None
    (axis,) = padded
    return (place, axis) if op.inputs[0].aval.shape[axis] == 1 and config[axis][0] == place.entry else None


def _unpadded(array: Any, axis: int, first: int, size: int) -> Any:
    """[n, …, 1 at axis, …] → […, size at axis, …], entries from `first` on."""
    laid = move_axis(lax.squeeze(array, (axis + 1,)), 0, axis)
    count = array.shape[0]
    if count == size:
        return laid
    config = [(first, size - first - count, 0) if i == axis else (0, 0, 0) for i in range(laid.ndim)]
    return lax.pad(laid, np.zeros((), laid.dtype), config)


# --- selects


def _selects(root: Op, graph: Graph, places: Places, inner: set[Op]) -> Closure | None:
    """A chain of selects under masks that exclude each other: at most one of the members is chosen anywhere."""
    first = _choice(root, places)
    if first is None or graph.mask_of(root.inputs[0]) is None or not is_summable(root.outputs[0]):
        return None
    chosen: dict[int, Op] = {}
    value, op = root.outputs[0], root
    while True:
        choice = _choice(op, places) if op is root or _is_interior(value, root.outputs[0].aval.shape) else None
        if choice is None or choice[:2] != first[:2] or choice[2] in chosen:
            break
        chosen[choice[2]] = op
        value = op.inputs[1]
        if value.op is None or value.op.name != "select_n":
            break
        op = value.op
    low, count = min(chosen), len(chosen)
    if count < 2 or max(chosen) - low + 1 != count:
        return None
    inner.update(o for o in chosen.values() if o is not root)
    (mask, mask_result), (member, member_result) = first[0], first[1]
    runs = [Run(mask, mask_result, low, count)]
    if isinstance(member, Group):
        runs.append(Run(member, member_result, low, count))
    base = () if is_zero(value) else (value,)
    values = base if isinstance(member, Group) else (*base, member)

    def emit(rolled: Sequence[Any], arrays: Sequence[Any]) -> Any:
        masks = rolled[0]
        if not isinstance(member, Group):
            start = arrays[0] if base else lax.full_like(arrays[-1], 0)
            return lax.select(lax.reduce_or(masks, axes=(0,)), arrays[-1], start)
        total = chosen_sum(masks, rolled[1])
        if not base:
            return total
        return lax.select(lax.reduce_or(masks, axes=(0,)), total, arrays[0])

    return Closure(tuple(runs), values, emit)


def _choice(op: Op, places: Places) -> tuple[Any, Any, int] | None:
    """(masks, what is chosen, e) of a select with the mask of e in front of a member e, or of a shared value."""
    if len(op.inputs) != 3:
        return None
    mask, _, on = op.inputs
    place, member = places.member(mask), places.member(on)
    if (
        place is None
        or any(v.aval.shape != op.outputs[0].aval.shape for v in op.inputs)
        or (member is not None and member.entry != place.entry)
    ):
        return None
    chosen = (member.group, member.result) if member is not None else (on, 0)
    return (place.group, place.result), chosen, place.entry


def is_summable(value: Value) -> bool:
    """Whether a choice between arrays of this type can be written as a sum."""
    return is_floating(value.aval.dtype) or is_integer(value.aval.dtype)


def chosen_sum(masks: Any, rolled: Any) -> Any:
    """Σ_e (rolled[e] where masks[e], else 0)."""
    return lax.reduce_sum(lax.select(masks, rolled, lax.full_like(rolled, 0)), axes=(0,))


def _switch(op: Op, places: Places) -> Closure | None:
    """A select between all members of a group by their number."""
    which, *cases = op.inputs
    found = [places.member(v) for v in cases]
    first = found[0]
    if first is None or not is_summable(op.outputs[0]) or places[which] is not None:
        return None
    if any(p is None or p != Place(first.group, first.result, i) for i, p in enumerate(found)):
        return None

    def emit(rolled: Sequence[Any], arrays: Sequence[Any]) -> Any:
        shape = rolled[0].shape
        number = lax.convert_element_type(arrays[0], np.int32)
        wanted = lax.broadcast_in_dim(number, shape, tuple(range(1, 1 + number.ndim)) if number.ndim else ())
        return chosen_sum(lax.eq(wanted, lax.broadcasted_iota(np.int32, shape, 0)), rolled[0])

    return Closure((Run(first.group, first.result, 0, len(cases)),), (which,), emit)


# --- scatters


def _scatters(root: Op, places: Places, inner: set[Op]) -> Closure | None:
    """A chain of additions of rows into one array: those of all members are added at once."""
    chain, start = [root], root.inputs[0]
    while start.op is not None and start.op.key == root.key and _is_interior(start, root.outputs[0].aval.shape):
        chain.append(start.op)
        start = start.op.inputs[0]
    found = [[places.member(v) for v in op.inputs[1:]] for op in chain]
    members = [[p for p in row if p is not None] for row in found]
    if len(chain) < 2 or any(len(row) != len(root.inputs) - 1 for row in members) or places[start] is not None:
        return None
    low = min(row[0].entry for row in members)
    wanted = {tuple(Place(p.group, p.result, low + k) for p in members[0]) for k in range(len(chain))}
    if {tuple(row) for row in members} != wanted:
        return None
    inner.update(chain[1:])
    runs = tuple(Run(p.group, p.result, low, len(chain)) for p in members[0])

    def emit(rolled: Sequence[Any], arrays: Sequence[Any]) -> Any:
        return scatter_all(root.eqn, arrays[0], *rolled)

    return Closure(runs, (start,), emit)


# --- stacks


def _joined(op: Op, places: Places) -> Closure | None:
    """A stack or concatenation in which members of a group follow each other in order."""
    stacks = op.name == "stack"
    axis = op.params["axis"] if stacks else op.params["dimension"]
    parts: list[Run | Value] = []
    for value in op.inputs:
        place, last = places.member(value), parts[-1] if parts else None
        if place is None:
            parts.append(value)
        elif isinstance(last, Run) and _follows(last, place):
            parts[-1] = dataclasses.replace(last, count=last.count + 1)
        else:
            parts.append(Run(place.group, place.result, place.entry, 1))
    runs = tuple(p for p in parts if isinstance(p, Run))
    if not any(r.count > 1 for r in runs):
        return None
    values = tuple(p for p in parts if not isinstance(p, Run))

    def emit(rolled: Sequence[Any], arrays: Sequence[Any]) -> Any:
        left, right = iter(rolled), iter(arrays)
        laid = []
        for part in parts:
            if not isinstance(part, Run):
                array = next(right)
                laid.append(lax.expand_dims(array, (axis,)) if stacks else array)
                continue
            array = move_axis(next(left), 0, axis)
            if not stacks:
                shape = array.shape
                array = lax.reshape(array, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))
            laid.append(array)
        return laid[0] if len(laid) == 1 else lax.concatenate(laid, axis)

    return Closure(runs, values, emit)


def _follows(run: Run, place: Place) -> bool:
    return (run.group, run.result, run.first + run.count) == (place.group, place.result, place.entry)


def move_axis(array: Any, source: int, target: int) -> Any:
    """`jnp.moveaxis` by one transpose, or none."""
    if source == target:
        return array
    order = [i for i in range(jax.numpy.ndim(array)) if i != source]
    order.insert(target, source)
    return lax.transpose(array, order)
