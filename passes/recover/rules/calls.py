"""Functions with derivative rules of their own, applied elementwise to structured values.

`custom_jvp` functions (most activations) are kept as such: on rows they are evaluated with their own rule, whatever
shape the program had traced them for.  Whether a function is elementwise is decided by the algebra itself: its result
must be a map of its arguments, each read where the result is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.passes._jax import bind_equation
from moe_xla.passes.recover.nodes import Graph, Leaf, Lit, Map, Node, operands_at
from moe_xla.passes.recover.rules import elementwise
from moe_xla.passes.recover.rules.table import TABLE, Context, rule
from moe_xla.passes.recover.terms import Factor, fresh_axis
from moe_xla.passes.recover.values import NoRule, Value, of_literal, of_node, read

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"}


class ElementwiseFunction:
    """An elementwise function that stands where a primitive may: it has a name and binds to arrays of any shape."""

    multiple_results = False

    def __init__(self, eqn: Any):
        self.body = eqn.params["call_jaxpr"]
        self.name = "custom_jvp_call"
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            return jax.jvp(lambda *args: bind_equation(eqn, args)[0], tuple(primals), tuple(tangents))

        primal = _PointwiseProgram(self.body)
        traced = jax.make_jaxpr(derivative)(avals, avals)
        _PointwiseProgram(traced)  # refuses here and now what could not be differentiated later
        tangent = functools.cache(lambda: _PointwiseProgram(traced, keep_rules=True))
        self._primal = primal
        function = jax.custom_jvp(lambda *args: primal(args)[0])

        @function.defjvp
        def rule_of_the_user(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            out, out_dot = tangent()([*primals, *tangents])
            return out, out_dot

        self._function = function

    def bind(self, *args: Any, **params: Any) -> Any:
        return self._function(*args)

    def evaluate(self, *args: Any) -> Any:
        """The function's value, without its rule: for literals, in whatever transformation the program stands."""
        return self._primal(args)[0]

    def __hash__(self) -> int:
        return hash(id(self.body.jaxpr))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ElementwiseFunction) and self.body.jaxpr is other.body.jaxpr


class _PointwiseProgram:
    """A jaxpr as a function of each element, evaluated on arrays of any one shape."""

    def __init__(self, closed: Any, keep_rules: bool = False):
        jaxpr = closed.jaxpr
        self.graph = Graph()
        self.leaves = [Leaf(None, v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        self.axes = tuple(fresh_axis(n) for n in jaxpr.outvars[0].aval.shape)
        values = lifted(self.graph, jaxpr, closed.consts, [of_node(leaf) for leaf in self.leaves], keep_rules)
        self.results = [self._pointwise(v) for v in values]
        self.dtypes = [v.aval.dtype for v in jaxpr.outvars]

    def _pointwise(self, value: Value) -> Factor:
        if not value.is_plain or len(value.shape) != len(self.axes):
            raise NoRule("a function that is not elementwise")
        factor = read(self.graph, value, self.axes)
        self._check(factor)
        return factor

    def _check(self, factor: Factor) -> None:
        if isinstance(factor.node, Map):
            for operand in operands_at(factor):
                self._check(operand)
        elif isinstance(factor.node, Leaf):
            if factor.node not in self.leaves or factor.args not in (self.axes, ()):  # scalars meet every element
                raise NoRule("a function that is not elementwise")
        elif not isinstance(factor.node, Lit):
            raise NoRule("a function that is not elementwise")

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        shape = np.broadcast_shapes(*(np.shape(a) for a in args))
        known: dict[Node, Any] = {n: jnp.broadcast_to(a, shape) for n, a in zip(self.leaves, args, strict=True)}
        results = [self._evaluate(f.node, known, shape) for f in self.results]
        return [lax.convert_element_type(r, d) for r, d in zip(results, self.dtypes, strict=True)]

    def _evaluate(self, node: Node, known: dict[Node, Any], shape: tuple[int, ...]) -> Any:
        if node not in known:
            if isinstance(node, Lit):
                known[node] = jnp.full(shape, node.value)
            else:
                assert isinstance(node, Map)
                operands = [self._evaluate(op.node, known, shape) for op in node.operands]
                known[node] = node.prim.bind(*operands, **node.params)
        return known[node]


def lifted(graph: Graph, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], keep_rules: bool) -> list[Value]:
    """The values of a jaxpr's results, every equation by its rule; `keep_rules` keeps inner derivative rules."""
    context = Context(graph, lambda site: False, lambda eqn, index: None)
    values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        if np.shape(const):
            raise NoRule("a function with constant arrays")
        values[var] = of_literal(graph, np.asarray(const), (), const.dtype)

    def value_of(atom: Any) -> Value:
        if isinstance(atom, jex.core.Literal):
            aval: Any = atom.aval
            return of_literal(graph, np.asarray(atom.val), aval.shape, aval.dtype)
        return values[atom]

    for eqn in jaxpr.eqns:
        operands = [value_of(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in CALLS or (name == "custom_jvp_call" and not keep_rules):
            inner = eqn.params[CALLS.get(name, "call_jaxpr")]
            body, inner_consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            results: Any = lifted(graph, body, inner_consts, operands, keep_rules)
        elif name in TABLE:
            results = TABLE[name](context, eqn, *operands)
        else:
            raise NoRule(f"a function that uses {name}")
        values.update(zip(eqn.outvars, results if isinstance(results, list) else [results], strict=True))
    return [value_of(a) for a in jaxpr.outvars]


@rule("custom_jvp_call")
def custom_jvp_call(context: Context, eqn: Any, *values: Value) -> Value:
    if len(eqn.outvars) != 1:
        raise NoRule("a custom_jvp function with several results")
    aval = eqn.outvars[0].aval
    return elementwise.apply(context, ElementwiseFunction(eqn), {}, list(values), aval.shape, aval.dtype)
