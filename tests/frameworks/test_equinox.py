"""Equinox: experts stacked by `filter_vmap`, in a list, or fetched for every token as a tree of parameters."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from .common import CHOICES, EXPERTS, HIDDEN, MODEL, assert_step, batch, dense_weights, einsum_masks, squared_error

LAYERS = 3


def expert(key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(MODEL, MODEL, HIDDEN, depth=1, activation=jax.nn.gelu, key=key)


def expert_stack(key: jax.Array) -> eqx.nn.MLP:
    """E experts in one module, each array with a leading axis of experts."""
    return eqx.filter_vmap(expert)(jax.random.split(key, EXPERTS))


class EinsumMoe(eqx.Module):
    """Dispatch by einsum, the experts by `filter_vmap` over module and buffer."""

    router: eqx.nn.Linear
    experts: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        router_key, key = jax.random.split(key)
        self.router = eqx.nn.Linear(MODEL, EXPERTS, use_bias=False, key=router_key)
        self.experts = expert_stack(key)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        masks = einsum_masks(jax.vmap(self.router)(x), capacity)
        buffer = jnp.einsum("tec,td->ecd", masks.dispatch, x)
        buffer = eqx.filter_vmap(lambda expert, rows: jax.vmap(expert)(rows))(self.experts, buffer)
        return jnp.einsum("tec,ecd->td", masks.combine, buffer), masks.balance


class DenseMoe(EinsumMoe):
    """Every expert on every token."""

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        weights = dense_weights(jax.vmap(self.router)(x))
        each = eqx.filter_vmap(lambda expert, x: jax.vmap(expert)(x), in_axes=(eqx.if_array(0), None))
        return jnp.einsum("te,etd->td", weights, each(self.experts, x)), jnp.zeros(())


class GatherMoe(EinsumMoe):
    """A layer for one token, which fetches the parameters of its experts; a `vmap` runs it on all tokens."""

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        arrays, static = eqx.partition(self.experts, eqx.is_array)

        def of_token(token):
            gate, chosen = jax.lax.top_k(jax.nn.softmax(self.router(token)), CHOICES)
            mine = jax.tree.map(lambda leaf: leaf[chosen], arrays)
            outputs = jax.vmap(lambda arrays: eqx.combine(arrays, static)(token))(mine)
            return gate @ outputs

        return jax.vmap(of_token)(x), jnp.zeros(())


class LoopMoe(eqx.Module):
    """A Python loop over a list of modules, each on every token."""

    router: eqx.nn.Linear
    experts: list[eqx.nn.MLP]

    def __init__(self, key: jax.Array):
        router_key, *keys = jax.random.split(key, 1 + EXPERTS)
        self.router = eqx.nn.Linear(MODEL, EXPERTS, key=router_key)
        self.experts = [expert(key) for key in keys]

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        weights = dense_weights(jax.vmap(self.router)(x))
        outputs = jnp.stack([jax.vmap(expert)(x) for expert in self.experts], axis=1)
        return jnp.sum(weights[..., None] * outputs, axis=1), jnp.zeros(())


class Block(eqx.Module):
    """A residual MoE layer behind a norm and dropout."""

    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    moe: Any

    def __init__(self, moe: Any, key: jax.Array):
        self.norm = eqx.nn.LayerNorm(MODEL)
        self.dropout = eqx.nn.Dropout(0.1)
        self.moe = moe(key)

    def __call__(self, x: jax.Array, capacity: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs, balance = self.moe(self.dropout(jax.vmap(self.norm)(x), key=key), capacity)
        return x + outputs, balance


class ScannedBlocks(eqx.Module):
    """Blocks with stacked parameters, rematerialised under `lax.scan`."""

    blocks: Block

    def __init__(self, moe: Any, key: jax.Array):
        self.blocks = eqx.filter_vmap(lambda key: Block(moe, key))(jax.random.split(key, LAYERS))

    def __call__(self, x: jax.Array, capacity: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @eqx.filter_checkpoint
        def body(x, layer):
            arrays, key = layer
            return eqx.combine(arrays, static)(x, capacity, key)

        x, balances = jax.lax.scan(body, x, (arrays, jax.random.split(key, LAYERS)))
        return x, balances.mean()


OPTIMIZER = optax.adamw(1e-2, eps=1e-3)


def train_step(static: Any, capacity: int, params: Any, opt_state: Any, data: dict[str, jax.Array], key: jax.Array):
    """One update of the arrays `params` of the model whose other leaves are `static`."""

    @eqx.filter_value_and_grad(has_aux=True)
    def loss_fn(model):
        outputs, balance = model(data["inputs"].reshape(-1, MODEL), capacity, key)
        loss = squared_error(outputs, data["targets"].reshape(-1, MODEL))
        return loss + 0.01 * balance, balance

    (loss, balance), grads = loss_fn(eqx.combine(params, static))
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, loss, balance


@pytest.mark.parametrize(
    ("model", "moe"),
    [(Block, EinsumMoe), (Block, DenseMoe), (Block, GatherMoe), (Block, LoopMoe), (ScannedBlocks, EinsumMoe)],
)
def test_partitioned_step(model, moe):
    params, static = eqx.partition(model(moe, jax.random.key(1)), eqx.is_inexact_array)
    inputs = (params, OPTIMIZER.init(params), batch(), jax.random.key(2))
    assert_step(functools.partial(train_step, static), inputs, bounded=moe is EinsumMoe)
