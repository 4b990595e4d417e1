"""Layers whose experts are chosen by a mask, `scores >= limit`, and run on every token: ties choose more of them.

`LAYERS[name](params, x) -> y` for `x` [TOKENS, MODEL].
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .dense import CHOICES, every_expert, summed

LAYERS: dict[str, Callable] = {}
# How many experts of a token the masks are for, where it is not `CHOICES`.
ONE_CHOICE = {"best"}


def layer(function: Callable) -> Callable:
    LAYERS[function.__name__] = function
    return function


def scores_of(params, x):
    return jax.nn.softmax(x @ params["wg"])


def largest(scores):
    return scores.max(-1, keepdims=True)


def normalised(weight):
    return weight / weight.sum(-1, keepdims=True)


def last(scores):
    """The smallest score that is chosen."""
    return lax.top_k(scores, CHOICES)[0][..., -1:]


@layer
def best(params, x):
    probs = scores_of(params, x)
    return summed(every_expert(params, x), jnp.where(probs >= largest(probs), probs, 0))


@layer
def second_of_the_rest(params, x):
    """The mask of the first choice leaves −∞, in whose maximum the second choice has its limit."""
    probs = scores_of(params, x)
    first = probs >= largest(probs)
    rest = jnp.where(first, -jnp.inf, probs)
    return summed(every_expert(params, x), probs * (first | (rest >= largest(rest))))


@layer
def second_normalised(params, x):
    """The same by `==`, of scores that are made zero."""
    probs = scores_of(params, x)
    first = probs == largest(probs)
    rest = jnp.where(first, 0, probs)
    weight = normalised(jnp.where(first | (largest(rest) == rest), probs, 0))
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, params["w1"]))
    return jnp.einsum("tef,efd,te->td", hidden, params["w2"], weight)


@layer
def weights_added(params, x):
    """Masks as numbers, each multiplied by the scores."""
    probs = scores_of(params, x)
    first = (probs >= largest(probs)).astype(x.dtype)
    rest = probs * (1 - first)
    second = (rest >= largest(rest)).astype(x.dtype)
    return summed(every_expert(params, x), probs * first + probs * second)


@layer
def above_the_second(params, x):
    """One mask: the largest of the scores below the first one is the limit of both."""
    probs = scores_of(params, x)
    limit = largest(probs * jnp.less(probs, largest(probs)).astype(x.dtype))
    gates = probs * jnp.greater_equal(probs, limit).astype(x.dtype)
    gates = gates / (gates.sum(-1, keepdims=True) + 1e-12)
    hidden = jax.nn.relu(jnp.einsum("td,edf->etf", x, params["w1"]))
    return jnp.einsum("etd,te->td", jnp.einsum("etf,efd->etd", hidden, params["w2"]), gates)


@layer
def last_of_top_k(params, x):
    probs = scores_of(params, x)
    return summed(every_expert(params, x), normalised(jnp.where(probs >= last(probs), probs, 0)))


@layer
def masked_softmax(params, x):
    logits = x @ params["wg"]
    return summed(every_expert(params, x), jax.nn.softmax(jnp.where(logits >= last(logits), logits, -jnp.inf)))


@layer
def masked_at_a_temperature(params, x):
    logits = x @ params["wg"]
    return summed(every_expert(params, x), jax.nn.softmax(jnp.where(logits >= last(logits), logits, -jnp.inf) / 0.7))


@layer
def below_in_order(params, x):
    """What is below the limit, found by sorting, is taken out."""
    logits = x @ params["wg"]
    limit = jnp.sort(logits)[:, -CHOICES][:, None]
    return summed(every_expert(params, x), jax.nn.softmax(jnp.where(logits < limit, -jnp.inf, logits)))


@layer
def biased(params, x):
    """Scores with a bias choose, those without it weigh."""
    scores = jax.nn.sigmoid(x @ params["wg"])
    shifted = scores + 0.1 * params["b2"][:, 0]
    return summed(every_expert(params, x), normalised(jnp.where(shifted >= last(shifted), scores, 0)))


@layer
def input_masked(params, x):
    probs = scores_of(params, x)
    weight = probs * (probs >= lax.top_k(probs, CHOICES)[0].min(-1, keepdims=True))
    hidden = jax.nn.silu(jnp.einsum("ted,edf->tef", x[:, None] * (weight > 0)[..., None], params["w1"]))
    return (jnp.einsum("tef,efd->ted", hidden, params["w2"]) * weight[..., None]).sum(1)


@layer
def padding_tokens(params, x):
    """Tokens that are padding have no experts; their scores are all zero, and all equal."""
    scores = scores_of(params, x) * (x[:, :1] > -0.5)
    chosen = (scores >= last(scores)) & (x[:, 1:2] > -0.9)
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", x, params["w1"]) + params["b1"])
    out = jnp.einsum("tef,efd->ted", hidden, params["w2"]) + params["b2"]
    return summed(out, jnp.where(chosen, scores, 0))


@layer
def mask_as_weight(params, x):
    """Experts first; each chosen one counts as much."""
    scores = params["wg"].T @ x.T
    chosen = (scores >= lax.top_k(scores.T, CHOICES)[0][:, -1]).astype(x.dtype)
    hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, params["w1"]))
    return jnp.einsum("etf,efd,et->td", hidden, params["w2"], chosen / chosen.sum(0))


@layer
def output_selected(params, x):
    probs = scores_of(params, x)
    out = jnp.where((probs >= last(probs))[..., None], every_expert(params, x), 0)
    return (out * probs[..., None]).sum(1)


def each_by_itself(params, x):
    """The experts of each mask are weighed and summed by themselves."""
    probs = scores_of(params, x)
    first = probs >= largest(probs)
    rest = jnp.where(first, -jnp.inf, probs)
    out = every_expert(params, x)
    return summed(out, probs * first) + summed(out, probs * (rest >= largest(rest)))


@layer
def groups(params, x):
    def group(x):
        return last_of_top_k(params, x)

    return jax.vmap(group)(jnp.stack([x, 2 * x])).sum(0)


@layer
def loop(params, x):
    """A loop over experts in Python."""
    probs = scores_of(params, x)
    weight = jnp.where(probs >= last(probs), probs, 0)
    y = jnp.zeros_like(x)
    for e in range(probs.shape[-1]):
        y = y + weight[:, e, None] * (jax.nn.silu(x @ params["w1"][e]) @ params["w2"][e])
    return y


@layer
def rematerialised(params, x):
    return jax.checkpoint(last_of_top_k)(params, x)


@layer
def rematerialised_layers(params, x):
    def body(x, _):
        return x + 0.1 * jax.checkpoint(second_of_the_rest)(params, x), None

    return lax.scan(body, x, None, length=2)[0]


@layer
def scanned_layers(params, x):
    """The backward scan reads what the forward scan has stacked."""

    def body(x, _):
        return x + 0.1 * last_of_top_k(params, x), None

    return lax.scan(body, x, None, length=3)[0]


@layer
def scanned_softmax(params, x):
    return lax.scan(lambda x, _: (x + masked_softmax(params, x), None), x, None, length=2)[0]


@layer
def scanned_maxima(params, x):
    return lax.scan(lambda x, _: (x + weights_added(params, x), None), x, None, length=2)[0]


@layer
def scanned_biases(params, x):
    return lax.scan(lambda x, _: (x + padding_tokens(params, x), None), x, None, length=2)[0]


@layer
def branch(params, x):
    return lax.cond(x.sum() > -1e9, lambda x: second_of_the_rest(params, x), lambda x: x, x)
