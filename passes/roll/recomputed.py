"""A backward scan computes again what the loop over experts in its forward scan stacked for it.

Such a loop hands on an array for each expert by itself, which no rolled loop has. Once the backward body runs the
forward body again, as under `jax.checkpoint`, the loop's forward and backward stand in one body and are rolled
together; the arrays that are carried into each iteration are stacked instead.

Constants that are made outside of the scans, like the numbers of the experts, are made inside of them, where a loop is
known by them.

In: a jaxpr.  Out: `recomputed(jaxpr)`: a function of its constants and inputs that gives its outputs, or None if it has
no such scans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
from jax import lax

from moe_xla.passes._jax import at_source, bind_equation, scan_counts

_MAKING = frozenset({"iota", "broadcast_in_dim", "convert_element_type", "reshape", "add", "sub", "mul", "neg"})


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan, and how many of its inputs are constants and are carried."""

    eqn: Any
    consts: int
    carries: int

    @property
    def body(self) -> Any:
        return self.eqn.params["jaxpr"]

    @property
    def first(self) -> int:
        """The first input that is sliced."""
        return self.consts + self.carries


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A backward scan and its forward scan; `given` are the sliced inputs that the forward scan stacks, and where."""

    forward: _Scan
    backward: _Scan
    given: dict[int, int]


def recomputed(jaxpr: Any, holds_loop: Callable[[Any], bool]) -> Callable[[Sequence[Any]], list[Any]] | None:
    """The jaxpr with the forward bodies that hold a loop run again backward, as a function of its arrays."""
    constants = _Constants(jaxpr)
    scans = [_Scan(eqn, *scan_counts(eqn)) for eqn in jaxpr.eqns if eqn.primitive.name == "scan" and not eqn.effects]
    stacked = {v: (scan, i) for scan in scans for i, v in enumerate(scan.eqn.outvars[scan.carries :])}
    pairs = [
        pair for scan in scans if (pair := _pair(scan, stacked)) is not None and holds_loop(_together(pair, constants))
    ]
    return (lambda arrays: _Run(pairs, constants, _read_elsewhere(jaxpr, pairs)).of(jaxpr, arrays)) if pairs else None


class _Constants:
    """The arrays of a jaxpr that are made of nothing but numbers."""

    def __init__(self, jaxpr: Any):
        self._made: dict[Any, Any] = {}
        for eqn in jaxpr.eqns:
            known = all(isinstance(a, jex.core.Literal) or a in self._made for a in eqn.invars)
            if known and eqn.primitive.name in _MAKING:
                self._made[eqn.outvars[0]] = eqn

    def inside(self, atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The arrays for atoms, those that are constants made again where this is called."""
        return [self._again(a) if self._is_known(a) else array for a, array in zip(atoms, arrays, strict=True)]

    def _is_known(self, atom: Any) -> bool:
        return not isinstance(atom, jex.core.Literal) and atom in self._made

    def _again(self, atom: Any) -> Any:
        if isinstance(atom, jex.core.Literal):
            return atom.val
        eqn = self._made[atom]
        with at_source(eqn):
            return bind_equation(eqn, [self._again(a) for a in eqn.invars])[0]


def _together(pair: _Pair, constants: _Constants) -> Any:
    """What the backward body becomes, as a jaxpr of the inputs of both bodies."""
    forward, backward = pair.forward.body.jaxpr, pair.backward.body.jaxpr
    first, count = pair.backward.first, len(forward.invars)

    def run(*arrays: Any) -> list[Any]:
        given, own = list(arrays[:count]), list(arrays[count:])
        for scan, inputs in ((pair.forward, given), (pair.backward, own)):
            inputs[: scan.consts] = constants.inside(scan.eqn.invars[: scan.consts], inputs[: scan.consts])
        made = _run_body(pair.forward.body, given)[pair.forward.carries :]
        for i, place in pair.given.items():
            own[first + i] = made[place]
        return _run_body(pair.backward.body, own)

    types = [v.aval for v in (*forward.invars, *backward.invars)]
    return jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]).jaxpr


def _read_elsewhere(jaxpr: Any, pairs: Sequence[_Pair]) -> set[Any]:
    """The variables that something else than a backward scan reads which makes them again."""
    made = {id(p.backward.eqn): {p.backward.first + i for i in p.given} for p in pairs}
    read = {a for e in jaxpr.eqns for i, a in _variables(e.invars) if i not in made.get(id(e), ())}
    return read.union(a for _, a in _variables(jaxpr.outvars))


def _variables(atoms: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(i, a) for i, a in enumerate(atoms) if not isinstance(a, jex.core.Literal)]


def _pair(scan: _Scan, stacked: dict[Any, tuple[_Scan, int]]) -> _Pair | None:
    """A scan with the one scan that stacks arrays for it."""
    found = {i: stacked[a] for i, a in _variables(scan.eqn.invars[scan.first :]) if a in stacked}
    forwards = {id(forward): forward for forward, _ in found.values()}
    if len(forwards) != 1:
        return None
    (forward,) = forwards.values()
    if forward.eqn.params["length"] != scan.eqn.params["length"]:
        return None
    return _Pair(forward, scan, {i: place for i, (_, place) in found.items()})


class _Run:
    """Evaluates a jaxpr, its pairs of scans as this pass has them."""

    def __init__(self, pairs: Sequence[_Pair], constants: _Constants, read: set[Any]):
        self._constants = constants
        self._read = read
        self._forward = {id(pair.forward.eqn): pair.forward for pair in pairs}
        self._backward = {id(pair.backward.eqn): pair for pair in pairs}
        self._inputs: dict[int, Sequence[Any]] = {}
        self._carried: dict[int, list[Any]] = {}

    def of(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], arrays, strict=True))
        return _evaluate(jaxpr, env, self._equation)

    def _equation(self, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        if id(eqn) in self._backward:
            return self._run_backward(self._backward[id(eqn)], inputs)
        if id(eqn) in self._forward:
            return self._run_forward(self._forward[id(eqn)], inputs)
        return bind_equation(eqn, inputs)

    def _run_forward(self, scan: _Scan, inputs: Sequence[Any]) -> list[Any]:
        """The scan, which stacks what is carried into each iteration, and of its own outputs those that are read."""
        wanted = [v in self._read for v in scan.eqn.outvars[scan.carries :]]

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            results = _run_body(scan.body, [*self._given(scan, inputs), *carry, *slices])
            return results[: scan.carries], (list(itertools.compress(results[scan.carries :], wanted)), carry)

        carried, (stacked, entering) = _scan(scan, body, inputs, list(inputs[scan.first :]))
        self._inputs[id(scan.eqn)], self._carried[id(scan.eqn)] = inputs, entering
        left = iter(stacked)
        return [*carried, *(next(left) if w else None for w in wanted)]

    def _run_backward(self, pair: _Pair, inputs: Sequence[Any]) -> list[Any]:
        forward, scan = pair.forward, pair.backward
        given = self._inputs[id(forward.eqn)]
        others = [a for i, a in enumerate(inputs[scan.first :]) if i not in pair.given]

        def body(carry: list[Any], slices: tuple[list[Any], list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            entering, sliced, rest = slices
            made = _run_body(forward.body, [*self._given(forward, given), *entering, *sliced])[forward.carries :]
            left, count = iter(rest), len(inputs) - scan.first
            own = [made[pair.given[i]] if i in pair.given else next(left) for i in range(count)]
            results = _run_body(scan.body, [*self._given(scan, inputs), *carry, *own])
            return results[: scan.carries], results[scan.carries :]

        slices = (self._carried[id(forward.eqn)], list(given[forward.first :]), others)
        carried, stacked = _scan(scan, body, inputs, slices)
        return [*carried, *stacked]

    def _given(self, scan: _Scan, inputs: Sequence[Any]) -> list[Any]:
        """The constants of a body, inside of it."""
        return self._constants.inside(scan.eqn.invars[: scan.consts], inputs[: scan.consts])


def _scan(scan: _Scan, body: Callable[..., Any], inputs: Sequence[Any], slices: Any) -> Any:
    kept = {name: scan.eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(body, list(inputs[scan.consts : scan.first]), slices, **kept)


def _run_body(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))
    return _evaluate(closed.jaxpr, env, bind_equation)


def _evaluate(jaxpr: Any, env: dict[Any, Any], run: Callable[[Any, Sequence[Any]], list[Any]]) -> list[Any]:
    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with at_source(eqn):
            env.update(zip(eqn.outvars, run(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]
