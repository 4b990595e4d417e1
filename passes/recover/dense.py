"""Arrays over all experts that are read at the chosen ones only: their definitions, found on demand.

A program that runs every expert on every token holds arrays `[tokens, experts, features]`.  They are ordinary arrays
to the algebra until one is read at data-dependent places, `y[t, index[t, k], :]`.  Then the equations that computed it
are read backwards, through elementwise operations and contractions, down to a contraction with the experts' weights,
which at these places is a grouped matmul.  If there is one, the definition takes the array's place, and the array must
not be needed by anything else.

In: a factor.  Out: the factor to read instead, and for each array that it replaces the indices it is read at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_xla.passes.recover.grouping import choices_in, matmul_indices, note_work
from moe_xla.passes.recover.nodes import Ein, Graph, Leaf, Map, Node, Slice, is_boolean, is_map, literal, operands_at
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.rules import TABLE, Context
from moe_xla.passes.recover.rules.calls import CALLS, lifted
from moe_xla.passes.recover.rules.elementwise import NAMES as ELEMENTWISE
from moe_xla.passes.recover.terms import (
    Const,
    Factor,
    Flat,
    Idx,
    Term,
    Var,
    factor_vars,
    fresh,
    substitute_factor,
    term_vars,
)
from moe_xla.passes.recover.values import Contradiction, NoRule, Value, host_of, is_boring, masked, of_node, read

_READ_THROUGH = ELEMENTWISE | {
    *("dot_general", "reduce_sum", "custom_jvp_call", *CALLS),
    *("broadcast_in_dim", "transpose", "reshape", "squeeze", "slice", "split", "unstack"),
}

OnRead = Callable[[Wire, frozenset[Idx]], bool]


class DenseReader:
    """Reads arrays over all experts at the chosen ones; `on_read` is told of each array, and may forbid it.

    `passage` may know what an array is that comes from another scan.
    """

    def __init__(self, context: Context, on_read: OnRead, passage: Callable[[Factor], Factor | None]):
        self._context = context
        self._graph = context.graph
        self._on_read = on_read
        self._passage = passage
        self._defined: dict[Node, Value | None] = {}
        self._known: dict[Factor, Factor] = {}

    def __call__(self, factor: Factor) -> Factor:
        """The factor, or its definition at the chosen experts where that is work on their rows."""
        if not isinstance(factor.node, (Leaf, Map)) or not choices_in(self._graph, factor):
            return factor
        variables = factor_vars([factor])
        names: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(variables)}
        key = substitute_factor(factor, names)
        if key not in self._known:
            self._known[key] = key  # an array is never read through itself
            self._known[key] = self._read(key)
        return substitute_factor(self._known[key], {Var(i, v.size): v for i, v in enumerate(variables)})

    def _read(self, factor: Factor) -> Factor:
        if isinstance(factor.node, Map):
            return self._pushed(factor)
        assert isinstance(factor.node, Leaf)
        value = self._definition(factor.node)
        if value is None:
            return self._passed(factor, factor.node.wire)
        try:
            found = self._pushed(read(self._graph, value, factor.args))
        except (NoRule, Contradiction):
            return factor
        indices = matmul_indices(self._graph, found.node)
        return found if indices and self._on_read(factor.node.wire, indices) else factor

    def _passed(self, factor: Factor, wire: Wire) -> Factor:
        rows, indices = self._passage(factor) if wire.step is None else None, choices_in(self._graph, factor)
        if rows is None or not self._on_read(wire, frozenset(indices)):
            return factor
        note_work(self._graph, rows.node, frozenset(indices))
        return rows

    def product(self, factor: Factor, index: Idx) -> tuple[Factor, ...] | None:
        """An array with a matrix for each assignment as the factors whose outer product it is, or None."""
        factors, wires = _multiplied(self._graph, factor), []
        if len(factors) > 1 and factor.node.origin is not None:
            wires.append(factor.node.origin)
        while len(factors) == 1 and isinstance(factors[0].node, Leaf):
            wires.append(factors[0].node.wire)
            value = self._definition(factors[0].node)
            if value is None:
                return None
            factors = _multiplied(self._graph, read(self._graph, value, factors[0].args))
        whole = len(factors) > 1 and set(factor_vars(factors)) == set(factor_vars([factor]))
        return tuple(factors) if whole and all(self._on_read(w, frozenset({index})) for w in wires) else None

    def _pushed(self, factor: Factor) -> Factor:
        """A factor with what it is made of read at the places where it is read."""
        if not choices_in(self._graph, factor):
            return factor
        if isinstance(factor.node, Leaf):
            return self(factor)
        if isinstance(factor.node, Map):
            operands = operands_at(factor)
            pushed = [self._pushed(op) for op in operands]
            if pushed == operands:
                return factor
            return self._graph.map(factor.node.prim, factor.node.params, pushed, factor.node.dtype)
        if isinstance(factor.node, Ein) and factor.node.gathers and not factor.node.equalities:
            return self._pushed_sum(factor, factor.node)
        if isinstance(factor.node, Slice):
            return self._pushed_slice(factor, factor.node)
        return factor

    def _pushed_slice(self, factor: Factor, node: Slice) -> Factor:
        """Part of an axis: that part of what the whole axis is read as."""
        place, size = factor.args[node.axis], node.base.shape[node.axis]
        one = node.stop - node.start == 1
        whole: Term = Const(node.start, size) if one else fresh(size)
        args = (*factor.args[: node.axis], whole, *factor.args[node.axis + 1 :])
        given = Factor(node.base, args)
        read_there = self._pushed(given)
        if read_there == given or one:
            return factor if read_there == given else read_there
        if read_there.args.count(whole) != 1 or any(whole in term_vars(a) for a in read_there.args if a != whole):
            return factor
        axis = read_there.args.index(whole)
        part = self._graph.slice(read_there.node, axis, node.start, node.stop)
        return Factor(part, tuple(place if i == axis else a for i, a in enumerate(read_there.args)))

    def _pushed_sum(self, factor: Factor, node: Ein) -> Factor:
        names: dict[Var, Term] = {**node.bind(factor.args), **{v: fresh(v.size) for v in node.binders}}
        given = [substitute_factor(f, names) for f in node.factors]
        factors = [self._pushed(f) for f in given]
        if len(given) == 1 and factors == given and _is_of_experts_alone(given[0]):
            return factor  # the sum of a matrix over one axis is worth the same for all assignments
        guards = [substitute_factor(g, names) for g in node.guards]
        bound = {names[v] for v in node.binders}
        axes = tuple(v for v in factor_vars([*factors, *guards]) if v not in bound)
        return Factor(self._graph.ein(axes, factors, guards, frozenset(), node.coef, node.dtype), axes)

    def _definition(self, leaf: Leaf) -> Value | None:
        """What the equation of an array says of it, in terms of the arrays before it."""
        if leaf not in self._defined:
            self._defined[leaf] = self._defined_by(leaf.wire, leaf.wire.step)
        return self._defined[leaf]

    def _as_array(self, wire: Wire) -> Value:
        """What is known of an array; where axes were merged, the array itself, to be read along each axis as it is."""
        value = wire.value
        assert value is not None
        if not is_boring(value) or not any(isinstance(a, Flat) for a in value.pieces[0].axes):
            return value
        return of_node(self._graph.leaf(wire, wire.shape, wire.dtype))

    def _defined_by(self, wire: Wire, step: Any) -> Value | None:
        if not isinstance(step, Step) or step.eqn is None or not step.outputs or step.name not in _READ_THROUGH:
            return None
        inputs = [self._as_array(w) for w in step.inputs if w.value is not None]
        if step.eqn.effects or len(inputs) < len(step.inputs) or not all(v.is_plain for v in inputs):
            return None
        try:
            if step.name in CALLS:
                inner = step.eqn.params[CALLS[step.name]]
                body, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                values: Any = lifted(self._graph, body, consts, inputs, keep_rules=True)
            else:
                values = TABLE[step.name](self._context, step.eqn, *inputs)
        except (NoRule, Contradiction):
            return None
        value: Value = values[wire.index] if isinstance(values, list) else values
        return value if value.is_plain and value.dtype == wire.dtype else None


def _is_of_experts_alone(factor: Factor) -> bool:
    """Whether an array is read at chosen experts, and depends on nothing else of the assignment."""
    plain = {a for a in factor.args if isinstance(a, Var)}
    return not plain & {v for a in factor.args if not isinstance(a, Var) for v in term_vars(a)}


def _multiplied(graph: Graph, factor: Factor) -> list[Factor]:
    """The factors of a product, each masked where the product is, or the factor itself."""
    if is_map(factor, "mul"):
        return [f for op in operands_at(factor) for f in _multiplied(graph, op)]
    if not is_map(factor, "select_n") or len(operands_at(factor)) != 3:
        return [factor]
    mask, if_false, if_true = operands_at(factor)
    factors = _multiplied(graph, if_true)
    host = host_of(factors, mask)
    if literal(if_false) is None or literal(if_false) != 0 or host is None or not is_boolean(mask.node.dtype):
        return [factor]
    factors[host] = masked(graph, factors[host], mask)
    return factors
