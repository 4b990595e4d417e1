"""Makes values vary over the same axes of a `shard_map`, as its check asks of operands and of loop carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def aligned(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """`arrays`, each varying over every axis that any of them varies over."""
    union = frozenset().union(*map(_axes, arrays))
    return [_over(x, union) for x in arrays]


def like(x: jax.Array, reference: jax.Array) -> jax.Array:
    """`x`, varying over the axes of `reference` too."""
    return _over(x, _axes(reference))


def _axes(x: jax.Array) -> frozenset[Any]:
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def _over(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = axes - _axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
