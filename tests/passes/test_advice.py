"""Each piece of advice belongs to a reason that the passes give, and a refusal carries it."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from moe_xla.passes import advice
from tests.forms.form import TOKENS, init_layer

PASSES = pathlib.Path(advice.__file__).parent


@pytest.mark.parametrize("part", [part for part, _ in advice._ADVICE if not part.startswith("no rule for")])
def test_there_is_such_a_reason(part):
    texts = [path.read_text() for path in PASSES.rglob("*.py") if path.name != "advice.py"]
    assert any(part in text for text in texts)


def test_nothing_is_said_where_nothing_is_known():
    assert advice.advice_for(None) is None
    assert advice.advice_for("no rule for fft") is None


def test_a_refusal_says_what_to_write_instead():
    params, x = init_layer(np.random.default_rng(0), jnp.float32, (TOKENS,))

    def layer(params, x):
        gate, index = jax.lax.top_k(jax.nn.softmax(x @ params["wg"]), 2)
        out = jnp.einsum("tef,efd->ted", jax.nn.relu(jnp.einsum("td,edf->tef", x, params["w1"])), params["w2"])
        weight = jnp.einsum("tk,tke->te", gate, jax.nn.one_hot(index, 5))
        return jnp.einsum("ted,te->td", out, weight) + jnp.tanh(out).mean(1)

    report = moe_xla.moe_jit(layer).explain(params, x)
    assert [site.status for site in report.sites] == ["kept"]
    assert report.sites[0].advice in str(report)
    assert "weights of the chosen ones" in report.sites[0].advice
