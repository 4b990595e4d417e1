"""Bad keywords fail where they are written, and the message names argument, value and what is allowed."""

import inspect
import re

import jax
import pytest

import moe_xla
from moe_xla.options import JIT_KEYWORDS


def identity(x):
    return x


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
@pytest.mark.parametrize("decorated", [(), (identity,)], ids=["with_arguments", "direct"])
@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"semantics": "loose"}, "semantics must be one of 'dropless', 'exact'; got 'loose'"),
        ({"semantics": None}, "semantics must be one of 'dropless', 'exact'; got None"),
        ({"backend": "cuda"}, "backend must be one of 'auto', 'blocked', 'ragged'.*; got 'cuda'"),
        ({"patterns": ["soft"]}, "each name in patterns must be one of 'einsum_dispatch'.*; got 'soft'"),
        ({"patterns": "einsum_dispatch"}, "patterns must be an iterable of names.*; got 'einsum_dispatch'"),
        ({"patterns": 3}, "patterns must be an iterable of names.*; got 3"),
        ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
        ({"probe": 1}, "probe must be True or False, got 1"),
        ({"probe": None}, "probe must be True or False, got None"),
    ],
)
def test_bad_value(transform, decorated, keywords, message):
    with pytest.raises((TypeError, ValueError), match=f"{transform.__name__}: {message}"):
        transform(*decorated, **keywords)


@pytest.mark.parametrize("decorated", [(), (identity,)], ids=["with_arguments", "direct"])
@pytest.mark.parametrize("name", ["mesh", "expert_axis", "schedule", "donate_argnum"])
def test_unknown_keyword_is_named_with_those_allowed(decorated, name):
    with pytest.raises(
        TypeError, match=rf"moe_jit got an unexpected keyword argument '{name}'; allowed are .*donate_argnums"
    ):
        moe_xla.moe_jit(*decorated, **{name: None})


def test_unknown_keyword_of_rewrite():
    with pytest.raises(TypeError, match="donate_argnums"):
        moe_xla.rewrite(identity, donate_argnums=0)


def test_every_keyword_of_jit_but_backend_is_accepted():
    assert set(JIT_KEYWORDS) == set(inspect.signature(jax.jit).parameters) - {"fun", "backend"}
    defaults = {name: inspect.signature(jax.jit).parameters[name].default for name in JIT_KEYWORDS}
    assert moe_xla.moe_jit(identity, **defaults)(1) == 1


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.verify])
def test_fn_must_be_callable(transform):
    with pytest.raises(TypeError, match=f"{transform.__name__}: fn must be a callable, got 3 of type int"):
        transform(3)


def test_decorator_applied_to_something_not_callable():
    with pytest.raises(TypeError, match="fn must be a callable"):
        moe_xla.rewrite(semantics="exact")(3)


def generator(x):
    yield x


@pytest.mark.parametrize("fn", [3, generator, staticmethod(identity), classmethod(identity)])
def test_what_jit_refuses_is_refused_in_its_words(fn):
    with pytest.raises(TypeError) as by_jit:
        jax.jit(fn)
    for transform in (moe_xla.moe_jit, moe_xla.moe_jit(semantics="exact")):
        with pytest.raises(TypeError, match=re.escape(str(by_jit.value))):
            transform(fn)


def test_verify_validates_too():
    with pytest.raises(ValueError, match="verify: semantics must be one of"):
        moe_xla.verify(identity, 1.0, semantics="loose")


@pytest.mark.parametrize("patterns", [("einsum_dispatch",), {"einsum_dispatch"}, iter(["einsum_dispatch"]), ()])
def test_patterns_may_be_any_iterable_of_names(patterns):
    assert moe_xla.rewrite(identity, patterns=patterns)(1) == 1


def test_bad_value_of_the_environment_variable(monkeypatch):
    monkeypatch.setenv("MOE_XLA_CHECK", "yes")
    with pytest.raises(ValueError, match="MOE_XLA_CHECK must be '1', '0' or unset; got 'yes'"):
        moe_xla.rewrite(identity)


def test_version_and_exports():
    assert moe_xla.__version__ == "0.1.0"
    assert all(hasattr(moe_xla, name) for name in moe_xla.__all__)
    assert callable(moe_xla.ops.plan)
