"""The only module that imports private parts of jax.

`source_of` needs the user's frame of an equation; `jax.extend.source_info_util` is its public place where it exists.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util


def source_of(eqn: Any) -> str | None:
    """`file:line (function)` of an equation in the user's code, or None."""
    info = getattr(eqn, "source_info", None)
    return (source_info_util.summarize(info) or None) if info is not None else None


@functools.cache
def parameters_of(operation: Any) -> dict[str, Any]:
    """The parameters with which an elementwise operation of `jax.lax` binds its primitive in this version of jax."""
    operand = jax.ShapeDtypeStruct((), np.float32)
    (eqn,) = jax.make_jaxpr(operation)(operand, operand).eqns
    return dict(eqn.params)


def bind_equation(eqn: Any, inputs: Any) -> list[Any]:
    """Runs an equation on arrays (of any shape its primitive takes); returns its results as a list."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*subfuns, *inputs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]
