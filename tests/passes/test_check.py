"""Every rule against plain evaluation: the values of whole programs, equation by equation, forward and backward."""

import chex
import jax
import jax.numpy as jnp
import pytest

import moe_xla
from moe_xla.passes import check, pipeline
from tests.forms import FORMS

NAMES = (
    "switch",
    "switch_argmax",
    "top2",
    "top2_choice_major",
    "top3",
    "top2_gate_einsum",
    "rank_f32",
    "overflow_width",
)
CHOSEN = [form for form in (FORMS.values() if isinstance(FORMS, dict) else FORMS) if form.name in NAMES]


@pytest.mark.parametrize("form", CHOSEN, ids=lambda form: form.name)
def test_values_equal_plain_evaluation(form):
    inputs = form.inputs(jnp.float32)
    closed = jax.make_jaxpr(form.step(form.tight))(*inputs)
    assert check.compare_every_equation(closed, jax.tree.leaves(inputs)) == ()


@pytest.mark.parametrize("form", CHOSEN, ids=lambda form: form.name)
@pytest.mark.parametrize("semantics", pipeline.SEMANTICS)
def test_rewritten_step_equals_the_untouched_one(form, semantics):
    inputs = form.inputs(jnp.float32)
    naive = form.step(form.tight)
    expected = jax.jit(form.step(form.tight if semantics == "exact" else form.loose))(*inputs)
    step = moe_xla.moe_jit(naive, semantics=semantics)
    (site,) = step.explain(*inputs).sites
    assert site.status == "rewritten", site
    if site.semantics != semantics:  # stepped down to exact, with a reason: it must then equal the program as written
        assert (site.semantics, bool(site.reason), form.name) == ("exact", True, "switch_argmax"), site
        expected = jax.jit(naive)(*inputs)
    chex.assert_trees_all_close(step(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_the_forms_are_found():
    assert len(CHOSEN) == len(NAMES)


def test_a_program_without_layers_is_unchanged():
    def step(x):
        return jnp.cumsum(jax.nn.one_hot(jnp.argmax(x, -1), 4), 0).sum() + jax.nn.softmax(x).sum()

    x = jnp.ones((3, 4))
    assert str(jax.make_jaxpr(moe_xla.rewrite(step))(x)) == str(jax.make_jaxpr(step)(x))
