"""`probe=True` when tracing under other transformations, and what `verify` says of each layer."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest

import moe_xla
from moe_xla import ops
from tests.forms import FORMS
from tests.forms.check import assert_close, quick_jit

FORM = FORMS["top2"]
PROGRAM = FORM.at(FORM.tight)
TRANSFORMS = {
    "jit": lambda fn: jax.jit(lambda params, x: fn(params, x)[0]),
    "grad": lambda fn: jax.grad(lambda params, x: fn(params, x)[0].sum()),
    "vmap": lambda fn: jax.vmap(lambda params, x: fn(params, x[None] + jnp.ones((41, 1)))[0], in_axes=(None, 0)),
    "jit of a closure": lambda fn: jax.jit(lambda params, x: jax.jit(lambda y: fn(params, y)[0])(2 * x)),
}


@pytest.fixture
def experts_are_wrong(monkeypatch):
    real = ops.grouped_dot
    monkeypatch.setattr(ops, "grouped_dot", lambda *args, **kwargs: 1.5 * real(*args, **kwargs))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_probing_leaves_no_trace_in_an_outer_transformation(name):
    inputs = FORM.inputs(jnp.float32)
    got = TRANSFORMS[name](moe_xla.moe_jit(PROGRAM, semantics="exact", probe=True, strict=True))(*inputs)
    assert_close(got, TRANSFORMS[name](PROGRAM)(*inputs), 1e-5)


@pytest.mark.parametrize("name", ["jit", "grad"])
@pytest.mark.usefixtures("experts_are_wrong")
def test_a_fault_is_refused_in_an_outer_transformation(name):
    inputs = FORM.inputs(jnp.float32)
    got = TRANSFORMS[name](moe_xla.rewrite(PROGRAM, semantics="exact", probe=True))(*inputs)
    assert_close(got, TRANSFORMS[name](PROGRAM)(*inputs), 1e-6)
    with pytest.raises(moe_xla.RewriteError, match="probe: the rewritten layer differs"):
        TRANSFORMS[name](moe_xla.rewrite(PROGRAM, semantics="exact", probe=True, strict=True))(*inputs)


def test_values_closed_over_are_drawn_where_they_are_traced():
    params, x = FORM.inputs(jnp.float32)

    @jax.jit
    def outer(params, x):
        return moe_xla.rewrite(lambda y: PROGRAM(params, y)[0], semantics="exact", probe=True, strict=True)(x)

    assert_close(outer(params, x), quick_jit(PROGRAM)(params, x)[0], 1e-5)


def test_the_function_is_traced_once():
    traced = chex.assert_max_traces(PROGRAM, n=1)
    step = moe_xla.moe_jit(traced, semantics="exact", probe=True)
    for _ in range(2):
        step(*FORM.inputs(jnp.float32))


def test_the_report_says_what_was_probed():
    inputs = FORM.inputs(jnp.float32)
    report = moe_xla.moe_jit(PROGRAM, semantics="exact", probe=True).explain(*inputs)
    assert f"site 1 on probes: {report.sites[0].probed}" in str(report)
    unprobed = moe_xla.moe_jit(PROGRAM, semantics="exact").explain(*inputs)
    assert unprobed.sites[0].probed is None and "on probes" not in str(unprobed)


@pytest.mark.parametrize("semantics", ["exact", "dropless"])
def test_verify_compares_each_site_on_the_inputs(semantics):
    result = moe_xla.verify(PROGRAM, *FORM.inputs(jnp.float32), semantics=semantics)
    (site,) = result.sites
    assert (site.site, site.differs) == (1, False) and site.arrays > 0 and 0 <= site.error < 1e-5
    assert f"site 1 on these inputs: {site.text}" in str(result)
    assert result.ok() == (semantics == "exact")
    assert ("in the exact semantics" in site.text) == (semantics == "dropless")


@pytest.mark.usefixtures("experts_are_wrong")
def test_verify_names_the_site_that_differs():
    result = moe_xla.verify(PROGRAM, *FORM.inputs(jnp.float32))
    (site,) = result.sites
    assert site.differs and site.error > 0.1 and not result.ok(rtol=10.0)
    assert "the rewritten layer differs from the layer as written by" in str(result)


def test_verify_without_a_layer():
    assert moe_xla.verify(lambda x: x + 1, jnp.ones(3)).sites == ()
