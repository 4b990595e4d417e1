"""Flax nnx: experts by `nnx.vmap`, layers by `nnx.scan` and `nnx.remat`, a functional step over the split state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from .common import CHOICES, EXPERTS, HIDDEN, MODEL, assert_step, batch, dense_weights, einsum_masks, squared_error

LAYERS = 2


class Expert(nnx.Module):
    """A two-layer MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(MODEL, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, MODEL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


def expert_stack(rngs: nnx.Rngs) -> Expert:
    """E experts in one module, each parameter with a leading axis of experts."""

    @nnx.split_rngs(splits=EXPERTS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return Expert(rngs)

    return create(rngs)


class EinsumMoe(nnx.Module):
    """Dispatch by einsum, the experts by `nnx.vmap` over module and buffer."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(MODEL, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = expert_stack(rngs)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        masks = einsum_masks(self.router(x), capacity)
        buffer = jnp.einsum("tec,td->ecd", masks.dispatch, x)
        buffer = nnx.vmap(lambda expert, rows: expert(rows), in_axes=(0, 0))(self.experts, buffer)
        return jnp.einsum("tec,ecd->td", masks.combine, buffer), masks.balance


class DenseMoe(nnx.Module):
    """Every expert on every token."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(MODEL, EXPERTS, rngs=rngs)
        self.experts = expert_stack(rngs)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        outputs = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None), out_axes=1)(self.experts, x)
        return jnp.einsum("te,ted->td", dense_weights(self.router(x)), outputs), jnp.zeros(())


class LoopMoe(nnx.Module):
    """A Python loop over a list of modules."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(MODEL, EXPERTS, rngs=rngs)
        self.experts = nnx.List([Expert(rngs) for _ in range(EXPERTS)])

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        gate, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), CHOICES)
        outputs = jnp.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = jnp.sum(gate * (chosen == number), axis=-1)
            outputs += weight[:, None] * expert(x)
        return outputs, jnp.zeros(())


class Block(nnx.Module):
    """A residual MoE layer behind a norm and dropout."""

    def __init__(self, moe: Any, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(MODEL, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.moe = moe(rngs)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        outputs, balance = self.moe(self.dropout(self.norm(x)), capacity)
        return x + outputs, balance


class Model(nnx.Module):
    """One block between a batch norm and a head."""

    def __init__(self, moe: Any, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(MODEL, rngs=rngs)
        self.block = Block(moe, rngs)
        self.head = nnx.Linear(MODEL, MODEL, rngs=rngs)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        x, balance = self.block(self.norm(x), capacity)
        return self.head(x), balance


class ScannedModel(nnx.Module):
    """Rematerialised blocks under `nnx.scan`."""

    def __init__(self, moe: Any, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return Block(moe, rngs)

        self.blocks = create(rngs)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        @nnx.remat
        def run(x, block):
            return block(x, capacity)

        x, balances = run(x, self.blocks)
        return x, balances.mean()


def train_step(graphdef: Any, capacity: int, state: Any, data: dict[str, jax.Array]):
    """One update of the model and the optimizer in `state`; returns the new state and the loss."""
    model, optimizer = nnx.merge(graphdef, state)

    def loss_fn(model):
        outputs, balance = model(data["inputs"].reshape(-1, MODEL), capacity)
        return squared_error(outputs, data["targets"].reshape(-1, MODEL)) + 0.01 * balance

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


@pytest.mark.parametrize(
    ("model", "moe"), [(Model, EinsumMoe), (Model, DenseMoe), (Model, LoopMoe), (ScannedModel, EinsumMoe)]
)
def test_optimizer_step(model, moe):
    instance = model(moe, nnx.Rngs(0))
    optimizer = nnx.Optimizer(instance, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    graphdef, state = nnx.split((instance, optimizer))
    assert_step(functools.partial(train_step, graphdef), (state, batch()), bounded=moe is EinsumMoe)
