"""Each piece of advice belongs to a reason that the passes give, and a refusal carries it."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from moe_xla.passes import advice
from tests.forms import composed
from tests.forms.form import EXPERTS, TOKENS, init_layer

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


def _padded(params, x, weights, choices=1):
    """Tokens whose weight is 0 are not to stand in a queue."""
    index = jax.lax.top_k(x @ params["wg"], choices)[1]
    hot = jax.nn.one_hot(index, EXPERTS) * weights[:, None, None]
    queue = hot.reshape(-1, EXPERTS)
    position = ((jnp.cumsum(queue, axis=0) - queue) * queue).sum(-1).reshape(index.shape)
    return hot, jax.nn.one_hot(position.astype(jnp.int32), 13)


def _padded_layer(params, x, weights):
    hot, slot = _padded(params, x, weights)
    mask = jnp.einsum("tke,tkc->tec", hot, slot)
    out = composed.mlp(params, jnp.einsum("tec,td->ecd", mask, x))
    return jnp.einsum("tec,ecd->td", mask, out)


@pytest.mark.parametrize("semantics", ["exact", "dropless"])
def test_weights_that_may_be_any_numbers(semantics):
    """A layer that is not found because its queues are counted by an input is reported with the count's line."""
    params, x = init_layer(np.random.default_rng(0), jnp.float32, (TOKENS,))
    weights = (jnp.arange(TOKENS) % 5 != 0).astype(x.dtype)
    (site,) = moe_xla.moe_jit(_padded_layer, semantics=semantics).explain(params, x, weights).sites
    assert (site.status, site.primitive, site.experts, site.tokens) == ("kept", "cumsum", EXPERTS, TOKENS)
    assert "weighted rows" in site.reason
    assert "(_padded)" in site.reason_source
    assert "paddings > 0" in site.advice

    def said(params, x, weights):
        return _padded_layer(params, x, (weights > 0).astype(x.dtype))

    (site,) = moe_xla.moe_jit(said, semantics=semantics).explain(params, x, weights).sites
    assert (site.status, site.semantics) == ("rewritten", semantics)


def test_weighted_counts_without_experts_are_nobodys_layer():
    """Positions of weighted rows are places here too, and nothing is computed for each expert."""
    params, x = init_layer(np.random.default_rng(0), jnp.float32, (TOKENS,))

    def statistics(params, x, weights):
        hot, slot = _padded(params, x, weights, choices=2)
        return jnp.einsum("tke,tkc,td->ecd", hot, slot, x)

    assert not moe_xla.moe_jit(statistics).explain(params, x, jnp.ones(TOKENS)).sites
