"""Unrolled loops over experts become operations with an expert axis.

In: a jaxpr.  Out: `unrolled(jaxpr)`: a function of its constants and inputs that gives its outputs with each group of
parallel operations run once, or None if the jaxpr holds no such loop.  A loop is rolled if it holds a contraction and
its members come together again; a member that is needed by itself is an entry of the rolled array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend as jex
from jax import lax

from moe_xla.passes._jax import at_source, bind_equation
from moe_xla.passes.roll.closures import Closure, Run, closures_of, move_axis
from moe_xla.passes.roll.graph import CONTRACTIONS, Graph, Op, Value, holds
from moe_xla.passes.roll.groups import Group, Place, Places


def unrolled(jaxpr: Any) -> Callable[[Sequence[Any]], list[Any]] | None:
    """The jaxpr with its unrolled loops rolled, as a function of the arrays for its constants and inputs."""
    graph = Graph(jaxpr)
    places = Places(graph)
    closures = closures_of(graph, places)
    if not closures:
        return None
    loops = _loops(places, closures.values())
    closed = {find(loops, r.group) for c in closures.values() for r in c.runs}
    contracted = {find(loops, g) for g in places.groups if g.kind == "op" and holds(g.op.eqn, contracts)}
    rolled = {g for g in places.groups if find(loops, g) in closed & contracted}
    closures = {op: c for op, c in closures.items() if c.runs[0].group in rolled}
    if not closures:
        return None
    return lambda arrays: _Emitter(graph, places, rolled, closures).run(arrays)


def contracts(eqn: Any) -> bool:
    """Whether an equation is a contraction."""
    return eqn.primitive.name in CONTRACTIONS


def _loops(places: Places, closures: Iterable[Closure]) -> dict[Group, Group]:
    """The groups, each with another of its loop, up to one that stands for itself."""
    loops = {group: group for group in places.groups}
    for group in places.groups:
        for operand in group.operands:
            if isinstance(operand, tuple):
                loops[find(loops, operand[0])] = find(loops, group)
    for closure in closures:
        for run in closure.runs:
            loops[find(loops, run.group)] = find(loops, closure.runs[0].group)
    return loops


def find(loops: dict[Group, Group], group: Group) -> Group:
    """The group that stands for the loop of a group."""
    root = group
    while loops[root] is not root:
        root = loops[root]
    while loops[group] is not root:
        loops[group], group = root, loops[group]
    return root


class _Emitter:
    """Runs a graph: members of `rolled` groups once for all, `closures` from the rolled arrays, the rest as it is."""

    def __init__(self, graph: Graph, places: Places, rolled: set[Group], closures: dict[Op, Closure]):
        self.graph = graph
        self.places = places
        self.rolled = rolled
        self.closures = closures
        self.arrays: dict[Value, Any] = {}
        self.stacks: dict[Group, list[Any]] = {}
        self._done: set[Op] = set()

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs for arrays of the inputs."""
        self.arrays.update(zip(self.graph.inputs, arrays, strict=True))
        for op in self.graph.ops:
            if op.key is None:
                self._need(op)
        for value in self.graph.outputs:
            self._need(self._unit(value))
        return [self._array(v) for v in self.graph.outputs]

    # --- order

    def _unit(self, value: Value) -> Any:
        """What has to run for a value: a group, an operation, or None for what is given."""
        place = self._place(value)
        return place.group if place is not None else value.op

    def _place(self, value: Value) -> Place | None:
        place = self.places.member(value)
        return place if place is not None and place.group in self.rolled else None

    def _needs(self, unit: Group | Op) -> list[Any]:
        if isinstance(unit, Group):
            if unit.kind == "list":
                return []
            return [o[0] if isinstance(o, tuple) else self._unit(o) for o in unit.operands if o is not None]
        closure = self.closures.get(unit)
        if closure is not None:
            return [*(r.group for r in closure.runs), *(self._unit(v) for v in closure.values)]
        return [self._unit(v) for v in unit.inputs]

    def _is_done(self, unit: Any) -> bool:
        if unit is None or unit in self.stacks:
            return True
        return isinstance(unit, Op) and unit in self._done

    def _need(self, unit: Any) -> None:
        pending = [unit]
        while pending:
            if self._is_done(pending[-1]):
                pending.pop()
                continue
            missing = [u for u in self._needs(pending[-1]) if not self._is_done(u)]
            if missing:
                pending.extend(reversed(missing))
            else:
                self._emit(pending.pop())

    # --- emission

    def _emit(self, unit: Group | Op) -> None:
        if isinstance(unit, Group):
            self._emit_group(unit)
            return
        with at_source(unit.source):
            closure = self.closures.get(unit)
            if closure is None:
                results = bind_equation(unit.eqn, [self._array(v) for v in unit.inputs])
            else:
                runs = [self._rows(r) for r in closure.runs]
                results = [closure.emit(runs, [self._array(v) for v in closure.values])]
        self.arrays.update(zip(unit.outputs, results, strict=True))
        self._done.add(unit)

    def _emit_group(self, group: Group) -> None:
        if group.kind == "list":
            members = [self.arrays[group.members[e][0]] for e in sorted(group.members)]
            self.stacks[group] = [lax.concatenate([lax.expand_dims(m, (0,)) for m in members], 0)]
            return
        with at_source(group.op.source):
            if group.kind == "entries":
                self.stacks[group] = [_entries(self._array(group.operands[0]), group)]
            else:
                self.stacks[group] = self._operation(group)

    def _operation(self, group: Group) -> list[Any]:
        count, eqn = len(group.members), group.op.eqn
        inputs, batched = [], []
        for operand, value in zip(group.operands, group.op.inputs, strict=True):
            batched.append(not isinstance(operand, Value))
            if operand is None:
                inputs.append(_numbers(group, value, group.op.inputs))
            elif isinstance(operand, Value):
                inputs.append(self._array(operand))
            else:
                inputs.append(self._rows(Run(operand[0], operand[1], group.first, count)))
        return batched_bind(eqn, inputs, batched)

    def _array(self, value: Value) -> Any:
        """The array of a value: given, computed, or an entry of a rolled array."""
        place = self._place(value)
        if value not in self.arrays:
            if place is None:
                held = value.held
                self.arrays[value] = held.val if isinstance(held, jex.core.Literal) else held
            else:
                row = place.entry - place.group.first
                self.arrays[value] = lax.index_in_dim(self.stacks[place.group][place.result], row, 0, keepdims=False)
        return self.arrays[value]

    def _rows(self, run: Run) -> Any:
        stack, start = self.stacks[run.group][run.result], run.first - run.group.first
        if run.count == stack.shape[0]:
            return stack
        return lax.slice_in_dim(stack, start, start + run.count, axis=0)


def batched_bind(eqn: Any, inputs: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    """Runs an equation for each entry of the inputs marked as batched; the results are stacked along a first axis."""
    axes = [array for array, mark in zip(inputs, batched, strict=True) if mark]

    def one(*entries: Any) -> list[Any]:
        left = iter(entries)
        return bind_equation(eqn, [next(left) if m else a for a, m in zip(inputs, batched, strict=True)])

    return list(jax.vmap(one)(*axes))


def _numbers(group: Group, literal: Value, inputs: Sequence[Value]) -> Any:
    """The numbers of the members, each for all elements of what it is compared with or stands for."""
    shape = literal.aval.shape or next(v.aval.shape for v in inputs if v is not literal)
    numbers = lax.broadcasted_iota(literal.aval.dtype, (len(group.members), *shape), 0)
    return lax.add(numbers, lax.full_like(numbers, group.first)) if group.first else numbers


def _entries(array: Any, group: Group) -> Any:
    """[n, …]: the entries of an array along an axis, as the seeds of a group read them."""
    axis, count, shape = group.axis, len(group.members), group.members[group.first][0].aval.shape
    width = shape[axis] if len(shape) == array.ndim else 1
    start = group.first * width
    if count * width != array.shape[axis]:
        array = lax.slice_in_dim(array, start, start + count * width, axis=axis)
    if width > 1:
        array = lax.reshape(array, (*array.shape[:axis], count, width, *array.shape[axis + 1 :]))
    moved = move_axis(array, axis, 0)
    return moved if moved.shape[1:] == shape else lax.reshape(moved, (count, *shape))
