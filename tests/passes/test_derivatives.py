"""A rewritten program that its caller differentiates has the derivatives of the program as written.

Some operations are the identity but for their derivative, and some reads are differentiated otherwise than what they
compute: jax clamps a gather's indices, but drops the cotangents of those that were out of range.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import moe_xla
from tests.forms.check import assert_close, quick_jit
from tests.generated import parts
from tests.generated.programs import Program, build, finish, inputs

SEMANTICS = ("exact", "dropless")
TOLERANCE = 1e-11

pytestmark = pytest.mark.usefixtures("x64")
every_semantics = pytest.mark.parametrize("semantics", SEMANTICS)


def _derivatives(program, fn):
    """What `fn` and its derivatives are, also along a direction that is its arguments' sine."""

    def run(*args):
        return finish(program, fn)(*args), jax.jvp(fn, args, jax.tree.map(jnp.sin, args))

    return run


def _check(program, semantics):
    capacity = program.capacity if semantics == "exact" else program.loose
    untouched, arguments = build(program, (capacity,)), inputs(program)
    step = moe_xla.moe_jit(build(program), semantics=semantics)
    (site,) = step.explain(*arguments).sites
    assert (site.status, site.semantics) == ("rewritten", semantics), site.reason
    both = [_derivatives(program, step), _derivatives(program, untouched)]
    actual, wanted = quick_jit(lambda *args: [run(*args) for run in both])(*arguments)
    assert_close(actual, wanted, TOLERANCE)


@every_semantics
@pytest.mark.parametrize("place", parts.DETACHED)
def test_stopped_derivatives_stay_stopped(place, semantics):
    _check(Program(detached=place, biases=True, activation="silu", taken="outside"), semantics)


@every_semantics
@pytest.mark.parametrize("take", [name for name in parts.TAKES if name != "visible"])
def test_gathers_of_what_was_dropped(take, semantics):
    _check(Program(family="scatter", take=take, taken="outside"), semantics)


def test_visible_gathers_of_what_was_dropped_have_no_cotangent():
    _check(Program(family="scatter", take="visible", taken="outside"), "exact")


@pytest.mark.parametrize("far", [7, -9])
def test_gathers_of_weights_out_of_range(far):
    """Experts that do not exist: jax reads the nearest one, and gives it no gradient."""
    rng = np.random.default_rng(0)
    index = jnp.asarray(rng.integers(0, 4, (8, 2))).at[3, 1].set(far)
    gate, x = jnp.asarray(rng.random((8, 2))), jnp.asarray(rng.normal(size=(8, 3)))
    params = {"w1": jnp.asarray(rng.normal(size=(4, 3, 5))), "w2": jnp.asarray(rng.normal(size=(4, 5, 3)))}

    def loss(params, x, gate, index):
        hidden = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, params["w1"][index]))
        return jnp.sum(jnp.einsum("tk,tkf,tkfd->td", gate, hidden, params["w2"][index]) ** 2)

    step = moe_xla.moe_jit(loss)
    assert_close(
        jax.value_and_grad(step, argnums=(0, 1, 2))(params, x, gate, index),
        jax.value_and_grad(loss, argnums=(0, 1, 2))(params, x, gate, index),
        TOLERANCE,
    )


def test_a_gate_that_is_straight_through():
    """The value is rounded, the derivative is not."""
    program = Program(taken="forward")

    def loss(fn, params, x):
        rounded = jax.tree.map(lambda a: a + lax.stop_gradient(jnp.round(4 * a) / 4 - a), params)
        return jnp.sum(fn(rounded, x)[0] ** 2)

    (params, x), fn = inputs(program), build(program)
    step = moe_xla.moe_jit(lambda params, x: loss(fn, params, x), semantics="exact")
    assert [site.status for site in step.explain(params, x).sites] == ["rewritten"]
    assert_close(
        jax.grad(step, argnums=(0, 1))(params, x),
        jax.grad(lambda params, x: loss(fn, params, x), argnums=(0, 1))(params, x),
        TOLERANCE,
    )
