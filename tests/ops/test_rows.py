"""Dispatch, sort, unsort, combine and row_dot: values, derivatives, poison, and the form of what is emitted."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_xla import ops
from tests.ops import reference

T, K, E, D = 9, 3, 4, 5
INDEX = np.random.default_rng(0).integers(-1, E + 1, (T, K))
PLAN = ops.Plan(*reference.plan(INDEX, E))
KEPT = PLAN.group_sizes.sum()
WITH_ROW = (INDEX >= 0) & (INDEX < E)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def with_nan(x, where):
    return np.where(where.reshape(-1, *[1] * (x.ndim - 1)), np.nan, x).astype(x.dtype)


TAIL = np.arange(T * K) >= KEPT


def test_dispatch():
    x = normal(T, D)
    rows = np.asarray(ops.dispatch(x, PLAN))
    assert 0 < KEPT < T * K
    np.testing.assert_array_equal(rows[:KEPT], x[PLAN.permutation[:KEPT] // K])
    assert not np.any(rows[KEPT:])
    np.testing.assert_array_equal(ops.dispatch(x[:, 0], PLAN), rows[:, 0])
    np.testing.assert_array_equal(ops.dispatch(x.reshape(T, D, 1), PLAN), rows[:, :, None])


def test_the_transpose_of_dispatch_sums_over_choices_without_a_scatter():
    x, ct = normal(T, D), with_nan(normal(T * K, D, seed=1), TAIL)
    transpose = jax.jit(lambda ct: jax.vjp(lambda x: ops.dispatch(x, PLAN), x)[1](ct)[0])
    expected = np.zeros((T, D))
    for row in range(KEPT):
        expected[PLAN.permutation[row] // K] += ct[row]
    np.testing.assert_allclose(transpose(ct), expected, rtol=1e-5, atol=1e-6)
    assert "scatter" not in transpose.lower(ct).as_text()


def test_sort_and_unsort_are_transposes_and_inverse_on_kept_rows():
    values = with_nan(normal(T * K, D), ~WITH_ROW.ravel())
    rows, to_values = jax.vjp(lambda v: ops.sort_rows(v, PLAN), values)
    rows = np.asarray(rows)
    np.testing.assert_array_equal(rows[:KEPT], values[PLAN.permutation[:KEPT]])
    assert not np.any(rows[KEPT:])
    back, to_rows = jax.vjp(lambda r: ops.unsort_rows(r, PLAN), with_nan(rows, TAIL))
    np.testing.assert_array_equal(back, np.where(WITH_ROW.reshape(-1, 1), values, 0))
    np.testing.assert_array_equal(to_values(rows)[0], back)
    np.testing.assert_array_equal(to_rows(jnp.asarray(values))[0], rows)


@pytest.mark.parametrize("choices", [1, 3, 20])  # 20 are summed in a loop
def test_combine(choices):
    index = np.random.default_rng(4).integers(-1, E + 1, (T, choices))
    plan = ops.Plan(*reference.plan(index, E))
    kept, present = plan.group_sizes.sum(), (index >= 0) & (index < E)
    rows, weights = normal(T * choices, D), normal(T, choices, seed=1)
    expected = np.zeros((T, D))
    for t, k in zip(*np.nonzero(present), strict=True):
        expected[t] += weights[t, k] * rows[plan.inverse[t * choices + k]]
    rows = with_nan(rows, np.arange(T * choices) >= kept)
    weights = np.where(present, weights, np.nan).astype(np.float32)

    @jax.jit
    def value_and_gradients(rows, weights, x):
        y, pullback = jax.vjp(lambda r, w: ops.combine(r, w, plan), rows, weights)
        return y, *pullback(y), jax.grad(lambda x: jnp.sum(ops.dispatch(x, plan)))(x)

    y, d_rows, d_weights, d_x = map(np.asarray, value_and_gradients(rows, weights, normal(T, D)))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(d_rows).all() and not np.any(d_rows[kept:])
    assert np.isfinite(d_weights).all() and not np.any(d_weights[~present])
    np.testing.assert_array_equal(d_x, np.broadcast_to(present.sum(1, keepdims=True), (T, D)))


def test_combine_sums_sixteen_bit_rows_in_float32():
    plan = ops.Plan(*reference.plan(np.zeros((1, 8), int), 1))
    rows = np.array([[256.0], *[[1.0]] * 7], jnp.bfloat16)  # in bfloat16, 256 + 1 is 256
    out = ops.combine(rows, np.ones((1, 8), jnp.bfloat16), plan)
    assert out.dtype == jnp.bfloat16
    assert out.item() == 264
    assert ops.combine(rows, np.ones((1, 8), np.float32), plan).dtype == np.float32
    transposed = jax.vjp(lambda x: ops.dispatch(x, plan), rows[:1])[1](rows)[0]
    assert transposed.item() == 264


def test_combine_needs_no_array_over_tokens_choices_and_features():
    tokens, d = 256, 64
    plan = ops.Plan(*reference.plan(np.zeros((tokens, 4), int), 2))
    compiled = jax.jit(ops.combine).lower(normal(tokens * 4, d), normal(tokens, 4), plan).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * d * 4


def layer(x, w, weights):
    rows = ops.grouped_dot(ops.dispatch(x, PLAN), w, PLAN.group_sizes)
    return ops.combine(rows, weights, PLAN)


def test_a_layer_and_its_derivatives(x64):
    x, w, weights = normal(T, D, dtype=float), normal(E, D, 2, dtype=float), normal(T, K, dtype=float)
    np.testing.assert_allclose(layer(x, w, weights), reference.layer(x, w, weights, INDEX), atol=1e-13)
    check_grads(lambda *v: jnp.tanh(layer(*v)), (x, w, weights), order=2, atol=1e-4, rtol=1e-4)


def test_derivatives_of_sort_unsort_and_row_dot(x64):
    def f(values, rows):
        sorted_rows = ops.sort_rows(jnp.sin(values), PLAN)
        return jnp.tanh(ops.row_dot(sorted_rows, rows)), jnp.cos(ops.unsort_rows(sorted_rows * rows, PLAN))

    args = normal(T * K, D, dtype=float), normal(T * K, D, seed=1, dtype=float)
    check_grads(f, args, order=2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shared", ["nothing", "plan", "values"])
def test_vmap(shared):
    batch = 3
    index = np.random.default_rng(5).integers(-1, E + 1, (batch, T, K))
    x, weights = normal(batch, T, D), normal(batch, T, K, seed=1)
    if shared == "plan":
        index = index[0]
    if shared == "values":
        x, weights = x[0], weights[0]
    axes = (None if shared == "values" else 0, None if shared == "values" else 0, None if shared == "plan" else 0)

    def loss(x, weights, index):
        plan = ops.plan(index, E)
        rows = jnp.sin(ops.dispatch(x, plan)) * ops.sort_rows(weights.ravel(), plan)[:, None]
        return jnp.sum(jnp.cos(ops.combine(rows, weights, plan))) + jnp.sum(ops.unsort_rows(rows, plan) ** 2)

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    out = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradient, axes))(x, weights, index))
    for i in range(batch):
        args = [v if axis is None else v[i] for v, axis in zip((x, weights, index), axes, strict=True)]
        chex.assert_trees_all_close(jax.tree.map(lambda v, i=i: v[i], out), gradient(*args), rtol=1e-4, atol=1e-5)


def test_row_dot():
    a, b = normal(6, 300), normal(6, 300, seed=1)
    np.testing.assert_allclose(ops.row_dot(a, b), np.sum(np.asarray(a, float) * b, 1), rtol=1e-4, atol=1e-4)
    ones = np.ones((2, 1024), jnp.bfloat16)
    assert ops.row_dot(ones, ones).dtype == jnp.bfloat16
    np.testing.assert_array_equal(ops.row_dot(ones, ones, preferred_element_type=np.float32), [1024, 1024])


def test_no_tokens():
    plan = ops.Plan(*reference.plan(np.zeros((0, 2), int), 3))
    assert ops.dispatch(np.ones((0, 4), np.float32), plan).shape == (0, 4)
    assert ops.combine(np.ones((0, 4), np.float32), np.ones((0, 2), np.float32), plan).shape == (0, 4)


def test_scan_and_checkpoint():
    w, weights = normal(E, D, D), normal(T, K)
    step = lambda x, _: (jnp.tanh(layer(x, w, weights)), None)  # noqa: E731
    loss = lambda x, step: jnp.sum(jax.lax.scan(step, x, None, length=2)[0])  # noqa: E731
    gradient = functools.partial(jax.jit(jax.grad(loss), static_argnums=1), normal(T, D))
    chex.assert_trees_all_close(gradient(step), gradient(jax.checkpoint(step)), rtol=1e-5, atol=1e-6)


def test_errors():
    x, rows, weights = normal(T, D), normal(T * K, D), normal(T, K)
    cases = [
        (TypeError, "x has dtype int32", lambda: ops.dispatch(INDEX.astype(np.int32), PLAN)),
        (TypeError, "plan must be a moe_xla.ops.Plan, got tuple", lambda: ops.dispatch(x, tuple(PLAN))),
        (ValueError, "x is a scalar", lambda: ops.dispatch(1.0, PLAN)),
        (ValueError, "x has 8 tokens, but the plan has 27 assignments", lambda: ops.dispatch(x[1:], PLAN)),
        (ValueError, "leading size of values is 26, but the plan's", lambda: ops.sort_rows(rows[1:], PLAN)),
        (ValueError, "leading size of rows is 26, but the plan's", lambda: ops.unsort_rows(rows[1:], PLAN)),
        (ValueError, "leading size of rows is 26, but the plan's", lambda: ops.combine(rows[1:], weights, PLAN)),
        (ValueError, "size of weights is 24, but the plan's", lambda: ops.combine(rows, weights[1:], PLAN)),
        (ValueError, r"weights has shape \(9,\); it must have 2 axes", lambda: ops.combine(rows, weights[:, 0], PLAN)),
        (ValueError, r"a has shape \(27, 5\), but b has shape \(26, 5\)", lambda: ops.row_dot(rows, rows[1:])),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            jax.eval_shape(call)
