"""The only module that imports private parts of jax.

`source_of` needs the user's frame of an equation; there is no public way to it (jax.extend has no source_info_util).
"""

from __future__ import annotations

from typing import Any

from jax._src import source_info_util


def source_of(eqn: Any) -> str | None:
    """`file:line (function)` of an equation in the user's code, or None."""
    info = getattr(eqn, "source_info", None)
    return None if info is None else source_info_util.summarize(info)


def bind_equation(eqn: Any, inputs: Any) -> list[Any]:
    """Runs an equation on arrays (of any shape its primitive takes); returns its results as a list."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*subfuns, *inputs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]
