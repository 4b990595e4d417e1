"""Layers that are written with `jax.lax.ragged_dot` get another backend.

In: a closed jaxpr and the name of a backend.  Out: a `Regrouped`: a jaxpr of the same inputs and outputs in which each
`ragged_dot_general` of the kinds that `jax.lax.ragged_dot` and its derivatives make is one of `moe_xla.ops`, wherever
it stands, and the `Site` values.  Every other equation stays as it is, and so do the bodies, rules and policies of
control flow.  Where nothing is replaced the jaxpr is the very same one.

    >>> import jax, jax.numpy as jnp
    >>> from moe_xla.passes.regroup import regrouped
    >>> rows, w, sizes = jnp.ones((6, 2)), jnp.ones((3, 2, 4)), jnp.array([1, 2, 3])
    >>> closed = jax.make_jaxpr(jax.lax.ragged_dot)(rows, w, sizes)
    >>> [eqn.primitive.name for eqn in regrouped(closed, "auto").closed.jaxpr.eqns]
    ['grouped_dot']

Values are those of the program as written, to rounding, for group sizes that are not negative; but NaN and infinity in
one expert's weights reach only its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.extend as jex
from absl import logging

from moe_xla.passes.regroup.products import emitted, holds_products, is_product
from moe_xla.passes.regroup.sites import sites_of
from moe_xla.passes.regroup.walk import ENTERED, Found, found_in
from moe_xla.passes.site import Site

__all__ = ["PATTERN", "Regrouped", "regrouped"]

PATTERN = "ragged_dot"


@dataclasses.dataclass(frozen=True)
class Regrouped:
    """A program whose ragged dots run on another backend, and the layers that they belong to."""

    closed: jex.core.ClosedJaxpr
    sites: tuple[Site, ...]


def regrouped(closed: jex.core.ClosedJaxpr, backend: str, semantics: str = "dropless") -> Regrouped:
    """The program with its ragged dots on `backend`; never raises for a program that jax itself accepts.

    `semantics` is what the sites say they were rewritten to: no assignment is dropped that is not in any of them.
    """
    if not holds_products(closed.jaxpr):
        return Regrouped(closed, ())
    try:
        found = found_in(closed.jaxpr, backend)
        return Regrouped(_Replacing(found, backend).body(closed), sites_of(found, PATTERN, semantics))
    except Exception as error:  # a fault of ours must never reach the user's step: it runs as written
        logging.warning("moe_xla: ragged dots run as written: %s: %s", type(error).__name__, error)
        return Regrouped(closed, ())


class _Replacing:
    """Replaces the products that may be, wherever they are reached.  A body that equations share stays shared."""

    def __init__(self, found: Iterable[Found], backend: str) -> None:
        self._kept = {id(f.eqn) for f in found if f.reason is not None}
        self._backend = backend
        self._bodies: dict[int, Any] = {}

    def body(self, body: Any) -> Any:
        """A jaxpr, closed or not, with its products replaced; itself if it holds none."""
        if id(body) not in self._bodies:
            self._bodies[id(body)] = self._body(body)
        return self._bodies[id(body)]

    def _body(self, body: Any) -> Any:
        jaxpr = getattr(body, "jaxpr", body)
        parts = [self._equations(eqn) for eqn in jaxpr.eqns]
        if all(part == [eqn] for part, eqn in zip(parts, jaxpr.eqns, strict=True)):
            return body
        replaced = jaxpr.replace(eqns=[eqn for part in parts for eqn in part])
        return jex.core.ClosedJaxpr(replaced, body.consts) if isinstance(body, jex.core.ClosedJaxpr) else replaced

    def _equations(self, eqn: Any) -> list[Any]:
        if is_product(eqn):
            return [eqn] if id(eqn) in self._kept else emitted(eqn, self._backend)
        if eqn.primitive.name not in ENTERED:
            return [eqn]
        params = {name: self._param(param) for name, param in eqn.params.items()}
        changed = any(params[name] is not param for name, param in eqn.params.items())
        return [eqn.replace(params=params) if changed else eqn]

    def _param(self, param: Any) -> Any:
        if isinstance(param, (jex.core.Jaxpr, jex.core.ClosedJaxpr)):
            return self.body(param)
        if isinstance(param, tuple) and any(isinstance(p, (jex.core.Jaxpr, jex.core.ClosedJaxpr)) for p in param):
            branches = tuple(map(self._param, param))
            return param if all(new is old for new, old in zip(branches, param, strict=True)) else branches
        return param
