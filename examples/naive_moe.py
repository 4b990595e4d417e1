"""A byte-level Mixture-of-Experts transformer, written the way most people write one: the user's code in this demo.

Nothing here knows of `moe_xla`.  The layer follows Switch Transformer (arXiv:2101.03961) and V-MoE (arXiv:2106.05974):
one-hot masks, positions by a cumulative sum, `capacity` slots an expert, einsums in and out of a padded buffer.

In: `Config` and a key.  Out: `init` gives the parameters, `loss` the training loss of a batch of bytes.
Letters: B sequences of S bytes, T = B·S tokens, d model, f hidden, E experts, K choices, C capacity, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
Tree = dict[str, Any]

BYTES = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; `scan` keeps the layers stacked and runs them by `lax.scan` instead of a Python loop."""

    layers: int = 4
    model: int = 64
    hidden: int = 256
    heads: int = 2
    experts: int = 16
    choices: int = 2
    capacity_factor: float = 1.25
    sequence: int = 256
    balance: float = 0.01
    scan: bool = False


def init(key: jax.Array, config: Config) -> Tree:
    """Float32 parameters; under `config.scan` each leaf of `layers` has a leading axis L."""
    embed_key, position_key, *layer_keys = jax.random.split(key, 2 + config.layers)
    layers = [init_layer(layer_key, config) for layer_key in layer_keys]
    return {
        "embed": 0.02 * jax.random.normal(embed_key, (BYTES, config.model)),
        "position": 0.02 * jax.random.normal(position_key, (config.sequence, config.model)),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if config.scan else layers,
        "norm": jnp.ones(config.model),
    }


def init_layer(key: jax.Array, config: Config) -> Params:
    """Parameters of one block: attention, router and expert weights."""
    d, f, experts = config.model, config.hidden, config.experts
    qkv_key, out_key, router_key, up_key, down_key = jax.random.split(key, 5)
    return {
        "norm_attention": jnp.ones(d),
        "qkv": jax.random.normal(qkv_key, (d, 3 * d)) / math.sqrt(d),
        "out": jax.random.normal(out_key, (d, d)) / math.sqrt(d * 2 * config.layers),
        "norm_moe": jnp.ones(d),
        "router": jax.random.normal(router_key, (d, experts)) / math.sqrt(d),
        "up": jax.random.normal(up_key, (experts, d, f)) / math.sqrt(d),
        "down": jax.random.normal(down_key, (experts, f, d)) / math.sqrt(f * 2 * config.layers),
    }


def moe_layer(params: Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """`x` [T, d] through the top-K of E expert MLPs; returns the output [T, d] and the load-balancing loss."""
    tokens, experts, choices = len(x), config.experts, config.choices
    capacity = math.ceil(config.capacity_factor * choices * tokens / experts)

    probs = jax.nn.softmax(x @ params["router"])  # [T, E]
    gates, chosen = jax.lax.top_k(probs, choices)  # [T, K]

    # Each token's place in the queue of its expert; all first choices queue before the second ones.
    onehot = jax.nn.one_hot(chosen, experts)  # [T, K, E]
    queue = onehot.transpose(1, 0, 2).reshape(choices * tokens, experts)
    position = jnp.cumsum(queue, axis=0) - queue
    position = position.reshape(choices, tokens, experts).transpose(1, 0, 2)
    position = (position * onehot).sum(axis=-1).astype(jnp.int32)  # [T, K]

    # Tokens that find their expert full are dropped: their row of the mask is zero.
    slot = jax.nn.one_hot(position, capacity) * (position < capacity)[..., None]  # [T, K, C]
    dispatch = jnp.einsum("tke,tkc->tec", onehot, slot)
    combine = jnp.einsum("tk,tke,tkc->tec", gates, onehot, slot)

    buffer = jnp.einsum("tec,td->ecd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, params["up"]))
    buffer = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
    output = jnp.einsum("tec,ecd->td", combine, buffer)

    load = onehot[:, 0].mean(axis=0)  # share of first choices that each expert got
    return output, experts * (load * probs.mean(axis=0)).sum()


def attention(params: Params, x: jax.Array, config: Config) -> jax.Array:
    """Causal self-attention over `x` [B, S, d]."""
    batch, sequence, d = x.shape
    qkv = (x @ params["qkv"]).reshape(batch, sequence, 3, config.heads, d // config.heads)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(batch, sequence, d) @ params["out"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x` over its root mean square along the last axis, times `scale` [d] (arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6) * scale


def block(params: Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """One transformer block over `x` [B, S, d]; also returns its load-balancing loss."""
    x = x + attention(params, rms_norm(x, params["norm_attention"]), config)
    tokens = rms_norm(x, params["norm_moe"]).reshape(-1, config.model)
    output, balance = moe_layer(params, tokens, config)
    return x + output.reshape(x.shape), balance


def run_layers(layers: list[Params] | Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """All blocks in turn; returns `x` [B, S, d] and the mean load-balancing loss."""
    if config.scan:
        x, balances = jax.lax.scan(lambda x, params: block(params, x, config), x, layers)
        return x, balances.mean()
    total = jnp.zeros(())
    for params in layers:
        x, balance = block(params, x, config)
        total = total + balance
    return x, total / config.layers


def loss(params: Tree, batch: jax.Array, config: Config) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte over `batch` [B, S + 1] uint8, plus the weighted load-balancing loss."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"][inputs] + params["position"]
    x, balance = run_layers(params["layers"], x, config)
    logits = rms_norm(x, params["norm"]) @ params["embed"].T
    log_probs = jax.nn.log_softmax(logits)
    cross_entropy = -jnp.take_along_axis(log_probs, targets[..., None].astype(jnp.int32), axis=-1).mean()
    return cross_entropy + config.balance * balance, {"cross_entropy": cross_entropy, "balance": balance}
