"""Layers that choose an expert for each token by `lax.switch` under `vmap`, which runs every expert on every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .dense import ONE_CHOICE, route
from .form import EXPERTS
from .loops import loops


def branches_of(params):
    """The experts, each as a function of a token."""

    def branch(e):
        return lambda h: jax.nn.silu(h @ params["w1"][e] + params["b1"][e]) @ params["w2"][e]

    return [branch(e) for e in range(EXPERTS)]


@loops
def switch_choices(params, x):
    gate, index = route(params, x)
    branches = branches_of(params)
    return jax.vmap(lambda h, i, g: sum(g[k] * lax.switch(i[k], branches, h) for k in range(2)))(x, index, gate)


@loops
def switch_vmapped_choices(params, x):
    gate, index = route(params, x)
    branches = branches_of(params)
    out = jax.vmap(lambda h, i: jax.vmap(lambda one: lax.switch(one, branches, h))(i))(x, index)
    return jnp.einsum("tkd,tk->td", out, gate)


@loops
def switch_flattened(params, x):
    """Tokens repeated for each choice."""
    gate, index = route(params, x)
    out = jax.vmap(lambda h, i: lax.switch(i, branches_of(params), h))(jnp.repeat(x, 2, axis=0), index.reshape(-1))
    return (out.reshape(*index.shape, -1) * gate[..., None]).sum(1)


@loops
def switch_list(params, x):
    """Experts with arrays of their own, two of one type, and gates inside of the branches."""
    gate, index = route(params, x)
    experts = [[params[name][e] for name in ("w1", "w3", "w2", "b2")] for e in range(EXPERTS)]
    branches = [lambda h, g, w=w: g * ((jax.nn.gelu(h @ w[0]) * (h @ w[1])) @ w[2] + w[3]) for w in experts]
    one = jax.vmap(lambda h, i, g: lax.switch(i, branches, h, g))
    return one(x, index[:, 0], gate[:, 0]) + one(x, index[:, 1], gate[:, 1])


@loops
def switch_top1(params, x):
    """The router stands in the function of one token."""

    def layer(h):
        probs = jax.nn.softmax(h @ params["wg"])
        index = jnp.argmax(probs)
        return probs[index] * lax.switch(index, branches_of(params), h)

    return jax.vmap(layer)(x)


@loops
def switch_clamped(params, x):
    """An index that need not be one of an expert's: jax takes the nearest expert."""
    index = jnp.round(2 + 3 * x[:, 0]).astype(jnp.int32)
    return jax.vmap(lambda h, i: lax.switch(i, branches_of(params), h))(x, index)


ONE_CHOICE |= {"switch_top1", "switch_clamped"}
