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

from moe_xla.passes.bodies import BodyChanger
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
        return Regrouped(_replaced(closed, found, backend), sites_of(found, PATTERN, semantics))
    except Exception as error:  # a fault of ours must never reach the user's step: it runs as written
        logging.warning("moe_xla: ragged dots run as written: %s: %s", type(error).__name__, error)
        return Regrouped(closed, ())


def _replaced(closed: jex.core.ClosedJaxpr, found: Iterable[Found], backend: str) -> jex.core.ClosedJaxpr:
    """The program with the products replaced that may be, wherever they are reached."""
    kept = {id(f.eqn) for f in found if f.reason is not None}

    def change(eqn: Any) -> list[Any] | None:
        if not is_product(eqn):
            return None
        return [eqn] if id(eqn) in kept else emitted(eqn, backend)

    replaced: jex.core.ClosedJaxpr = BodyChanger(change, ENTERED).body(closed)
    return replaced
