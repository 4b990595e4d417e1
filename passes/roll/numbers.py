"""Known integers as arrays of a program: written as iotas where they follow each other, so that no constant is needed.

A body of a loop can take no new constants without changing what the loop is given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax


def array_of(number: np.ndarray) -> Any:
    """The array of known integers or truth values."""
    number = np.asarray(number)
    first, steps = _steps(number)
    if steps is None:
        return number
    terms: list[Any] = []
    for axis, step in enumerate(steps):
        if step:
            iota = lax.broadcasted_iota(number.dtype, number.shape, axis)
            terms.append(iota if step == 1 else lax.mul(iota, lax.full_like(iota, step)))
    if first or not terms:
        terms.append(lax.full(number.shape, first, number.dtype))
    return functools.reduce(lax.add, terms)


def _steps(number: np.ndarray) -> tuple[Any, list[int] | None]:
    """The first number, and by how much numbers grow along each axis; None where they do not grow evenly."""
    first = number.reshape(-1)[0] if number.size else 0
    if number.dtype == bool:
        return first, [0] * number.ndim if np.all(number == first) else None
    steps = [int(number.take(1, axis).reshape(-1)[0] - first) if n > 1 else 0 for axis, n in enumerate(number.shape)]
    grown = first + sum(step * np.indices(number.shape)[axis] for axis, step in enumerate(steps) if step)
    return first, steps if np.array_equal(np.broadcast_to(grown, number.shape), number) else None


def numbers_along(number: np.ndarray, shape: Sequence[int]) -> Any:
    """[n, *shape]: numbers[e] everywhere."""
    array = array_of(number)
    return lax.broadcast_in_dim(array, (len(number), *shape), (0,)) if shape else array
