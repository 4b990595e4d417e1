"""`verify` measures the difference between a function and its rewritten self."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from moe_xla.passes import pipeline

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)


def step(state, x, n=1):
    return {"w": state["w"] + jnp.tile(x, (n, 1)), "keys": state["key"]}, x.sum()


def state(rows=2):
    return {"w": jnp.ones((rows, 3)), "key": jax.random.key(0)}


def test_equal_programs():
    result = moe_xla.verify(step, state(), X)
    assert [output.path for output in result.outputs] == ["[0]['keys']", "[0]['w']", "[1]"]
    assert result.max_abs == result.max_rel == 0.0 and result.ok(rtol=0.0)
    assert result.report.semantics == "exact" and result.different_equations == ()
    assert "[0]['w']" in str(result) and "no Mixture-of-Experts layer found" in str(result)


def test_differences_are_measured(passes_find, rewritten_site):
    passes_find(rewritten_site, shift=0.5)
    result = moe_xla.verify(lambda x: {"a": x * 4, "b": x.astype(jnp.bfloat16)}, X, semantics="dropless")
    a, b = result.outputs
    assert (a.path, a.type, a.max_abs, a.max_rel) == ("['a']", "float32[2,3]", 0.5, 0.125)
    assert b.max_abs == pytest.approx(0.5, abs=1e-2) and result.max_abs >= 0.5
    assert not result.ok() and result.ok(rtol=0.6) and result.ok(atol=0.51)
    assert result.report.sites == (rewritten_site,)


@pytest.mark.parametrize(
    "want, got, max_abs",
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], 0.0),
        ([1.0, np.nan], [1.0, 0.0], np.inf),
        ([1.0, 2.0], [1.0, np.nan], np.inf),
        ([np.inf, 2.0], [-np.inf, 2.0], np.inf),
        ([], [], 0.0),
        ([0.0, 0.0], [0.0, 1.0], 1.0),
        ([True, False], [True, True], 1.0),
        ([1 + 2j], [1 + 1j], 1.0),
    ],
)
def test_special_values(monkeypatch, want, got, max_abs):
    def rewrite_jaxpr(closed, options):
        return pipeline.Rewritten(lambda *_: [jnp.asarray(got)], ())

    monkeypatch.setattr(pipeline, "rewrite_jaxpr", rewrite_jaxpr)
    assert moe_xla.verify(lambda x: x, jnp.asarray(want)).max_abs == max_abs


def test_a_changed_type_is_a_difference(monkeypatch):
    def rewrite_jaxpr(closed, options):
        return pipeline.Rewritten(lambda x: [x.astype(jnp.bfloat16)], ())

    monkeypatch.setattr(pipeline, "rewrite_jaxpr", rewrite_jaxpr)
    result = moe_xla.verify(lambda x: x, X)
    assert result.outputs[0].type == "float32[2,3] became bfloat16[2,3]" and not result.ok(rtol=1.0, atol=1.0)


def test_a_whole_output_has_a_path():
    assert moe_xla.verify(lambda x: x, X).outputs[0].path == "output"


def test_output_that_has_no_values():
    gradient = jax.grad(lambda x: x.astype(jnp.float32).sum(), allow_int=True)
    assert moe_xla.verify(gradient, np.arange(3)).ok()


@pytest.mark.parametrize("static", [{"static_argnums": 2}, {"static_argnames": "n"}])
def test_static_arguments(static):
    assert moe_xla.verify(step, state(4), X, 2, **static).ok()
    with_keyword = {"static_argnames": "n"}
    assert moe_xla.verify(step, state(4), X, n=2, **with_keyword).ok()


def test_function_that_was_rewritten_already_is_compared_with_the_original(passes_find, rewritten_site):
    passes_find(rewritten_site, shift=1.0)
    plain = lambda x: x * 2  # noqa: E731

    class Model:
        factor = 2.0

        @functools.partial(moe_xla.moe_jit, static_argnums=0)
        def step(self, x):
            return x * self.factor

    jitted = moe_xla.moe_jit(plain, donate_argnums=0)
    for fn in (plain, jitted, moe_xla.rewrite(plain), Model().step):
        assert moe_xla.verify(fn, jnp.asarray(X)).max_abs == pytest.approx(1.0)


def test_arguments_are_not_donated():
    x = jnp.asarray(X)
    moe_xla.verify(moe_xla.moe_jit(lambda x: x + 1, donate_argnums=0), x)
    assert not x.is_deleted()


def test_every_equation(equations_differ):
    inputs_given = equations_differ("dot_general at model.py:3: 0.5")
    result = moe_xla.verify(step, state(4), X, 2, static_argnums=2, every_equation=True)
    assert result.different_equations == ("dot_general at model.py:3: 0.5",)
    assert result.max_abs == 0.0 and not result.ok()
    assert "dot_general at model.py:3: 0.5" in str(result)
    assert len(inputs_given) == 1
