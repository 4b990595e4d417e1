"""Stand-ins for the compiler's passes, so that the face is tested for any outcome they can have."""

import sys
import types

import jax
import jax.extend as jex
import pytest

import moe_xla
import moe_xla.passes
from moe_xla.passes import pipeline


def evaluate_shifted(closed, shift):
    """Evaluates `closed` and adds `shift` to each output: a rewrite that got its numbers wrong by that much."""
    evaluate = jex.core.jaxpr_as_fun(closed)
    return lambda *inputs: [output + shift for output in evaluate(*inputs)]


@pytest.fixture
def passes_find(monkeypatch):
    """`passes_find(*sites, shift=None)`: from now on the passes find these sites, and are wrong by `shift`."""

    def install(*sites, shift=None):
        def rewrite_jaxpr(closed, options):
            install.options.append(options)
            evaluate = jex.core.jaxpr_as_fun(closed) if shift is None else evaluate_shifted(closed, shift)
            return pipeline.Rewritten(evaluate, sites)

        monkeypatch.setattr(pipeline, "rewrite_jaxpr", rewrite_jaxpr)

    install.options = []
    return install


@pytest.fixture
def equations_differ(monkeypatch):
    """`equations_differ(*lines)`: from now on checked mode finds these; returns the list of the inputs it was given."""

    def install(*lines):
        inputs_given = []

        def compare_every_equation(closed, inputs, options):
            assert isinstance(options, pipeline.PassOptions)
            assert [jax.typeof(x) for x in inputs] == list(closed.in_avals)
            inputs_given.append(inputs)
            return lines

        fake = types.SimpleNamespace(compare_every_equation=compare_every_equation)
        monkeypatch.setitem(sys.modules, "moe_xla.passes.check", fake)
        monkeypatch.setattr(moe_xla.passes, "check", fake, raising=False)
        return inputs_given

    return install


@pytest.fixture
def rewritten_site():
    return moe_xla.Site(
        status="rewritten",
        pattern="einsum_dispatch",
        semantics="dropless",
        source="model.py:41 (moe)",
        tokens=4096,
        experts=32,
        choices=2,
        capacity=320,
        drop_rule="rank >= 320",
        backend="blocked",
        useful_flops=51_500_000_000,
        naive_flops=310_200_000_000,
        removed_bytes=1_342_000_000,
    )


@pytest.fixture
def kept_site():
    return moe_xla.Site(
        status="kept",
        pattern="einsum_dispatch",
        source="model.py:41 (moe)",
        reason="slots are not proven unique",
        primitive="sort",
        reason_source="model.py:38 (route)",
        tokens=128,
        experts=8,
        choices=1,
        capacity=16,
    )
