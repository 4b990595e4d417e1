"""Nodes as arrays over their own axes, and arrays read at any places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla import ops
from moe_xla.passes.recover.facts import rank_of, rank_sites, tainting_sites
from moe_xla.passes.recover.loads import literal_number
from moe_xla.passes.recover.lower.arrays import arranged, matched, pad, spread, take_rows
from moe_xla.passes.recover.lower.base import (
    Emitter,
    Refusal,
)
from moe_xla.passes.recover.nodes import (
    Ein,
    Ends,
    Iota,
    Leaf,
    Lit,
    Map,
    Node,
    Occupant,
    Pad,
    Rank,
    Slice,
    is_extended,
)
from moe_xla.passes.recover.program import Step
from moe_xla.passes.recover.terms import (
    Const,
    Factor,
    Idx,
    Term,
    Var,
    flatten,
    parts_of,
    substitute_factor,
    vars_of,
)


class DefinitionEmitter(Emitter):
    """Emits nodes by their definitions."""

    def node(self, node: Node) -> Any:
        """A node's array over its own axes."""
        if node not in self.nodes:
            # What a body takes in may be what an array in the body computes anew, from that: it comes from elsewhere.
            array = self._as_written(node) if node not in self.pending else None
            self.nodes[node] = self._emit(node) if array is None else array
        return self.nodes[node]

    def _as_written(self, node: Node) -> Any | None:
        """A node's array from the program's own equation for it, if that can run."""
        if node.origin is None or not self.keeps(node.origin):
            return None
        self.pending.add(node)
        try:
            array = self.array(node.origin)
        finally:
            self.pending.remove(node)
        return lax.reshape(array, node.shape) if array.shape != node.shape else array

    def _emit(self, node: Node) -> Any:
        if isinstance(node, Lit):
            return np.asarray(node.value)
        if isinstance(node, Leaf):
            return self.array(node.wire)
        if isinstance(node, Iota):
            return lax.iota(node.dtype, node.shape[0])
        if isinstance(node, Rank):
            return self._rank_table(node)
        if isinstance(node, Occupant):
            return self._occupant(node, node.variables, node.variables)
        if isinstance(node, Ends):
            return lax.cumsum(jnp.asarray(self.node(node.count)), axis=node.axis)
        layout = self.layout(node)
        if layout is not None:
            return self.unsorted(node, layout)
        if isinstance(node, Map):
            return self._map(node)
        if isinstance(node, Slice):
            return lax.slice_in_dim(self.node(node.base), node.start, node.stop, axis=node.axis)
        if isinstance(node, Pad):
            return pad(self.node(node.base), node.axis, node.low, node.high)
        assert isinstance(node, Ein)
        return self.ein(node)

    def _map(self, node: Map) -> Any:
        self.check_positions(node)
        return self.apply(node, [self.fetch(op, node.variables) for op in node.operands], node.shape)

    def check_positions(self, node: Map) -> None:
        sites = frozenset().union(*(tainting_sites(self.graph, op.node) for op in node.operands))
        if not self.is_position_safe(node.name, map(literal_number, node.operands), sites):
            step = self.asker()
            raise Refusal(sites, f"{node.name} looks at queue positions in a way that depends on the capacity", step)

    def apply(self, node: Map, operands: Sequence[Any], shape: Sequence[int]) -> Any:
        full = [spread(jnp.asarray(x), shape) for x in operands]
        return node.prim.bind(*full, **node.params)

    def _rank_table(self, node: Rank) -> Any:
        variables = node.batch + node.order + node.many
        index = self.fetch(node.index.factor, variables)
        index = spread(index, [v.size for v in variables])
        experts = lax.broadcasted_iota(index.dtype, (*index.shape, node.index.size), len(variables))
        mask = lax.eq(experts, lax.broadcast_in_dim(index, experts.shape, range(index.ndim)))
        for guard in node.guards:
            held = spread(self.fetch(guard, variables), index.shape)
            mask = lax.bitwise_and(mask, lax.broadcast_in_dim(held, experts.shape, range(index.ndim)))
        batch = len(node.batch)
        counts = mask.astype(node.dtype)
        if node.many:
            counts = lax.reduce_sum(counts, range(batch + len(node.order), len(variables)))
        flat = counts.reshape(*(v.size for v in node.batch), -1, node.index.size)
        return lax.cumsum(flat, axis=batch).reshape(node.shape)

    def _own_rank(self, factor: Factor) -> tuple[Any, list[Term]] | None:
        """Positions in the own queue, from the plan instead of a table over experts, and where they are read."""
        node = factor.node
        if not isinstance(node, Rank):
            return None
        fact = rank_of(self.graph, factor)
        if fact is None or not fact.is_own(self.graph) or not isinstance(factor.args[-1], Idx):
            return None
        variables = node.batch + node.order + node.many
        target = [fact.own_index.args[node.index.args.index(v)] if v in node.index.args else None for v in node.many]  # type: ignore[union-attr]
        args = (*factor.args[:-1], *target)
        if any(a is None for a in args):
            return None
        key = ("own", node)
        if key not in self.rows:
            self.rows[key] = self._queue_positions(node, variables)
        return self.rows[key], list(args)  # type: ignore[arg-type]

    def _queue_positions(self, node: Rank, variables: tuple[Var, ...]) -> Any:
        """How many assignments are counted up to each one, in its own queue, whether it is counted itself or not."""
        routing, sizes = self._queue_plan(node, ()), [v.size for v in variables]
        held = self.conditions(node.guards, variables, [math.prod(sizes)])
        positions = ops.rank(routing) + 1 if held is None else _counted(routing, held)
        return lax.convert_element_type(positions.reshape(sizes), node.dtype)

    def _queue_plan(self, node: Rank, guards: Sequence[Factor]) -> ops.Plan:
        """Assignments sorted by queue, as the rank counts them; those that fail a condition stand in none."""
        variables = node.batch + node.order + node.many
        sizes = [v.size for v in variables]
        index = lax.convert_element_type(spread(self.fetch(node.index.factor, variables), sizes), np.int32)
        experts = node.index.size
        valid = lax.bitwise_and(lax.ge(index, np.int32(0)), lax.lt(index, np.int32(experts)))
        held = self.conditions(guards, variables, sizes)
        valid = valid if held is None else lax.bitwise_and(valid, held)
        queues = math.prod(v.size for v in node.batch)
        if queues > 1:
            offset = lax.iota(np.int32, queues).reshape(
                [v.size for v in node.batch] + [1] * (len(sizes) - len(node.batch))
            )
            index = lax.add(index, spread(offset * np.int32(experts), sizes))
        return ops.plan(lax.select(valid, index, lax.full_like(index, queues * experts)), queues * experts)

    def _occupant(self, node: Occupant, args: Sequence[Term], variables: Sequence[Var]) -> Any:
        """Who stands at a position of a queue: the row as far behind the expert's first one."""
        assert node.queue is not None
        rank = node.queue.rank
        if self.recovery.session.is_dropless(rank.site):
            reason = "reads the row of the last slot for positions that exceed the capacity"
            raise Refusal(frozenset({rank.site}), reason, self.asker())
        key = ("queue", rank)
        if key not in self.rows:
            self.rows[key] = self._queue_plan(rank, rank.guards)
        routing = self.rows[key]
        first = lax.sub(lax.cumsum(routing.group_sizes), routing.group_sizes)
        queue = self._number(flatten(args[:-1]), math.prod(node.shape[:-1]), variables)
        position = self._number(args[-1], node.shape[-1], variables)
        row = lax.add(*matched(take_rows(first, queue), position))
        who = take_rows(routing.permutation, lax.min(row, np.int32(routing.permutation.size - 1)))
        inner = math.prod(v.size for v in rank.order[node.axis + 1 :])
        return lax.rem(lax.div(who, np.int32(inner)), np.int32(rank.order[node.axis].size))

    def _number(self, term: Term, size: int, variables: Sequence[Var]) -> Any:
        """A place as an array of numbers on its axis; those out of range, which nobody asks for, as the nearest."""
        if isinstance(term, Idx):
            place = lax.convert_element_type(jnp.asarray(self.fetch(term.factor, variables)), np.int32)
            return lax.clamp(np.int32(0), place, np.int32(size - 1))
        if isinstance(term, Const):
            return np.full([1] * len(variables), term.value, np.int32)
        if isinstance(term, Var):
            return arranged(lax.iota(np.int32, size), (term,), variables)
        number: Any = np.zeros([1] * len(variables), np.int32)
        for part in term.parts:
            digit = self._number(part, part.size, variables)
            number = lax.add(*matched(lax.mul(number, np.int32(part.size)), digit))
        return number

    def fetch(self, factor: Factor, variables: Sequence[Var]) -> Any:
        """A factor as an array whose axes are `variables` (length 1 where the factor does not depend on one)."""
        if isinstance(factor.node, Lit):
            return np.asarray(factor.node.value).reshape([1] * len(variables))
        if isinstance(factor.node, Occupant):
            return self._occupant(factor.node, factor.args, variables)
        own = self._own_rank(factor)
        if own is not None:
            return self._read(own[0], own[1], variables)
        pushed = self._pushed(factor)
        if pushed is not None:
            return self.fetch(pushed, variables)
        data = self.node(factor.node)
        if isinstance(factor.node, Leaf):
            self._refuse_unproved(factor)
        return self._read(data, list(factor.args), variables)

    def _pushed(self, factor: Factor) -> Factor | None:
        """A map read at data-dependent places, as the map of its operands read there (ranks are then own ranks)."""
        node = factor.node
        if not isinstance(node, Map) or not any(isinstance(p, Idx) for a in factor.args for p in parts_of(a)):
            return None
        if node.origin is not None and self.keeps(node.origin) and not rank_sites(self.graph, node):
            return None
        mapping = node.bind(factor.args)
        operands = [substitute_factor(op, mapping) for op in node.operands]
        pushed = self.graph.map(node.prim, node.params, operands, node.dtype)
        return pushed if pushed != factor else None

    def _read(self, data: Any, args: list[Term], variables: Sequence[Var]) -> Any:
        shape: list[int] = []
        terms: list[Term] = []
        for arg in args:
            parts = parts_of(arg)
            shape += [p.size for p in parts]
            terms += parts
        data = jnp.asarray(data) if not is_extended(data.dtype) else data
        data = lax.reshape(data, shape) if tuple(shape) != data.shape else data
        for axis in reversed([i for i, t in enumerate(terms) if isinstance(t, Const)]):
            place = terms.pop(axis)
            assert isinstance(place, Const)
            data = lax.index_in_dim(data, place.value, axis, keepdims=False)
        if all(isinstance(t, Var) for t in terms) and len(set(terms)) == len(terms):
            return arranged(data, tuple(terms), variables)  # type: ignore[arg-type]
        return self._gathered(data, terms, variables)

    def _gathered(self, data: Any, terms: list[Term], variables: Sequence[Var]) -> Any:
        points = vars_of([t for t in terms if isinstance(t, Idx)] + [t for t in terms if terms.count(t) > 1])
        leading = [i for i, t in enumerate(terms) if isinstance(t, Idx) or t in points]
        rest = [i for i in range(len(terms)) if i not in leading]
        self.refuse_wide_rows([t for t in terms if isinstance(t, Idx)], [data.shape[i] for i in rest])
        sizes = [data.shape[i] for i in leading]
        table = lax.transpose(data, [*leading, *rest])
        table = lax.reshape(table, (math.prod(sizes), *table.shape[len(leading) :]))
        index: Any = None
        for i, size in zip(leading, sizes, strict=True):
            term = terms[i]
            if isinstance(term, Idx):
                self._refuse_slot_reads(term)
                place = self.fetch(term.factor, points)
                place = lax.clamp(np.int32(0), lax.convert_element_type(place, np.int32), np.int32(size - 1))
            else:
                place = arranged(lax.iota(np.int32, size), (term,), points)  # type: ignore[arg-type]
            index = place if index is None else lax.add(*matched(lax.mul(index, np.int32(size)), place))
        index = spread(index, [v.size for v in points])
        rows = take_rows(table, index)
        return arranged(rows, (*points, *(terms[i] for i in rest)), variables)  # type: ignore[arg-type]

    def refuse_wide_rows(self, indices: Sequence[Idx], axes: Sequence[Var | int]) -> None:
        """Refuses an array with a matrix for every assignment: that is more than the padded buffers ever were."""
        sizes = [a.size if isinstance(a, Var) else a for a in axes]
        assignments = math.prod(v.size for v in vars_of(indices))
        experts = math.prod(i.size for i in indices)
        if sum(n > 1 for n in sizes) > 1 and assignments > 4 * experts:
            self.refuse(indices, "needs a matrix of an expert for every assignment")

    def _refuse_unproved(self, factor: Factor) -> None:
        """Refuses to read slots of an array, and names the equation that made it, and why that was not understood."""
        assert isinstance(factor.node, Leaf)
        step, indices = factor.node.wire.step, [p for a in factor.args for p in parts_of(a) if isinstance(p, Idx)]
        sites = frozenset().union(*(rank_sites(self.graph, i.node) for i in indices))
        if sites and isinstance(step, Step) and step.outputs:
            raise Refusal(sites, step.refusal or "makes an array that is laid out over the slots", step)

    def _refuse_slot_reads(self, place: Idx) -> None:
        sites = rank_sites(self.graph, place.node)
        if sites:
            raise Refusal(sites, "reads an array that is laid out over the slots", self.asker())

    def weights(self, factors: Sequence[Factor], order: Sequence[Any], shape: Sequence[int]) -> Any:
        return self._joined(lax.mul, factors, order, shape)

    def conditions(self, guards: Sequence[Factor], order: Sequence[Any], shape: Sequence[int]) -> Any:
        return self._joined(lax.bitwise_and, guards, order, shape)

    def _joined(
        self, join: Callable[[Any, Any], Any], factors: Sequence[Factor], order: Sequence[Any], shape: Sequence[int]
    ) -> Any:
        """Factors over the variables `order`, joined two by two, as one array of `shape`; None where there is none."""
        total: Any = None
        for factor in factors:
            data = jnp.asarray(self.fetch(factor, order))
            total = data if total is None else join(*matched(total, data))
        return None if total is None else lax.reshape(spread(total, [v.size for v in order]), shape)


def _counted(routing: ops.Plan, held: Any) -> Any:
    """[A]: how many of an expert's assignments up to each one are `held` [A]."""
    total = lax.cumsum(lax.convert_element_type(take_rows(held, routing.permutation), np.int32))
    before = lax.concatenate([np.zeros(1, np.int32), total], 0)
    first = lax.sub(routing.inverse, ops.rank(routing))
    return lax.sub(take_rows(total, routing.inverse), take_rows(before, first))
