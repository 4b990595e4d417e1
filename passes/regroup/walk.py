"""Finds the ragged dots of a program, wherever they stand, and decides for each whether it can be replaced.

In: a jaxpr and the name of a backend.  Out: a `Found` for each time a ragged dot is reached: a body that two equations
share is reached twice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend as jex

from moe_xla import ops
from moe_xla.passes.regroup.products import Product, backend_of, emitted, equations_in, is_product, product_of

# Equations whose bodies may hold other operations without meaning anything else.
ENTERED = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"),
        *("scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "shard_map"),
    }
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A ragged dot in its place.

    Attributes:
      eqn: the equation.
      product: what it computes; None if that is nothing known.
      reason: why it stays as it is, or None.
      backend: the backend that runs it if it does not.
      sizes: where its group sizes come from, as far as that is seen: equal for products of one layer in one body.
      times: how often a call of the step runs it, if loops without a fixed length are taken once.
      is_recomputed: whether it stands in the backward pass of a `checkpoint`.
    """

    eqn: Any
    product: Product | None
    reason: str | None
    backend: str | None
    sizes: Any
    times: int
    is_recomputed: bool


@dataclasses.dataclass(frozen=True)
class _Place:
    """What surrounds a body: how often it runs, the policies that decide what is saved of it, who does not let in."""

    times: int = 1
    policies: tuple[Any, ...] = ()
    is_recomputed: bool = False
    closed_by: str | None = None

    def within(self, eqn: Any) -> _Place:
        """That of the bodies of an equation."""
        params, name = eqn.params, eqn.primitive.name
        policy = params.get("policy")
        return _Place(
            self.times * (params["length"] if name == "scan" else 1),
            self.policies if policy is None else (*self.policies, policy),
            self.is_recomputed or bool(params.get("differentiated")),
            self.closed_by if name in ENTERED else self.closed_by or name,
        )


def found_in(jaxpr: Any, backend: str) -> list[Found]:
    """Every ragged dot, in the order of the program; one that cannot be replaced somewhere stays everywhere."""
    found = list(_Walk(backend).of(jaxpr, {}, _Place()))
    reasons = {id(f.eqn): f.reason for f in reversed(found) if f.reason is not None}
    return [dataclasses.replace(f, reason=reasons.get(id(f.eqn))) for f in found]


class _Walk:
    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._platform = ops.default_platform()
        self._numbers = itertools.count()

    def of(self, jaxpr: Any, names: dict[Any, Any], place: _Place) -> Iterator[Found]:
        """The ragged dots of a body in which variables have `names` given outside."""
        number, names = next(self._numbers), dict(names)

        def name(atom: Any) -> Any:
            return None if isinstance(atom, jex.core.Literal) else names.get(atom, (number, atom))

        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "convert_element_type":
                names[eqn.outvars[0]] = name(eqn.invars[0])
            if is_product(eqn):
                yield self._found(eqn, name(eqn.invars[2]), place)
                continue
            for body in jex.core.jaxprs_in_params(eqn.params):
                yield from self.of(body, _passed(body, [*map(name, eqn.invars)]), place.within(eqn))

    def _found(self, eqn: Any, sizes: Any, place: _Place) -> Found:
        product, reason, chosen = product_of(eqn), None, None
        if isinstance(product, str):
            return Found(eqn, None, product, None, sizes, place.times, place.is_recomputed)
        try:
            chosen = backend_of(eqn, product, self._backend, self._platform)
            reason = self._obstacle(eqn, chosen, place)
        except ValueError as error:
            reason = str(error)
        return Found(eqn, product, reason, chosen, sizes, place.times, place.is_recomputed)

    def _obstacle(self, eqn: Any, chosen: str, place: _Place) -> str | None:
        if place.closed_by is not None:
            return f"a ragged dot inside {place.closed_by}, which is run as written"
        if chosen == "ragged":
            return f"the backend chosen for {self._platform} is jax.lax.ragged_dot itself"
        if not all(_agrees(policy, eqn, self._backend) for policy in place.policies):
            return "the policy of a checkpoint tells ragged_dot_general from other operations"
        return None


def _passed(body: Any, names: Sequence[Any]) -> dict[Any, Any]:
    """The names of the inputs of a body that are, one by one, the inputs of its equation (the last ones of a cond)."""
    passed = names[1:] if len(names) == len(body.invars) + 1 else names
    return dict(zip(body.invars, passed, strict=True)) if len(passed) == len(body.invars) else {}


def _agrees(policy: Any, eqn: Any, backend: str) -> bool:
    """Whether a checkpoint policy says of what takes the place of a ragged dot what it says of the ragged dot."""

    def answer(asked: Any) -> Any:
        return policy(asked.primitive, *(v.aval for v in asked.invars), **asked.params)

    expected = answer(eqn)
    new = emitted(eqn, backend)
    inner = (e for outer in new for body in jex.core.jaxprs_in_params(outer.params) for e in equations_in(body))
    return all(answer(e) == expected for e in (*new, *inner))
