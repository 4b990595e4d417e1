"""What is known of the arrays of a level before it runs: small integers, zeros, and axes of experts.

In: a `Graph`.  Out: `Marks`.  An axis is an axis of experts if the array is made, by operations that keep it, from the
comparison of an array with the numbers along it, or from a scatter to it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend as jex
import numpy as np

from moe_xla.passes._jax import scan_counts
from moe_xla.passes.recover.nodes import is_boolean, is_integer
from moe_xla.passes.roll.graph import Graph, Op, Value

_LARGEST = 4096
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "argmax", "argmin"})
EXPERTS = "experts"
_NUMBERS = "numbers"  # along this axis the entries are 0, 1, 2, …


class Marks:
    """`known` values, `zeros`, and the `tags` of axes; `joined` are the tags that met an axis of experts."""

    def __init__(self, graph: Graph):
        self.known: dict[Value, np.ndarray] = {}
        self.zeros: set[Value] = set()
        self.tags: dict[Value, dict[int, set[Any]]] = {}
        self.joined: set[Any] = set()
        for op in graph.ops:
            self._note(op)

    def number(self, value: Value) -> np.ndarray | None:
        """A small array of integers or booleans, if it is known."""
        if isinstance(value.held, jex.core.Literal):
            held = np.asarray(value.held.val)
            return held.astype(value.aval.dtype) if is_small(value) else None
        return self.known.get(value)

    def has(self, value: Value, axis: int, tag: str = EXPERTS) -> bool:
        """Whether an axis bears a tag."""
        return tag in self.tags.get(value, {}).get(axis, ())

    def _note(self, op: Op) -> None:
        out = op.outputs[0] if op.outputs else None
        if out is None:
            return
        numbers = [self.number(v) for v in op.inputs]
        if all(is_small(v) for v in op.outputs) and all(n is not None for n in numbers):
            result = known_result(op, numbers)
            if result is not None:
                self.known[out] = result
        if op.name in ("broadcast_in_dim", "convert_element_type") and self._is_zero(op.inputs[0]):
            self.zeros.add(out)
        if op.name == "scan":
            _, carries = scan_counts(op.eqn)
            self.tags.update({value: {0: {op}} for value in op.outputs[carries:]})
            return
        for value in op.outputs[:1]:
            tags = self._tags(op, value)
            if tags:
                self.tags[value] = tags

    def _is_zero(self, value: Value) -> bool:
        return value in self.zeros or (value.literal is not None and bool(np.asarray(value.literal) == 0))

    def _tags(self, op: Op, out: Value) -> dict[int, set[Any]]:
        """The tags of the axes of a result."""
        tags: dict[int, set[Any]] = collections.defaultdict(set)
        if op.name == "iota":
            tags[op.params["dimension"]].add(_NUMBERS)
        elif op.name.startswith("scatter"):
            scattered = op.params["dimension_numbers"].scatter_dims_to_operand_dims
            if scattered:
                tags[max(scattered)].add(EXPERTS)
        elif op.name == "dot_general":
            self._meet_in_dot(op)
        known = self.known.get(out)
        if known is not None and known.ndim == 1 and np.array_equal(known, np.arange(len(known))):
            tags[0].add(_NUMBERS)
        for value in op.inputs:
            for axis, kept in moved_axes(op, value, out).items():
                tags[kept] |= self.tags.get(value, {}).get(axis, set())
        tags = {axis: found for axis, found in tags.items() if found}
        if op.name == "eq":
            for axis, found in tags.items():
                if sum(self.has(v, axis, _NUMBERS) for v in op.inputs) == 1:
                    found.add(EXPERTS)
        for found in tags.values():
            if EXPERTS in found:
                self.joined |= found
        return tags

    def _meet_in_dot(self, op: Op) -> None:
        (left, right), (left_batch, right_batch) = op.params["dimension_numbers"]
        for one, other in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
            found = self.tags.get(op.inputs[0], {}).get(one, set()) | self.tags.get(op.inputs[1], {}).get(other, set())
            if EXPERTS in found:
                self.joined |= found


def moved_axes(op: Op, value: Value, out: Value) -> dict[int, int]:
    """Axes of an input that are axes of the result, of operations that keep them."""
    shape, result = value.aval.shape, out.aval.shape
    if op.name == "broadcast_in_dim":
        pairs = dict(enumerate(int(i) for i in op.params["broadcast_dimensions"]))
    elif op.name == "transpose":
        pairs = {source: target for target, source in enumerate(op.params["permutation"])}
    elif op.name == "squeeze":
        kept = [i for i in range(len(shape)) if i not in op.params["dimensions"]]
        pairs = {axis: i for i, axis in enumerate(kept)}
    elif op.name in _REDUCTIONS:
        kept = [i for i in range(len(shape)) if i not in op.params["axes"]]
        pairs = {axis: i for i, axis in enumerate(kept)}
    elif op.name == "reshape":
        pairs = _reshaped(shape, result)
    elif op.name == "dot_general":
        pairs = _free_axes(op, value, len(shape))
    else:
        aligned = len(shape) == len(result) and all(n in (1, m) for n, m in zip(shape, result, strict=True))
        pairs = {i: i for i in range(len(shape))} if aligned else {}
    return {a: b for a, b in pairs.items() if shape[a] == result[b]}


def _reshaped(shape: Sequence[int], result: Sequence[int]) -> dict[int, int]:
    """Axes kept by a reshape that adds or drops axes of size 1."""
    left = [i for i, n in enumerate(shape) if n != 1]
    right = [i for i, n in enumerate(result) if n != 1]
    return dict(zip(left, right, strict=True)) if [shape[i] for i in left] == [result[i] for i in right] else {}


def _free_axes(op: Op, value: Value, rank: int) -> dict[int, int]:
    (left, right), (left_batch, right_batch) = op.params["dimension_numbers"]
    second = value is not op.inputs[0]
    contracted, batch = (right, right_batch) if second else (left, left_batch)
    start = len(left_batch)
    if second:
        start += op.inputs[0].aval.ndim - len(left) - len(left_batch)
    free = [i for i in range(rank) if i not in contracted and i not in batch]
    return {**{a: i for i, a in enumerate(batch)}, **{a: start + i for i, a in enumerate(free)}}


def is_small(value: Value) -> bool:
    """Whether the entries of an array may be known: few integers or booleans."""
    dtype = value.aval.dtype
    return value.aval.size <= _LARGEST and (is_integer(dtype) or is_boolean(dtype))


def known_result(op: Op, arrays: Sequence[Any]) -> np.ndarray | None:
    """The result of a simple operation on known integers, or None."""
    name, params, out = op.name, op.params, op.outputs[0].aval
    if name in _ARITHMETIC or name in _COMPARISONS:
        with np.errstate(over="ignore"):  # integers wrap, as they do in the program
            result = (_ARITHMETIC.get(name) or _COMPARISONS[name])(*arrays)
    elif name == "select_n" and len(arrays) == 3 and arrays[0].dtype == bool:
        result = np.where(arrays[0], arrays[2], arrays[1])
    elif name == "convert_element_type":
        result = arrays[0]
    elif name in ("reshape", "squeeze"):
        result = np.reshape(arrays[0], out.shape)
    elif name == "broadcast_in_dim":
        ranks = [1] * len(out.shape)
        for axis, size in zip(params["broadcast_dimensions"], np.shape(arrays[0]), strict=True):
            ranks[axis] = size
        result = np.broadcast_to(np.reshape(arrays[0], ranks), out.shape)
    elif name == "iota":
        ranks = [-1 if i == params["dimension"] else 1 for i in range(len(out.shape))]
        result = np.broadcast_to(np.arange(out.shape[params["dimension"]]).reshape(ranks), out.shape)
    else:
        return None
    return np.asarray(result).astype(out.dtype)
