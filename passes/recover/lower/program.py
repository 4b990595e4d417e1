"""Programs: which arrays are needed, which equations can run as written, and the bodies of scans and checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.passes._jax import bind_checkpoint, bind_equation
from moe_xla.passes.recover.branches import Switch
from moe_xla.passes.recover.facts import direct_operands
from moe_xla.passes.recover.interpret import Recovery
from moe_xla.passes.recover.loads import number_of
from moe_xla.passes.recover.lower.base import (
    Refusal,
)
from moe_xla.passes.recover.lower.sums import SumEmitter
from moe_xla.passes.recover.nodes import Ein, Leaf, Node, is_boolean, is_extended
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.scopes import Export, Feed, Scope
from moe_xla.passes.recover.terms import (
    Factor,
    Idx,
    Var,
    parts_of,
)
from moe_xla.passes.recover.values import NoRule, Value, cast, has_slots, of_node, plain_map, scattered


class Lowering(SumEmitter):
    """One emission of a recovered program."""

    def __init__(self, recovery: Recovery, arrays: dict[Wire, Any], backend: str, within: Scope | None = None):
        super().__init__(recovery, arrays, backend, within)
        for step in recovery.steps:
            for wire in step.outputs:
                self.keeps(wire)

    def results(self, outputs: Sequence[Wire | Node]) -> list[Any]:
        """The arrays of the program's outputs; equations with effects run too."""
        effects = [w for step in self.recovery.effects for w in (step.inputs or step.outputs)]
        needed = self.needed([*outputs, *effects])
        for step in self.recovery.steps:
            for wire in step.outputs:
                if wire in needed and not wire.layers:
                    self._try(wire)
        results = [self.array(w) if isinstance(w, Wire) else self.node(w) for w in outputs]
        self.run_effects()
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
                    pending += nodes_read([*direct_operands(item), *_conditions_of_rows(item)])
                    pending += [item.origin] if item.origin is not None and self.keeps(item.origin) else []
            elif item not in needed:
                needed.add(item)
                pending += self._reads(item)
        return needed

    def _reads(self, wire: Wire) -> list[Wire | Node]:
        if wire in self.arrays:
            return []
        if isinstance(wire.step, Scope | Switch) and is_own(wire):
            return self._require(wire.step, wire)
        if wire.step is not None and (is_own(wire) or self.keeps(wire)):
            return list(wire.step.inputs)
        return _nodes_of(_meaning(wire))

    def keeps(self, wire: Wire) -> bool:
        """Whether the equation that computes a wire can run as written."""
        known = self.kept.get(wire)
        if known is None:
            known = not wire.layers and self._can_run(wire)
            self.kept[wire] = known
        return known

    def _can_run(self, wire: Wire) -> bool:
        step = wire.step
        if wire in self.arrays:
            return True
        if step is None:
            nodes = _nodes_of(_meaning(wire))
            return not wire.changed and not any(isinstance(n, Leaf) and n.wire.dense for n in nodes)
        if isinstance(step, Scope | Switch):
            return is_own(wire)
        if not step.inputs:
            return not wire.changed
        return not wire.changed and self._is_safe(step) and all(self.keeps(w) for w in step.inputs)

    def _is_safe(self, step: Step) -> bool:
        """Whether a step may see the positions that flow into it (in dropless, none that asks for the capacity)."""
        sites = frozenset().union(*(w.tainted for w in step.inputs))
        return self.is_position_safe(step.name, map(number_of, step.inputs), sites)

    def array(self, wire: Wire) -> Any:
        """The array of a wire in the rewritten program."""
        if wire in self.arrays:
            return self.arrays[wire]
        step = wire.step
        if wire.dense:
            self._refuse_dense(wire)
        if step is None:
            assert not is_own(wire)
            self.arrays[wire] = self._of_value(wire, _meaning(wire))
            return self.arrays[wire]
        if isinstance(step, Scope | Switch) and is_own(wire):
            self._run_scope(step)
            return self.arrays[wire]
        if not step.inputs and not step.outputs:
            result = self.constant(step)
        elif self.keeps(wire):
            return self.run(wire, step)
        elif is_own(wire):
            if not self._is_safe(step):
                self._refuse_position(step)
            return self.run(wire, step)
        else:
            result = self._of_value(wire, _meaning(wire))
        self.arrays[wire] = result
        return result

    def _require(self, scope: Scope | Switch, wire: Wire) -> list[Wire | Node]:
        """Notes that an output of a body is needed; the arrays outside that the body then reads."""
        if isinstance(scope, Switch):
            return self._require_of_switch(scope, wire)
        for export in scope.exports:
            if export.outer is wire:
                scope.required[export] = None
        inner = Lowering(scope.recovery, _placeholders(scope), self.backend, scope)
        wanted = inner.needed([*(last for _, _, last in scope.carries), *(e.source for e in scope.required)])
        feeds = self._fed[scope] = [f for f in scope.feeds if f.inner in wanted]
        return [*(initial for initial, _, _ in scope.carries), *(f.source for f in feeds)]

    def _require_of_switch(self, switch: Switch, wire: Wire) -> list[Wire | Node]:
        switch.required.update({r: None for r in switch.results if r.outer is wire})
        reads: list[Wire | Node] = [switch.index]
        for place, scope in enumerate(switch.branches):
            scope.required.update({e: None for e in scope.exports if e.outer is wire})
            inner = Lowering(scope.recovery, _placeholders(scope), self.backend, scope)
            wanted = inner.needed([*(r.inner[place] for r in switch.required), *(e.source for e in scope.required)])
            feeds = self._fed[scope] = [f for f in scope.feeds if f.inner in wanted]
            reads += [f.source for f in feeds]
        return reads

    def _run_scope(self, scope: Scope | Switch) -> None:
        if isinstance(scope, Switch):
            self.run_switch(scope)
            return
        self.stack.append(scope)
        feeds = self.feeds(scope)
        arrays = [self.source(f) for f in feeds]
        exports = list(scope.required)
        if scope.is_scan:
            carried, stacked = self._scan(scope, feeds, arrays, exports)
            self.arrays.update(zip(scope.carried, carried, strict=True))
        else:
            stacked = self._checkpoint(scope, feeds, arrays, exports)
        self.leave(scope, exports, stacked)
        self.stack.pop()

    def feeds(self, scope: Scope) -> list[Feed]:
        """What crosses into a body."""
        return self._fed[scope]

    def source(self, feed: Feed) -> Any:
        """The array outside of what crosses into a body."""
        return self.array(feed.source) if isinstance(feed.source, Wire) else self.node(feed.source)

    def leave(self, scope: Scope, exports: Sequence[Export], arrays: Sequence[Any]) -> None:
        """Takes the arrays that a body exports."""
        for export, array in zip(exports, arrays, strict=True):
            self.arrays[export.outer] = array

    def body(self, scope: Scope, given: dict[Wire, Any], outputs: Sequence[Wire | Node], times: int) -> list[Any]:
        """The results of a body that runs `times` times."""
        inner = Lowering(scope.recovery, given, self.backend, scope)
        inner.needed(outputs)
        results = inner.results(outputs)
        self.flops += [(key, times * flops) for key, flops in inner.flops]
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
            results = self.body(scope, given, outputs, params["length"])
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
            return self.body(scope, inner, [e.source for e in exports], 1)

        return bind_checkpoint(scope.eqn, body, arrays)

    def run_switch(self, switch: Switch) -> None:
        """Runs a cond on the arrays that any of its branches reads; exports are zeros in the other branches."""
        self.stack.append(switch)
        sources = list(dict.fromkeys(f.source for scope in switch.branches for f in self._fed[scope]))
        arrays = [self.array(s) if isinstance(s, Wire) else self.node(s) for s in sources]
        exports = [(scope, e) for scope in switch.branches for e in scope.required]

        def branch(place: int, scope: Scope, given: Sequence[Any]) -> list[Any]:
            outside = dict(zip(sources, given, strict=True))
            inner = {f.inner: outside[f.source] for f in self._fed[scope]}
            own = [e for s, e in exports if s is scope]
            outputs = [*(r.inner[place] for r in switch.required), *(e.source for e in own)]
            made = dict(zip([*switch.required, *own], self.body(scope, inner, outputs, 1), strict=True))
            wanted: list[Any] = [*switch.required, *(e for _, e in exports)]
            return [_strong(made[w], w.outer) if w in made else _zeros(w.outer) for w in wanted]

        branches = [functools.partial(branch, place, scope) for place, scope in enumerate(switch.branches)]
        results = lax.switch(self.array(switch.index), branches, arrays)
        outers = [*(r.outer for r in switch.required), *(e.outer for _, e in exports)]
        self.arrays.update(zip(outers, results, strict=True))
        self.stack.pop()

    def run_effects(self) -> None:
        """Runs the equations that have effects, in the program's order, unless an output has run them already."""
        for step in self.recovery.effects:
            if isinstance(step, Scope | Switch):
                self._run_scope(step)
            elif step.outputs:
                self.array(step.outputs[0])
            else:
                bind_equation(step.eqn, [self.array(w) for w in step.inputs])

    def constant(self, step: Step) -> Any:
        """A literal or constant of the program."""
        atom = step.eqn
        if hasattr(atom, "val"):
            return np.asarray(atom.val, atom.aval.dtype) if not is_extended(atom.aval.dtype) else atom.val
        return atom

    def run(self, wire: Wire, step: Step) -> Any:
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
            asker = self.asker()
            if asker is None:
                raise Refusal(wire.slots, "an array over the slot axis is a result of the step", wire.step)
            why = asker.refusal or "needs the array over the slot axis"
            raise Refusal(wire.slots, why, asker)
        if wire.step is not None:
            self.stack.append(wire.step)
        depth = len(self.stack)
        if not value.is_plain:
            value = self._boolean(value) if is_boolean(value.dtype) else self._filled(value)
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

    def _filled(self, value: Value) -> Value:
        """A value as an ordinary one: its pieces where they hit, its background elsewhere, which may be infinite."""
        if value.background is None:
            return scattered(self.graph, value)
        pieces = scattered(self.graph, Value(value.shape, value.dtype, value.pieces))
        ones = tuple(p.replace(factors=(), coef=1) for p in value.pieces)
        hit = self._boolean(Value(value.shape, np.dtype(bool), ones))
        cases = [hit, value.background, pieces]
        return plain_map(self.graph, prims.select_n_p, {}, cases, value.shape, value.dtype)

    def _boolean(self, value: Value) -> Value:
        if value.background is not None:
            raise NoRule("a truth value with a background as an array")
        counts = scattered(self.graph, cast(self.graph, value, np.dtype(np.int32)))
        zero = of_node(self.graph.lit(0, np.int32).node)
        return plain_map(self.graph, prims.ne_p, {}, [counts, zero], value.shape, np.dtype(bool))

    def _refuse_dense(self, wire: Wire) -> None:
        asker = self.asker()
        if wire.value is not None and any(p.equalities for p in wire.value.pieces):
            raise Refusal(wire.dense, "slots that are not provably the same or different", wire.step)
        if asker is None:
            raise Refusal(wire.dense, "the work of every expert is a result of the step", wire.step)
        raise Refusal(wire.dense, asker.refusal or f"{asker.name} needs the work of every expert", asker)

    def _refuse_position(self, step: Step) -> None:
        sites = frozenset().union(*(w.tainted for w in step.inputs))
        raise Refusal(sites, f"{step.name} looks at queue positions in a way that depends on the capacity", step)


def _meaning(wire: Wire) -> Value:
    """The value that defines a wire's array."""
    value = wire.definition if wire.definition is not None else wire.value
    assert value is not None
    return value


def is_own(wire: Wire) -> bool:
    """Whether nothing is known of a wire but its own array."""
    value = _meaning(wire)
    return value.is_plain and isinstance(value.factor.node, Leaf) and value.factor.node.wire is wire


def _conditions_of_rows(node: Node) -> list[Factor]:
    """The conditions without which no row of a node is read: its rows may be ordered by them."""
    return sorted(node.domain, key=repr) if isinstance(node, Ein) else []


def _placeholders(scope: Scope) -> dict[Wire, Any]:
    return dict.fromkeys([*(f.inner for f in scope.feeds), *(start for _, start, _ in scope.carries)])


def _first(data: Any, axis: int | None) -> Any:
    """`axis` in front."""
    return data if not axis else jnp.moveaxis(data, axis, 0)


def _zeros(wire: Wire) -> Any:
    return jnp.zeros(wire.shape, wire.dtype)


def _strong(data: Any, wire: Wire) -> Any:
    """An array of exactly a wire's type: what a scan carries must not change between weak and strong types."""
    return data if is_extended(wire.dtype) else lax.convert_element_type(data, np.dtype(wire.dtype))


def _nodes_of(value: Value) -> list[Wire | Node]:
    """The nodes that a value reads."""
    nodes: list[Wire | Node] = [] if value.background is None else _nodes_of(value.background)
    for piece in value.pieces:
        pairs = [t for pair in piece.equalities for t in pair]
        nodes += nodes_read([*piece.factors, *piece.guards])
        nodes += [p.node for t in (*piece.axes, *pairs) for p in parts_of(t) if isinstance(p, Idx)]
    return nodes


def nodes_read(factors: Sequence[Factor]) -> list[Wire | Node]:
    indices = [p.node for f in factors for a in f.args for p in parts_of(a) if isinstance(p, Idx)]
    return [*(f.node for f in factors), *indices]
