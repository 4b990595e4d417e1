"""What a form is: one naive Mixture-of-Experts program, with the facts a test needs to judge its rewrite.

A form's `layer(params, x, capacity) -> (y, aux)` is written as a user would write it.  `capacity` is a Python int
and enters the program only through overflow, so that at `loose` capacity nothing is dropped and the result is what
`semantics="dropless"` must give for the program traced at `tight` capacity.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Distinct sizes, so that an axis can be told by its length in a traced program.
TOKENS = 41
GROUPS, GROUP_TOKENS = 3, 29
EXPERTS = 5
MODEL = 6
HIDDEN = 9
TIGHT = {1: 7, 2: 13, 3: 19}
TIGHT_GROUPED = {1: 7, 2: 11}

# Relative error allowed to forms that compute partly in the named precision, whatever their inputs are.
FLOAT32 = 2e-5
BF16 = 0.04

Params = dict[str, jax.Array]
Aux = dict[str, jax.Array]


def init_params(
    rng: np.random.Generator, dtype, experts: int = EXPERTS, model: int = MODEL, hidden: int = HIDDEN
) -> Params:
    """Parameters of one layer; a form uses those it needs, the gradients of the others are zero."""
    shapes = {
        "wg": (model, experts),
        "choice_bias": (experts,),
        "w1": (experts, model, hidden),
        "w2": (experts, hidden, model),
        "w3": (experts, model, hidden),
        "b1": (experts, hidden),
        "b2": (experts, model),
        "scale": (experts,),
        "shared1": (model, hidden),
        "shared2": (hidden, model),
    }
    scales = {"wg": 1.0, "scale": 1.0}
    return {name: jnp.asarray(scales.get(name, 0.4) * rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def init_layer(rng: np.random.Generator, dtype, shape: tuple[int, ...]) -> tuple[Params, jax.Array]:
    """Parameters and input of one layer."""
    return init_params(rng, dtype), init_tokens(rng, dtype, shape)


def init_tokens(rng: np.random.Generator, dtype, shape: tuple[int, ...]) -> jax.Array:
    """An input `[*shape, MODEL]` whose mean is off zero, which loads the experts unevenly."""
    return jnp.asarray(rng.normal(size=(*shape, MODEL)) + 0.4, dtype)


def mixed_loss(y: jax.Array, aux: Aux) -> jax.Array:
    """A scalar that depends on `y` and on every float in `aux`."""
    total = jnp.mean(jnp.square(y)) + jnp.mean(y)
    for name in sorted(aux):
        if jnp.issubdtype(aux[name].dtype, jnp.floating):
            total = total + 0.1 * jnp.mean(aux[name]).astype(total.dtype)
    return total


@dataclasses.dataclass(frozen=True)
class Form:
    """One naive program.

    Attributes:
      name: unique name.
      layer: `(params, x, capacity) -> (y, aux)`; `aux` is a dict of arrays, float ones enter the loss.
      init: `(rng, dtype) -> (params, x)`.
      exercises: what this form has that others have not.
      tokens: T, rows of the layer's input, all groups together.
      experts: E.
      choices: K.
      groups: G, groups or batch rows with their own capacity.
      tight: a capacity at which at least a tenth of the assignments is dropped.
      loose: a capacity that nothing can overflow.
      sites: number of sites the compiler must report.
      dense: `(params, x) -> y`, every expert on every token without any capacity, where that is easy to say.
      tolerance: relative error that is allowed whatever the precision of the inputs; None for that precision's own.
      rows: rows of `y`, where one call of the program runs the layer on `tokens` rows several times over.
      mixes_tokens: whether a token's output depends on other tokens even when nothing is dropped.
      pattern: the name of the pattern that the report must give.
      own_step: `(capacity) -> step`, where the program does not take its gradients from outside.
    """

    name: str
    layer: Callable[[Params, jax.Array, int], tuple[jax.Array, Aux]]
    init: Callable[[np.random.Generator, Any], tuple[Params, jax.Array]]
    exercises: str
    tokens: int
    experts: int
    choices: int
    groups: int
    tight: int
    loose: int
    sites: int = 1
    dense: Callable[[Params, jax.Array], jax.Array] | None = None
    tolerance: float | None = None
    rows: int | None = None
    mixes_tokens: bool = False
    pattern: str = "einsum_dispatch"
    own_step: Callable[[int], Callable] | None = None

    def __repr__(self) -> str:
        return f"<form {self.name}: {self.exercises}>"

    def at(self, capacity: int) -> Callable[[Params, jax.Array], tuple[jax.Array, Aux]]:
        """The forward program `(params, x) -> (y, aux)` at one capacity."""

        def forward(params, x):
            return self.layer(params, x, capacity)

        return forward

    def step(self, capacity: int) -> Callable[[Params, jax.Array], tuple]:
        """`(params, x) -> ((loss, (y, aux)), gradients)` at one capacity."""
        if self.own_step is not None:
            return self.own_step(capacity)
        return jax.value_and_grad(self.loss(capacity), argnums=(0, 1), has_aux=True)

    def loss(self, capacity: int) -> Callable[[Params, jax.Array], tuple[jax.Array, tuple[jax.Array, Aux]]]:
        """`(params, x) -> (loss, (y, aux))`: the loss mixes `y` and every float in `aux`."""

        def loss(params, x):
            y, aux = self.layer(params, x, capacity)
            return mixed_loss(y, aux), (y, aux)

        return loss

    def inputs(self, dtype=jnp.float32) -> tuple[Params, jax.Array]:
        """Fixed parameters and input; the same values, rounded, in every precision."""
        return self.init(np.random.default_rng(zlib.crc32(self.name.encode())), dtype)


FORMS: dict[str, Form] = {}


def add(
    name: str,
    layer: Callable,
    exercises: str,
    *,
    choices: int,
    grouped: bool = False,
    init: Callable | None = None,
    tokens: int | None = None,
    experts: int = EXPERTS,
    groups: int | None = None,
    tight: int | None = None,
    loose: int | None = None,
    sites: int = 1,
    dense: Callable | None = None,
    tolerance: float | None = None,
    rows: int | None = None,
    mixes_tokens: bool = False,
    pattern: str = "einsum_dispatch",
    own_step: Callable | None = None,
) -> None:
    """Registers a form over `[TOKENS, MODEL]`, or over `[GROUPS, GROUP_TOKENS, MODEL]` where `grouped`."""
    if name in FORMS:
        raise ValueError(f"two forms are named {name!r}")
    shape = (GROUPS, GROUP_TOKENS) if grouped else (TOKENS,)
    groups = groups or (GROUPS if grouped else 1)
    tokens = tokens or (GROUPS * GROUP_TOKENS if grouped else TOKENS)
    FORMS[name] = Form(
        name=name,
        layer=layer,
        init=init or (lambda rng, dtype: init_layer(rng, dtype, shape)),
        exercises=exercises,
        tokens=tokens,
        experts=experts,
        choices=choices,
        groups=groups,
        tight=tight or (TIGHT_GROUPED if groups > 1 else TIGHT)[choices],
        loose=loose or tokens // groups * choices,
        sites=sites,
        dense=dense,
        tolerance=tolerance,
        rows=rows,
        mixes_tokens=mixes_tokens,
        pattern=pattern,
        own_step=own_step,
    )


def form(name: str, exercises: str, **facts) -> Callable[[Callable], Callable]:
    """Decorator: registers a hand-written layer, see `add`."""

    def register(layer):
        add(name, layer, exercises, **facts)
        return layer

    return register
