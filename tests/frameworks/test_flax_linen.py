"""Flax linen: experts by lifted transformations, layers scanned and rematerialised, a `TrainState` around them."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state

from .common import (
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


class Expert(nn.Module):
    """A gated MLP whose kernels carry logical axes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        hidden = nn.silu(nn.Dense(HIDDEN, kernel_init=init, name="gate")(x)) * nn.Dense(HIDDEN, name="up")(x)
        return nn.Dense(MODEL, use_bias=False, name="down")(hidden)


def expert_stack(x_axis: int | None) -> Any:
    """E experts by `nn.vmap`; each gets its slice of axis `x_axis`, or all of `x`."""
    return nn.vmap(
        Expert,
        in_axes=x_axis,
        out_axes=0,
        axis_size=EXPERTS,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        metadata_params={nn.PARTITION_NAME: "expert"},
    )


class EinsumMoe(nn.Module):
    """Dispatch by einsum into a constrained buffer; the balance loss is sown."""

    capacity: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, MODEL)
        masks = einsum_masks(nn.Dense(EXPERTS, use_bias=False, name="router")(tokens), self.capacity)
        self.sow("losses", "balance", masks.balance)
        self.sow("intermediates", "fraction_kept", masks.dispatch.sum() / (CHOICES * len(tokens)))
        buffer = jnp.einsum("tec,td->ecd", masks.dispatch, tokens)
        buffer = nn.with_logical_constraint(buffer, ("expert", None, "embed"))
        buffer = expert_stack(0)(name="experts")(buffer)
        buffer = nn.with_logical_constraint(buffer, ("expert", None, "embed"))
        return jnp.einsum("tec,ecd->td", masks.combine, buffer).reshape(x.shape)


class DenseMoe(nn.Module):
    """Every expert on every token, by a `vmap` that shares the input."""

    capacity: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = dense_weights(nn.Dense(EXPERTS, name="router")(x))
        return jnp.einsum("bse,ebsd->bsd", weights, expert_stack(None)(name="experts")(x))


class LoopMoe(nn.Module):
    """A Python loop over modules that are experts."""

    capacity: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, chosen = jax.lax.top_k(nn.softmax(nn.Dense(EXPERTS, name="router")(x)), CHOICES)
        outputs = jnp.zeros_like(x)
        for number in range(EXPERTS):
            weight = jnp.where(chosen == number, gate, 0).sum(-1, keepdims=True)
            outputs = outputs + weight * Expert(name=f"expert_{number}")(x)
        return outputs


class Block(nn.Module):
    """A dense layer with dropout, then the MoE layer; its signature suits `nn.scan`."""

    moe: Any
    capacity: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(MODEL)(nn.LayerNorm()(x)))
        return x + self.moe(self.capacity, name="moe")(nn.LayerNorm()(x)), None


class Model(nn.Module):
    """One block between a batch norm and a head."""

    moe: Any
    capacity: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False)(x)
        x, _ = Block(self.moe, self.capacity)(x, None)
        return nn.Dense(MODEL)(x)


class ScannedModel(nn.Module):
    """Rematerialised blocks under `nn.scan`."""

    moe: Any
    capacity: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            length=LAYERS,
            variable_axes={"params": 0, "losses": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = blocks(self.moe, self.capacity)(x, None)
        return nn.LayerNorm()(x)


class TrainState(train_state.TrainState):
    """With the running averages of batch norms."""

    batch_stats: Any


def initial_state(model: nn.Module, x: jax.Array) -> TrainState:
    variables = nn.meta.unbox(quick_jit(model.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x))
    return TrainState.create(
        apply_fn=None,
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        tx=optax.adamw(1e-2, eps=1e-3),
    )


def train_step(model: Any, capacity: int, state: TrainState, data: dict[str, jax.Array], key: jax.Array):
    """One update; returns the new state and what was measured."""

    def loss_fn(params):
        outputs, updates = model(capacity).apply(
            {"params": params, "batch_stats": state.batch_stats},
            data["inputs"],
            rngs={"dropout": jax.random.fold_in(key, state.step)},
            mutable=["batch_stats", "losses", "intermediates"],
        )
        balance = sum(jnp.mean(loss) for loss in jax.tree.leaves(updates.get("losses", {})))
        return squared_error(outputs, data["targets"]) + 0.01 * balance, updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates.get("batch_stats", {}))
    # What was kept is another number in the dropless step; it is returned to be computed.
    metrics = {"loss": loss, "norm": optax.tree.norm(grads), "kept": updates.get("intermediates", {})}
    return state, metrics


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        (Model, EinsumMoe),
        (Model, DenseMoe),
        (Model, LoopMoe),
        (ScannedModel, EinsumMoe),
        (ScannedModel, DenseMoe),
        (ScannedModel, LoopMoe),
    ],
)
def test_train_state_step(model, moe):
    data = batch()
    build = functools.partial(model, moe)
    state = initial_state(build(8), data["inputs"])
    step = functools.partial(train_step, build)
    assert_step(step, (state, data, jax.random.key(3)), bounded=moe is EinsumMoe)
