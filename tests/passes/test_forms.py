"""Every naive program of the corpus is rewritten, forward and backward, in both semantics.

The program is traced at a capacity that drops assignments.  In `exact` it is compared with itself, untouched; in
`dropless` with the untouched program at a capacity that nothing overflows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from tests.forms import FORMS, Form, composed, scatters
from tests.forms.check import QUICK, assert_close, quick_jit, rewrite_and_run, site_errors, tolerance
from tests.forms.composed import Parts
from tests.forms.form import HIDDEN, MODEL, init_params, mixed_loss
from tests.forms.own import own_errors

SEMANTICS = ("exact", "dropless")

every_form = pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in FORMS.items()])
every_semantics = pytest.mark.parametrize("semantics", SEMANTICS)


def _assert_rewritten(form: Form, build, semantics: str, dtype) -> None:
    inputs = form.inputs(dtype)
    outcome = rewrite_and_run(form, build(form.tight), semantics, inputs)
    problems = [*site_errors(form, outcome.sites, semantics), *outcome.slot_arrays]
    assert not problems
    expected = quick_jit(build(form.tight if semantics == "exact" else form.loose))(*inputs)
    assert_close(outcome.outputs, expected, tolerance(form, dtype))


@every_form
def test_form_is_what_it_says(form):
    """The form itself, without the compiler: it drops when tight, and is per token and as its reference when loose."""
    problems = own_errors(form)
    assert not problems


# A custom_vjp rule cannot be taken along to rows, and who differentiates the result would miss it.
KEPT_FORWARD = {"experts_custom_vjp": "custom_vjp_call"}


@every_form
def test_forward_in_float32(form):
    if form.name in KEPT_FORWARD:
        _assert_kept(form, KEPT_FORWARD[form.name])
    else:
        _assert_rewritten(form, form.at, "dropless", jnp.float32)


def _assert_kept(form: Form, primitive: str) -> None:
    inputs = form.inputs(jnp.float32)
    outcome = rewrite_and_run(form, form.at(form.tight), "dropless", inputs)
    assert [(site.status, site.primitive) for site in outcome.sites] == [("kept", primitive)]
    assert_close(outcome.outputs, quick_jit(form.at(form.tight))(*inputs), 0)


@every_semantics
@every_form
@pytest.mark.usefixtures("x64")
def test_value_and_gradients_in_float64(form, semantics):
    _assert_rewritten(form, form.step, semantics, jnp.float64)


# Forms in which a dtype is named, or gradients travel through a loop; for the others float64 says it all.
IN_FLOAT32 = (
    *("mask_", "rank_f32", "experts_bf16", "experts_preferred", "_bf16", "float_"),
    *("gshard", "switch_paper", "scan"),
)


@pytest.mark.parametrize(
    "form", [pytest.param(f, id=name) for name, f in FORMS.items() if any(part in name for part in IN_FLOAT32)]
)
def test_value_and_gradients_in_float32(form):
    _assert_rewritten(form, form.step, "exact", jnp.float32)


# --- sizes and loads at the edges


def _edge(tokens=24, experts=5, choices=2, capacity=5, x_of=None, **parts):
    return tokens, experts, capacity, x_of, Parts(choices=choices, experts=composed.biased, **parts)


EDGES = {
    "one_token": _edge(tokens=1, capacity=1),
    "one_expert": _edge(experts=1, choices=1),
    "every_expert_chosen": _edge(experts=3, choices=3),
    "one_slot": _edge(capacity=1),
    "one_slot_width": _edge(capacity=1, overflow="width", order="choice"),
    "slots_to_spare": _edge(capacity=100),
    "more_experts_than_tokens": _edge(tokens=3, experts=11, capacity=2),
    "all_tokens_equal": _edge(x_of=lambda x: jnp.ones_like(x)),
    "all_tokens_zero": _edge(x_of=jnp.zeros_like, router=composed.top_k_softmax),
    "two_slots": _edge(capacity=2),
    "two_tokens": _edge(tokens=2, experts=3, capacity=2),
    "one_expert_takes_most": _edge(tokens=96, experts=16, capacity=9, x_of=lambda x: 1 + 0.1 * x),
    "more_rows_than_a_block": _edge(tokens=700, experts=3, capacity=211),
}


# An axis of length 1 leaves nothing to tell a slot or an expert by; these run as written.
WITHOUT_A_QUEUE = {"one_token", "one_expert", "one_slot", "one_slot_width"}


@every_semantics
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EDGES)
def test_sizes_and_loads_at_the_edges(name, semantics):
    tokens, experts, capacity, x_of, parts = EDGES[name]
    rng = np.random.default_rng(1)
    params = init_params(rng, jnp.float64, experts=experts)
    x = jnp.asarray(rng.normal(size=(tokens, MODEL)))
    x = x if x_of is None else x_of(x)

    def step(capacity):
        def loss(params, x):
            y, aux = composed.layer(parts, params, x, capacity)
            return mixed_loss(y, aux), (y, aux)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    rewritten = moe_xla.moe_jit(step(capacity), semantics=semantics, compiler_options=QUICK)
    sites = rewritten.explain(params, x).sites
    if name in WITHOUT_A_QUEUE:
        assert all(site.status == "kept" for site in sites)
    else:
        assert [(site.status, site.semantics) for site in sites] == [("rewritten", semantics)]
        assert [(site.tokens, site.experts, site.choices) for site in sites] == [(tokens, experts, parts.choices)]
    drops = semantics == "exact" or name in WITHOUT_A_QUEUE
    expected = quick_jit(step(capacity if drops else tokens * parts.choices))(params, x)
    assert_close(rewritten(params, x), expected, 1e-11)


# --- activations and losses


ACTIVATIONS = (
    *("softplus", "mish", "elu", "celu", "selu", "relu6", "leaky_relu", "hard_tanh", "squareplus", "log_sigmoid"),
)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    experts = functools.partial(composed.biased, activation=getattr(jax.nn, name))
    _assert_grouped(Parts(experts=experts), lambda y, aux: mixed_loss(y, aux))


@every_semantics
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["softplus", "log_sigmoid", "sigmoid"])
def test_empty_slots_that_are_not_zero(name, semantics):
    """Without biases an empty slot holds a number times the sums of a matrix, which are no work of an assignment."""
    parts = Parts(experts=functools.partial(composed.mlp, activation=getattr(jax.nn, name)))
    _assert_grouped(parts, lambda y, aux: mixed_loss(y, aux), semantics)


SPELLED_OUT = {
    "softsign": lambda h: h / (1 + jnp.abs(h)),
    "swish": lambda h: h / (1 + jnp.exp(-h)),
    "inverse_square_root": lambda h: h / jnp.sqrt(1 + jnp.square(h)),
    "unit_rows": lambda h: h / (1e-6 + jnp.abs(h).sum(-1, keepdims=True)),
}


@every_semantics
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SPELLED_OUT)
def test_activations_that_divide(name, semantics):
    """Zero divided by what cannot be zero is zero: empty slots need no bound."""
    parts = Parts(experts=functools.partial(composed.biased, activation=SPELLED_OUT[name]))
    _assert_grouped(parts, lambda y, aux: mixed_loss(y, aux), semantics)


def _fused(split):
    """Gate and input matrices are one, [E, d, 2 f]."""

    def experts(params, buffer):
        both = jnp.concatenate([params["w1"], params["w3"]], axis=-1)
        gate, hidden = split(jnp.einsum("ecd,edf->ecf", buffer, both))
        return jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * hidden, params["w2"])

    return experts


@every_semantics
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["split", "slices"])
def test_gate_and_input_in_one_matrix(name, semantics):
    split = {"split": lambda h: jnp.split(h, 2, axis=-1), "slices": lambda h: (h[..., :HIDDEN], h[..., HIDDEN:])}
    _assert_grouped(Parts(experts=_fused(split[name])), lambda y, aux: mixed_loss(y, aux), semantics)


@every_semantics
@pytest.mark.usefixtures("x64")
def test_constraints_on_the_buffers(semantics):
    """What a program asks of its buffers, by shardings or barriers, is asked of nobody when there are none."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("expert",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))

    def experts(params, buffer):
        buffer = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(buffer, placed))
        return jax.lax.with_sharding_constraint(composed.biased(params, buffer), placed)

    _assert_grouped(Parts(experts=experts), lambda y, aux: mixed_loss(y, aux), semantics)


@every_semantics
@pytest.mark.usefixtures("x64")
def test_constraints_on_the_routing(semantics):
    """Experts and positions that a program lays out over a mesh before it reads rows by them are what they were."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("token",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("token"))
    form = FORMS["scatter_drop"]

    def layer(params, x, capacity):
        def combine(out, weight, expert, slot, capacity):
            where = [jax.lax.with_sharding_constraint(a, placed) for a in (expert, slot)]
            return scatters._fill(out, weight, *where, capacity)

        return scatters.scattered(params, x, capacity, dispatch=scatters._drop, combine=combine)

    def step(capacity):
        return jax.value_and_grad(lambda params, x: mixed_loss(*layer(params, x, capacity)), argnums=(0, 1))

    inputs = form.inputs(jnp.float64)
    outcome = rewrite_and_run(form, step(form.tight), semantics, inputs)
    assert not [*site_errors(form, outcome.sites, semantics), *outcome.slot_arrays]
    expected = quick_jit(step(form.tight if semantics == "exact" else form.loose))(*inputs)
    assert_close(outcome.outputs, expected, 1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("loss", [lambda y, aux: y.sum(), lambda y, aux: y.mean()], ids=["sum", "mean"])
def test_losses_with_a_constant_cotangent(loss):
    _assert_grouped(Parts(experts=composed.gated), loss)


def _assert_grouped(parts, loss, semantics="exact"):
    """Rewritten, equal to the untouched program, and without a matrix for every assignment."""
    form = FORMS["top2"]
    inputs = form.inputs(jnp.float64)

    def step(capacity):
        return jax.value_and_grad(lambda params, x: loss(*composed.layer(parts, params, x, capacity)), argnums=(0, 1))

    outcome = rewrite_and_run(form, step(form.tight), semantics, inputs)
    assert not [*site_errors(form, outcome.sites, semantics), *outcome.slot_arrays]
    expected = quick_jit(step(form.tight if semantics == "exact" else form.loose))(*inputs)
    assert_close(outcome.outputs, expected, 1e-11)


# --- accuracy


def _worst_element(outputs, expected) -> float:
    """Largest error of an element, relative to itself."""
    worst = 0.0
    for out, ref in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
        scale = np.abs(ref) + 1e-9 * np.abs(ref).max() + 1e-30
        worst = max(worst, (np.abs(out - ref) / scale).max())
    return worst


@pytest.mark.parametrize("name", ["keep_in_dispatch_only", "experts_gelu_bias", "gshard_stack", "top2"])
def test_a_huge_token_costs_the_others_nothing(name):
    """Nothing is computed as the difference of what empty slots hold: every element is as good as the program's own."""
    form = FORMS[name]
    params, x = form.inputs(jnp.float32)
    inputs = params, x.at[5, 2].set(1e4)
    step = form.step(form.tight)
    with jax.enable_x64(True):
        expected = jax.jit(step)(*jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), inputs))
    own = _worst_element(jax.jit(step)(*inputs), expected)
    rewritten = moe_xla.moe_jit(step, semantics="exact")
    assert [site.status for site in rewritten.explain(*inputs).sites] == ["rewritten"]
    assert _worst_element(rewritten(*inputs), expected) < 10 * own + 1e-6
