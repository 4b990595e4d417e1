"""A backward scan computes again what the loop over experts in its forward scan stacked for it.

Such a loop hands on an array for each expert by itself, which no rolled loop has. Once the backward body runs the
forward body again, as under `jax.checkpoint`, the loop's forward and backward stand in one body and are rolled
together; the arrays that are carried into each iteration are stacked instead.  So are the choices, which are not made
again: numbers that another program rounds in another way could choose otherwise.

What is made outside of the scans of nothing but numbers, like the numbers of the experts, or is cut out of an array
there, like the matrix of one expert, is made inside of them, where a loop is known by it.

In: a jaxpr.  Out: `recomputed(jaxpr)`: a function of its constants and inputs that gives its outputs, or None if it has
no such scans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend as jex
from jax import lax

from moe_xla.passes._jax import at_source, bind_equation, scan_counts
from moe_xla.passes.recover.nodes import is_integer
from moe_xla.passes.roll.graph import KEEPING, Graph, Op, Value, body_of, holds, is_helper, read

_ARITHMETIC = frozenset({"iota", "add", "sub", "mul", "neg", "lt", "select_n"})
_CUTTING = frozenset({"slice", "dynamic_slice"})
_CHOOSING = frozenset({"top_k", "approx_top_k", "argmax", "argmin", "sort"})

_Bind = Callable[[Any, Sequence[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan, and how many of its inputs are constants and are carried."""

    op: Op
    consts: int
    carries: int

    @property
    def body(self) -> Any:
        return self.op.params["jaxpr"]

    @property
    def first(self) -> int:
        """The first input that is sliced."""
        return self.consts + self.carries

    @property
    def given(self) -> Sequence[Value]:
        """The constants."""
        return self.op.inputs[: self.consts]

    @property
    def stacked(self) -> Sequence[Value]:
        """The outputs that are stacked."""
        return self.op.outputs[self.carries :]

    @property
    def types(self) -> Sequence[Any]:
        """The types of what each iteration has of its own."""
        return [v.aval for v in self.body.jaxpr.invars[self.consts :]]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A backward scan and its forward scan; `given` are the sliced inputs that the forward scan stacks, and where."""

    forward: _Scan
    backward: _Scan
    given: dict[int, int]

    @property
    def others(self) -> Sequence[int]:
        """The sliced inputs of the backward scan that something else gives."""
        return [i for i in range(len(self.backward.op.inputs) - self.backward.first) if i not in self.given]

    def run(
        self, consts: Sequence[Sequence[Any]], again: Sequence[Any], chosen: Sequence[Any], own: Sequence[Any]
    ) -> list[Any]:
        """The backward body, on the constants of both bodies, what the forward one has `again`, and what is its `own`.

        Of its own are the carries and the slices of the `others`; `chosen` are the choices of the forward body.
        """
        left = iter(chosen)

        def bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
            return [next(left) for _ in eqn.outvars] if _chooses(eqn) else bind_equation(eqn, inputs)

        made = _run_body(self.forward.body, [*consts[0], *again], bind)[self.forward.carries :]
        slices = {i: made[place] for i, place in self.given.items()}
        slices.update(zip(self.others, own[self.backward.carries :], strict=True))
        ordered = [slices[i] for i in range(len(slices))]
        return _run_body(self.backward.body, [*consts[1], *own[: self.backward.carries], *ordered])


def recomputed(jaxpr: Any, holds_loop: Callable[[Any], bool]) -> Callable[[Sequence[Any]], list[Any]] | None:
    """The jaxpr with the forward bodies that hold a loop run again backward, as a function of its arrays."""
    graph = Graph(jaxpr)
    scans = [_Scan(op, *scan_counts(op.eqn)) for op in graph.ops if op.name == "scan" and op.key is not None]
    stacked = {v: (scan, i) for scan in scans for i, v in enumerate(scan.stacked)}
    made = _made(graph)
    pairs = [pair for scan in scans if (pair := _pair(scan, stacked)) is not None and holds_loop(_together(pair, made))]
    backward = {pair.backward.op for pair in pairs}
    pairs = [pair for pair in pairs if pair.forward.op not in backward]  # derivatives of derivatives
    return (lambda arrays: _Run(graph, pairs, made).of(arrays)) if pairs else None


# --- what is made inside of a body


def _made(graph: Graph) -> set[Value]:
    """The arrays that are made of nothing but numbers, and those that are cut out of an array at such places."""
    numbers: set[Value] = set()
    parts: set[Value] = set()
    for op in graph.ops:
        if op.key is None or len(op.outputs) != 1:
            continue
        known = [v in numbers or isinstance(v.held, jex.core.Literal) for v in op.inputs]
        if all(known) and op.name in _ARITHMETIC | KEEPING:
            numbers.update(op.outputs)
        elif (op.name in _CUTTING and all(known[1:])) or (op.name in KEEPING and op.inputs[0] in parts):
            parts.update(op.outputs)
    return numbers | parts


def _roots(values: Iterable[Value], made: set[Value]) -> list[Value]:
    """The arrays that `values` are made from."""
    found: dict[Value, None] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in made and value.op is not None:
            pending.extend(value.op.inputs)
        elif value.held is None:
            found[value] = None
    return list(found)


def _inside(values: Sequence[Value], made: set[Value], env: dict[Value, Any]) -> list[Any]:
    """The arrays of `values`, where those that are `made` are made again."""
    known: dict[Value, Any] = {}

    def array(value: Value) -> Any:
        if value not in made or value.op is None:
            return read(env, value)
        if value not in known:
            with at_source(value.op.source):
                (known[value],) = bind_equation(value.op.eqn, [array(v) for v in value.op.inputs])
        return known[value]

    return [array(v) for v in values]


def _together(pair: _Pair, made: set[Value]) -> Any:
    """What the backward body becomes, as a jaxpr."""
    forward, backward = pair.forward, pair.backward
    roots = _roots([*forward.given, *backward.given], made)
    own = [*backward.types[: backward.carries], *(backward.types[backward.carries + i] for i in pair.others)]
    chosen = [v.aval for eqn in _choices(forward.body.jaxpr) for v in eqn.outvars]
    types = [[v.aval for v in roots], forward.types, chosen, own]

    def run(arrays: Sequence[Any], *rest: Sequence[Any]) -> list[Any]:
        env = dict(zip(roots, arrays, strict=True))
        return pair.run([_inside(s.given, made, env) for s in (forward, backward)], *rest)

    return jax.make_jaxpr(run)(*([_shaped(t) for t in group] for group in types)).jaxpr


def _shaped(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


# --- pairs of scans


def _pair(scan: _Scan, stacked: dict[Value, tuple[_Scan, int]]) -> _Pair | None:
    """A scan with the one scan that stacks arrays for it."""
    found = {i: stacked[v] for i, v in enumerate(scan.op.inputs[scan.first :]) if v in stacked}
    forwards = {forward.op: forward for forward, _ in found.values()}
    if len(forwards) != 1:
        return None
    (forward,) = forwards.values()
    if forward.op.params["length"] != scan.op.params["length"] or holds(forward.op.eqn, _differs_each_time):
        return None
    return _Pair(forward, scan, {i: place for i, (_, place) in found.items()})


def _differs_each_time(eqn: Any) -> bool:
    """Whether an equation gives other results when it is run again."""
    return bool(eqn.primitive.name == "rng_uniform")


class _Run:
    """Evaluates a graph, its pairs of scans as this pass has them."""

    def __init__(self, graph: Graph, pairs: Sequence[_Pair], made: set[Value]):
        self._graph = graph
        self._made = made
        self._forward = {pair.forward.op: pair.forward for pair in pairs}
        self._backward = {pair.backward.op: pair for pair in pairs}
        self._env: dict[Value, Any] = {}
        self._kept: dict[Op, list[list[Any]]] = {}  # what is carried into each iteration, and what is chosen there

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs for arrays of the inputs."""
        self._env = dict(zip(self._graph.inputs, arrays, strict=True))
        for op in self._graph.ops:
            with at_source(op.source):
                self._env.update(zip(op.outputs, self._operation(op), strict=True))
        return self._read(self._graph.outputs)

    def _read(self, values: Sequence[Value]) -> list[Any]:
        return [read(self._env, v) for v in values]

    def _operation(self, op: Op) -> list[Any]:
        if op in self._backward:
            return self._run_backward(self._backward[op])
        if op in self._forward:
            return self._run_forward(self._forward[op])
        return bind_equation(op.eqn, self._read(op.inputs))

    def _is_read(self, value: Value) -> bool:
        """Whether something else than a backward scan reads an array that this makes again."""
        return value.is_output or any(not self._is_made_again(user, place) for user, place in value.users)

    def _is_made_again(self, user: Op, place: int) -> bool:
        pair = self._backward.get(user)
        return pair is not None and place - pair.backward.first in pair.given

    def _run_forward(self, scan: _Scan) -> list[Any]:
        """The scan, which stacks what is carried into each iteration, its choices, and its outputs that are read."""
        wanted = [self._is_read(v) for v in scan.stacked]

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], tuple[list[Any], ...]]:
            chosen: list[Any] = []

            def bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
                results = bind_equation(eqn, inputs)
                chosen.extend(results if _chooses(eqn) else ())
                return results

            results = _run_body(scan.body, [*self._given(scan), *carry, *slices], bind)
            stacked = list(itertools.compress(results[scan.carries :], wanted))
            return results[: scan.carries], (stacked, carry, chosen)

        carried, (stacked, *kept) = self._scan(scan, body, self._read(scan.op.inputs[scan.first :]))
        self._kept[scan.op] = kept
        left = iter(stacked)
        return [*carried, *(next(left) if w else None for w in wanted)]

    def _run_backward(self, pair: _Pair) -> list[Any]:
        forward, scan = pair.forward, pair.backward
        others = self._read([scan.op.inputs[scan.first + i] for i in pair.others])

        def body(carry: list[Any], slices: tuple[list[Any], ...]) -> tuple[list[Any], list[Any]]:
            entering, chosen, sliced, rest = slices
            consts = [self._given(s) for s in (forward, scan)]
            results = pair.run(consts, [*entering, *sliced], chosen, [*carry, *rest])
            return results[: scan.carries], results[scan.carries :]

        given = self._read(forward.op.inputs[forward.first :])
        carried, stacked = self._scan(scan, body, (*self._kept[forward.op], given, others))
        return [*carried, *stacked]

    def _given(self, scan: _Scan) -> list[Any]:
        """The constants of a body, inside of it."""
        return _inside(scan.given, self._made, self._env)

    def _scan(self, scan: _Scan, body: Callable[..., Any], slices: Any) -> Any:
        kept = {name: scan.op.params[name] for name in ("length", "reverse", "unroll")}
        return lax.scan(body, self._read(scan.op.inputs[scan.consts : scan.first]), slices, **kept)


def _run_body(closed: Any, arrays: Sequence[Any], bind: _Bind = bind_equation) -> list[Any]:
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.core.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        inputs = [value(v) for v in eqn.invars]
        with at_source(eqn):
            results = _run_body(body_of(eqn), inputs, bind) if is_helper(eqn) else bind(eqn, inputs)
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(v) for v in closed.jaxpr.outvars]


def _choices(jaxpr: Any) -> Iterator[Any]:
    """The equations that choose, in the order in which `_run_body` runs them."""
    for eqn in jaxpr.eqns:
        if is_helper(eqn):
            yield from _choices(body_of(eqn).jaxpr)
        elif _chooses(eqn):
            yield eqn


def _chooses(eqn: Any) -> bool:
    """Whether integers come of an equation that compares numbers with each other."""
    return eqn.primitive.name in _CHOOSING and any(is_integer(v.aval.dtype) for v in eqn.outvars)
