"""Haiku: experts as arrays, lifted and as named modules; layers by `layer_stack` and `hk.remat`, groups by `vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

from .common import (
    BATCH,
    CHOICES,
    EXPERTS,
    HIDDEN,
    MODEL,
    assert_step,
    batch,
    dense_weights,
    einsum_masks,
    quick_jit,
    squared_error,
)

LAYERS = 3

Layer = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]


def router(x: jax.Array) -> jax.Array:
    return hk.Linear(EXPERTS, with_bias=False, name="router")(x)


def einsum_moe(x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Dispatch by einsum into stacked weights."""
    masks = einsum_masks(router(x), capacity)
    init = hk.initializers.VarianceScaling()
    up = hk.get_parameter("up", (EXPERTS, MODEL, HIDDEN), init=init)
    bias = hk.get_parameter("bias", (EXPERTS, HIDDEN), init=jnp.zeros)
    down = hk.get_parameter("down", (EXPERTS, HIDDEN, MODEL), init=init)
    buffer = jnp.einsum("tec,td->ecd", masks.dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, up) + bias[:, None])
    return jnp.einsum("tec,ecd->td", masks.combine, jnp.einsum("ecf,efd->ecd", hidden, down)), masks.balance


def lifted_moe(x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Dispatch by einsum, the experts' parameters made by a lifted `vmap` of one expert's `init`."""
    masks = einsum_masks(router(x), capacity)
    buffer = jnp.einsum("tec,td->ecd", masks.dispatch, x)
    expert = hk.without_apply_rng(hk.transform(lambda rows: hk.nets.MLP([HIDDEN, MODEL])(rows)))
    init = hk.lift(lambda key, buffer: jax.vmap(expert.init)(jax.random.split(key, EXPERTS), buffer), name="experts")
    key = hk.next_rng_key() if hk.running_init() else None
    return jnp.einsum("tec,ecd->td", masks.combine, jax.vmap(expert.apply)(init(key, buffer), buffer)), masks.balance


def dense_moe(x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Every expert on every token."""
    weights = dense_weights(router(x))
    up = hk.get_parameter("up", (EXPERTS, MODEL, HIDDEN), init=hk.initializers.VarianceScaling())
    down = hk.get_parameter("down", (EXPERTS, HIDDEN, MODEL), init=hk.initializers.VarianceScaling())
    outputs = jnp.einsum("tef,efd->ted", jax.nn.silu(jnp.einsum("td,edf->tef", x, up)), down)
    return jnp.einsum("te,ted->td", weights, outputs), jnp.zeros(())


def loop_moe(x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """A Python loop over named modules."""
    gate, chosen = jax.lax.top_k(jax.nn.softmax(router(x)), CHOICES)
    outputs = jnp.zeros_like(x)
    for number in range(EXPERTS):
        weight = jnp.where(chosen == number, gate, 0).sum(-1)
        outputs += weight[:, None] * hk.nets.MLP([HIDDEN, MODEL], name=f"expert_{number}")(x)
    return outputs, jnp.zeros(())


def block(moe: Layer, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """A residual MoE layer on tokens [T, d], behind a norm and dropout."""
    normed = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
    outputs, balance = moe(hk.dropout(hk.next_rng_key(), 0.1, normed), capacity)
    return x + outputs, balance


def one_block(moe: Layer, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """A block between a batch norm, whose averages are state, and a head."""
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training=True)
    outputs, balance = block(moe, x.reshape(-1, MODEL), capacity)
    return hk.Linear(MODEL)(outputs).reshape(x.shape), balance


def grouped_block(moe: Layer, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Each sequence is routed on its own, by `hk.vmap`."""
    outputs, balance = hk.vmap(lambda x: block(moe, x, capacity // BATCH + 1), split_rng=not hk.running_init())(x)
    return outputs, balance.mean()


def stacked_blocks(moe: Layer, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Rematerialised blocks under `layer_stack`."""

    @hk.experimental.layer_stack(LAYERS)
    def layers(x, total):
        x, balance = hk.remat(lambda x: block(moe, x, capacity))(x)
        return x, total + balance

    outputs, balance = layers(x.reshape(-1, MODEL), jnp.zeros(()))
    return outputs.reshape(x.shape), balance / LAYERS


OPTIMIZER = optax.adamw(1e-2, eps=1e-3)


def train_step(model: Any, capacity: int, params: Any, state: Any, opt_state: Any, data: Any, key: jax.Array):
    """One update; `state` is what the model keeps beside its parameters."""

    def loss_fn(params):
        (outputs, balance), new_state = model(capacity).apply(params, state, key, data["inputs"])
        return squared_error(outputs, data["targets"]) + 0.01 * balance, new_state

    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), state, opt_state, loss


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        (one_block, einsum_moe),
        (one_block, lifted_moe),
        (one_block, dense_moe),
        (one_block, loop_moe),
        (grouped_block, einsum_moe),
        (stacked_blocks, einsum_moe),
    ],
)
def test_transformed_step(model, moe):
    def build(capacity):
        return hk.transform_with_state(lambda x: model(moe, x, capacity))

    data = batch()
    params, state = quick_jit(build(8).init)(jax.random.key(1), data["inputs"])
    inputs = (params, state, OPTIMIZER.init(params), data, jax.random.key(2))
    assert_step(functools.partial(train_step, build), inputs, bounded=moe in (einsum_moe, lifted_moe))
