"""A backward scan or cond computes again what its forward one has computed.

A loop over experts in a layer that is scanned hands on an array for each expert by itself, which no rolled loop has.
Once the backward body runs the forward body again, as under `jax.checkpoint`, the loop's forward and backward stand in
one body and are rolled together; the arrays that are carried into each iteration are stacked instead, and the choices.

What is made outside of the scans of nothing but numbers, like the numbers of the experts, or is cut out of an array
there, like the matrix of one expert, is made inside of them, where a loop is known by it.

In: a jaxpr.  Out: `recomputed(jaxpr)`: a function of its constants and inputs that gives its outputs, or None if it has
no such scans and conds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend as jex

from moe_xla.passes._jax import at_source, bind_equation, scan_counts
from moe_xla.passes.roll.again import (
    Once,
    chosen_types,
    differs_each_time,
    run_again,
    run_body,
    run_noting,
    run_opened,
    scan_like,
    traced,
)
from moe_xla.passes.roll.graph import KEEPING, Graph, Op, Value, holds, read

_ARITHMETIC = frozenset({"iota", "add", "sub", "mul", "neg", "lt", "select_n"})
_CUTTING = frozenset({"slice", "dynamic_slice"})

_Read = Callable[[Sequence[Value]], list[Any]]


def recomputed(
    jaxpr: Any, wanted: Callable[[Any, Callable[[], Sequence[Any]]], bool]
) -> Callable[[Sequence[Any]], list[Any]] | None:
    """The jaxpr in which backward bodies run forward bodies again, as a function of its arrays.

    `wanted` tells of a forward equation, and of what makes the jaxprs that the backward bodies become, whether so.
    """
    graph = Graph(jaxpr)
    made = _made(graph)
    pairs = [
        pair for op in graph.ops if (pair := _pair(op, made)) is not None and wanted(pair.forward.eqn, pair.bodies)
    ]
    forward = {pair.forward for pair in pairs}
    pairs = [pair for pair in pairs if pair.backward not in forward]  # derivatives of derivatives
    return (lambda arrays: _Run(graph, pairs).of(arrays)) if pairs else None


def _pair(op: Op, made: set[Value]) -> _Scans | _Conds | None:
    if op.key is None or op.name not in ("scan", "cond"):
        return None
    pair = _scans(op, made) if op.name == "scan" else _conds(op)
    return None if pair is None or holds(pair.forward.eqn, differs_each_time) else pair


class _Run:
    """Evaluates a graph, its pairs as this pass has them."""

    def __init__(self, graph: Graph, pairs: Sequence[_Scans | _Conds]):
        self._graph = graph
        self._forward = {pair.forward: pair for pair in pairs}
        self._backward = {pair.backward: pair for pair in pairs}
        self._env: dict[Value, Any] = {}
        self._kept: dict[Op, Any] = {}  # what a forward body keeps for its backward one

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
            pair = self._backward[op]
            return pair.run_backward(self._read, self._kept[pair.forward])
        if op in self._forward:
            wanted = [self._is_read(v) for v in op.outputs]
            results, self._kept[op] = self._forward[op].run_forward(self._read, wanted)
            return results
        return bind_equation(op.eqn, self._read(op.inputs))

    def _is_read(self, value: Value) -> bool:
        """Whether something else reads an array than what makes it again."""
        return value.is_output or any(not self._is_made_again(user, place) for user, place in value.users)

    def _is_made_again(self, user: Op, place: int) -> bool:
        return user in self._backward and place in self._backward[user].given


# --- scans


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
    def types(self) -> Sequence[Any]:
        """The types of the inputs, inside."""
        return [v.aval for v in self.body.jaxpr.invars]


@dataclasses.dataclass(frozen=True)
class _Scans:
    """A backward scan and its forward scan.

    `given` are the inputs that the forward scan stacks, and which of its outputs; `made` are made inside.
    """

    first: _Scan
    second: _Scan
    given: dict[int, int]
    made: set[Value]

    @property
    def forward(self) -> Op:
        return self.first.op

    @property
    def backward(self) -> Op:
        return self.second.op

    @property
    def _others(self) -> Sequence[int]:
        """The sliced inputs of the backward scan that something else gives."""
        return [i for i in range(self.second.first, len(self.backward.inputs)) if i not in self.given]

    def run_forward(self, read: _Read, wanted: Sequence[bool]) -> tuple[list[Any], list[Any]]:
        """The outputs that are `wanted`, None for others; and what is carried into each iteration, and chosen there."""
        scan = self.first
        consts, count = self._inside(read), scan.carries

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], tuple[list[Any], ...]]:
            chosen: list[Any] = []
            results = run_noting(scan.body, [*consts(scan), *carry, *slices], chosen)
            return results[:count], (list(itertools.compress(results[count:], wanted[count:])), carry, chosen)

        carries, slices = (read(scan.op.inputs[scan.consts :][i]) for i in (slice(count), slice(count, None)))
        carried, (stacked, *kept) = scan_like(scan.op.eqn, body, carries, slices)
        left = iter(stacked)
        return [*carried, *(next(left) if w else None for w in wanted[count:])], kept

    def run_backward(self, read: _Read, kept: Sequence[Any]) -> list[Any]:
        """The outputs of the backward scan, for what the forward one kept."""
        first, second = self.first, self.second
        consts = self._inside(read)

        def body(carry: list[Any], slices: tuple[list[Any], ...]) -> tuple[list[Any], list[Any]]:
            entering, chosen, sliced, others = slices
            results = self._body([consts(first), consts(second)], entering, chosen, sliced, others, carry)
            return results[: second.carries], results[second.carries :]

        carries = read(second.op.inputs[second.consts : second.first])
        slices = (*kept, read(first.op.inputs[first.first :]), read([second.op.inputs[i] for i in self._others]))
        carried, stacked = scan_like(second.op.eqn, body, carries, slices)
        return [*carried, *stacked]

    def _body(
        self,
        consts: Sequence[Sequence[Any]],
        entering: Sequence[Any],
        chosen: Sequence[Any],
        sliced: Sequence[Any],
        others: Sequence[Any],
        carry: Sequence[Any],
    ) -> list[Any]:
        once = Once()
        made = run_again(self.first.body, [*consts[0], *entering, *sliced], chosen, once)
        slices = {i: made[place] for i, place in self.given.items()}
        slices.update(zip(self._others, others, strict=True))
        return run_opened(self.second.body, [*consts[1], *carry, *(slices[i] for i in sorted(slices))], once)

    def bodies(self) -> Sequence[Any]:
        """What the backward body becomes."""
        first, second = self.first, self.second
        roots = _roots([*first.op.inputs[: first.consts], *second.op.inputs[: second.consts]], self.made)

        def run(arrays: Sequence[Any], *rest: Sequence[Any]) -> list[Any]:
            env = dict(zip(roots, arrays, strict=True))
            consts = self._inside(lambda values: [read(env, v) for v in values])
            return self._body([consts(first), consts(second)], *rest)

        one, other = first.types, second.types
        groups = (
            one[first.consts : first.first],
            chosen_types(first.body.jaxpr),
            one[first.first :],
            [other[i] for i in self._others],
            other[second.consts : second.first],
        )
        return [traced(run, [v.aval for v in roots], *groups).jaxpr]

    def _inside(self, read: _Read) -> Callable[[_Scan], list[Any]]:
        """Gives the constants of a body, inside of it: those that are `made` are made again."""

        def consts(scan: _Scan) -> list[Any]:
            known: dict[Value, Any] = {}

            def array(value: Value) -> Any:
                if value not in self.made or value.op is None:
                    return read([value])[0]
                if value not in known:
                    with at_source(value.op.source):
                        (known[value],) = bind_equation(value.op.eqn, [array(v) for v in value.op.inputs])
                return known[value]

            return [array(v) for v in scan.op.inputs[: scan.consts]]

        return consts


def _scans(op: Op, made: set[Value]) -> _Scans | None:
    """A scan with the one scan, in the other direction, that stacks arrays for it."""
    second = _Scan(op, *scan_counts(op.eqn))
    found = {i: v for i, v in enumerate(op.inputs) if i >= second.first and _is_stacked(v)}
    forwards = {v.op for v in found.values()}
    if len(forwards) != 1:
        return None
    (forward,) = forwards
    if forward is None or forward.params["length"] != op.params["length"]:
        return None
    if forward.params["reverse"] == op.params["reverse"]:  # it only goes on from there
        return None
    return _Scans(_Scan(forward, *scan_counts(forward.eqn)), second, {i: v.index for i, v in found.items()}, made)


def _is_stacked(value: Value) -> bool:
    """Whether a scan without effects stacks an array."""
    op = value.op
    return op is not None and op.name == "scan" and op.key is not None and value.index >= scan_counts(op.eqn)[1]


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


# --- conds


@dataclasses.dataclass(frozen=True)
class _Conds:
    """A backward cond and the forward cond that is taken with it.

    `given` are the inputs that nothing else reads of what the forward cond gives, and which of its outputs.
    """

    forward: Op
    backward: Op
    given: dict[int, int]

    @property
    def _others(self) -> Sequence[int]:
        """The inputs of the backward branches that something else gives."""
        return [i for i in range(1, len(self.backward.inputs)) if i not in self.given]

    def run_forward(self, read: _Read, wanted: Sequence[bool]) -> tuple[list[Any], None]:
        """The outputs that are `wanted`, None for others."""

        def branch(body: Any) -> jex.core.ClosedJaxpr:
            def run(arrays: Sequence[Any]) -> list[Any]:
                return list(itertools.compress(run_body(body, arrays), wanted))

            return traced(run, _types(self.forward.inputs[1:]))

        branches = [branch(body) for body in self.forward.params["branches"]]
        results = iter(_cond(self.forward, branches, read(self.forward.inputs)))
        return [next(results) if w else None for w in wanted], None

    def run_backward(self, read: _Read, _: Any) -> list[Any]:
        """The outputs of the backward cond."""
        inputs = [*self.backward.inputs[:1], *self.forward.inputs[1:], *(self.backward.inputs[i] for i in self._others)]
        return _cond(self.backward, self._branches(), read(inputs))

    def _branches(self) -> list[jex.core.ClosedJaxpr]:
        """What the backward branches become: functions of the inputs of both conds."""
        others = [self.backward.inputs[i] for i in self._others]

        def branch(first: Any, second: Any) -> jex.core.ClosedJaxpr:
            def run(arrays: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
                once = Once()
                made = run_body(first, arrays, once)
                inputs = {i: made[place] for i, place in self.given.items()}
                inputs.update(zip(self._others, rest, strict=True))
                return run_opened(second, [inputs[i] for i in sorted(inputs)], once)

            return traced(run, _types(self.forward.inputs[1:]), _types(others))

        pairs = zip(self.forward.params["branches"], self.backward.params["branches"], strict=True)
        return [branch(first, second) for first, second in pairs]

    def bodies(self) -> Sequence[Any]:
        """What the backward branches become."""
        return [branch.jaxpr for branch in self._branches()]


def _conds(op: Op) -> _Conds | None:
    """A cond with the one cond that is taken with it and gives it arrays that are for nothing else."""
    found = {i: v for i, v in enumerate(op.inputs) if i and _is_left_to(v, op)}
    forwards = {v.op for v in found.values()}
    if len(forwards) != 1:
        return None
    (forward,) = forwards
    return None if forward is None else _Conds(forward, op, {i: v.index for i, v in found.items()})


def _is_left_to(value: Value, op: Op) -> bool:
    """Whether an array is the result of a cond that is taken with the cond `op`, and nothing else reads it."""
    made = value.op
    if made is None or made.name != "cond" or made.key is None or made.inputs[0] is not op.inputs[0]:
        return False
    return not value.is_output and all(user is op for user, _ in value.users)


def _types(values: Sequence[Value]) -> list[Any]:
    return [v.aval for v in values]


def _cond(op: Op, branches: Sequence[jex.core.ClosedJaxpr], inputs: Sequence[Any]) -> list[Any]:
    """A cond like `op` with other branches."""
    return bind_equation(op.eqn.replace(params={**op.params, "branches": tuple(branches)}), inputs)
