"""Reductions over groups and biases of groups: values, poison, derivatives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_xla import ops
from moe_xla.ops import blocked
from tests.ops import reference

A, E, N = 11, 4, 3
SIZES = np.array([4, 0, 1, 3])  # a tail of three rows
KEPT = SIZES.sum()


def rows(dtype=np.float32):
    return np.random.default_rng(0).normal(size=(A, N)).astype(dtype)


def poisoned(kept=KEPT, dtype=np.float32):
    values = rows(dtype)
    values[kept:] = np.nan
    return values


@pytest.fixture(params=["small", "in loops"])
def way(request, monkeypatch):
    """Both ways in which groups are reduced."""
    if request.param == "in loops":
        monkeypatch.setattr(blocked, "_SMALL_WORK", 0)
        monkeypatch.setattr(blocked, "_REDUCED_ROWS", 2)
    return request.param


@functools.partial(jax.jit, static_argnames=("initial", "way"))
def compiled_sum_and_max(values, sizes, initial, way):
    del way  # compiled for each
    return ops.group_sum(values, sizes), ops.group_max(values, sizes, initial)


def sum_and_max(*args):
    return [np.asarray(x) for x in compiled_sum_and_max(*args)]


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("sizes", [SIZES, np.zeros(E, int), np.array([0, 0, 0, A])], ids=str)
def test_sum_and_max(way, sizes, dtype, tolerance):
    total, largest = sum_and_max(poisoned(sizes.sum(), dtype), sizes, -0.5, way)
    assert (total.dtype, largest.dtype) == (dtype, dtype)
    clean = np.asarray(rows(dtype), np.float64)
    np.testing.assert_allclose(total.astype(float), reference.group_sum(clean, sizes), tolerance, tolerance)
    np.testing.assert_array_equal(largest.astype(float), reference.group_max(clean, sizes, -0.5))
    assert not np.any(total[sizes == 0])


def test_sums_over_many_blocks_are_kept_in_float32():
    values = np.ones((2000, 1), jnp.bfloat16)
    out = ops.group_sum(values, [1000, 600], preferred_element_type=np.float32)
    np.testing.assert_array_equal(out, [[1000], [600]])


def test_nan_reaches_only_its_group(way):
    values = poisoned()
    values[5, 1] = np.nan  # a row of group 3
    expected = np.zeros((E, N), bool)
    expected[3, 1] = True
    for result in sum_and_max(values, SIZES, -9.0, way):
        np.testing.assert_array_equal(np.isnan(result), expected)


def test_add_group_bias():
    bias = np.arange(E * N, dtype=np.float32).reshape(E, N)
    bias[1] = np.nan  # of a group without rows

    @jax.jit
    def value_and_gradients(rows, bias):
        out, pullback = jax.vjp(lambda r, b: ops.add_group_bias(r, b, SIZES), rows, bias)
        return out, *pullback(jnp.sin(out))

    out, d_rows, d_bias = map(np.asarray, value_and_gradients(poisoned(), bias))
    np.testing.assert_array_equal(out[:KEPT], rows()[:KEPT] + np.repeat(bias, SIZES, 0))
    assert not np.any(out[KEPT:])
    np.testing.assert_allclose(d_rows, np.sin(out), rtol=1e-5)
    np.testing.assert_allclose(d_bias, reference.group_sum(np.sin(out), SIZES), rtol=1e-5)
    assert jax.eval_shape(ops.add_group_bias, rows(jnp.bfloat16), bias, SIZES).dtype == np.float32


def test_derivatives(x64):
    def f(rows, bias):
        shifted = jnp.tanh(ops.add_group_bias(rows, bias, SIZES))
        return ops.group_sum(shifted, SIZES), ops.group_max(shifted, SIZES, -9.0)

    bias = np.random.default_rng(1).normal(size=(E, N))
    check_grads(f, (rows(float), bias), order=2, atol=1e-4, rtol=1e-4)


def test_the_derivative_of_max_is_shared_by_ties_and_vanishes_below_the_initial_value():
    values = np.array([[1.0, 2.0], [1.0, 0.0], [-5.0, -5.0]], np.float32)
    gradient = np.asarray(jax.jit(jax.grad(lambda v: jnp.sum(ops.group_max(v, [2, 1], -1.0))))(values))
    np.testing.assert_array_equal(gradient, [[0.5, 1.0], [0.5, 0.0], [0.0, 0.0]])
    expected = jax.grad(lambda v: jnp.sum(jnp.max(v, 0)))(values[:2])
    np.testing.assert_array_equal(gradient[:2], expected)


def test_vmap():
    values = np.stack([rows(), -rows()])
    sizes = np.stack([SIZES, SIZES[::-1]])
    bias = np.ones((E, N), np.float32)

    @jax.jit
    def f(rows, sizes):
        return ops.group_sum(ops.add_group_bias(rows, bias, sizes), sizes), ops.group_max(rows, sizes, 0.0)

    out = jax.tree.map(np.asarray, jax.vmap(f)(values, sizes))
    for i in range(2):
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], out), f(values[i], sizes[i]), rtol=1e-6)


def test_errors():
    with pytest.raises(ValueError, match="leading size of bias is 3, but the size of group_sizes is 4"):
        ops.add_group_bias(rows(), jnp.ones((3, N)), SIZES)
    with pytest.raises(ValueError, match="last size of bias is 2, but the last size of rows is 3"):
        ops.add_group_bias(rows(), jnp.ones((E, 2)), SIZES)
    with pytest.raises(ValueError, match=r"initial has shape \(3,\); it must be a scalar"):
        ops.group_max(rows(), SIZES, jnp.ones(3))
    with pytest.raises(TypeError, match="rows has dtype int32"):
        ops.group_sum(jnp.ones((3, 2), np.int32), SIZES)
