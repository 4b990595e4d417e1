"""What an integer picks: a branch of a cond, or a matrix of an array of matrices.

In: equations.  Out: `may_pick(eqn)`; `batched_pick`, which runs an equation for many tokens, each with a branch of its
own: every branch on all tokens, and of its results those where it is picked, as in a loop over experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from moe_xla.passes.recover.nodes import is_floating
from moe_xla.passes.roll.again import run_body
from moe_xla.passes.roll.graph import holds
from moe_xla.passes.roll.unrolled import batched_bind, contracts

_MATRICES = 3  # axes of an array of matrices


def may_pick(eqn: Any) -> bool:
    """Whether an equation may run the expert that an integer picks: a branch that contracts, or a part of an array."""
    if eqn.primitive.name == "cond":
        return holds(eqn, contracts)
    array = eqn.invars[0].aval if eqn.primitive.name in ("dynamic_slice", "gather") else None
    return array is not None and is_floating(array.dtype) and array.ndim >= _MATRICES


def batched_pick(eqn: Any, inputs: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    """As `batched_bind`.  Where a cond takes a branch for each entry, jax would give each entry arrays of its own.

    A branch gets zeros for the entries that do not pick it: its results are not theirs.
    """
    if eqn.primitive.name != "cond" or not batched[0]:
        return batched_bind(eqn, inputs, batched)
    number, *arrays = inputs
    number = lax.convert_element_type(number, np.int32)
    branches = eqn.params["branches"]
    masks = [lax.eq(number, np.int32(e)) for e in range(len(branches))]
    results = [_run(branch, mask, arrays, batched[1:]) for branch, mask in zip(branches, masks, strict=True)]
    return [_picked(masks, cases) for cases in zip(*results, strict=True)]


def _run(branch: Any, mask: Any, arrays: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    """The results of a branch for all entries, along a first axis; `mask` tells those that pick it."""

    def one(_: Any, *entries: Any) -> list[Any]:
        left = iter(entries)
        return run_body(branch, [next(left) if m else array for array, m in zip(arrays, batched, strict=True)])

    entries = [array for array, m in zip(arrays, batched, strict=True) if m]
    own = [_where(mask, a) if is_floating(a.dtype) and a.ndim > 1 else a for a in entries]
    return list(jax.vmap(one)(mask, *own))


def _picked(masks: Sequence[Any], cases: Sequence[Any]) -> Any:
    """Of each case the entries where it is picked; floats are added up, as the gradients of experts are."""
    if is_floating(cases[0].dtype):
        return functools.reduce(lax.add, (_where(mask, case) for mask, case in zip(masks, cases, strict=True)))
    result = cases[-1]
    for mask, case in zip(reversed(masks[:-1]), reversed(cases[:-1]), strict=True):
        result = _where(mask, case, result)
    return result


def _where(mask: Any, array: Any, other: Any = None) -> Any:
    """The entries of an array along its first axis where a mask holds, those of `other`, or zeros, elsewhere."""
    where = lax.broadcast_in_dim(mask, array.shape, (0,))
    return lax.select(where, array, lax.full_like(array, 0) if other is None else other)
