"""One level of a program as a graph of operations in which equal operations are one object.

In: a jaxpr.  Out: a `Graph` of its live operations, in order.  Helpers wrapped in jit are written out in it, a select
of a select under masks that exclude each other reads the inner operand that it can reach, and what a `switch` under
`vmap` puts around its branches is moved to where it can be read (see `guards`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend as jex
import numpy as np

from moe_xla.passes._jax import derivative_rule
from moe_xla.passes.recover.nodes import freeze, is_integer
from moe_xla.passes.roll.guards import moved

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CONTRACTIONS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
VIEWS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "expand_dims", "copy"})
KEEPING = VIEWS | {"convert_element_type"}  # all elements of an array, laid out or represented in another way
_HELPER_LENGTH = 8
_RULE = "jvp_jaxpr_fun"


@dataclasses.dataclass(eq=False)
class Value:
    """An array: result `index` of an operation, an input (`op` is None), a literal or a constant (`held`)."""

    aval: Any
    op: Op | None = None
    index: int = 0
    held: Any = None
    users: list[tuple[Op, int]] = dataclasses.field(default_factory=list)
    is_output: bool = False

    @property
    def literal(self) -> Any:
        """The number that a scalar literal holds, or None."""
        return self.held.val if isinstance(self.held, jex.core.Literal) and not self.aval.shape else None


@dataclasses.dataclass(eq=False)
class Op:
    """An equation applied to values.  `source` is the equation the user wrote: the call of a helper for its parts."""

    eqn: Any
    source: Any
    key: Any
    inputs: tuple[Value, ...]
    outputs: list[Value] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def params(self) -> Any:
        """The parameters of the equation."""
        return self.eqn.params


class Graph:
    """The live operations of a jaxpr in order (`ops`), its inputs (constants first) and its outputs."""

    def __init__(self, jaxpr: Any):
        self._table: dict[Any, Any] = {}
        self._bodies: dict[int, int] = {}
        self._held: list[Any] = []  # what `_bodies` knows by its id
        self._masks: dict[Value, Any] = {}
        self._all: list[Op] = []
        self.inputs = [Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), self.inputs, strict=True))
        self._write(jaxpr, env, None)
        self.outputs = [self._read(env, a) for a in jaxpr.outvars]
        self.ops = self._live()

    def _read(self, env: dict[Any, Value], atom: Any) -> Value:
        if not isinstance(atom, jex.core.Literal):
            return env[atom]
        aval: Any = atom.aval
        key = ("literal", bool(getattr(aval, "weak_type", False)), freeze(np.asarray(atom.val, aval.dtype)))
        return self._table.setdefault(key, Value(aval, held=atom))

    def _write(self, jaxpr: Any, env: dict[Any, Value], source: Any) -> None:
        for eqn in jaxpr.eqns:
            inputs = [self._read(env, a) for a in eqn.invars]
            if is_helper(eqn):
                results = self._body(body_of(eqn), inputs, source if source is not None else eqn)
            else:
                results = self._apply(eqn, source if source is not None else eqn, inputs)
            env.update(zip(eqn.outvars, results, strict=True))

    def _body(self, closed: Any, inputs: Sequence[Value], source: Any) -> list[Value]:
        env: dict[Any, Value] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[var] = self._table.setdefault(("const", id(const)), Value(var.aval, held=const))
        self._write(closed.jaxpr, env, source)
        return [self._read(env, a) for a in closed.jaxpr.outvars]

    def _apply(self, eqn: Any, source: Any, inputs: Sequence[Value]) -> list[Value]:
        inputs = tuple(self._reachable(eqn, inputs))
        replacement = moved(eqn, inputs)
        if replacement is not None:
            return self._body(*replacement, source)
        if eqn.effects:
            return self._new(eqn, source, None, inputs)
        key = (eqn.primitive, self._parameters(eqn))
        entry = (key, tuple(id(v) for v in inputs))
        if entry not in self._table:
            self._table[entry] = self._new(eqn, source, key, inputs)
        return self._table[entry]

    def _new(self, eqn: Any, source: Any, key: Any, inputs: tuple[Value, ...]) -> list[Value]:
        op = Op(eqn, source, key, inputs)
        op.outputs = [Value(v.aval, op, i) for i, v in enumerate(eqn.outvars)]
        self._all.append(op)
        return op.outputs

    def _parameters(self, eqn: Any) -> Any:
        frozen = ((k, self._rule(eqn) if k == _RULE else self._freeze(v)) for k, v in sorted(eqn.params.items()))
        return (*frozen, str(eqn.ctx))

    def _freeze(self, value: Any) -> Any:
        """`freeze`, once for each jaxpr."""
        if not isinstance(value, (jex.core.Jaxpr, jex.core.ClosedJaxpr)):
            return freeze(value)
        if id(value) not in self._bodies:
            self._held.append(value)
            self._bodies[id(value)] = self._table.setdefault(("body", freeze(value)), len(self._table))
        return self._bodies[id(value)]

    def _rule(self, eqn: Any) -> Any:
        """What the rule of a derivative computes.  In it, calls with rules of their own stand for what they call."""
        rule, consts, zeros = derivative_rule(eqn)
        bare = [e.replace(params={**e.params, _RULE: None}) if _RULE in e.params else e for e in rule.eqns]
        return freeze(rule.replace(eqns=bare)), tuple(id(c) for c in consts), freeze(zeros)

    def mask_of(self, value: Value) -> tuple[Any, int] | None:
        """(what, e) of a mask `what == e`: masks of one `what` and different e exclude each other in every element."""
        if value not in self._masks:
            self._masks[value] = self._mask(value)
        return self._masks[value]

    def _mask(self, value: Value) -> tuple[Any, int] | None:
        op = value.op
        if op is None:
            return None
        if op.name == "eq":
            tested = tested_by(op)
            return (id(tested[0]), tested[1]) if tested else None
        if op.name in VIEWS and len(op.inputs) == 1:
            inner = self.mask_of(op.inputs[0])
            return ((op.key, inner[0]), inner[1]) if inner else None
        return None

    def excludes(self, one: Value, other: Value) -> bool:
        """Whether two masks are never true in the same element."""
        a, b = self.mask_of(one), self.mask_of(other)
        return a is not None and b is not None and a[0] == b[0] and a[1] != b[1]

    def _reachable(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Inputs of an equation; the true case of a select passes over selects whose masks exclude its own."""
        if eqn.primitive.name != "select_n" or len(inputs) != 3:
            return inputs
        mask, off, on = inputs
        while on.op is not None and on.op.name == "select_n" and self.excludes(mask, on.op.inputs[0]):
            on = on.op.inputs[1]
        return mask, off, on

    def _live(self) -> list[Op]:
        needed: set[Op] = set()
        for value in self.outputs:
            value.is_output = True
        pending = [v.op for v in self.outputs if v.op is not None] + [o for o in self._all if o.key is None]
        while pending:
            op = pending.pop()
            if op not in needed:
                needed.add(op)
                pending.extend(v.op for v in op.inputs if v.op is not None)
        live = [op for op in self._all if op in needed]
        for op in live:
            for place, value in enumerate(op.inputs):
                value.users.append((op, place))
        return live


def read(env: dict[Value, Any], value: Value) -> Any:
    """The array of a value that is given, computed or held."""
    if value in env:
        return env[value]
    return value.held.val if isinstance(value.held, jex.core.Literal) else value.held


def tested_by(op: Op) -> tuple[Value, int] | None:
    """(v, e) of the comparison of an array v with an integer literal e."""
    for value, other in (op.inputs, op.inputs[::-1]):
        number = other.literal
        if number is not None and value.held is None and is_integer(value.aval.dtype):
            return value, int(number)
    return None


def body_of(eqn: Any) -> Any:
    """The closed jaxpr that a call runs."""
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return body if isinstance(body, jex.core.ClosedJaxpr) else jex.core.ClosedJaxpr(body, ())


def is_random(eqn: Any) -> bool:
    """Whether an equation draws random numbers: not all generators give a batch of keys what each key gets alone."""
    name = eqn.primitive.name
    return name.startswith("rng_") or name in ("random_bits", "random_split", "random_fold_in")


def is_plain_call(eqn: Any) -> bool:
    """A call that does no more than run its body: no shardings, no donation, no options of a compiler."""
    params = eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    plain = all("Unspecified" in type(s).__name__ for s in shardings) and not any(params.get("donated_invars", ()))
    return eqn.primitive.name in CALLS and plain and not params.get("compiler_options_kvs") and not eqn.effects


def is_helper(eqn: Any) -> bool:
    """A call that is written out: of a few equations, as that of `jnp.where`, or one that may hold experts."""
    if not is_plain_call(eqn):
        return False
    body = body_of(eqn).jaxpr
    return len(body.eqns) <= _HELPER_LENGTH or any(holds(e, _may_hold_experts) for e in body.eqns)


def _may_hold_experts(eqn: Any) -> bool:
    return eqn.primitive.name in CONTRACTIONS or eqn.primitive.name == "scan"


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(item, (jex.core.Jaxpr, jex.core.ClosedJaxpr)):
                yield getattr(item, "jaxpr", item)


def holds(eqn: Any, test: Callable[[Any], bool]) -> bool:
    """Whether an equation, or one in its bodies, passes a test."""
    return test(eqn) or any(holds(e, test) for j in inner_jaxprs(eqn) for e in j.eqns)
