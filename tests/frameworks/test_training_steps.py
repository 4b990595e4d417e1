"""What people put around a layer: microbatches, loss scaling, mixed precision, shardings, names, rematerialisation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .common import EXPERTS, HIDDEN, MODEL, TOKENS, assert_step, einsum_masks, normal, squared_error

MICROBATCHES = 2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def moe_layer(params: dict[str, jax.Array], x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Dispatch by einsum; routes in float32 and runs its experts in the type of `x`."""
    masks = einsum_masks(x.astype(jnp.float32) @ params["router"].astype(jnp.float32), capacity)
    buffer = jnp.einsum("tec,td->ecd", masks.dispatch.astype(x.dtype), x)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", buffer, params["up"]))
    outputs = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
    return jnp.einsum("tec,ecd->td", masks.combine.astype(x.dtype), outputs), masks.balance


def init_params() -> dict[str, jax.Array]:
    return {
        "router": normal(2, MODEL, EXPERTS),
        "up": 0.3 * normal(3, EXPERTS, MODEL, HIDDEN),
        "down": 0.3 * normal(4, EXPERTS, HIDDEN, MODEL),
    }


def tokens(*lead: int) -> dict[str, jax.Array]:
    return {"inputs": normal(0, *lead, TOKENS, MODEL), "targets": normal(1, *lead, TOKENS, MODEL)}


def loss_fn(params: dict[str, jax.Array], data: dict[str, jax.Array], capacity: int, layer=moe_layer) -> jax.Array:
    outputs, balance = layer(params, data["inputs"], capacity)
    return squared_error(data["inputs"] + outputs, data["targets"]) + 0.01 * balance


def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def assert_plain_step(layer, **kwargs) -> None:
    """`assert_step` of one update of `layer`'s parameters."""

    def step(capacity, params, opt_state, data):
        loss, grads = jax.value_and_grad(loss_fn)(params, data, capacity, layer)
        return *update(params, opt_state, grads), loss

    params = init_params()
    assert_step(step, (params, OPTIMIZER.init(params), tokens()), **kwargs)


# --- microbatches


def test_gradients_accumulated_by_scan():
    def step(capacity, params, opt_state, data):
        def accumulate(carry, microbatch):
            total, grads = carry
            loss, new = jax.value_and_grad(loss_fn)(params, microbatch, capacity)
            return (total + loss, jax.tree.map(jnp.add, grads, new)), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        (loss, grads), losses = lax.scan(accumulate, (jnp.zeros(()), zeros), data)
        grads = jax.tree.map(lambda grad: grad / MICROBATCHES, grads)
        return *update(params, opt_state, grads), loss / MICROBATCHES, losses

    params = init_params()
    assert_step(step, (params, OPTIMIZER.init(params), tokens(MICROBATCHES)))


def test_gradients_accumulated_by_the_optimizer():
    """`optax.MultiSteps` updates the parameters in a `cond` of every second step."""
    optimizer = optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), every_k_schedule=MICROBATCHES)

    def step(capacity, params, opt_state, data):
        def one(carry, microbatch):
            params, opt_state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, microbatch, capacity)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return lax.scan(one, (params, opt_state), data)

    params = init_params()
    assert_step(step, (params, optimizer.init(params), tokens(MICROBATCHES)))


# --- precision


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


@pytest.mark.parametrize("skip", ["cond", "where"])
def test_scaled_loss_in_float16(skip):
    """The scale halves and the update is skipped if a gradient is not finite, else the scale may grow."""

    def step(capacity, params, opt_state, scale, data):
        def scaled(params):
            loss = loss_fn(cast(params, jnp.float16), cast(data, jnp.float16), capacity)
            return loss.astype(jnp.float32) * scale, loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda grad: grad / scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in jax.tree.leaves(grads)]))
        if skip == "cond":
            new = lax.cond(
                finite, update, lambda params, opt_state, grads: (params, opt_state), params, opt_state, grads
            )
        else:
            updated = update(params, opt_state, grads)
            new = jax.tree.map(functools.partial(jnp.where, finite), updated, (params, opt_state))
        return *new, jnp.where(finite, scale * 2, scale / 2), loss

    params = init_params()
    assert_step(step, (params, OPTIMIZER.init(params), jnp.float32(128), tokens()), tol=2e-2)


def test_bfloat16_policy():
    """Parameters and outputs in float32, the layer in bfloat16."""

    def layer(params, x, capacity):
        outputs, balance = moe_layer(cast(params, jnp.bfloat16), x.astype(jnp.bfloat16), capacity)
        return outputs.astype(jnp.float32), balance

    assert_plain_step(layer, tol=5e-2)


# --- names, shardings, remat


def test_named_calls_and_scopes():
    @functools.partial(jax.named_call, name="moe")
    def layer(params, x, capacity):
        with jax.named_scope("layer"):
            return moe_layer(params, x, capacity)

    assert_plain_step(layer)


def test_sharding_constraints():
    mesh = jax.make_mesh((1, 1), ("data", "expert"), (AxisType.Auto, AxisType.Auto), devices=jax.devices()[:1])

    def put(x, *axes):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def layer(params, x, capacity):
        masks = einsum_masks(put(x, "data") @ params["router"], capacity)
        buffer = put(jnp.einsum("tec,td->ecd", put(masks.dispatch, "data", "expert"), x), "expert")
        hidden = put(jax.nn.relu(jnp.einsum("ecd,edf->ecf", buffer, put(params["up"], "expert"))), "expert")
        outputs = put(jnp.einsum("ecf,efd->ecd", hidden, params["down"]), "expert", None, None)
        return put(jnp.einsum("tec,ecd->td", masks.combine, outputs), "data"), masks.balance

    assert_plain_step(layer)


def test_checkpoint_by_policy():
    """Everything but the outputs of matmuls is computed again in the backward pass."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    assert_plain_step(jax.checkpoint(moe_layer, policy=policy, static_argnums=2))


def test_steps_in_a_loop():
    """Several updates in one `fori_loop`, with a running average of the parameters."""

    def step(capacity, params, opt_state, average, data):
        def one(number, carry):
            params, opt_state, average, losses = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, data, capacity)
            params, opt_state = update(params, opt_state, grads)
            average = optax.incremental_update(params, average, 0.1)
            return params, opt_state, average, losses.at[number].set(loss)

        return lax.fori_loop(0, 2, one, (params, opt_state, average, jnp.zeros(2)))

    params = init_params()
    assert_step(step, (params, OPTIMIZER.init(params), params, tokens()))
