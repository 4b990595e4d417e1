"""A layer in a branch of `lax.cond` or `lax.switch` is rewritten there: forward, backward, and between the two."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from tests.forms import composed, dense, orders, scatters
from tests.forms.check import QUICK, quick_jit, shapes
from tests.forms.composed import Parts
from tests.forms.form import EXPERTS, HIDDEN, MODEL, TOKENS, init_params

CAPACITY = 5
AMPLE = 2 * TOKENS


PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    return init_params(rng, jnp.float64), jnp.asarray(rng.normal(size=(TOKENS, MODEL)))


def _moe(params, x, capacity, **parts):
    return composed.layer(Parts(**parts), params, x, capacity)[0]


def _dense(params, x):
    return jnp.tanh(x @ params["shared1"]) @ params["shared2"]


@program
def other_branch(params, x, capacity, flag):
    return jax.lax.cond(flag > 0, lambda p, x: _moe(p, x, capacity), _dense, params, x)


@program
def skipped(params, x, capacity, flag):
    return x + jax.lax.cond(flag > 0, lambda: _moe(params, x, capacity), lambda: jnp.zeros_like(x))


@program
def both_branches(params, x, capacity, flag):
    return jax.lax.cond(
        flag > 0,
        lambda p, x: _moe(p, x, capacity, experts=composed.biased),
        lambda p, x: _moe(p, 2 * x, capacity, choices=1),
        params,
        x,
    )


@program
def three_branches(params, x, capacity, flag):
    branches = [_dense, lambda p, x: _moe(p, x, capacity), lambda p, x: x]
    return jax.lax.switch(flag, branches, params, x)


@program
def nested(params, x, capacity, flag):
    return jax.lax.cond(flag >= 0, lambda p, x: other_branch(p, x, capacity, flag), lambda p, x: -x, params, x)


@program
def checkpointed_outside(params, x, capacity, flag):
    return jax.checkpoint(lambda p, x: other_branch(p, x, capacity, flag))(params, x)


@program
def checkpointed_inside(params, x, capacity, flag):
    inside = jax.checkpoint(lambda p, x: _moe(p, x, capacity))
    return jax.lax.cond(flag > 0, inside, _dense, params, x)


@program
def layers_in_turn(params, x, capacity, flag):
    """A scan over layers of which every second one is a Mixture of Experts."""

    def body(x, layer):
        return x + other_branch(params, x, capacity, (layer + flag) % 2), None

    return jax.lax.scan(body, x, jnp.arange(4))[0]


@program
def layers_in_turn_checkpointed(params, x, capacity, flag):
    @jax.checkpoint
    def body(x, layer):
        return x + other_branch(params, x, capacity, (layer + flag) % 2), None

    return jax.lax.scan(body, x, jnp.arange(4))[0]


@program
def in_a_jit(params, x, capacity, flag):
    return jax.jit(other_branch, static_argnums=2)(params, x, capacity, flag)


@program
def experts_alone(params, x, capacity, flag):
    """Dispatch and combine stand outside: the padded buffer goes in and comes out."""

    def experts(params, buffer):
        return jax.lax.cond(flag > 0, composed.biased, lambda params, buffer: 2 * buffer, params, buffer)

    return _moe(params, x, capacity, experts=experts)


@program
def scattered(params, x, capacity, flag):
    def moe(params, x):
        return scatters.scattered(params, x, capacity, dispatch=scatters._drop, combine=scatters._fill)[0]

    return jax.lax.cond(flag > 0, moe, _dense, params, x)


@program
def by_priority(params, x, capacity, flag):
    def moe(params, x):
        return orders.by_priority(params, x, capacity, take=orders._gathered)[0]

    return jax.lax.cond(flag > 0, moe, _dense, params, x)


def _step(program, capacity):
    def loss(params, x, flag):
        y = program(params, x, capacity, flag)
        return jnp.sum(jnp.sin(y)), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


DROPLESS = ("other_branch", "both_branches", "layers_in_turn", "scattered")
CASES = [*((name, "exact") for name in PROGRAMS), *((name, "dropless") for name in DROPLESS)]


@pytest.mark.parametrize(("name", "semantics"), CASES)
@pytest.mark.usefixtures("x64")
def test_layers_in_branches_are_rewritten(name, semantics):
    params, x = _inputs()
    step = moe_xla.moe_jit(_step(PROGRAMS[name], CAPACITY), semantics=semantics, compiler_options=QUICK)
    sites = step.explain(params, x, 1).sites
    assert sites and all((s.status, s.semantics) == ("rewritten", semantics) for s in sites), step.explain(params, x, 1)
    reference = quick_jit(_step(PROGRAMS[name], CAPACITY if semantics == "exact" else AMPLE))
    for flag in (0, 1, 2):
        chex.assert_trees_all_close(step(params, x, flag), reference(params, x, flag), rtol=1e-10, atol=1e-10)


def _once(layer, params, x, flag):
    return jax.lax.cond(flag > 0, layer, lambda params, x: x, params, x)


def _in_turn(layer, params, x, flag):
    """Every second layer of a scan."""
    return jax.lax.scan(lambda x, n: (x + _once(layer, params, x, (n + flag) % 2), None), x, jnp.arange(3))[0]


# The backward branch of a loop over experts, and of what else hands on the work of every expert, computes it again.
COMPUTED_AGAIN = ("input_masked", "sorted_ranges", "loop_where", "loop_top1", "loop_fori", "loop_map")


@pytest.mark.parametrize("stack", (_once, _in_turn))
@pytest.mark.parametrize(
    "name", ("one_hots_summed", "taken_by_index", "gather_index", "top2_by_argmax", *COMPUTED_AGAIN)
)
@pytest.mark.usefixtures("x64")
def test_layers_without_a_capacity(name, stack):
    def step(params, x, flag):
        return jax.value_and_grad(lambda *inputs: jnp.sum(jnp.sin(stack(dense.LAYERS[name], *inputs, flag))), (0, 1))(
            params, x
        )

    rewritten = moe_xla.moe_jit(step, semantics="exact", compiler_options=QUICK)
    params, x = _inputs()
    (site,) = rewritten.explain(params, x, 1).sites
    assert (site.status, site.pattern) == ("rewritten", dense.PATTERN.get(name, "dense_experts"))
    dots = {s for s, primitive in shapes(rewritten.trace(params, x, 1).jaxpr.jaxpr) if primitive == "dot_general"}
    assert not any({EXPERTS, HIDDEN} <= set(s) and set(s) & {TOKENS, 2 * TOKENS} for s in dots)
    for flag in (0, 1):
        inputs = (params, x, flag)
        chex.assert_trees_all_close(rewritten(*inputs), quick_jit(step)(*inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_another_condition_backward_does_not_see_the_rows_of_the_forward_branch():
    """A backward cond by hand that asks for something else than the forward cond did: its rows may not be there."""

    def step(params, x, flag, other):
        y, residual = jax.lax.cond(flag > 0, _dispatched, lambda x: (x, jnp.zeros((EXPERTS, CAPACITY, MODEL))), x)
        return y, jax.lax.cond(other > 0, lambda r: jnp.sin(r) * 2, lambda r: r, residual)

    def _dispatched(x):
        e = jnp.argmax(x[:, :EXPERTS], axis=-1)
        one_hot = jax.nn.one_hot(e, EXPERTS, dtype=x.dtype)
        rank = jnp.sum((jnp.cumsum(one_hot, 0) - 1) * one_hot, -1).astype(jnp.int32)
        mask = one_hot[:, :, None] * jax.nn.one_hot(rank, CAPACITY, dtype=x.dtype)[:, None]
        buffer = jnp.einsum("tec,td->ecd", mask, x)
        return jnp.einsum("ecd,tec->td", buffer @ params["w1"][:, :, :MODEL], mask), buffer

    params, x = _inputs()
    rewritten = moe_xla.moe_jit(step, semantics="exact", compiler_options=QUICK)
    for flag in (0, 1):
        for other in (0, 1):
            inputs = (params, x, flag, other)
            chex.assert_trees_all_close(rewritten(*inputs), quick_jit(step)(*inputs), rtol=1e-10, atol=1e-10)
