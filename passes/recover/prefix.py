"""Prefix sums that are spelled out: slices, pads, concatenations and additions along one axis that add up to a cumsum.

`lax.associative_scan(jnp.add, mask)` is traced as a tree of these, and an exclusive count is a shifted inclusive one.
Each such array holds, at place i, the sum of one range of the mask's rows; two integer vectors say which.

In: steps whose inputs are ranges of one mask.  Out: `Ranges` of their outputs, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_xla.passes.recover.program import Step, Wire


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """At place i along `axis`: the sum of rows `start[i]:stop[i]` of the mask `base` (zeros where base is None)."""

    base: Wire | None
    axis: int
    start: np.ndarray
    stop: np.ndarray

    @property
    def inclusive(self) -> bool:
        """Whether place i sums the rows up to and including i."""
        return self._counts_to(np.arange(len(self.stop)) + 1)

    @property
    def exclusive(self) -> bool:
        """Whether place i sums the rows before i."""
        return self._counts_to(np.arange(len(self.stop)))

    def _counts_to(self, stops: np.ndarray) -> bool:
        whole = self.base is not None and len(self.stop) == self.base.shape[self.axis]
        empty = self.start >= self.stop
        return whole and bool(np.all((self.stop == stops) & (self.start == 0) | empty & (stops == 0)))

    def take(self, places: Any) -> Ranges:
        return Ranges(self.base, self.axis, self.start[places], self.stop[places])


def rows_of(base: Wire, axis: int) -> Ranges:
    """A mask as its own rows."""
    n = base.shape[axis]
    return Ranges(base, axis, np.arange(n), np.arange(n) + 1)


def zeros(length: int, axis: int) -> Ranges:
    return Ranges(None, axis, np.zeros(length, np.int64), np.zeros(length, np.int64))


Lookup = Callable[[Wire, int], "Ranges | None"]


def ranges_of(step: Step, lookup: Lookup) -> Ranges | None:
    """The ranges that a step's output holds; `lookup(wire, axis)` gives those of its inputs."""
    rule = _RULES.get(step.name)
    return rule(step, lookup) if rule is not None else None


def _slice(step: Step, lookup: Lookup) -> Ranges | None:
    params, shape = step.eqn.params, step.inputs[0].shape
    strides = params["strides"] or (1,) * len(shape)
    cuts = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    axes = [i for i, cut in enumerate(cuts) if cut != (0, shape[i], 1)]
    if len(axes) != 1:
        return None
    ranges = lookup(step.inputs[0], axes[0])
    return ranges.take(slice(*cuts[axes[0]])) if ranges is not None else None


def _pad(step: Step, lookup: Lookup) -> Ranges | None:
    config = step.eqn.params["padding_config"]
    axes = [i for i, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if len(axes) != 1 or lookup(step.inputs[1], -1) is None:
        return None
    axis = axes[0]
    low, high, interior = config[axis]
    ranges = lookup(step.inputs[0], axis)
    if ranges is None or low < 0 or high < 0:
        return None
    result = zeros(step.outputs[0].shape[axis], axis)
    places = low + np.arange(len(ranges.stop)) * (interior + 1)
    result.start[places], result.stop[places] = ranges.start, ranges.stop
    return dataclasses.replace(result, base=ranges.base)


def _concatenate(step: Step, lookup: Lookup) -> Ranges | None:
    axis = step.eqn.params["dimension"]
    parts = [lookup(w, axis) for w in step.inputs]
    known = [p for p in parts if p is not None]
    base = _common_base(known)
    if len(known) != len(parts) or base is None:
        return None
    return Ranges(base, axis, np.concatenate([p.start for p in known]), np.concatenate([p.stop for p in known]))


def _common_base(parts: Sequence[Ranges]) -> Wire | None:
    bases = {p.base for p in parts if p.base is not None}
    return bases.pop() if len(bases) == 1 else None


def _add(step: Step, lookup: Lookup) -> Ranges | None:
    shape = step.outputs[0].shape
    if any(w.shape != shape for w in step.inputs):
        return None
    for axis in range(len(shape)):
        a, b = (lookup(w, axis) for w in step.inputs)
        if a is None or b is None or a.base is None or a.base is not b.base or len(a.stop) != len(b.stop):
            continue
        return _joined(a, b)
    return None


def _joined(a: Ranges, b: Ranges) -> Ranges | None:
    """Adjacent ranges, added."""
    no_a, no_b = a.start >= a.stop, b.start >= b.stop
    a_first = (a.stop == b.start) & ~no_a & ~no_b
    b_first = (b.stop == a.start) & ~no_a & ~no_b & ~a_first
    if not np.all(no_a | no_b | a_first | b_first):
        return None
    start = np.where(no_a | b_first, b.start, a.start)
    stop = np.where(no_b | b_first, a.stop, b.stop)
    return Ranges(a.base, a.axis, start, stop)


def _cumsum(step: Step, lookup: Lookup) -> Ranges | None:
    axis = step.eqn.params["axis"]
    ranges = lookup(step.inputs[0], axis)
    if ranges is None or step.eqn.params["reverse"] or ranges.base is None:
        return None
    full = ranges.start < ranges.stop
    stops = np.maximum.accumulate(np.where(full, ranges.stop, 0))
    before = np.concatenate([[0], stops[:-1]])
    if not np.all(~full | (ranges.start == before)):
        return None
    return Ranges(ranges.base, axis, np.zeros_like(stops), stops)


_RULES: dict[str, Callable[[Step, Lookup], Ranges | None]] = {
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "add": _add,
    "cumsum": _cumsum,
}
