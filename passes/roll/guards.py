"""What a `switch` under `vmap` puts around its branches, moved to where loops are read.

Under `vmap` every branch runs on everything. jax gives branch e `where(index == e, a, stop_gradient(a))` of each array
`a` that any branch reads, so the weights of all experts at once, and the gradient of `a` is zero where `index != e`.
An expert's entry of such an array is then an entry of a guarded array; it becomes the guarded entry, which is known to
be e's. The gradient, a zero beside an entry padded to all experts, becomes the padding of an entry beside zero. Where
such gradients are summed over tokens, and then over choices, they become the padding of one sum.

In: an equation and the operations that gave its inputs.  Out: `moved(eqn, inputs)`: a jaxpr that gives the same result,
and its inputs, or None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from moe_xla.passes._jax import bind_equation

ADDS = frozenset({"add", "add_any"})
_MOST_LEAVES = 4096

Moved = tuple[Any, tuple[Any, ...]]


def moved(eqn: Any, inputs: Sequence[Any]) -> Moved | None:
    """A closed jaxpr that gives the result of an equation, and the values it reads; None if nothing is to be moved."""
    if eqn.primitive.name == "slice":
        return _entry_of_guarded(eqn, inputs[0])
    if eqn.primitive.name == "select_n" and len(inputs) == 3:
        return _padded_guard(eqn, *inputs)
    if eqn.primitive.name == "reduce_sum":
        return _sum_of_padded(eqn, inputs[0])
    return None


def _entry_of_guarded(eqn: Any, array: Any) -> Moved | None:
    """A slice of `where(mask, a, stop_gradient(a))` as that of the slice of `a`."""
    if array.op is None or not is_guard(array.op):
        return None
    mask, off, on = array.op.inputs
    starts, sizes = eqn.params["start_indices"], eqn.outvars[0].aval.shape
    cut = {i for i, (n, size) in enumerate(zip(on.aval.shape, sizes, strict=True)) if n != size or starts[i]}
    if not _is_constant_along(mask, cut):
        return None
    spread = mask.op

    def entry(held: Any, *cases: Any) -> Any:
        parts = [bind_equation(eqn, [case])[0] for case in cases]
        where = lax.broadcast_in_dim(held, parts[0].shape, spread.params["broadcast_dimensions"])
        return lax.select_n(where, *parts)

    return _traced(eqn, entry, (spread.inputs[0], off, on))


def is_guard(op: Any) -> bool:
    """Whether an operation gives an array as it is, and stops its gradient where a mask is false."""
    return op.name == "select_n" and len(op.inputs) == 3 and _is_stopped(*op.inputs[1:])


def _is_stopped(off: Any, on: Any) -> bool:
    """Whether one array is another without its gradient."""
    while off.op is not None and off.op.name == "broadcast_in_dim":
        if on.op is None or on.op.key != off.op.key or len(off.op.inputs) != 1:
            return False
        off, on = off.op.inputs[0], on.op.inputs[0]
    return off.op is not None and off.op.name == "stop_gradient" and off.op.inputs[0] is on


def _padded_guard(eqn: Any, mask: Any, off: Any, on: Any) -> Moved | None:
    """`where(mask, pad(a), 0)` as the padding of `where(mask, a, 0)`."""
    padding = on.op
    if padding is None or padding.name != "pad" or not is_zero(off) or not is_zero(padding.inputs[1]):
        return None
    config = padding.params["padding_config"]
    if any(inside or low < 0 or high < 0 for low, high, inside in config):
        return None
    if not _is_constant_along(mask, {i for i, (low, high, _) in enumerate(config) if low or high}):
        return None
    spread = mask.op

    def padded(held: Any, part: Any, zero: Any) -> Any:
        where = lax.broadcast_in_dim(held, part.shape, spread.params["broadcast_dimensions"])
        return lax.pad(lax.select_n(where, lax.full_like(part, 0), part), zero, config)

    return _traced(eqn, padded, (spread.inputs[0], *padding.inputs))


def _sum_of_padded(eqn: Any, array: Any) -> Moved | None:
    """A sum of padded guards, or of what these add up to, over axes that are not padded, as padded sums of guards.

    A guard that is summed already is summed over all axes at once.
    """
    axes = eqn.params["axes"]
    leaves = _padded_guards(array, axes)
    if not leaves:
        return None
    sums = [_whole_sum(op.inputs[0], axes) for op in leaves]
    configs = [[c for i, c in enumerate(op.params["padding_config"]) if i not in axes] for op in leaves]

    def total(zero: Any, *arrays: Any) -> Any:
        parts = [lax.reduce_sum(a, axes=over) for a, (_, over) in zip(arrays, sums, strict=True)]
        return functools.reduce(lax.add, (lax.pad(part, zero, c) for part, c in zip(parts, configs, strict=True)))

    return _traced(eqn, total, (leaves[0].inputs[1], *(value for value, _ in sums)))


def _padded_guards(array: Any, axes: Sequence[int]) -> list[Any] | None:
    """The operations of which a tree of additions is the sum, if each pads a guard, along other axes than these."""
    leaves: list[Any] = []
    pending = [array]
    while pending:
        op = pending.pop().op
        if op is None or len(leaves) + len(pending) > _MOST_LEAVES:
            return None
        if op.name in ADDS and all(v.aval.shape == array.aval.shape for v in op.inputs):
            pending.extend(reversed(op.inputs))
        elif op.name == "pad" and is_zero(op.inputs[1]) and _is_masked(_whole_sum(op.inputs[0], ())[0].op):
            leaves.append(op)
        else:
            return None
    unpadded = all(op.params["padding_config"][i] == (0, 0, 0) for op in leaves for i in axes)
    return leaves if unpadded else None


def _is_masked(op: Any) -> bool:
    """Whether an operation gives an array as it is where a mask is true, and zero elsewhere."""
    return op is not None and op.name == "select_n" and len(op.inputs) == 3 and is_zero(op.inputs[1])


def _whole_sum(value: Any, axes: Sequence[int]) -> tuple[Any, list[int]]:
    """What a sum of a value over axes is the sum of, and over which axes: a value that is a sum itself is no step."""
    if value.op is None or value.op.name != "reduce_sum":
        return value, list(axes)
    inner, summed = value.op.params["axes"], value.op.inputs[0]
    left = [i for i in range(summed.aval.ndim) if i not in inner]
    return summed, sorted((*inner, *(left[i] for i in axes)))


def _is_constant_along(mask: Any, axes: set[int]) -> bool:
    """Whether a mask is a smaller one, laid out over more axes, these among them."""
    return (
        bool(axes)
        and mask.op is not None
        and mask.op.name == "broadcast_in_dim"
        and len(mask.op.inputs) == 1
        and not axes & set(mask.op.params["broadcast_dimensions"])
    )


def is_zero(value: Any) -> bool:
    """Whether a value is zero everywhere, as written."""
    number = spread_from(value).literal
    return number is not None and bool(number == 0)


def spread_from(value: Any) -> Any:
    """What an array is laid out and converted from, where each of its elements is an element of that."""
    while value.op is not None and value.op.name in ("broadcast_in_dim", "convert_element_type", "stop_gradient"):
        value = value.op.inputs[0]
    return value


def _traced(eqn: Any, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Moved | None:
    closed = jax.make_jaxpr(function)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in inputs)
    )
    return (closed, inputs) if closed.out_avals[0] == eqn.outvars[0].aval else None
