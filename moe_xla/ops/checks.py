"""Trace-time checks of the arguments of the public functions, with errors that say what is allowed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

FLOATS = tuple(np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))


def array(name: str, value: Any) -> jax.Array:
    """`value` as an array, or a TypeError that names the argument."""
    try:
        return value if isinstance(value, jax.Array) else jnp.asarray(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an array, got {value!r} of type {type(value).__name__}") from error


def float_array(name: str, value: Any, ndim: int | None = None) -> jax.Array:
    """`value` as a floating-point array of rank `ndim` (any rank of at least one if None)."""
    x = array(name, value)
    if x.dtype not in FLOATS:
        allowed = ", ".join(d.name for d in FLOATS)
        raise TypeError(f"{name} has dtype {x.dtype.name}; allowed are {allowed}")
    if ndim is None and not x.ndim:
        raise ValueError(f"{name} is a scalar; it must have a leading axis of rows")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name} has shape {x.shape}; it must have {ndim} axes")
    return x


def int_vector(name: str, value: Any) -> jax.Array:
    """`value` as an int32 array of rank 1."""
    x = int_array(name, value)
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {x.shape}; it must have 1 axis")
    return x


def int_array(name: str, value: Any) -> jax.Array:
    """`value` as an int32 array of any rank; what int32 cannot hold becomes negative."""
    x = array(name, value)
    if not np.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name} has dtype {x.dtype.name}; it must be an integer type")
    narrow = lax.convert_element_type(x, np.int32)
    if np.can_cast(x.dtype, np.int32):
        return narrow
    return lax.select(lax.eq(lax.convert_element_type(narrow, x.dtype), x), narrow, lax.full_like(narrow, -1))


def count(name: str, value: Any, least: int = 0) -> int:
    """`value` as a static int of at least `least`."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{name} must be a static int, got {value!r} of type {type(value).__name__}") from error
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def equal(what: str, value: int, other_what: str, other: int) -> None:
    """Raises unless two sizes agree."""
    if value != other:
        raise ValueError(f"{what} is {value}, but {other_what} is {other}; they must be equal")


def float_dtype(name: str, value: Any, default: Any) -> np.dtype:
    """`value`, or `default` if it is None, as a floating-point dtype."""
    if value is None:
        return np.dtype(default)
    try:
        dtype = np.dtype(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a dtype, got {value!r}") from error
    if dtype not in FLOATS:
        raise TypeError(f"{name} is {dtype.name}; allowed are {', '.join(d.name for d in FLOATS)}")
    return dtype


def precision(value: Any) -> Any:
    """`value` as `jax.lax.dot_general` takes it, hashable; jax's default matmul precision if it is None."""
    if value is None:
        value = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # made at run time
    if value is None or isinstance(value, (lax.Precision, lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return value
    try:
        if not isinstance(value, str):
            first, second = value
            return lax.Precision(first), lax.Precision(second)
        return lax.DotAlgorithmPreset[value] if value in lax.DotAlgorithmPreset.__members__ else lax.Precision(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision is {value!r}; allowed are None, a jax.lax.Precision or its name, two of them, "
            "a jax.lax.DotAlgorithmPreset or its name, and a jax.lax.DotAlgorithm"
        ) from error


def accumulator(*dtypes: Any) -> np.dtype:
    """The dtype in which sums of products of values of `dtypes` are kept: float32, or float64 if any is."""
    return np.dtype(jnp.promote_types(np.float32, jnp.result_type(*dtypes)))
