"""Layers without a capacity: every expert on every token, and a matrix of the chosen expert for every token.

`LAYERS[name](params, x) -> y` for `x` [TOKENS, MODEL]; `PATTERN` names the pattern of those that are not
`dense_experts`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .form import EXPERTS, HIDDEN, TOKENS

CHOICES = 2
LAYERS: dict[str, Callable] = {}
PATTERN: dict[str, str] = {}
ONE_CHOICE = {"top1_masked", "gather_take"}


def layer(function: Callable) -> Callable:
    LAYERS[function.__name__] = function
    return function


def gathers(function: Callable) -> Callable:
    PATTERN[function.__name__] = "weight_gather"
    return layer(function)


def route(params, x):
    gate, index = lax.top_k(jax.nn.softmax(x @ params["wg"]), CHOICES)
    return gate / gate.sum(-1, keepdims=True), index


def one_hot(index, x):
    return jax.nn.one_hot(index, EXPERTS, dtype=x.dtype)


def weights(params, x):
    gate, index = route(params, x)
    return (one_hot(index, x) * gate[..., None]).sum(1)


def every_expert(params, x, activation=jax.nn.silu):
    hidden = activation(jnp.einsum("td,edf->tef", x, params["w1"]))
    return jnp.einsum("tef,efd->ted", hidden, params["w2"])


def summed(out, weight):
    return jnp.einsum("ted,te->td", out, weight)


@layer
def one_hots_summed(params, x):
    return summed(every_expert(params, x), weights(params, x))


@layer
def relu(params, x):
    return summed(every_expert(params, x, jax.nn.relu), weights(params, x))


@layer
def experts_first(params, x):
    """Expert axis in front, biases, and an activation that is not zero at zero."""
    hidden = jnp.einsum("td,edf->etf", x, params["w1"]) + params["b1"][:, None]
    hidden = jax.nn.gelu(hidden) + jnp.cos(hidden)
    out = jnp.einsum("etf,efd->etd", hidden, params["w2"]) + params["b2"][:, None]
    return jnp.einsum("etd,te->td", out, weights(params, x))


@layer
def gated(params, x):
    gate, index = route(params, x)
    weight = jnp.einsum("tke,tk->te", one_hot(index, x), gate)
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, params["w1"])) * jnp.einsum("td,edf->tef", x, params["w3"])
    return (jnp.einsum("tef,efd->ted", hidden, params["w2"]) * weight[..., None]).sum(1)


@layer
def gated_in_halves(params, x):
    """Gate and up in one matrix, split by columns."""
    both = jnp.einsum("td,edf->tef", x, jnp.concatenate([params["w1"], params["w3"]], axis=-1))
    gate, up = jnp.split(both, 2, axis=-1)
    return summed(jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, params["w2"]), weights(params, x))


@layer
def gated_in_a_stack(params, x):
    """Gate and up in one array, along an axis of its own."""
    gate, up = jnp.einsum("td,ekdf->ktef", x, jnp.stack([params["w1"], params["w3"]], axis=1))
    return summed(jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, params["w2"]), weights(params, x))


@layer
def vmapped_experts(params, x):
    out = jax.vmap(lambda w1, w2: jax.nn.silu(x @ w1) @ w2)(params["w1"], params["w2"])
    return jnp.einsum("etd,te->td", out, weights(params, x))


@layer
def weights_set(params, x):
    gate, index = route(params, x)
    weight = jnp.zeros((TOKENS, EXPERTS), x.dtype).at[jnp.arange(TOKENS)[:, None], index].set(gate)
    return summed(every_expert(params, x), weight)


@layer
def weights_put(params, x):
    gate, index = route(params, x)
    weight = jnp.put_along_axis(jnp.zeros((TOKENS, EXPERTS), x.dtype), index, gate, axis=1, inplace=False)
    return summed(every_expert(params, x), weight)


@layer
def weights_where(params, x):
    gate, index = route(params, x)
    weight = jnp.where(index[..., None] == jnp.arange(EXPERTS), gate[..., None], 0).sum(1)
    return summed(every_expert(params, x), weight)


@layer
def masked_softmax(params, x):
    logits = x @ params["wg"]
    chosen = one_hot(lax.top_k(logits, CHOICES)[1], x).sum(1)
    return summed(every_expert(params, x), jax.nn.softmax(jnp.where(chosen > 0, logits, -jnp.inf)))


@layer
def taken_along_axis(params, x):
    gate, index = route(params, x)
    return (jnp.take_along_axis(every_expert(params, x), index[..., None], axis=1) * gate[..., None]).sum(1)


@layer
def taken_by_index(params, x):
    gate, index = route(params, x)
    return (every_expert(params, x)[jnp.arange(TOKENS)[:, None], index] * gate[..., None]).sum(1)


@layer
def taken_by_one_hot(params, x):
    gate, index = route(params, x)
    return (jnp.einsum("tke,ted->tkd", one_hot(index, x), every_expert(params, x)) * gate[..., None]).sum(1)


@layer
def input_masked(params, x):
    weight = weights(params, x)
    hidden = jax.nn.silu(jnp.einsum("ted,edf->tef", x[:, None] * (weight > 0)[..., None], params["w1"]))
    return (jnp.einsum("tef,efd->ted", hidden, params["w2"]) * weight[..., None]).sum(1)


@layer
def input_gated(params, x):
    """The gate comes before the experts, and all of them are summed: experts of zero are zero."""
    rows = jnp.einsum("td,te->ted", x, weights(params, x))
    return jnp.einsum("tef,efd->ted", jax.nn.silu(jnp.einsum("ted,edf->tef", rows, params["w1"])), params["w2"]).sum(1)


@layer
def top2_by_argmax(params, x):
    probs = jax.nn.softmax(x @ params["wg"])
    first = one_hot(probs.argmax(-1), x)
    second = one_hot((probs * (1 - first)).argmax(-1), x)
    return summed(every_expert(params, x), first * probs + second * probs)


@layer
def top1_masked(params, x):
    probs = jax.nn.softmax(x @ params["wg"])
    return summed(every_expert(params, x), one_hot(probs.argmax(-1), x) * probs)


@layer
def rematerialised(params, x):
    return jax.checkpoint(one_hots_summed)(params, x)


@layer
def rematerialised_layers(params, x):
    def body(x, _):
        return x + 0.1 * jax.checkpoint(gated)(params, x), None

    return lax.scan(body, x, None, length=2)[0]


@layer
def scanned_layers(params, x):
    """The backward scan reads what the forward scan has stacked."""

    def body(x, _):
        return x + 0.1 * relu(params, x), None

    return lax.scan(body, x, None, length=3)[0]


@layer
def sorted_ranges(params, x):
    """Assignments sorted by expert; every expert runs on all of them, under the mask of its own range."""
    gate, index = route(params, x)
    order = jnp.argsort(index.reshape(-1), stable=True)
    ends = jnp.cumsum(jnp.bincount(index.reshape(-1), length=EXPERTS))
    place, starts = jnp.arange(order.size), ends - jnp.bincount(index.reshape(-1), length=EXPERTS)
    mine = (place >= starts[:, None]) & (place < ends[:, None])
    hidden = jax.nn.silu(jnp.einsum("ad,edf->eaf", x[order // CHOICES], params["w1"]))
    out = jnp.where(mine[..., None], jnp.einsum("eaf,efd->ead", hidden, params["w2"]), 0).sum(0)
    return jnp.zeros_like(x).at[order // CHOICES].add(out * gate.reshape(-1)[order][:, None])


@layer
def sorted_ranges_back(params, x):
    """The same; places begin behind a zero in an array, and rows are brought back by the inverse order."""
    gate, index = route(params, x)
    order = index.ravel().argsort()
    ends = jnp.cumsum(jax.nn.one_hot(index, EXPERTS, dtype=jnp.int32).sum((0, 1)))
    place, starts = jnp.arange(order.size), jnp.concatenate([jnp.array([0], ends.dtype), ends[:-1]])
    mine = (place >= starts[:, None]) & (place < ends[:, None])
    rows = jnp.repeat(x[jnp.repeat(jnp.arange(len(x)), CHOICES)[order]][None], EXPERTS, axis=0)
    hidden = jax.nn.silu(jnp.einsum("ead,edf->eaf", rows, params["w1"]))
    out = (jnp.einsum("eaf,efd->ead", hidden, params["w2"]) * mine[..., None]).sum(0)
    return jnp.einsum("tkd,tk->td", out[order.argsort()].reshape(*index.shape, -1), gate)


@gathers
def gather_index(params, x):
    gate, index = route(params, x)
    hidden = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, params["w1"][index]) + params["b1"][index])
    return (jnp.einsum("tkf,tkfd->tkd", hidden, params["w2"][index]) * gate[..., None]).sum(1)


@gathers
def gather_halves(params, x):
    gate, index = route(params, x)
    both = jnp.einsum("td,tkdf->tkf", x, jnp.concatenate([params["w1"], params["w3"]], axis=-1)[index])
    hidden = jax.nn.silu(both[..., :HIDDEN]) * both[..., HIDDEN:]
    return jnp.einsum("tkf,tkfd,tk->td", hidden, params["w2"][index], gate)


@gathers
def gather_take(params, x):
    probs = jax.nn.softmax(x @ params["wg"])
    w1, w2 = (jnp.take(params[name], probs.argmax(-1), axis=0) for name in ("w1", "w2"))
    return jnp.einsum("tf,tfd->td", jax.nn.relu(jnp.einsum("td,tdf->tf", x, w1)), w2) * probs.max(-1)[:, None]


@gathers
def gather_tree(params, x):
    """A vmap over tokens and choices that indexes a tree of parameters."""
    gate, index = route(params, x)

    def expert(row, e):
        w = jax.tree.map(lambda leaf: leaf[e], {"w1": params["w1"], "w2": params["w2"]})
        return jax.nn.gelu(row @ w["w1"]) @ w["w2"]

    rows = jax.vmap(jax.vmap(expert, in_axes=(None, 0)))(x, index)
    return (rows * gate[..., None]).sum(1)
