"""Emits the rewritten program: each array that is needed, in the cheapest sound way.

An array whose own equation can still be run, on inputs that can be had, is computed by that equation, exactly as
written.  An array that stands behind a slot axis is computed from its value instead: work on assignments happens on
*rows* sorted by expert, through `moe_xla.ops`; one plan per routing serves forward and backward.  An array over a slot
axis is never built: needing one is a `Refusal` that names the sites and the equation that asked.

In: a finished `Recovery` and the program's input arrays.  Out: output arrays.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives as prims
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla import ops
from moe_xla.passes._jax import bind_checkpoint, bind_equation
from moe_xla.passes.recover.facts import direct_operands, rank_of, rank_sites, tainting_sites
from moe_xla.passes.recover.interpret import Recovery
from moe_xla.passes.recover.nodes import (
    Ein,
    Iota,
    Leaf,
    Lit,
    Map,
    Node,
    Pad,
    Rank,
    Slice,
    is_boolean,
    is_extended,
    is_floating,
)
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.scopes import Export, Feed, Scope
from moe_xla.passes.recover.terms import (
    Const,
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    parts_of,
    substitute,
    substitute_factor,
    term_vars,
    vars_of,
)
from moe_xla.passes.recover.values import NoRule, Value, cast, has_slots, of_node, plain_map, scattered

# Operations through which a queue position may pass in dropless: they do not ask whether it exceeds a capacity.
_POSITION_SAFE = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "neg",
        "div",
        "convert_element_type",
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "cumsum",
        "integer_pow",
        "square",
        "sqrt",
        "dot_general",
        "concatenate",
        "slice",
        "stop_gradient",
        "copy",
        "reduce_precision",
    ]
)


class Refusal(Exception):
    """A site cannot be rewritten as asked."""

    def __init__(self, sites: frozenset[Any], reason: str, step: Step | Scope | None):
        super().__init__(reason)
        self.sites = sites
        self.reason = reason
        self.step = step


class Grouping(NamedTuple):
    """How a node is a grouped matmul: `out[points, free] = Σ_inner left[points, inner] · w[index, inner, free]`."""

    left: tuple[Factor, ...]
    weight: Factor
    axis: int
    place: Idx
    inner: tuple[Var, ...]
    free: tuple[Var, ...]


@dataclasses.dataclass(frozen=True)
class Routing:
    """What decides in which row an assignment sits: its expert, and the conditions without which it has none.

    Both are over the variables 0, 1, …, so that equal routings are equal.  Assignments that fail a condition go to the
    tail: grouped matmuls make their rows zero and sums over an expert's rows leave them out.
    """

    index: Idx
    held: frozenset[Factor]


class Layout(NamedTuple):
    """The rows that a node lives on, and the node's axes that are the variables of their routing."""

    routing: Routing
    axes: tuple[int, ...]


class Lowering:
    """One emission of a recovered program."""

    def __init__(self, recovery: Recovery, arrays: dict[Wire, Any], backend: str, within: Scope | None = None):
        self.recovery = recovery
        self.graph = recovery.graph
        self.backend = backend
        self.arrays = arrays
        self.kept: dict[Wire, bool] = {}
        self.nodes: dict[Node, Any] = {}
        self.rows: dict[Any, Any] = {}
        self.plans: dict[Routing, ops.Plan] = {}
        self.layouts: dict[Any, Layout | None] = {}
        self.groupings: dict[Node, Grouping | None] = {}
        self.stack: list[Step | Scope] = [] if within is None else [within]
        self.tokens: list[tuple[Node, int]] = []
        self._latest: Any = None
        self.flops: list[tuple[Node, int]] = []
        self.backends: list[tuple[Node, str]] = []
        self._fed: dict[Scope, list[Feed]] = {}
        for step in recovery.steps:
            for wire in step.outputs:
                self.keeps(wire)

    # ---------------------------------------------------------------------------------------------- wires

    def results(self, outputs: Sequence[Wire | Node]) -> list[Any]:
        """The arrays of the program's outputs; equations with effects run too."""
        effects = [w for step in self.recovery.effects for w in (step.inputs or step.outputs)]
        needed = self.needed([*outputs, *effects])
        for step in self.recovery.steps:
            for wire in step.outputs:
                if wire in needed and not wire.slots:
                    self._try(wire)
        results = [self.array(w) if isinstance(w, Wire) else self.node(w) for w in outputs]
        self._run_effects()
        return results

    def _try(self, wire: Wire) -> None:
        """Computes an array in program order, so that nothing is nested deeply; a refusal is for who truly needs it."""
        depth = len(self.stack)
        try:
            self.array(wire)
        except Refusal:
            del self.stack[depth:]

    def needed(self, outputs: Sequence[Wire | Node]) -> set[Wire]:
        """The arrays that the outputs may need."""
        needed: set[Wire] = set()
        seen: set[Node] = set()
        pending: list[Wire | Node] = list(outputs)
        while pending:
            item = pending.pop()
            if isinstance(item, Node):
                if item in seen:
                    continue
                seen.add(item)
                if isinstance(item, Leaf):
                    pending.append(item.wire)
                else:
                    pending += _nodes_read(direct_operands(item))
                    pending += [item.origin] if item.origin is not None and self.keeps(item.origin) else []
            elif item not in needed:
                needed.add(item)
                pending += self._reads(item)
        return needed

    def _reads(self, wire: Wire) -> list[Wire | Node]:
        if wire in self.arrays:
            return []
        if isinstance(wire.step, Scope) and _is_own(wire):
            return self._require(wire.step, wire)
        if wire.step is not None and (_is_own(wire) or self.keeps(wire)):
            return list(wire.step.inputs)
        return _nodes_of(_meaning(wire))

    def keeps(self, wire: Wire) -> bool:
        """Whether the equation that computes a wire can run as written."""
        known = self.kept.get(wire)
        if known is None:
            known = not wire.slots and self._can_run(wire)
            self.kept[wire] = known
        return known

    def _can_run(self, wire: Wire) -> bool:
        step = wire.step
        if wire in self.arrays:
            return True
        if step is None:
            return not wire.changed
        if isinstance(step, Scope):
            return _is_own(wire)
        if not step.inputs:
            return not wire.changed
        return not wire.changed and self._is_safe(step) and all(self.keeps(w) for w in step.inputs)

    def _is_safe(self, step: Step) -> bool:
        """Whether a step may see the positions that flow into it (in dropless, none that asks for the capacity)."""
        sites = frozenset().union(*(w.tainted for w in step.inputs))
        return step.name in _POSITION_SAFE or not any(self.recovery.session.is_dropless(s) for s in sites)

    def array(self, wire: Wire) -> Any:
        """The array of a wire in the rewritten program."""
        if wire in self.arrays:
            return self.arrays[wire]
        step = wire.step
        if step is None:
            assert not _is_own(wire)
            self.arrays[wire] = self._of_value(wire, _meaning(wire))
            return self.arrays[wire]
        if isinstance(step, Scope) and _is_own(wire):
            self._run_scope(step)
            return self.arrays[wire]
        if not step.inputs and not step.outputs:
            result = self._constant(step)
        elif self.keeps(wire):
            return self._run(wire, step)
        elif _is_own(wire):
            if not self._is_safe(step):
                self._refuse_position(step)
            return self._run(wire, step)
        else:
            result = self._of_value(wire, _meaning(wire))
        self.arrays[wire] = result
        return result

    # --------------------------------------------------------------------------------------------- scopes

    def _require(self, scope: Scope, wire: Wire) -> list[Wire | Node]:
        """Notes that an output of a body is needed; the arrays outside that the body then reads."""
        for export in scope.exports:
            if export.outer is wire:
                scope.required[export] = None
        inner = Lowering(scope.recovery, _placeholders(scope), self.backend, scope)
        wanted = inner.needed([*(last for _, _, last in scope.carries), *(e.source for e in scope.required)])
        feeds = self._fed[scope] = [f for f in scope.feeds if f.inner in wanted]
        return [*(initial for initial, _, _ in scope.carries), *(f.source for f in feeds)]

    def _run_scope(self, scope: Scope) -> None:
        self.stack.append(scope)
        feeds = self._fed[scope]
        arrays = [self.array(f.source) if isinstance(f.source, Wire) else self.node(f.source) for f in feeds]
        exports = list(scope.required)
        if scope.is_scan:
            carried, stacked = self._scan(scope, feeds, arrays, exports)
            self.arrays.update(zip(scope.carried, carried, strict=True))
        else:
            stacked = self._checkpoint(scope, feeds, arrays, exports)
        for export, array in zip(exports, stacked, strict=True):
            self.arrays[export.outer] = array
        self.stack.pop()

    def _body(self, scope: Scope, given: dict[Wire, Any], outputs: Sequence[Wire | Node], times: int) -> list[Any]:
        inner = Lowering(scope.recovery, given, self.backend, scope)
        inner.needed(outputs)
        results = inner.results(outputs)
        self.flops += [(node, times * flops) for node, flops in inner.flops]
        self.tokens += inner.tokens
        self.backends += inner.backends
        return [jnp.asarray(r) if not hasattr(r, "dtype") or isinstance(r, np.ndarray) else r for r in results]

    def _scan(
        self, scope: Scope, feeds: Sequence[Feed], arrays: Sequence[Any], exports: Sequence[Export]
    ) -> tuple[list[Any], list[Any]]:
        params = scope.eqn.params
        whole = {f.inner: a for f, a in zip(feeds, arrays, strict=True) if f.axis is None}
        sliced = [(f.inner, _first(a, f.axis)) for f, a in zip(feeds, arrays, strict=True) if f.axis is not None]
        outputs = [*(last for _, _, last in scope.carries), *(e.source for e in exports)]
        count = len(scope.carries)

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            given = {**whole, **dict(zip((w for w, _ in sliced), slices, strict=True))}
            given.update(zip((start for _, start, _ in scope.carries), carry, strict=True))
            results = self._body(scope, given, outputs, params["length"])
            return [_strong(r, w) for r, (_, w, _) in zip(results, scope.carries, strict=False)], results[count:]

        initial = [_strong(self.array(first), first) for first, _, _ in scope.carries]
        carried, stacked = lax.scan(
            body,
            initial,
            [a for _, a in sliced],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return carried, stacked

    def _checkpoint(
        self, scope: Scope, feeds: Sequence[Feed], arrays: Sequence[Any], exports: Sequence[Export]
    ) -> list[Any]:
        def body(*given: Any) -> list[Any]:
            inner = dict(zip((f.inner for f in feeds), given, strict=True))
            return self._body(scope, inner, [e.source for e in exports], 1)

        return bind_checkpoint(scope.eqn, body, arrays)

    def _run_effects(self) -> None:
        """Runs the equations that have effects, in the program's order, unless an output has run them already."""
        for step in self.recovery.effects:
            if isinstance(step, Scope):
                self._run_scope(step)
            elif step.outputs:
                self.array(step.outputs[0])
            else:
                bind_equation(step.eqn, [self.array(w) for w in step.inputs])

    def _constant(self, step: Step) -> Any:
        atom = step.eqn
        if hasattr(atom, "val"):
            return np.asarray(atom.val, atom.aval.dtype) if not is_extended(atom.aval.dtype) else atom.val
        return atom

    def _run(self, wire: Wire, step: Step) -> Any:
        """Runs a step's equation on the arrays of its inputs."""
        self.stack.append(step)
        inputs = [self.array(w) for w in step.inputs]
        self.stack.pop()
        for output, result in zip(step.outputs, bind_equation(step.eqn, inputs), strict=True):
            # An array that has another meaning in the rewritten program comes from its value, not from this equation.
            self.arrays.setdefault(output, result)
        return self.arrays[wire]

    def _of_value(self, wire: Wire, value: Value) -> Any:
        if has_slots(self.graph, value):
            asker = self.stack[-1] if self.stack else None
            if asker is None:
                raise Refusal(wire.slots, "an array over the slot axis is a result of the step", wire.step)
            why = asker.refusal or "needs the array over the slot axis"
            raise Refusal(wire.slots, why, asker)
        if wire.step is not None:
            self.stack.append(wire.step)
        depth = len(self.stack)
        if not value.is_plain:
            value = self._boolean(value) if is_boolean(value.dtype) else scattered(self.graph, value)
        piece = value.pieces[0]
        axes = [a for a in piece.axes if a.size != 1]
        variables = [v for a in axes for v in parts_of(a)]
        assert all(isinstance(v, Var) for v in variables) and len(set(variables)) == len(variables), variables
        data = self.fetch(value.factor, variables)  # type: ignore[arg-type]
        full = (
            lax.broadcast_in_dim(data, [v.size for v in variables], range(len(variables)))
            if data.shape != tuple(v.size for v in variables)
            else data
        )
        del self.stack[depth - (wire.step is not None) :]
        return lax.reshape(full, wire.shape) if full.shape != wire.shape else full

    def _boolean(self, value: Value) -> Value:
        if value.background is not None:
            raise NoRule("a truth value with a background as an array")
        counts = scattered(self.graph, cast(self.graph, value, np.dtype(np.int32)))
        zero = of_node(self.graph.lit(0, np.int32).node)
        return plain_map(self.graph, prims.ne_p, {}, [counts, zero], value.shape, np.dtype(bool))

    def _refuse_position(self, step: Step) -> None:
        sites = frozenset().union(*(w.tainted for w in step.inputs))
        raise Refusal(sites, f"{step.name} looks at queue positions in a way that depends on the capacity", step)

    # ---------------------------------------------------------------------------------------------- nodes

    def node(self, node: Node) -> Any:
        """A node's array over its own axes."""
        if node not in self.nodes:
            self.nodes[node] = self._emit(node)
        return self.nodes[node]

    def _emit(self, node: Node) -> Any:
        if isinstance(node, Lit):
            return np.asarray(node.value)
        if isinstance(node, Leaf):
            return self.array(node.wire)
        if node.origin is not None and self.keeps(node.origin):
            array = self.array(node.origin)
            return lax.reshape(array, node.shape) if array.shape != node.shape else array
        if isinstance(node, Iota):
            return lax.iota(node.dtype, node.shape[0])
        if isinstance(node, Rank):
            return self._rank_table(node)
        layout = self.layout(node)
        if layout is not None:
            return self._unsorted(node, layout)
        if isinstance(node, Map):
            return self._map(node)
        if isinstance(node, Slice):
            return lax.slice_in_dim(self.node(node.base), node.start, node.stop, axis=node.axis)
        if isinstance(node, Pad):
            return _pad(self.node(node.base), node.axis, node.low, node.high)
        assert isinstance(node, Ein)
        return self._ein(node)

    def _map(self, node: Map) -> Any:
        self._check_positions(node)
        return self._apply(node, [self.fetch(op, node.variables) for op in node.operands], node.shape)

    def _check_positions(self, node: Map) -> None:
        if node.name in _POSITION_SAFE:
            return
        sites = frozenset().union(*(tainting_sites(self.graph, op.node) for op in node.operands))
        if any(self.recovery.session.is_dropless(s) for s in sites):
            step = self.stack[-1] if self.stack else None
            raise Refusal(sites, f"{node.name} looks at queue positions in a way that depends on the capacity", step)

    def _apply(self, node: Map, operands: Sequence[Any], shape: Sequence[int]) -> Any:
        full = [_spread(jnp.asarray(x), shape) for x in operands]
        return node.prim.bind(*full, **node.params)

    def _rank_table(self, node: Rank) -> Any:
        variables = node.batch + node.order + node.many
        index = self.fetch(node.index.factor, variables)
        index = _spread(index, [v.size for v in variables])
        experts = lax.broadcasted_iota(index.dtype, (*index.shape, node.index.size), len(variables))
        mask = lax.eq(experts, lax.broadcast_in_dim(index, experts.shape, range(index.ndim)))
        for guard in node.guards:
            held = _spread(self.fetch(guard, variables), index.shape)
            mask = lax.bitwise_and(mask, lax.broadcast_in_dim(held, experts.shape, range(index.ndim)))
        batch = len(node.batch)
        counts = mask.astype(node.dtype)
        if node.many:
            counts = lax.reduce_sum(counts, range(batch + len(node.order), len(variables)))
        flat = counts.reshape(*(v.size for v in node.batch), -1, node.index.size)
        return lax.cumsum(flat, axis=batch).reshape(node.shape)

    def _own_rank(self, factor: Factor) -> tuple[Any, tuple[Var, ...]] | None:
        """Positions in the own queue, from the plan instead of a table over experts; over the rank's variables."""
        node = factor.node
        if not isinstance(node, Rank):
            return None
        fact = rank_of(self.graph, factor)
        if fact is None or not fact.is_own(self.graph) or not isinstance(factor.args[-1], Idx):
            return None
        variables = node.batch + node.order + node.many
        target = [fact.own_index.args[node.index.args.index(v)] if v in node.index.args else None for v in node.many]  # type: ignore[union-attr]
        args = (*factor.args[:-1], *target)
        if not all(isinstance(a, Var) for a in args) or len(set(args)) != len(args):
            return None
        key = ("own", node)
        if key not in self.rows:
            self.rows[key] = self._queue_positions(node, variables)
        return self.rows[key], tuple(args)  # type: ignore[arg-type]

    def _queue_positions(self, node: Rank, variables: tuple[Var, ...]) -> Any:
        sizes = [v.size for v in variables]
        index = lax.convert_element_type(_spread(self.fetch(node.index.factor, variables), sizes), np.int32)
        experts = node.index.size
        valid = lax.bitwise_and(lax.ge(index, np.int32(0)), lax.lt(index, np.int32(experts)))
        for guard in node.guards:
            valid = lax.bitwise_and(valid, _spread(self.fetch(guard, variables), sizes))
        queues = math.prod(v.size for v in node.batch)
        if queues > 1:
            offset = lax.iota(np.int32, queues).reshape(
                [v.size for v in node.batch] + [1] * (len(sizes) - len(node.batch))
            )
            index = lax.add(index, _spread(offset * np.int32(experts), sizes))
        index = lax.select(valid, index, lax.full_like(index, queues * experts))
        positions = ops.rank(ops.plan(index, queues * experts)) + 1
        return lax.convert_element_type(positions.reshape(sizes), node.dtype)

    # ---------------------------------------------------------------------------------------- reading a node

    def fetch(self, factor: Factor, variables: Sequence[Var]) -> Any:
        """A factor as an array whose axes are `variables` (length 1 where the factor does not depend on one)."""
        if isinstance(factor.node, Lit):
            return np.asarray(factor.node.value).reshape([1] * len(variables))
        own = self._own_rank(factor)
        if own is not None:
            return _arranged(own[0], own[1], variables)
        pushed = self._pushed(factor)
        if pushed is not None:
            return self.fetch(pushed, variables)
        data = self.node(factor.node)
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
            return _arranged(data, tuple(terms), variables)  # type: ignore[arg-type]
        return self._gathered(data, terms, variables)

    def _gathered(self, data: Any, terms: list[Term], variables: Sequence[Var]) -> Any:
        points = vars_of([t for t in terms if isinstance(t, Idx)] + [t for t in terms if terms.count(t) > 1])
        leading = [i for i, t in enumerate(terms) if isinstance(t, Idx) or t in points]
        rest = [i for i in range(len(terms)) if i not in leading]
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
                place = _arranged(lax.iota(np.int32, size), (term,), points)  # type: ignore[arg-type]
            index = place if index is None else lax.add(*_matched(lax.mul(index, np.int32(size)), place))
        index = _spread(index, [v.size for v in points])
        rows = _take_rows(table, index)
        return _arranged(rows, (*points, *(terms[i] for i in rest)), variables)  # type: ignore[arg-type]

    def _refuse_slot_reads(self, place: Idx) -> None:
        sites = rank_sites(self.graph, place.node)
        if sites:
            raise Refusal(sites, "reads an array that is laid out over the slots", self._asker())

    # ------------------------------------------------------------------------------------- rows by expert

    def plan(self, routing: Routing) -> ops.Plan:
        if routing not in self.plans:
            index, variables = routing.index, term_vars(routing.index)
            sizes = [v.size for v in variables]
            expert = _spread(jnp.asarray(self.fetch(index.factor, variables)), sizes)
            expert = lax.convert_element_type(expert, np.int32)
            held = self._conditions(sorted(routing.held, key=repr), variables, sizes)
            if held is not None:
                expert = lax.select(held, expert, lax.full_like(expert, index.size))
            self.plans[routing] = ops.plan(expert, index.size)
        return self.plans[routing]

    def grouping(self, node: Node) -> Grouping | None:
        """How a node is a grouped matmul with all its assignments on its axes, or None."""
        if not isinstance(node, Ein):
            return None
        if node not in self.groupings:
            self.groupings[node] = self._grouping(node)
        return self.groupings[node]

    def _grouping(self, node: Ein) -> Grouping | None:
        if not node.gathers or not node.binders or node.equalities or not is_floating(node.dtype):
            return None
        for i, weight in enumerate(node.factors):
            places = [j for j, a in enumerate(weight.args) if isinstance(a, Idx)]
            if len(places) != 1 or not all(isinstance(a, (Var, Idx)) for a in weight.args):
                continue
            index = weight.args[places[0]]
            assert isinstance(index, Idx)
            points = set(term_vars(index))
            others = [a for j, a in enumerate(weight.args) if j != places[0]]
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
            return Grouping(left, weight, places[0], index, inner, free)  # type: ignore[arg-type]
        return None

    def layout(self, node: Node) -> Layout | None:
        """The rows a node lives on, when its work is done on rows; None for an ordinary array."""
        key = (node, node.domain) if isinstance(node, Ein) else node
        if key not in self.layouts:
            self.layouts[key] = None
            self.layouts[key] = self._layout(node)
        return self.layouts[key]

    def _layout(self, node: Node) -> Layout | None:
        if isinstance(node, Ein):
            grouping = self.grouping(node)
            if grouping is None:
                return None
            variables = term_vars(grouping.place)
            routing = _routing(grouping.place, [*node.guards, *node.domain])
            return Layout(routing, tuple(node.out.index(v) for v in variables))
        if isinstance(node, Map):
            for operand in node.operands:
                layout = self.layout(operand.node)
                if layout is None or not all(isinstance(a, Var) for a in operand.args):
                    continue
                axes = [operand.args[i] for i in layout.axes]
                return Layout(layout.routing, tuple(v.id for v in axes))  # type: ignore[union-attr]
        if isinstance(node, (Slice, Pad)):
            layout = self.layout(node.base)
            return layout if layout is not None and node.axis not in layout.axes else None
        return None

    def _unsorted(self, node: Node, layout: Layout) -> Any:
        rest = tuple(Var(i, n) for i, n in enumerate(node.shape) if i not in layout.axes)
        points = tuple(Var(i, node.shape[i]) for i in layout.axes)
        rows = self.node_rows(node, layout)
        plan = self.plan(layout.routing)
        data = _take_rows(rows, plan.inverse, unique=True)
        data = lax.reshape(data, [v.size for v in (*points, *rest)])
        return _arranged(data, (*points, *rest), node.variables)

    def node_rows(self, node: Node, layout: Layout) -> Any:
        """The rows [A, rest…] of a node that lives on rows; rest are its other axes in order."""
        key = ("rows", node, layout)
        if key not in self.rows:
            self.rows[key] = self._emit_rows(node, layout)
        return self.rows[key]

    def _emit_rows(self, node: Node, layout: Layout) -> Any:
        points = tuple(Var(i, node.shape[i]) for i in layout.axes)
        rest = tuple(Var(i, n) for i, n in enumerate(node.shape) if i not in layout.axes)
        assignments = math.prod(v.size for v in points)
        if isinstance(node, Map):
            self._check_positions(node)
            operands = [self.factor_rows(op, layout.routing, points, rest) for op in node.operands]
            return self._apply(node, operands, (assignments, *(v.size for v in rest)))
        if isinstance(node, (Slice, Pad)):
            base = self.node_rows(node.base, layout)
            axis = 1 + [i for i in range(len(node.shape)) if i not in layout.axes].index(node.axis)
            if isinstance(node, Slice):
                return lax.slice_in_dim(base, node.start, node.stop, axis=axis)
            return _pad(base, axis, node.low, node.high)
        assert isinstance(node, Ein)
        return self._grouped_rows(node, layout)

    def _grouped_rows(self, node: Ein, layout: Layout) -> Any:
        grouping = self.grouping(node)
        assert grouping is not None
        points = term_vars(grouping.place)
        inner, free = grouping.inner, grouping.free
        left = self._product_rows(grouping.left, layout.routing, points, inner, ())
        rows = lax.reshape(left, (left.shape[0], math.prod(v.size for v in inner)))
        weights = self.node(grouping.weight.node)
        order = [
            grouping.axis,
            *(grouping.weight.args.index(v) for v in inner),
            *(grouping.weight.args.index(v) for v in free),
        ]
        experts, k, n = grouping.place.size, rows.shape[1], math.prod(v.size for v in free)
        flipped = [grouping.axis, *order[1 + len(inner) :], *order[1 : 1 + len(inner)]]
        if flipped == sorted(flipped) and order != sorted(order):
            matrix = lax.reshape(weights, (experts, n, k))
            out = self._grouped_dot(rows, matrix, layout.routing, True, node.dtype)
        else:
            matrix = lax.reshape(lax.transpose(weights, order), (experts, k, n))
            out = self._grouped_dot(rows, matrix, layout.routing, False, node.dtype)
        if node.coef != 1:
            out = out * np.asarray(node.coef, out.dtype)
        out = lax.reshape(out, (out.shape[0], *(v.size for v in free)))
        position = {v: i for i, v in enumerate(free)}
        wanted = [position[v] for v in node.out if v in position]
        return lax.transpose(out, [0, *(1 + i for i in wanted)])

    def _grouped_dot(self, rows: Any, matrix: Any, routing: Routing, transpose: bool, dtype: Any) -> Any:
        self._note_matmul(routing, (rows.shape[0], *matrix.shape[1:]), (rows.dtype, matrix.dtype))
        kind = jnp.promote_types(rows.dtype, matrix.dtype)
        result = ops.grouped_dot(
            rows.astype(kind),
            matrix.astype(kind),
            self._sizes(routing),
            transpose_w=transpose,
            backend=self.backend,
            preferred_element_type=dtype,
        )
        self._latest = result
        return result

    def _sizes(self, routing: Routing) -> Any:
        """The group sizes of a routing, known only after the grouped matmul before this one.

        The order of this program frees rows as early as it can (a weight gradient right before the gradient of the rows
        it was made from); XLA:CPU would else choose an order that keeps more of them.
        """
        sizes = self.plan(routing).group_sizes
        if self._latest is None or jax.default_backend() != "cpu" or not is_floating(self._latest.dtype):
            return sizes
        element = lax.reshape(lax.slice(self._latest, (0,) * self._latest.ndim, (1,) * self._latest.ndim), ())
        product = lax.mul(element, lax.full_like(element, 0))  # zero, or NaN: nothing that XLA may take for a constant
        zero = lax.select(lax.eq(product, product), product, lax.full_like(product, 0))
        return sizes + lax.convert_element_type(zero, sizes.dtype)

    def _note_matmul(self, routing: Routing, sizes: tuple[int, int, int], dtypes: Sequence[Any]) -> None:
        need = ops.Need(jax.default_backend(), tuple(np.dtype(d) for d in dtypes), sizes[1], sizes[2])
        self.flops.append((routing.index.node, 2 * math.prod(sizes)))
        self.backends.append((routing.index.node, ops.resolve(self.backend, need)))

    def _product_rows(
        self,
        factors: Sequence[Factor],
        routing: Routing,
        points: Sequence[Var],
        rest: Sequence[Var],
        guards: Sequence[Factor],
    ) -> Any:
        """The product of factors on rows, zero where a guard fails; anything in the tail."""
        total: Any = None
        for factor in factors:
            rows = self.factor_rows(factor, routing, points, rest)
            total = rows if total is None else lax.mul(*_matched(total, rows))
        assignments = math.prod(v.size for v in points)
        if total is None:
            total = np.ones((1,) * (1 + len(rest)))
        total = _spread(jnp.asarray(total), (assignments, *(v.size for v in rest)))
        for guard in _unheld(guards, routing, points):
            held = self.factor_rows(guard, routing, points, rest)
            total = _where(held, total)
        return total

    def factor_rows(self, factor: Factor, routing: Routing, points: Sequence[Var], rest: Sequence[Var]) -> Any:
        """A factor on the rows of a routing: [A, rest…], with length 1 where it does not depend on an axis."""
        if isinstance(factor.node, Lit):
            return np.asarray(factor.node.value).reshape([1] * (1 + len(rest)))
        layout = self.layout(factor.node)
        if layout is not None and layout.routing == routing and all(isinstance(a, Var) for a in factor.args):
            if [factor.args[i] for i in layout.axes] == list(points):
                rows = self.node_rows(factor.node, layout)
                names = [a for i, a in enumerate(factor.args) if i not in layout.axes]
                return _arranged(rows, (_ROW, *names), (_ROW, *rest))  # type: ignore[arg-type]
        used = [v for v in points if v in factor_vars([factor])]
        if not used:
            return self.fetch(factor, rest)[None]
        data = jnp.asarray(self.fetch(factor, (*used, *rest)))
        table = lax.reshape(data, (math.prod(v.size for v in used), *data.shape[len(used) :]))
        return _take_rows(table, self._row_index(routing, points, used))

    def _row_index(self, routing: Routing, points: Sequence[Var], used: Sequence[Var]) -> Any:
        """For each row, the place of its assignment among the variables `used`."""
        key = ("index", routing, tuple(v in used for v in points))
        if key not in self.rows:
            place: Any = None
            stride = math.prod(v.size for v in points)
            for v in points:
                stride //= v.size
                if v not in used:
                    continue
                digit = self.plan(routing).permutation
                if stride > 1:
                    digit = lax.div(digit, np.int32(stride))
                if v is not points[0]:
                    digit = lax.rem(digit, np.int32(v.size))
                place = digit if place is None else place * np.int32(v.size) + digit
            self.rows[key] = place
            if len(used) < len(points):
                self.tokens.append((routing.index.node, math.prod(v.size for v in used)))
        return self.rows[key]

    # ------------------------------------------------------------------------------------------- einsums

    def _ein(self, node: Ein) -> Any:
        if any(isinstance(p, Idx) for t in node.out for p in parts_of(t)):
            return self._scatter(node)
        split = self._split_grouped(node)
        if split is not None:
            return self._ein(split)
        combined = self._combined(node)
        if combined is not None:
            return combined
        dotted = self._row_dotted(node)
        if dotted is not None:
            return dotted
        out = tuple(p for t in node.out for p in parts_of(t))
        guards = [*node.guards, *self._equal_guards(node)]
        data = self._einsum(node.factors, guards, out, node.coef, node.dtype)  # type: ignore[arg-type]
        return lax.reshape(data, node.shape) if data.shape != node.shape else data

    def _equal_guards(self, node: Ein) -> list[Factor]:
        """Equalities that no proof discharged, as conditions; between slots they would compare every pair of rows."""
        sites = frozenset().union(*(rank_sites(self.graph, t.node) for pair in node.equalities for t in pair))
        if sites:
            raise Refusal(sites, "slots that are not provably the same or different", self._asker())
        return [self.graph.compare(prims.eq_p, a.factor, b.factor) for a, b in sorted(node.equalities, key=repr)]

    def _split_grouped(self, node: Ein) -> Ein | None:
        """A grouped matmul whose assignments are partly summed: the matmul first, the sum over assignments after."""
        for weight in node.factors:
            places = [a for a in weight.args if isinstance(a, Idx)]
            if len(places) != 1 or not all(isinstance(a, (Var, Idx)) for a in weight.args):
                continue
            points = term_vars(places[0])
            inner = [a for a in weight.args if isinstance(a, Var) and a in node.binders and a not in points]
            if not inner or all(p in node.out for p in points):
                continue
            joined = tuple(f for f in node.factors if set(inner) & set(factor_vars([f])))
            outer = tuple(f for f in node.factors if f not in joined)
            free = [a for a in weight.args if isinstance(a, Var) and a not in inner and a not in points]
            if set(factor_vars(joined)) - set(points) - set(inner) - set(free):
                continue
            axes = (*points, *free)
            domain = (*node.guards, *node.domain)
            matmul = self.graph.ein(axes, joined, (), frozenset(), 1, node.dtype, domain=domain)
            if self.grouping(matmul) is None:
                continue
            whole = self.graph.ein(
                node.out,
                (*outer, Factor(matmul, axes)),
                node.guards,
                node.equalities,
                node.coef,
                node.dtype,
            )
            assert isinstance(whole, Ein)
            return whole
        return None

    def _row_factor(self, node: Ein) -> tuple[Factor, Layout] | None:
        for factor in node.factors:
            layout = self.layout(factor.node)
            if layout is not None and all(isinstance(a, Var) for a in factor.args):
                return factor, layout
        return None

    def _combined(self, node: Ein) -> Any:
        """Σ over choices of weight · row, per token: the combine."""
        found = self._row_factor(node)
        if found is None or node.equalities:
            return None
        factor, layout = found
        points = tuple(factor.args[i] for i in layout.axes)
        rest = tuple(a for i, a in enumerate(factor.args) if i not in layout.axes)
        summed = tuple(p for p in points if p in node.binders)
        others = [f for f in node.factors if f is not factor]
        if set(node.binders) != set(summed) or set(factor_vars([*others, *node.guards])) - set(points):
            return None
        kept = tuple(p for p in points if p not in summed)
        if set(node.out) != {*kept, *rest}:
            return None
        order = (*kept, *summed)
        inverse = lax.reshape(self.plan(layout.routing).inverse, [v.size for v in points])
        inverse = lax.transpose(inverse, [points.index(v) for v in order])
        tokens, choices = math.prod(v.size for v in kept), math.prod(v.size for v in summed)
        inverse = lax.reshape(inverse, (tokens, choices))
        weights = self._weights(others, order, (tokens, choices))
        held = self._conditions(node.guards, order, (tokens, choices))
        rows = self.node_rows(factor.node, layout)
        total: Any = None
        wide = np.promote_types(node.dtype, np.float32) if is_floating(node.dtype) else node.dtype
        for k in range(choices):
            row = lax.convert_element_type(_take_rows(rows, lax.index_in_dim(inverse, k, 1, False)), wide)
            if weights is not None:
                row = lax.mul(row, _spread(lax.convert_element_type(_column(weights, k, row.ndim), wide), row.shape))
            if held is not None:
                row = _where(_column(held, k, row.ndim), row)
            total = row if total is None else lax.add(total, row)
        if node.coef != 1:
            total = total * np.asarray(node.coef, wide)
        total = lax.convert_element_type(total, node.dtype)
        data = lax.reshape(total, [v.size for v in (*kept, *rest)])
        return _arranged(data, (*kept, *rest), node.out)  # type: ignore[arg-type]

    def _weights(self, factors: Sequence[Factor], order: Sequence[Any], shape: Sequence[int]) -> Any:
        total: Any = None
        for factor in factors:
            data = jnp.asarray(self.fetch(factor, order))
            total = data if total is None else lax.mul(*_matched(total, data))
        return None if total is None else lax.reshape(_spread(total, [v.size for v in order]), shape)

    def _conditions(self, guards: Sequence[Factor], order: Sequence[Any], shape: Sequence[int]) -> Any:
        total: Any = None
        for guard in guards:
            data = jnp.asarray(self.fetch(guard, order))
            total = data if total is None else lax.bitwise_and(*_matched(total, data))
        return None if total is None else lax.reshape(_spread(total, [v.size for v in order]), shape)

    def _row_dotted(self, node: Ein) -> Any:
        """Σ over features of a product of rows, per assignment: the gradient of the combine weights."""
        found = self._row_factor(node)
        if found is None or node.equalities or not is_floating(node.dtype):
            return None
        factor, layout = found
        points = tuple(factor.args[i] for i in layout.axes)
        features = tuple(v for v in factor_vars(node.factors) if v not in points)
        if set(node.out) != set(points) or set(node.binders) != set(features):
            return None
        product = self._product_rows(node.factors, layout.routing, points, features, ())  # type: ignore[arg-type]
        wide = np.promote_types(node.dtype, np.float32)
        total = lax.reduce_sum(lax.convert_element_type(product, wide), range(1, product.ndim))
        total = total * np.asarray(node.coef, wide) if node.coef != 1 else total
        for guard in node.guards:
            held = self.factor_rows(guard, layout.routing, points, ())  # type: ignore[arg-type]
            total = _where(held, total)
        data = _take_rows(total.astype(node.dtype), self.plan(layout.routing).inverse, unique=True)
        return _arranged(lax.reshape(data, [v.size for v in points]), points, node.out)  # type: ignore[arg-type]

    def _einsum(
        self, factors: Sequence[Factor], guards: Sequence[Factor], out: Sequence[Var], coef: Any, dtype: Any
    ) -> Any:
        arrays, names = [], []
        for factor in factors:
            variables = factor_vars([factor])
            arrays.append(lax.convert_element_type(jnp.asarray(self.fetch(factor, variables)), dtype))
            names.append(variables)
        for guard in guards:
            variables = factor_vars([guard])
            held = jnp.asarray(self.fetch(guard, variables))
            host = next((i for i, vs in enumerate(names) if set(variables) <= set(vs)), None)
            if host is None:
                arrays.append(lax.convert_element_type(held, dtype))
                names.append(variables)
            else:
                arrays[host] = _where(_arranged(held, variables, names[host]), arrays[host])
        used = {v for vs in names for v in vs}
        letters: dict[Var, str] = {
            v: string.ascii_letters[i] for i, v in enumerate(dict.fromkeys(v for vs in names for v in vs))
        }
        result_vars = tuple(v for v in out if v in used)
        if arrays:
            spec = ",".join("".join(letters[v] for v in vs) for vs in names)
            spec += "->" + "".join(letters[v] for v in result_vars)
            result = jnp.einsum(spec, *arrays, preferred_element_type=None if is_boolean(dtype) else dtype).astype(
                dtype
            )
        else:
            result = jnp.ones((), dtype)
        if coef != 1:
            result = result * np.asarray(coef, dtype)
        return _spread(_arranged(result, result_vars, out), [v.size for v in out])

    def _scatter(self, node: Ein) -> Any:
        out = tuple(p for t in node.out for p in parts_of(t))
        indices = [t for t in out if isinstance(t, Idx)]
        sites = frozenset().union(*(rank_sites(self.graph, t.node) for t in indices))
        if sites and (len(out) > 1 or any(self.recovery.session.is_dropless(s) for s in sites)):
            raise Refusal(sites, "an array over the slot axis is needed", self.stack[-1] if self.stack else None)
        if node.reducer == "max":
            return self._group_maxima(node, out, indices)
        grouped = self._group_reduced(node, out, indices)
        if grouped is None:
            grouped = self._scattered(node, out, indices)
        return lax.reshape(grouped, node.shape) if grouped.shape != node.shape else grouped

    def _group_reduced(self, node: Ein, out: tuple[Term, ...], indices: list[Idx]) -> Any:
        """Sums over the assignments of each expert: weight gradients (outer products) and bias gradients."""
        if len(indices) != 1 or node.equalities or not is_floating(node.dtype) or not node.factors:
            return None
        points = term_vars(indices[0])
        dense = [t for t in out if isinstance(t, Var)]
        if set(points) & set(dense) or len(dense) + 1 != len(out):
            return None
        if set(factor_vars(node.factors)) - set(points) - set(dense) or set(factor_vars(node.guards)) - set(points):
            return None
        if set(node.binders) != set(points):
            return None
        routing = self._reduced_routing(node, indices[0])
        left, right = _sides(node.factors, dense)
        if left is None:
            product = self._product_rows(node.factors, routing, points, dense, node.guards)
            flat = lax.reshape(product, (product.shape[0], math.prod(v.size for v in dense)))
            total = ops.group_sum(flat.astype(node.dtype), self.plan(routing).group_sizes)
            order = [indices[0], *dense]
        else:
            a_vars = [v for v in dense if v in factor_vars(left)]
            b_vars = [v for v in dense if v not in a_vars]
            a = self._product_rows(left, routing, points, a_vars, node.guards)
            b = self._product_rows(right, routing, points, b_vars, node.guards)
            a = lax.reshape(a, (a.shape[0], math.prod(v.size for v in a_vars)))
            b = lax.reshape(b, (b.shape[0], math.prod(v.size for v in b_vars)))
            kind = jnp.promote_types(a.dtype, b.dtype)
            self._note_matmul(routing, (a.shape[0], a.shape[1], b.shape[1]), (a.dtype, b.dtype))
            total = self._latest = ops.grouped_outer(
                a.astype(kind),
                b.astype(kind),
                self._sizes(routing),
                backend=self.backend,
                preferred_element_type=node.dtype,
            )
            order = [indices[0], *a_vars, *b_vars]
        total = lax.reshape(total, [t.size for t in order])  # type: ignore[attr-defined]
        if node.coef != 1:
            total = total * np.asarray(node.coef, total.dtype)
        return lax.transpose(total, [order.index(t) for t in out])

    def _reduced_routing(self, node: Ein, index: Idx) -> Routing:
        """The routing to reduce on: one that the factors live on already, if its conditions are among the node's."""
        whole = _routing(index, node.guards)
        for factor in node.factors:
            layout = self.layout(factor.node)
            if layout is not None and all(isinstance(a, Var) for a in factor.args):
                matches = layout.routing.index == whole.index and layout.routing.held <= whole.held
                if matches and [factor.args[i] for i in layout.axes] == list(term_vars(index)):
                    return layout.routing
        return whole

    def _group_maxima(self, node: Ein, out: tuple[Term, ...], indices: list[Idx]) -> Any:
        """The largest row of each expert, `initial` where it has none."""
        points = term_vars(indices[0])
        dense = [t for t in out if isinstance(t, Var)]
        if len(indices) != 1 or set(points) & set(dense) or len(dense) + 1 != len(out) or len(node.factors) != 1:
            sites = frozenset().union(*(rank_sites(self.graph, g.node) for g in node.guards))
            raise Refusal(sites, "a maximum over slots that are not those of one expert", self._asker())
        routing = self._reduced_routing(node, indices[0])
        rows = self.factor_rows(node.factors[0], routing, points, dense)
        rows = _spread(jnp.asarray(rows), (math.prod(v.size for v in points), *(v.size for v in dense)))
        lowest = np.asarray(node.initial, node.dtype)
        for guard in _unheld(node.guards, routing, points):
            rows = _where(self.factor_rows(guard, routing, points, dense), rows, lowest)
        flat = lax.reshape(rows, (rows.shape[0], math.prod(v.size for v in dense)))
        largest = ops.group_max(flat, self.plan(routing).group_sizes, lowest)
        largest = lax.reshape(largest, (indices[0].size, *(v.size for v in dense)))
        order = [indices[0], *dense]
        return lax.transpose(largest, [order.index(t) for t in out])

    def _asker(self) -> Step | Scope | None:
        return self.stack[-1] if self.stack else None

    def _scattered(self, node: Ein, out: tuple[Term, ...], indices: list[Idx]) -> Any:
        points = vars_of(indices)
        dense = tuple(t for t in out if isinstance(t, Var) and t not in points)
        guards = [*node.guards, *self._equal_guards(node)]
        rows = self._einsum(node.factors, guards, (*points, *dense), node.coef, node.dtype)
        leading = [t for t in out if isinstance(t, Idx) or t in points]
        places = []
        for term in leading:
            if isinstance(term, Idx):
                place = lax.convert_element_type(jnp.asarray(self.fetch(term.factor, points)), np.int32)
                places.append(jnp.where(place < 0, term.size, place))
            elif isinstance(term, Const):
                places.append(jnp.full([1] * len(points), term.value, np.int32))
            else:
                places.append(_arranged(lax.iota(np.int32, term.size), (term,), points))
        places = [_spread(p, [v.size for v in points]) for p in places]
        empty = jnp.zeros([t.size for t in (*leading, *dense)], node.dtype)
        if is_boolean(node.dtype):
            filled = empty.at[tuple(places)].max(rows, mode="drop")
        else:
            filled = empty.at[tuple(places)].add(rows, mode="drop")
        order = [*leading, *dense]
        return lax.transpose(filled, [order.index(t) for t in out])  # type: ignore[arg-type]


_ROW = Var(-1, 0)


def _routing(index: Idx, conditions: Sequence[Factor]) -> Routing:
    """The routing by an index; conditions that read more than its variables do not count."""
    names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(term_vars(index))}
    place = substitute(index, names)
    assert isinstance(place, Idx)
    return Routing(
        place, frozenset(substitute_factor(c, names) for c in conditions if set(factor_vars([c])) <= set(names))
    )


def _unheld(guards: Sequence[Factor], routing: Routing, points: Sequence[Var]) -> list[Factor]:
    """The guards that rows outside the tail may fail; `points` are the routing's variables here."""
    names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(points)}
    return [g for g in guards if substitute_factor(g, names) not in routing.held]


def _meaning(wire: Wire) -> Value:
    """The value that defines a wire's array."""
    value = wire.definition if wire.definition is not None else wire.value
    assert value is not None
    return value


def _is_own(wire: Wire) -> bool:
    """Whether nothing is known of a wire but its own array."""
    value = _meaning(wire)
    return value.is_plain and isinstance(value.factor.node, Leaf) and value.factor.node.wire is wire


def _placeholders(scope: Scope) -> dict[Wire, Any]:
    return dict.fromkeys([*(f.inner for f in scope.feeds), *(start for _, start, _ in scope.carries)])


def _first(data: Any, axis: int | None) -> Any:
    """`axis` in front."""
    return data if not axis else jnp.moveaxis(data, axis, 0)


def _strong(data: Any, wire: Wire) -> Any:
    """An array of exactly a wire's type: what a scan carries must not change between weak and strong types."""
    return data if is_extended(wire.dtype) else lax.convert_element_type(data, np.dtype(wire.dtype))


def _nodes_of(value: Value) -> list[Wire | Node]:
    """The nodes that a value reads."""
    nodes: list[Wire | Node] = [] if value.background is None else _nodes_of(value.background)
    for piece in value.pieces:
        pairs = [t for pair in piece.equalities for t in pair]
        nodes += _nodes_read([*piece.factors, *piece.guards])
        nodes += [p.node for t in (*piece.axes, *pairs) for p in parts_of(t) if isinstance(p, Idx)]
    return nodes


def _nodes_read(factors: Sequence[Factor]) -> list[Wire | Node]:
    indices = [p.node for f in factors for a in f.args for p in parts_of(a) if isinstance(p, Idx)]
    return [*(f.node for f in factors), *indices]


def _sides(factors: Sequence[Factor], dense: Sequence[Var]) -> tuple[list[Factor] | None, list[Factor]]:
    """Factors in two groups that share no dense axis, that of the first axis first, or (None, …) for one group only."""
    left: list[Factor] = []
    right: list[Factor] = []
    seen: set[Var] = set()
    for factor in factors:
        mine = {v for v in factor_vars([factor]) if v in dense}
        if (not left and mine) or mine & seen:
            left.append(factor)
            seen |= mine
        else:
            right.append(factor)
    covered = {v for f in right for v in factor_vars([f]) if v in dense}
    if not covered or covered & seen or covered | seen != set(dense):
        return None, []
    return (left, right) if dense[0] in seen else (right, left)


def _spread(data: Any, shape: Sequence[int]) -> Any:
    """An array with axes of length 1, or without axes, broadcast to `shape`."""
    if tuple(data.shape) == tuple(shape):
        return data
    if 1 in data.shape:
        kept = [i for i, n in enumerate(data.shape) if n != 1 or shape[i] == 1]
        return lax.broadcast_in_dim(lax.reshape(data, [data.shape[i] for i in kept]), tuple(shape), kept)
    return lax.broadcast_in_dim(data, tuple(shape), range(data.ndim))


def _matched(a: Any, b: Any) -> tuple[Any, Any]:
    """Two arrays with as many axes each, axes of length 1 broadcast to those of the other, in their common dtype."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    kind = a.dtype if a.dtype == b.dtype else jnp.promote_types(a.dtype, b.dtype)
    return _spread(lax.convert_element_type(a, kind), shape), _spread(lax.convert_element_type(b, kind), shape)


def _where(held: Any, data: Any, other: Any = 0) -> Any:
    """`data` where `held`, which may have axes of length 1, `other` elsewhere."""
    shape = np.broadcast_shapes(held.shape, data.shape)
    return lax.select(_spread(jnp.asarray(held), shape), _spread(data, shape), lax.full(shape, other, data.dtype))


def _column(data: Any, k: int, axes: int) -> Any:
    """Column `k` of a matrix [T, K] as [T, 1, …] with `axes` axes."""
    return lax.reshape(lax.index_in_dim(data, k, 1), (data.shape[0], *(1,) * (axes - 1)))


def _arranged(data: Any, names: Sequence[Var], variables: Sequence[Var]) -> Any:
    """Axes `names` as axes `variables`, length 1 where absent."""
    order = sorted(range(len(names)), key=lambda i: list(variables).index(names[i]))
    if order != list(range(len(names))):
        data = lax.transpose(data, order)
    if len(names) == len(variables):
        return data
    sizes = dict(zip([names[i] for i in order], data.shape, strict=True))
    return lax.reshape(data, [sizes.get(v, 1) for v in variables])


def _take_rows(table: jax.Array, index: jax.Array, unique: bool = False) -> jax.Array:
    """`table[index]` along the first axis; `unique` promises that no place is read twice."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + table.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    return lax.gather(
        table,
        index[..., None],
        numbers,
        slice_sizes=(1, *table.shape[1:]),
        unique_indices=unique,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _pad(data: Any, axis: int, low: int, high: int) -> Any:
    config = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(data.ndim)]
    return lax.pad(data, np.zeros((), data.dtype), config)
