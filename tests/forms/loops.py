"""Layers that loop over their experts, in Python or in the program; each runs every expert on every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .dense import LAYERS, ONE_CHOICE, PATTERN, route, summed, weights
from .form import EXPERTS


def loops(function, pattern="expert_loop"):
    PATTERN[function.__name__] = pattern
    LAYERS[function.__name__] = function
    return function


def _expert(params, x, e):
    return jax.nn.silu(x @ params["w1"][e] + params["b1"][e]) @ params["w2"][e]


def _weight(index, gate, e):
    return jnp.where(index == e, gate, 0).sum(-1)[:, None]


@loops
def loop_where(params, x):
    gate, index = route(params, x)
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        y = y + _weight(index, gate, e) * _expert(params, x, e)
    return y


@loops
def loop_columns(params, x):
    combine, y = weights(params, x), 0
    for e in range(EXPERTS):
        gate = jax.nn.silu(x @ params["w1"][e])
        y = y + combine[:, e, None] * ((gate * (x @ params["w3"][e])) @ params["w2"][e])
    return y


@loops
def loop_stack(params, x):
    out = jnp.stack([_expert(params, x, e) for e in range(EXPERTS)], axis=1)
    return summed(out, weights(params, x))


@loops
def loop_stack_taken(params, x):
    gate, index = route(params, x)
    out = jnp.stack([_expert(params, x, e) for e in range(EXPERTS)], axis=1)
    return (jnp.take_along_axis(out, index[..., None], axis=1) * gate[..., None]).sum(1)


@loops
def loop_top1(params, x):
    probs = jax.nn.softmax(x @ params["wg"])
    index, y = probs.argmax(-1), jnp.zeros_like(x)
    for e in range(EXPERTS):
        y = jnp.where((index == e)[:, None], _expert(params, x, e), y)
    return y * probs.max(-1)[:, None]


@loops
def loop_list(params, x):
    """Experts with arrays of their own."""
    gate, index = route(params, x)
    experts = [{name: params[name][e] for name in ("w1", "b1", "w2")} for e in range(EXPERTS)]
    y = jnp.zeros_like(x)
    for e, expert in enumerate(experts):
        out = jax.nn.gelu(x @ expert["w1"] + expert["b1"]) @ expert["w2"]
        y = y + _weight(index, gate, e) * out
    return y


@loops
def loop_scan(params, x):
    gate, index = route(params, x)

    def body(y, expert):
        w1, w2, e = expert
        return y + _weight(index, gate, e) * (jax.nn.relu(x @ w1) @ w2), None

    return lax.scan(body, jnp.zeros_like(x), (params["w1"], params["w2"], jnp.arange(EXPERTS)))[0]


@loops
def loop_scan_weights(params, x):
    def body(y, expert):
        w1, w2, weight = expert
        return y + weight[:, None] * (jax.nn.silu(x @ w1) @ w2), None

    return lax.scan(body, jnp.zeros_like(x), (params["w1"], params["w2"], weights(params, x).T))[0]


@loops
def loop_fori(params, x):
    gate, index = route(params, x)
    return lax.fori_loop(
        0, EXPERTS, lambda e, y: y + _weight(index, gate, e) * _expert(params, x, e), jnp.zeros_like(x)
    )


@loops
def loop_map(params, x):
    out = lax.map(lambda w: jax.nn.silu(x @ w[0]) @ w[1], (params["w1"], params["w2"]))
    return jnp.einsum("etd,te->td", out, weights(params, x))


def loop_vmap(params, x):
    """A vmap over the numbers of experts."""
    gate, index = route(params, x)
    return jax.vmap(lambda e: _weight(index, gate, e) * _expert(params, x, e))(jnp.arange(EXPERTS)).sum(0)


loops(loop_vmap, "dense_experts")
ONE_CHOICE.add("loop_top1")
