"""An emission that compares itself with the program as written, site by site, while it runs.

Arrays that are computed as written in the rewritten program too are a site's *leaves*.  A *boundary* array is one that
the rewritten program computes from its value, from leaves only, and the program as written by way of arrays over slots
or experts.  Each boundary array is computed in both ways **from the same leaves**, so that differences do not add up
from layer to layer, and routing, which depends on leaves alone, is the same on both sides.  In a scan this happens in
every iteration; what the program as written carries from a forward to a backward scan is carried beside the rewritten
program's own residuals.

A dropless site equals the site as written only where no queue overflows.  So with `balanced` the choices of experts are
replaced, on both sides, by ones that spread tokens evenly, and the lengths of the queues are measured, too.

In: a finished `Recovery` and the program's input arrays.  Out: `findings`, what was measured, and `scores`, one row of
numbers for each (`Score`; for a `Queue` its length in the first place).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla.passes._jax import bind_equation
from moe_xla.passes.recover.branches import Switch
from moe_xla.passes.recover.grouping import leaves_of
from moe_xla.passes.recover.interpret import Recovery
from moe_xla.passes.recover.lower.program import Lowering, is_own
from moe_xla.passes.recover.nodes import Node, is_extended, is_floating
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.scopes import Export, Feed, Scope
from moe_xla.passes.recover.terms import key_of
from moe_xla.passes.recover.values import is_boring

# How the leaves are varied: not at all; the rows of one token; all that are no rows of tokens, by their rounding.
_VARIANTS = 3
_AS_GIVEN, _ONE_TOKEN, _ROUNDED = range(_VARIANTS)
# By how much one token's rows are multiplied: enough for a leak of rounding's size to be seen, in 16 bits no overflow.
_LOUD, _LOUD_HALF = 1000.0, 8.0
# Allowed differences, relative as `Score.error` is, and that in roundings of the coarsest dtype on the way.
TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
TOLERANCE_OF_ACCELERATORS = 2e-2  # whose matmuls round float32 to fewer bits
ROUNDINGS = 4
LARGEST_TOLERANCE = 0.3
_NOISE = 16
_CHOOSING = frozenset({"top_k", "argmax", "argmin"})


class Unprobed(Exception):
    """The program cannot be run on probes."""


class Score(NamedTuple):
    """What is measured of one boundary array; truth values are 0 and 1.

    Attributes:
      error: root mean square of the difference, relative to that of the array as written: a few places where rounding
        flips a comparison weigh little, one wrong row among many is well above rounding.
      differs: whether that is more than rounding explains.
      judged: whether the array as written was finite and not zero, and well-conditioned where the two differ.
      leak: largest difference, relative to the largest magnitude, that rows of one token, multiplied, make in places
        that they do not reach in the program as written.
      leaks: whether that is more than rounding explains.
      moved: whether those rows moved anything, so that `leak` says something.
    """

    error: Any
    differs: Any
    judged: Any
    leak: Any
    leaks: Any
    moved: Any


@dataclasses.dataclass(frozen=True)
class Queue:
    """The longest queue of a site; equal keys are the same queues, counted twice."""

    site: Any
    key: Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """A boundary array: the sites whose rows it stands for, its type, and the equation that computes it as written."""

    sites: frozenset[Any]
    type: str
    step: Step


class Probe(Lowering):
    """One emission with its comparisons; `written` has arrays as written that were computed in or outside of bodies.

    `token_rows` are the numbers of tokens and assignments by which rows of tokens are told from weights; `balanced`
    asks for choices of experts that load them evenly.  `main` is given where the leaves of another emission are the
    arrays, varied.
    """

    def __init__(
        self,
        recovery: Recovery,
        arrays: dict[Wire, Any],
        backend: str,
        token_rows: frozenset[int],
        balanced: bool,
        within: Scope | None = None,
        written: dict[Wire, Any] | None = None,
        main: Probe | None = None,
    ):
        self._main = main
        super().__init__(recovery, arrays, backend, within)
        self.token_rows = token_rows
        self.balanced = balanced
        self.written = written or {}
        self.findings: list[Finding | Queue] = []
        self._within = within
        self._memo: dict[Wire, Any] = {}
        self._scores: list[Any] = []
        self._inner: dict[Scope, list[Finding | Queue]] = {}
        self._balanced: dict[Wire, int] = {}

    @property
    def scores(self) -> Any:
        """One `Score` for each finding, as an array [findings, fields]."""
        return jnp.concatenate([jnp.zeros((0, len(Score._fields)), np.float32), *self._scores])

    def keeps(self, wire: Wire) -> bool:
        """As of `Lowering`; leaves do not count as given where the emission is repeated on them."""
        return super().keeps(wire) if self._main is None else self._main.keeps(wire)

    def results(self, outputs: Sequence[Wire | Node]) -> list[Any]:
        """As of `Lowering`; then compares what was emitted."""
        results = super().results(outputs)
        self._judge()
        if self.balanced:
            self._measure_queues()
        return results

    def run_effects(self) -> None:
        """Leaves out the equations that have effects: probes are nobody's data."""

    def run(self, wire: Wire, step: Step) -> Any:
        """As of `Lowering`, where the step has no effects; choices of experts are balanced."""
        _refuse_effects(step)
        super().run(wire, step)
        if self.balanced and step.name in _CHOOSING:
            self._balance(step)
        return self.arrays[wire]

    def _balance(self, step: Step) -> None:
        """Replaces the chosen experts: distinct ones for each token, over several steps too, evenly over the tokens."""
        chosen = step.outputs[-1]
        if chosen.number not in self.recovery.session.choices or chosen in self._balanced:
            return
        self._balanced[chosen] = turn = len(self._balanced)
        axis = step.eqn.params["axes"][0] if "axes" in step.eqn.params else step.eqn.params.get("axis", -1)
        experts = step.inputs[0].shape[axis]
        numbers = (np.arange(math.prod(chosen.shape)) + turn) % experts
        self.arrays[chosen] = jnp.asarray(numbers.reshape(chosen.shape), chosen.dtype)

    def _measure_queues(self) -> None:
        """Notes the length of the longest queue of each site that is counted here."""
        for graph, rank in self.recovery.session.ranks:
            if graph is not self.graph or rank.site in self.recovery.session.recomputed:
                continue
            arrays = frozenset(leaf.wire.number for leaf in leaves_of(graph, rank.index.node))
            self.findings.append(Queue(rank.site, (arrays, key_of(rank.index).places)))
            length = jnp.max(jnp.asarray(self.node(rank)), initial=0).astype(np.float32)
            self._scores.append(jnp.full((1, len(Score._fields)), length))

    # ------------------------------------------------------------------------------------------- as written

    def as_written(self, wire: Wire) -> Any:
        """The array of a wire as the program computes it, from leaves and arrays that have been emitted."""
        if wire in self.arrays:
            return self.arrays[wire]
        if wire in self.written:
            return self.written[wire]
        if wire.step is None or (isinstance(wire.step, Step) and not wire.step.inputs and not wire.step.outputs):
            return self.array(wire)
        return self._by_equation(wire)

    def _by_equation(self, wire: Wire) -> Any:
        if wire not in self._memo:
            step = wire.step
            _refuse_effects(step)
            given, results = (
                (step.given, step.returned) if isinstance(step, Scope | Switch) else (step.inputs, step.outputs)
            )
            arrays = [self.as_written(w) for w in given]
            self._memo.update(zip(results, bind_equation(step.eqn, arrays), strict=True))
        return self._memo[wire]

    # ----------------------------------------------------------------------------------------------- bodies

    def feeds(self, scope: Scope) -> list[Feed]:
        """As of `Lowering`; what crosses as a value crosses as written, too."""
        return [*super().feeds(scope), *_entered(scope)]

    def source(self, feed: Feed) -> Any:
        """As of `Lowering`."""
        if isinstance(feed.source, Wire) and not is_boring(feed.source.value):
            return self.as_written(feed.source)
        return super().source(feed)

    def leave(self, scope: Scope, exports: Sequence[Export], arrays: Sequence[Any]) -> None:
        """As of `Lowering`; also takes the arrays as written, and the scores."""
        count = len(exports)
        super().leave(scope, exports, arrays[:count])
        *written, scores = arrays[count:]
        self.written.update(zip([outer for _, outer in _left(scope)], written, strict=True))
        self.findings += self._inner[scope]
        self._scores.append(jnp.max(scores, axis=0) if scope.is_scan else scores)

    def body(self, scope: Scope, given: dict[Wire, Any], outputs: Sequence[Wire | Node], times: int) -> list[Any]:
        """As of `Lowering`; the results are followed by arrays as written, and the scores."""
        entered = {f.inner for f in _entered(scope)}
        arrays = {w: a for w, a in given.items() if w not in entered}
        written = {w: a for w, a in given.items() if w in entered}
        inner = Probe(scope.recovery, arrays, self.backend, self.token_rows, self.balanced, scope, written)
        inner.needed(outputs)
        results = [*inner.results(outputs), *(inner.as_written(w) for w, _ in _left(scope)), inner.scores]
        self._inner[scope] = inner.findings
        return [jnp.asarray(r) if not hasattr(r, "dtype") or isinstance(r, np.ndarray) else r for r in results]

    def run_switch(self, switch: Switch) -> None:
        """What only one branch hands on cannot be told from what the others fill in."""
        raise Unprobed("a layer in a branch of a cond")

    # --------------------------------------------------------------------------------------------- comparing

    def _judge(self) -> None:
        """Computes each boundary array in both ways from the leaves, varied in three ways."""
        crossed = {w: c for w in self.arrays if (c := self._crossed(w)) is not None}
        if not crossed:
            return
        leaves = {w: a for w, a in self.arrays.items() if w not in crossed}

        def both(variant: Any) -> list[tuple[Any, Any]]:
            varied = {w: self._varied(w, a, variant) for w, a in leaves.items()}
            state = self.balanced, self._within, dict(self.written), self
            again = Probe(self.recovery, varied, self.backend, self.token_rows, *state)
            got = [jnp.asarray(again.array(w)) for w in crossed]
            return list(zip(got, [again._by_equation(w) for w in crossed], strict=True))

        pairs = lax.map(both, np.arange(_VARIANTS, dtype=np.int32))
        for (wire, between), (got, want) in zip(crossed.items(), pairs, strict=True):
            sites = frozenset().union(*map(_stakes, between))
            self.findings.append(Finding(sites, f"{wire.dtype}{list(wire.shape)}", wire.step))
            carried = any(w in self.written and is_floating(w.dtype) for w in between)
            self._scores.append(_score(got, want, _tolerance([wire, *between]), carried))

    def _crossed(self, wire: Wire) -> list[Wire] | None:
        """The arrays between a boundary array as written and its leaves; None for any other array."""
        step = wire.step
        if not isinstance(step, Step) or not step.outputs or is_extended(wire.dtype):
            return None
        if self.keeps(wire) or is_own(wire):
            return None
        seen: dict[Wire, None] = {}
        pending = list(step.inputs)
        while pending:
            here = pending.pop()
            if here in seen:
                continue
            seen[here] = None
            if here in self.arrays or here in self.written or here.step is None:
                continue
            pending += here.step.given if isinstance(here.step, Scope | Switch) else here.step.inputs
        return list(seen) if any(map(_stakes, seen)) else None

    def _varied(self, wire: Wire, array: Any, variant: Any) -> Any:
        """A leaf in one variant; what may be positions or counts of queues, whole numbers, is never varied."""
        if is_extended(wire.dtype) or not is_floating(wire.dtype) or not wire.shape:
            return array
        array = jnp.asarray(array)
        whole = jnp.all(array == jnp.round(array)) if wire.tainted else False
        rows = self._rows_of_token(wire.shape)
        if rows is not None:
            loud = _LOUD_HALF if wire.dtype == np.float16 else _LOUD
            factor = jnp.where(rows & (variant == _ONE_TOKEN), loud, 1.0)
        else:
            sign = 2 * (lax.iota(np.int32, array.size) * np.int32(7919) % 31 % 2).reshape(array.shape) - 1
            factor = jnp.where(variant == _ROUNDED, 1 + 2 * float(jnp.finfo(wire.dtype).eps) * sign, 1.0)
        return (array * jnp.where(whole, 1.0, factor)).astype(array.dtype)

    def _rows_of_token(self, shape: Sequence[int]) -> Any:
        """Where the rows of one token are in an array whose first axes are tokens or assignments; None for others.

        It is the first token, which hardly any layer drops.
        """
        least = min(self.token_rows, default=0)
        for axes in range(1, len(shape) + 1):
            count = math.prod(shape[:axes])
            if count not in self.token_rows:
                continue
            each = count // least if count % least == 0 else 1
            here = lax.iota(np.int32, count) < np.int32(each)
            return here.reshape(*shape[:axes], *(1,) * (len(shape) - axes))
        return None


def _stakes(wire: Wire) -> frozenset[Any]:
    """The sites that an array is of: it is over their slots or experts, or tests their positions."""
    return wire.layers | (wire.tainted if wire.changed else frozenset())


def _entered(scope: Scope) -> list[Feed]:
    """What a body is given as a value that is no array of the rewritten program."""
    return [f for f in scope.entered if not is_boring(f.inner.value)]


def _left(scope: Scope) -> list[tuple[Wire, Wire]]:
    """What leaves a body as such a value: the wires inside and outside."""
    return [(inner, outer) for inner, outer in scope.left if not is_own(outer)]


def _refuse_effects(step: Step | Scope | Switch) -> None:
    if step.eqn.effects:
        raise Unprobed(f"{step.name} has effects")


def _tolerance(wires: Sequence[Wire]) -> float:
    """The allowed relative difference of what is computed by way of arrays of these dtypes."""
    kinds = [np.dtype(w.dtype) for w in wires if not is_extended(w.dtype) and is_floating(w.dtype)]
    coarsest = max((float(jnp.finfo(d).eps) for d in kinds), default=float(jnp.finfo(np.float32).eps))
    least = TOLERANCE["float64" if coarsest < 1e-10 else "float32"]
    if jax.default_backend() != "cpu":
        least = max(least, TOLERANCE_OF_ACCELERATORS)
    return min(LARGEST_TOLERANCE, max(least, ROUNDINGS * coarsest))


def _score(got: Any, want: Any, tolerance: float, carried: bool) -> Any:
    """The `Score` of an array in all variants; `carried` where what was carried as written is not varied with it."""
    got, want = _wide(got), _wide(want)
    finite = jnp.isfinite(want[_AS_GIVEN])
    scale = _largest(want[_AS_GIVEN], finite)
    unit = jnp.where(scale > 0, scale, 1)
    mean = _root_mean_square(want[_AS_GIVEN] / unit, finite)
    error = _root_mean_square((got[_AS_GIVEN] - want[_AS_GIVEN]) / unit, finite)
    noise = _root_mean_square((want[_ROUNDED] - want[_AS_GIVEN]) / unit, finite & jnp.isfinite(want[_ROUNDED]))
    moved = finite & (want[_ONE_TOKEN] != want[_AS_GIVEN])
    leak = _largest(got[_ONE_TOKEN] - got[_AS_GIVEN], finite & ~moved)
    differs = (error > tolerance * mean + _NOISE * noise) & (scale > 0)
    leaks = (leak > tolerance * scale) & jnp.any(moved) & (scale > 0) & (not carried)
    judged = (scale > 0) & ((error <= tolerance * mean) | differs)
    fields = Score(
        error=jnp.where(judged, error / jnp.where(scale > 0, mean, 1), 0),
        differs=differs,
        judged=judged,
        leak=jnp.where(leaks, leak / unit, 0),
        leaks=leaks,
        moved=jnp.any(moved) & (not carried),
    )
    return jnp.stack([jnp.asarray(f, np.float32) for f in fields])[None]


def _wide(array: Any) -> Any:
    """Numbers as float32 or float64."""
    return jnp.abs(array) if jnp.iscomplexobj(array) else array.astype(jnp.promote_types(array.dtype, np.float32))


def _root_mean_square(array: Any, where: Any) -> Any:
    """The root mean square, infinite for NaN."""
    squares = jnp.where(jnp.isnan(array), np.inf, jnp.square(array))
    return jnp.sqrt(jnp.sum(jnp.where(where, squares, 0)) / jnp.maximum(jnp.sum(where, dtype=np.int32), 1))


def _largest(array: Any, where: Any) -> Any:
    """The largest magnitude, infinite for NaN."""
    magnitude = jnp.where(jnp.isnan(array), np.inf, jnp.abs(array))
    return jnp.max(jnp.where(where, magnitude, 0), initial=0)
