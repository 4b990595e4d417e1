"""The face and the passes together, on one Switch layer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla

T, D, F, E = 64, 8, 16, 4
CAPACITY = 12


def switch_layer(params, x):
    probs = jax.nn.softmax(x @ params["router"])
    onehot = jax.nn.one_hot(jnp.argmax(probs, axis=-1), E)
    position = jnp.sum((jnp.cumsum(onehot, axis=0) - 1) * onehot, axis=-1)
    dispatch = onehot[:, :, None] * jax.nn.one_hot(position.astype(jnp.int32), CAPACITY)[:, None, :]
    hidden = jax.nn.gelu(jnp.einsum("tec,td,edf->ecf", dispatch, x, params["w_in"]))
    out = jnp.einsum("ecf,efd->ecd", hidden, params["w_out"])
    return jnp.einsum("tec,t,ecd->td", dispatch, probs.max(axis=-1), out)


def loss(params, x):
    return jnp.mean((switch_layer(params, x) - x) ** 2)


def train_step(params, x, learning_rate):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), {"loss": value, "rate": learning_rate * 2}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.fixture
def params():
    return {"router": normal(0, D, E), "w_in": 0.3 * normal(1, E, D, F), "w_out": 0.3 * normal(2, E, F, D)}


@pytest.fixture
def x():
    return normal(3, T, D)


def test_training_step_is_rewritten_once_and_gives_the_same_numbers(params, x):
    chex.clear_trace_counter()
    step = moe_xla.moe_jit(chex.assert_max_traces(train_step, n=1), semantics="exact", strict=True, donate_argnums=0)
    expected = jax.jit(train_step)(params, x, 0.1)
    (site,) = step.explain(params, x, 0.1).sites
    actual = step(params, x, 0.1)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    assert (site.status, site.semantics, site.tokens, site.experts, site.choices) == ("rewritten", "exact", T, E, 1)
    assert f"[{E},{CAPACITY}" not in step.lower(expected[0], x, 0.1).compile().as_text()


def test_verify(params, x):
    assert moe_xla.verify(train_step, params, x, 0.1).ok(rtol=1e-4)
    assert not moe_xla.verify(train_step, params, x, 0.1, semantics="dropless").ok(rtol=1e-4)


AROUND = {
    "grad": lambda fn: jax.grad(fn),
    "vmap": lambda fn: jax.vmap(fn, in_axes=(None, 0)),
    "jvp": lambda fn: lambda p, x: jax.jvp(fn, (p, x), (p, x)),
    "scan": lambda fn: lambda p, xs: jax.lax.scan(lambda total, x: (total + fn(p, x), total), 0.0, xs),
}


@pytest.mark.parametrize(
    ("transform", "around"),
    [
        (moe_xla.rewrite, "grad"),
        (moe_xla.moe_jit, "grad"),
        (moe_xla.moe_jit, "vmap"),
        (moe_xla.rewrite, "jvp"),
        (moe_xla.rewrite, "scan"),
    ],
)
def test_transformations_of_a_rewritten_layer(transform, around, params, x):
    inputs = jnp.stack([x, 2 * x]) if around in ("vmap", "scan") else x
    layer = transform(loss, semantics="exact", strict=True)
    expected = jax.jit(AROUND[around](loss))(params, inputs)
    actual = jax.jit(AROUND[around](layer))(params, inputs)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
