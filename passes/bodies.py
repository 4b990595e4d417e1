"""Changes equations of a program wherever they stand, in the bodies of other equations too.

In: a jaxpr, closed or not, and what becomes of an equation.  Out: the jaxpr with its equations changed; the very same
one where none is.  Rules and policies of control flow stay as they are, and a body that equations share stays shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax.extend as jex

_BODIES = (jex.core.Jaxpr, jex.core.ClosedJaxpr)


class BodyChanger:
    """Changes bodies, each once.

    `change(eqn)` gives the equations that take the place of one, or None for one that is only entered, if its primitive
    is one of `entered`.
    """

    def __init__(self, change: Callable[[Any], list[Any] | None], entered: Collection[str]):
        self._change = change
        self._entered = entered
        self._known: dict[int, Any] = {}

    def body(self, body: Any) -> Any:
        """A jaxpr, closed or not, with its equations changed; itself if none is."""
        return self.once(body, self._with_equations)

    def once(self, body: Any, change: Callable[[Any], Any]) -> Any:
        """What `change` makes of a body, the first time that the body is met."""
        if id(body) not in self._known:
            self._known[id(body)] = change(body)
        return self._known[id(body)]

    def _with_equations(self, body: Any) -> Any:
        jaxpr = getattr(body, "jaxpr", body)
        parts = [self._equations(eqn) for eqn in jaxpr.eqns]
        if all(len(part) == 1 and part[0] is eqn for part, eqn in zip(parts, jaxpr.eqns, strict=True)):
            return body
        changed = jaxpr.replace(eqns=[eqn for part in parts for eqn in part])
        return jex.core.ClosedJaxpr(changed, body.consts) if isinstance(body, jex.core.ClosedJaxpr) else changed

    def _equations(self, eqn: Any) -> list[Any]:
        changed = self._change(eqn)
        if changed is not None:
            return changed
        if eqn.primitive.name not in self._entered:
            return [eqn]
        return [with_params(eqn, {name: self._param(param) for name, param in eqn.params.items()})]

    def _param(self, param: Any) -> Any:
        if isinstance(param, _BODIES):
            return self.body(param)
        if isinstance(param, tuple) and any(isinstance(p, _BODIES) for p in param):
            branches = tuple(map(self._param, param))
            return param if all(new is old for new, old in zip(branches, param, strict=True)) else branches
        return param


def with_params(eqn: Any, params: dict[str, Any]) -> Any:
    """An equation with other parameters; itself if they are the same objects."""
    return eqn.replace(params=params) if any(params[k] is not p for k, p in eqn.params.items()) else eqn
