"""Functions with derivative rules of their own, applied elementwise to structured values.

`custom_jvp` functions (most activations) are kept as such: on rows they are evaluated with their own rule, whatever
shape the program had traced them for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from moe_xla.passes._jax import bind_equation
from moe_xla.passes.recover.rules import elementwise
from moe_xla.passes.recover.rules.table import Context, rule
from moe_xla.passes.recover.values import NoRule, Value

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


class ElementwiseFunction:
    """An elementwise function that stands where a primitive may: it has a name and binds to arrays of any shape."""

    name = "custom_jvp_call"
    multiple_results = False

    def __init__(self, eqn: Any):
        self.eqn = eqn
        body = eqn.params["call_jaxpr"]
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            return jax.jvp(lambda *args: bind_equation(eqn, args)[0], tuple(primals), tuple(tangents))

        jvp = jax.make_jaxpr(derivative)(avals, avals)
        if not (_is_elementwise(body.jaxpr) and _is_elementwise(jvp.jaxpr)):
            raise NoRule(f"{eqn.params.get('name', 'custom_jvp')}: a function that is not elementwise")
        function = jax.custom_jvp(lambda *args: _evaluate(body, args)[0])

        @function.defjvp
        def rule_of_the_user(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            shaped = [
                lax.broadcast_in_dim(p, np.shape(t), ()) if np.ndim(p) < np.ndim(t) else p
                for p, t in zip(primals, tangents, strict=True)
            ]
            out, out_dot = _evaluate(jvp, [*shaped, *tangents])
            return out, lax.convert_element_type(jnp.broadcast_to(out_dot, out.shape), out.dtype)

        self._function = function

    def bind(self, *args: Any, **params: Any) -> Any:
        return self._function(*args)

    def __hash__(self) -> int:
        return hash(id(self.eqn.params["call_jaxpr"].jaxpr))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ElementwiseFunction) and (
            self.eqn.params["call_jaxpr"].jaxpr is other.eqn.params["call_jaxpr"].jaxpr
        )


def _is_elementwise(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            if not _is_elementwise(getattr(inner, "jaxpr", inner)):
                return False
        elif name == "broadcast_in_dim":
            if eqn.invars[0].aval.shape not in ((), eqn.outvars[0].aval.shape):
                return False
        elif name not in elementwise.NAMES:
            return False
    return True


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    """The function of an elementwise jaxpr on arrays of another shape than it was traced for."""
    jaxpr = getattr(closed, "jaxpr", closed)
    environment: dict[Any, Any] = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    environment.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return jnp.asarray(var.val, var.aval.dtype) if hasattr(var, "val") else environment[var]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in _CALLS:
            outputs = _evaluate(eqn.params[_CALLS[name]], inputs)
        elif name == "broadcast_in_dim":
            outputs = inputs
        else:
            shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
            full = [lax.broadcast_in_dim(x, shape, ()) if np.shape(x) != shape else x for x in inputs]
            outputs = [eqn.primitive.bind(*full, **eqn.params)]
        environment.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


@rule("custom_jvp_call")
def custom_jvp_call(context: Context, eqn: Any, *values: Value) -> Value:
    if len(eqn.outvars) != 1:
        raise NoRule("a custom_jvp function with several results")
    aval = eqn.outvars[0].aval
    return elementwise.apply(context, ElementwiseFunction(eqn), {}, list(values), aval.shape, aval.dtype)
