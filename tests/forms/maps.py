"""Layers that go over the tokens one by one, by `lax.map` or `lax.scan`: each runs the experts that it has chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .dense import CHOICES, ONE_CHOICE, gathers, route
from .loops import loops
from .switches import branches_of


def one(params, h, e):
    """The expert e on one token."""
    return jax.nn.silu(h @ params["w1"][e]) @ params["w2"][e]


@loops
def map_switch(params, x):
    gate, index = route(params, x)

    def token(each):
        h, i, g = each
        return sum(g[k] * lax.switch(i[k], branches_of(params), h) for k in range(CHOICES))

    return lax.map(token, (x, index, gate))


@loops
def map_switch_top1(params, x):
    """The router stands in the function of one token."""

    def token(h):
        probs = jax.nn.softmax(h @ params["wg"])
        index = jnp.argmax(probs)
        return probs[index] * lax.switch(index, branches_of(params), h)

    return lax.map(token, x)


@loops
def scan_switch_of_pairs(params, x):
    """Tokens repeated for each choice; the scan goes backwards and counts."""
    gate, index = route(params, x)

    def pair(count, each):
        h, i = each
        return count + 1, lax.switch(i, branches_of(params), h)

    count, out = lax.scan(pair, 0, (jnp.repeat(x, CHOICES, axis=0), index.reshape(-1)), reverse=True)
    return (out.reshape(*index.shape, -1) * gate[..., None]).sum(1) + count


@gathers
def map_matrices(params, x):
    gate, index = route(params, x)

    def token(each):
        h, i, g = each
        return sum(g[k] * one(params, h, i[k]) for k in range(CHOICES))

    return lax.map(token, (x, index, gate))


@gathers
def map_of_loops(params, x):
    """The choices of a token are a loop of their own, that slices the matrices."""
    gate, index = route(params, x)

    def token(each):
        h, i, g = each

        def choice(k, y):
            w1, w2 = (lax.dynamic_index_in_dim(params[name], i[k], keepdims=False) for name in ("w1", "w2"))
            return y + g[k] * (jax.nn.silu(h @ w1) @ w2)

        return lax.fori_loop(0, CHOICES, choice, jnp.zeros_like(h))

    return lax.map(token, (x, index, gate))


ONE_CHOICE |= {"map_switch_top1"}
