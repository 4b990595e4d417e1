"""Layers in bodies that are programs of their own, `custom_vjp` functions and `while` loops, are rewritten there."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from tests.forms import composed
from tests.forms.check import QUICK, quick_jit
from tests.forms.composed import Parts
from tests.forms.form import MODEL, TOKENS, init_params

CAPACITY, AMPLE = 5, 2 * TOKENS

pytestmark = pytest.mark.usefixtures("x64")
every_semantics = pytest.mark.parametrize("semantics", ("exact", "dropless"))


def _inputs():
    rng = np.random.default_rng(4)
    return init_params(rng, jnp.float64), jnp.asarray(rng.normal(size=(TOKENS, MODEL)))


def _layer(params, x, capacity=CAPACITY):
    return composed.layer(Parts(), params, x, capacity)[0]


def _with_rule(scale):
    """The layer with a derivative rule: the plain one times `scale`."""

    @jax.custom_vjp
    def layer(params, x):
        return _layer(params, x)

    layer.defvjp(lambda params, x: jax.vjp(_layer, params, x), lambda pull, g: pull(scale * g))
    return layer


def _in_a_scan(layer):
    return lambda params, x: jax.lax.scan(lambda x, _: (x + layer(params, x), None), x, length=3)[0]


def _in_a_jit(layer):
    return lambda params, x: jax.jit(layer)(params, x) + x


def _assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-10)


@every_semantics
@pytest.mark.parametrize("around", (_in_a_scan, _in_a_jit))
@pytest.mark.parametrize("scale", (1.0, 0.5))
def test_a_layer_with_a_rule_of_its_own_is_rewritten_exactly_and_keeps_the_rule(around, scale, semantics):
    forward = around(_with_rule(scale))
    inputs = _inputs()
    rewritten = moe_xla.moe_jit(forward, semantics=semantics, compiler_options=QUICK)
    (site,) = rewritten.explain(*inputs).sites
    assert (site.status, site.semantics) == ("rewritten", "exact")
    assert (site.reason is None) == (semantics == "exact")
    _assert_close(rewritten(*inputs), quick_jit(forward)(*inputs))

    def gradients(function):
        return jax.grad(lambda params, x: jnp.sum(jnp.sin(function(params, x))), argnums=(0, 1))

    _assert_close(
        quick_jit(gradients(moe_xla.rewrite(forward, semantics=semantics)))(*inputs),
        quick_jit(gradients(forward))(*inputs),
    )


@every_semantics
def test_a_rule_that_the_step_itself_differentiates_is_part_of_the_site(semantics):
    """Forward and backward of the rule stand in the step like any other equations."""

    layer = _with_rule(0.5)

    def step(params, x):
        return jax.value_and_grad(lambda params: jnp.sum(jnp.sin(layer(params, x))))(params)

    inputs = _inputs()
    rewritten = moe_xla.moe_jit(step, semantics=semantics, compiler_options=QUICK)
    assert [(s.status, s.semantics) for s in rewritten.explain(*inputs).sites] == [("rewritten", semantics)]
    if semantics == "exact":
        _assert_close(rewritten(*inputs), quick_jit(step)(*inputs))


def _while(capacity):
    def run(params, x):
        def body(carry):
            step, x = carry
            return step + 1, x + _layer(params, x, capacity)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]

    return run


@every_semantics
def test_a_layer_in_a_while_loop(semantics):
    inputs = _inputs()
    rewritten = moe_xla.moe_jit(_while(CAPACITY), semantics=semantics, compiler_options=QUICK)
    assert [(s.status, s.semantics) for s in rewritten.explain(*inputs).sites] == [("rewritten", semantics)]
    _assert_close(rewritten(*inputs), quick_jit(_while(CAPACITY if semantics == "exact" else AMPLE))(*inputs))


def test_layers_inside_and_outside_of_a_loop_are_sites_of_their_own():
    def forward(params, x):
        return _layer(params, _while(CAPACITY)(params, x)) + x

    inputs = _inputs()
    rewritten = moe_xla.moe_jit(forward, semantics="exact", compiler_options=QUICK)
    assert [site.status for site in rewritten.explain(*inputs).sites] == ["rewritten", "rewritten"]
    _assert_close(rewritten(*inputs), quick_jit(forward)(*inputs))


def test_bodies_without_a_layer_are_left_alone():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

    def forward(x, w):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e6, lambda c: product(c, w) + 1, x)

    x = jnp.ones((3, 3))
    expected = jax.make_jaxpr(forward)(x, x)
    assert str(jax.make_jaxpr(moe_xla.rewrite(forward))(x, x)) == str(expected)
