"""Bodies that are programs of their own: those of `custom_vjp` functions and of `while` loops.

What flows through them into the rest of the program are arrays, so a layer inside is rewritten within its body, and
the body put back in its place.  A function with a derivative rule keeps the rule as it is: whoever differentiates the
result gets what the user wrote, which is why the layers inside are rewritten as `exact`.

In: a closed jaxpr, and the rewriting of one.  Out: a `Parted`: a jaxpr of the same inputs and outputs, and the sites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.extend as jex

from moe_xla.passes.bodies import BodyChanger, with_params
from moe_xla.passes.site import REWRITTEN, Site

CUSTOM_VJP = "custom_vjp_call"
_APART = {CUSTOM_VJP: "call_jaxpr", "while": "body_jaxpr"}
_ENTERED = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "scan", "cond"})
# Without one of these there is no layer; many other loops have none.
_CONTRACTIONS = frozenset({"dot_general", "ragged_dot_general"})


class Result(Protocol):
    """A rewritten program: a function of flat inputs, and what was found."""

    @property
    def evaluate(self) -> Callable[..., Sequence[Any]]: ...

    @property
    def sites(self) -> tuple[Site, ...]: ...


# What rewrites a program, and why only exactly if so.
Rewrite = Callable[[jex.core.ClosedJaxpr, str | None], Result]


@dataclasses.dataclass(frozen=True)
class Parted:
    """A program whose bodies apart are rewritten, and the layers in them."""

    closed: jex.core.ClosedJaxpr
    sites: tuple[Site, ...]


def with_bodies_apart(closed: jex.core.ClosedJaxpr, rewrite: Rewrite) -> Parted:
    """The program with the bodies of `custom_vjp` functions and loops rewritten; the very same one if none is."""
    parting = _Parting(rewrite)
    return Parted(parting.bodies.body(closed), tuple(parting.sites))


class _Parting:
    """Rewrites bodies wherever they are reached, each once."""

    def __init__(self, rewrite: Rewrite):
        self._rewrite = rewrite
        self.bodies = BodyChanger(self._equation, _ENTERED)
        self.sites: list[Site] = []

    def _equation(self, eqn: Any) -> list[Any] | None:
        name = eqn.primitive.name
        if name not in _APART:
            return None
        why = f"the rule of a {CUSTOM_VJP} differentiates the layer as it is written" if name == CUSTOM_VJP else None
        key = _APART[name]
        body = self.bodies.once(eqn.params[key], lambda body: self._apart(body, why))
        return [with_params(eqn, {**eqn.params, key: body})]

    def _apart(self, body: Any, why: str | None) -> Any:
        """A body with its layers rewritten; itself where none is."""
        if not _contracts(body):
            return body
        result = self._rewrite(body, why)
        self.sites += result.sites
        if not any(site.status == REWRITTEN for site in result.sites):
            return body
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in _invars(body)]
        return jax.make_jaxpr(result.evaluate)(*inputs)


def _invars(body: Any) -> Sequence[Any]:
    return getattr(body, "jaxpr", body).invars


def _contracts(body: Any) -> bool:
    jaxpr = getattr(body, "jaxpr", body)
    return any(
        eqn.primitive.name in _CONTRACTIONS or any(map(_contracts, jex.core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
