"""Plans: the order of rows, ranks, and the experts of rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_xla import ops
from moe_xla.ops import routing
from tests.ops import reference

CASES = {
    "random": (np.random.default_rng(0).integers(0, 7, (40, 2)), 7),
    "some dropped": (np.random.default_rng(1).integers(-2, 9, (3, 5, 4)), 7),
    "all dropped": (np.full(6, -1), 3),
    "one expert": (np.zeros((5, 1), int), 1),
    "no expert": (np.zeros(4, int), 0),
    "no assignment": (np.zeros((0, 2), int), 3),
    "an empty expert at each end": (np.array([2, 1, 2, 2]), 4),
}


@functools.partial(jax.jit, static_argnums=1)
def routed(index, experts):
    plan = ops.plan(index, experts)
    return tuple(plan), ops.rank(plan), ops.expert_of_row(plan.group_sizes, index.size)


@pytest.mark.parametrize("index, experts", CASES.values(), ids=CASES)
def test_plan_rank_and_expert_of_row(index, experts):
    plan, rank, owners = routed(index, experts)
    permutation, inverse, sizes = reference.plan(index, experts)
    chex.assert_trees_all_equal(plan, (permutation, inverse, sizes))
    np.testing.assert_array_equal(rank, reference.rank(index, experts))
    expected = np.append(np.repeat(np.arange(experts), sizes), np.full(index.size - sizes.sum(), experts))
    np.testing.assert_array_equal(owners, expected)
    assert {x.dtype for x in (*plan, rank, owners)} == {np.dtype(np.int32)}


def test_narrow_indices():
    index = np.array([3, -1, 127, 0, 3], np.int8)
    chex.assert_trees_all_equal(tuple(ops.plan(index, 300)), reference.plan(index, 300))


def test_the_order_is_the_same_where_keys_do_not_fit_one_integer(monkeypatch):
    key = jnp.asarray(CASES["random"][0].ravel())
    packed = routing._stable_argsort(key, 7)
    paired = routing._stable_argsort(key, 2**30)
    chex.assert_trees_all_equal(packed, paired)


def test_wide_indices_are_not_wrapped_into_range(x64):
    plan = ops.plan(jnp.array([2**32, 1, -(2**32) + 1]), 2)
    np.testing.assert_array_equal(plan.group_sizes, [0, 1])


def test_plan_under_vmap():
    index = np.random.default_rng(3).integers(-1, 5, (4, 6, 2))
    plans = jax.vmap(lambda i: ops.plan(i, 5))(index)
    for i in range(4):
        chex.assert_trees_all_equal(tuple(x[i] for x in plans), reference.plan(index[i], 5))


def test_errors():
    with pytest.raises(TypeError, match="expert_index has dtype float32; it must be an integer"):
        ops.plan(jnp.ones(3), 2)
    with pytest.raises(TypeError, match=r"num_experts must be a static int, got 2.0 of type float"):
        ops.plan(jnp.array([1]), 2.0)
    with pytest.raises(TypeError, match="num_experts must be a static int"):
        jax.jit(ops.plan)(jnp.array([1]), 2)
    with pytest.raises(ValueError, match="num_experts is -1; it must be at least 0"):
        ops.plan(jnp.array([1]), -1)
    with pytest.raises(ValueError, match=r"group_sizes has shape \(\); it must have 1 axis"):
        ops.expert_of_row(jnp.array(1), 3)
