"""`MOE_XLA_CHECK=1`: each call with concrete arguments is checked equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)
FOUND = "dot_general at model.py:3: 0.5"


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MOE_XLA_CHECK", "1")


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_difference_raises_and_names_the_equation(transform, equations_differ):
    equations_differ(FOUND)
    with pytest.raises(moe_xla.RewriteError, match=FOUND):
        transform(lambda x: x)(X)


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_equal_equations_let_the_call_run(transform, equations_differ):
    inputs_given = equations_differ()
    np.testing.assert_array_equal(transform(lambda x, n: x + n)(X, 1), X + 1)
    ((x,),) = inputs_given
    np.testing.assert_array_equal(x, X)


def test_moe_jit_checks_every_call_before_it_donates(equations_differ):
    inputs_given = equations_differ()
    step = moe_xla.moe_jit(lambda state, n: jnp.tile(state, n), donate_argnums=0, static_argnums=1)
    for _ in range(2):
        step(jnp.asarray(X), 1)
    assert len(inputs_given) == 2


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_traced_arguments_and_traced_constants_are_not_checked(transform, equations_differ):
    inputs_given = equations_differ(FOUND)
    jax.jit(transform(lambda x: x + 1))(X)
    jax.jit(lambda y: transform(lambda x: x + y)(X))(X)
    transform(lambda x: x + 1) if transform is moe_xla.rewrite else transform(lambda x: x).lower(X)
    assert not inputs_given


def test_zero_turns_it_off(monkeypatch, equations_differ):
    equations_differ(FOUND)
    monkeypatch.setenv("MOE_XLA_CHECK", "0")
    np.testing.assert_array_equal(moe_xla.rewrite(lambda x: x)(X), X)
