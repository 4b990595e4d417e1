"""`rewrite` composes with the other transformations of jax, whether they stand inside the step or around it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import moe_xla
from tests.forms import FORMS
from tests.forms.check import assert_close, quick_jit, rewrite_and_run, site_errors, slot_arrays
from tests.forms.form import mixed_loss

SEMANTICS = ("exact", "dropless")
# One form each: width-only drops, grouped top-2, a stack; K=1, a custom_jvp activation.
FEW = ("overflow_width", "gshard_masks", "scan")
NAMES = (*FEW, "switch_flat", "experts_custom_jvp")
TOLERANCE = 1e-11

pytestmark = pytest.mark.usefixtures("x64")
every_semantics = pytest.mark.parametrize("semantics", SEMANTICS)
each_form = pytest.mark.parametrize("form", [pytest.param(FORMS[name], id=name) for name in NAMES])
few_forms = pytest.mark.parametrize("form", [pytest.param(FORMS[name], id=name) for name in FEW])


def _capacity(form, semantics):
    return form.tight if semantics == "exact" else form.loose


def _loss_of(forward):
    def loss(params, x):
        return mixed_loss(*forward(params, x))

    return loss


def _cotangent(y):
    return jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)


# --- differentiation inside the step


def _by_value_and_grad(forward):
    return jax.value_and_grad(_loss_of(forward))


def _by_vjp(forward):
    def step(params, x):
        y, pull, aux = jax.vjp(forward, params, x, has_aux=True)
        return y, aux, pull(_cotangent(y))

    return step


def _by_linearize(forward):
    def step(params, x):
        y, push = jax.linearize(lambda params, x: forward(params, x)[0], params, x)
        return y, push(params, x * x)

    return step


def _by_jvp(forward):
    def step(params, x):
        y, dy = jax.jvp(lambda params, x: forward(params, x)[0], (params, x), (params, x * x))
        return y, dy

    return step


def _by_linear_transpose(forward):
    def step(params, x):
        y, push = jax.linearize(lambda x: forward(params, x)[0], x)
        return jax.linear_transpose(push, x)(_cotangent(y))

    return step


INSIDE = {
    "value_and_grad": _by_value_and_grad,
    "vjp": _by_vjp,
    "linearize": _by_linearize,
    "jvp": _by_jvp,
    "linear_transpose": _by_linear_transpose,
}


@every_semantics
@pytest.mark.parametrize("how", INSIDE)
@each_form
def test_differentiated_inside(form, how, semantics):
    inputs = form.inputs(jnp.float64)
    outcome = rewrite_and_run(form, INSIDE[how](form.at(form.tight)), semantics, inputs)
    problems = [*site_errors(form, outcome.sites, semantics), *outcome.slot_arrays]
    assert not problems
    expected = quick_jit(INSIDE[how](form.at(_capacity(form, semantics))))(*inputs)
    assert_close(outcome.outputs, expected, TOLERANCE)


# --- transformations around the rewritten layer


@every_semantics
@pytest.mark.parametrize("how", ["value_and_grad", "linearize", "jvp"])
@few_forms
def test_differentiated_around(form, how, semantics):
    inputs = form.inputs(jnp.float64)
    step = INSIDE[how](moe_xla.rewrite(form.at(form.tight), semantics=semantics))
    left = slot_arrays(form, jax.make_jaxpr(step)(*inputs).jaxpr, form.tight)
    assert not left
    expected = quick_jit(INSIDE[how](form.at(_capacity(form, semantics))))(*inputs)
    assert_close(quick_jit(step)(*inputs), expected, TOLERANCE)


@few_forms
def test_no_tracer_leaks(form):
    inputs = form.inputs(jnp.float64)
    with jax.checking_leaks():
        sites = moe_xla.moe_jit(form.step(form.tight)).explain(*inputs).sites
    assert [site.status for site in sites] == ["rewritten"] * len(sites) and sites


@few_forms
def test_second_derivative(form):
    """Forward over reverse, of the rewritten gradient and around it."""
    params, x = form.inputs(jnp.float64)

    def curvature(gradient):
        return jax.jvp(lambda x: gradient(params, x), (x,), (jnp.cos(x),))[1]

    def naive():
        return curvature(jax.grad(_loss_of(form.at(form.tight)), argnums=(0, 1)))

    def around():
        return curvature(moe_xla.rewrite(jax.grad(_loss_of(form.at(form.tight)), argnums=(0, 1)), semantics="exact"))

    expected = quick_jit(naive)()
    assert_close(quick_jit(around)(), expected, TOLERANCE)
    assert_close(quick_jit(moe_xla.rewrite(naive, semantics="exact"))(), expected, TOLERANCE)


def _batch(form):
    params, x = form.inputs(jnp.float64)
    return params, jnp.stack([x, jnp.roll(x, 5, axis=-2), x * 0.5 + 0.3])


@every_semantics
@each_form
def test_vmap_around(form, semantics):
    params, xs = _batch(form)
    layer = moe_xla.rewrite(form.at(form.tight), semantics=semantics)
    batched = jax.vmap(layer, in_axes=(None, 0))
    left = slot_arrays(form, jax.make_jaxpr(batched)(params, xs).jaxpr, form.tight)
    assert not left
    expected = quick_jit(jax.vmap(form.at(_capacity(form, semantics)), in_axes=(None, 0)))(params, xs)
    assert_close(quick_jit(batched)(params, xs), expected, TOLERANCE)


@few_forms
def test_vmap_of_gradients_around(form):
    """Per-example gradients: batched parameters and batched inputs."""
    params, xs = _batch(form)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 1.1, leaf * 0.9]), params)
    step = moe_xla.rewrite(form.step(form.tight), semantics="exact")
    expected = quick_jit(jax.vmap(form.step(form.tight)))(stacked, xs)
    assert_close(quick_jit(jax.vmap(step))(stacked, xs), expected, TOLERANCE)


@every_semantics
@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit], ids=["checkpoint", "jit"])
def test_rewritten_layer_in_a_wrapper(wrap, semantics):
    form = FORMS["top2_choice_major"]
    inputs = form.inputs(jnp.float64)
    layer = wrap(moe_xla.rewrite(form.at(form.tight), semantics=semantics))
    expected = quick_jit(_by_value_and_grad(form.at(_capacity(form, semantics))))(*inputs)
    assert_close(quick_jit(_by_value_and_grad(layer))(*inputs), expected, TOLERANCE)


@every_semantics
def test_rewritten_layer_in_a_scan(semantics):
    """The user's scan around a rewritten layer, differentiated from outside."""
    form = FORMS["experts_gated"]
    params, x = form.inputs(jnp.float64)
    scales = jnp.linspace(0.5, 1.5, 4)

    def stack(layer):
        def total(params, x):
            def body(x, scale):
                y, aux = layer(params, x * scale)
                return 0.5 * (x + y), aux["balance"]

            x, balance = lax.scan(body, x, scales)
            return jnp.sum(x * x) + balance.sum()

        return jax.value_and_grad(total, argnums=(0, 1))

    rewritten = stack(moe_xla.rewrite(form.at(form.tight), semantics=semantics))
    expected = quick_jit(stack(form.at(_capacity(form, semantics))))(params, x)
    assert_close(quick_jit(rewritten)(params, x), expected, TOLERANCE)


@every_semantics
def test_scan_over_one_layer(semantics):
    form = FORMS["experts_gated"]
    params, x = form.inputs(jnp.float64)

    def step(capacity):
        def total(params, x):
            def body(x, own):
                y, aux = form.at(capacity)(own, x)
                return 0.5 * (x + y), aux["balance"]

            x, balance = lax.scan(body, x, jax.tree.map(lambda leaf: leaf[None], params))
            return jnp.sum(x * x) + balance.sum()

        return jax.value_and_grad(total, argnums=(0, 1))

    outcome = rewrite_and_run(form, step(form.tight), semantics, (params, x))
    problems = [*site_errors(form, outcome.sites, semantics), *outcome.slot_arrays]
    assert not problems
    assert_close(outcome.outputs, quick_jit(step(_capacity(form, semantics)))(params, x), TOLERANCE)


def test_rewritten_twice_is_rewritten_once():
    form = FORMS["top2"]
    inputs = form.inputs(jnp.float64)
    once = moe_xla.rewrite(form.step(form.tight), semantics="exact")
    step = moe_xla.moe_jit(once, semantics="exact")
    assert not [site for site in step.explain(*inputs).sites if site.status == "rewritten"]
    assert_close(step(*inputs), quick_jit(form.step(form.tight))(*inputs), TOLERANCE)


# --- whole training steps


@every_semantics
def test_training_loop(semantics):
    """Several optimizer steps in one program; errors would add up."""
    form = FORMS["scan_of_remat"]
    params, x = form.inputs(jnp.float64)

    def train(capacity, params, x):
        step = form.step(capacity)

        def body(params, seed):
            (loss, _), (gradients, _) = step(params, x + 0.1 * jnp.sin(seed + x))
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), loss

        return lax.scan(body, params, jnp.arange(5.0))

    outcome = rewrite_and_run(form, functools.partial(train, form.tight), semantics, (params, x))
    problems = site_errors(form, outcome.sites, semantics)
    assert not problems
    expected = quick_jit(functools.partial(train, _capacity(form, semantics)))(params, x)
    assert_close(outcome.outputs, expected, 1e-9)


@every_semantics
def test_step_with_a_learnt_input(semantics):
    """The layer between other differentiated layers, under an inner jit, with a dead branch of metrics."""
    form = FORMS["top2_softmax_of_chosen"]
    params, x = form.inputs(jnp.float64)

    def model(capacity, params, x):
        hidden = jnp.tanh(x @ params["shared1"]) @ params["shared2"]
        y, aux = jax.jit(form.at(capacity))(params, hidden)
        unused = jnp.linalg.norm(y)
        del unused
        return jnp.mean((y + hidden) ** 2) + 0.01 * aux["balance"]

    def step(capacity):
        return jax.value_and_grad(functools.partial(model, capacity))

    outcome = rewrite_and_run(form, step(form.tight), semantics, (params, x))
    problems = [*site_errors(form, outcome.sites, semantics), *outcome.slot_arrays]
    assert not problems
    assert_close(outcome.outputs, quick_jit(step(_capacity(form, semantics)))(params, x), TOLERANCE)


@pytest.mark.parametrize("masked", ["params", "x"])
def test_gradient_of_one_argument(masked):
    """Only a part of the backward pass is there."""
    form = FORMS["experts_gelu_bias"]
    inputs = form.inputs(jnp.float64)
    step = jax.grad(_loss_of(form.at(form.tight)), argnums=0 if masked == "params" else 1)
    outcome = rewrite_and_run(form, step, "exact", inputs)
    problems = [*site_errors(form, outcome.sites, "exact"), *outcome.slot_arrays]
    assert not problems
    assert_close(outcome.outputs, quick_jit(step)(*inputs), TOLERANCE)


def test_frozen_experts():
    """Gradients of the router only, the experts held fixed."""
    form = FORMS["experts_gelu_bias"]
    params, x = form.inputs(jnp.float64)

    def loss(wg):
        return mixed_loss(*form.layer({**lax.stop_gradient(params), "wg": wg}, x, form.tight))

    outcome = rewrite_and_run(form, jax.value_and_grad(loss), "exact", (params["wg"],))
    problems = site_errors(form, outcome.sites, "exact")
    assert not problems
    assert_close(outcome.outputs, quick_jit(jax.value_and_grad(loss))(params["wg"]), TOLERANCE)
