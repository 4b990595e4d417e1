"""Experts chosen by a threshold mask: work on the rows that it keeps, ties and all; other masks stay as they are."""

from __future__ import annotations

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import moe_xla
from moe_xla import ops
from tests.forms import dense, thresholds
from tests.forms.check import QUICK, assert_close, quick_jit
from tests.forms.form import EXPERTS, HIDDEN, MODEL, TOKENS, init_layer
from tests.forms.thresholds import largest, last, scores_of
from tests.passes.test_dense import _sites, _step

every_layer = pytest.mark.parametrize("name", thresholds.LAYERS)


def _inputs(dtype):
    return init_layer(np.random.default_rng(3), dtype, (TOKENS,))


def _tied(dtype):
    """Scores of a few values, with a token whose scores are all equal."""
    params, x = _inputs(dtype)
    return {**params, "wg": jnp.round(params["wg"])}, jnp.round(x).at[3].set(0)


def _dots_of_every_expert(step, inputs):
    """Contractions to arrays of tokens, experts and features: rows in the order of tokens have such axes too."""
    found = _contractions(step.trace(*inputs).jaxpr.jaxpr)
    return [shape for shape in found if {TOKENS, EXPERTS} < set(shape) - {2}]


def _contractions(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][0][0]:
            yield eqn.outvars[0].aval.shape
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _contractions(inner)


def _assert_rewritten(name, program, inputs, tolerance, semantics="exact"):
    step, sites = _sites(program, inputs, semantics)
    tokens = 2 * TOKENS if name == "groups" else TOKENS
    pattern = "expert_loop" if name == "loop" else "dense_experts"
    choices = 1 if name in thresholds.ONE_CHOICE else thresholds.CHOICES
    found = [(s.status, s.pattern, s.tokens, s.experts, s.choices, s.capacity, s.reason) for s in sites]
    assert found == [("rewritten", pattern, tokens, EXPERTS, choices, None, None)]
    assert not _dots_of_every_expert(step, inputs)
    assert_close(step(*inputs), quick_jit(program)(*inputs), tolerance)
    return step


@every_layer
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("x64")
def test_value_and_gradients(name, dtype):
    tolerance = {"float32": 2e-5, "float64": 1e-11}[dtype]
    program = _step(thresholds.LAYERS[name])
    step = _assert_rewritten(name, program, _inputs(dtype), tolerance)
    if dtype == "float64":
        assert_close(step(*_tied(dtype)), quick_jit(program)(*_tied(dtype)), tolerance)


@every_layer
def test_forward_in_float32(name):
    _assert_rewritten(name, thresholds.LAYERS[name], _inputs(jnp.float32), 2e-5, "dropless")


@pytest.mark.usefixtures("x64")
def test_masks_that_are_not_joined():
    """Each mask has rows of its own, where their experts are weighed and summed apart."""
    program = _step(thresholds.each_by_itself)
    for inputs in (_inputs(jnp.float64), _tied(jnp.float64)):
        step, sites = _sites(program, inputs)
        assert {site.status for site in sites} == {"rewritten"}
        assert_close(step(*inputs), quick_jit(program)(*inputs), 1e-11)


@pytest.mark.parametrize("name", ["above_the_second", "last_of_top_k", "second_of_the_rest"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.usefixtures("x64")
def test_a_stack_of_layers(name, dtype):
    """The scores of a layer come from all the layers before it."""

    def layers(params, x):
        for _ in range(4):
            x = x + 0.1 * thresholds.LAYERS[name](params, jnp.tanh(x))
        return x

    step, sites = _sites(_step(layers), _inputs(dtype))
    assert [(s.status, s.choices) for s in sites] == [("rewritten", 2)] * 4
    if dtype == "float64":
        for inputs in (_inputs(dtype), _tied(dtype)):
            assert_close(step(*inputs), quick_jit(_step(layers))(*inputs), 1e-11)


@pytest.mark.usefixtures("x64")
def test_ties_choose_more_experts():
    """What the tests above compare: a top-k choice would give other numbers."""
    params, x = _tied(jnp.float64)
    probs = scores_of(params, x)
    chosen = (probs >= last(probs)).sum(-1)
    assert chosen[3] == EXPERTS
    assert set(chosen.tolist()) >= {2, 3, 4}
    top = lax.top_k(probs, dense.CHOICES)[1]
    weight = dense.one_hot(top, x).sum(1) * probs
    other = dense.summed(dense.every_expert(params, x), weight / weight.sum(-1, keepdims=True))
    assert float(jnp.abs(other - thresholds.last_of_top_k(params, x)).max()) > 1e-3


@pytest.mark.usefixtures("x64")
def test_only_rows_that_are_kept_are_multiplied(monkeypatch):
    sizes = []
    multiply = ops.grouped_dot

    def noting(rows, w, group_sizes, **rest):
        jax.debug.callback(lambda kept: sizes.append(np.asarray(kept)), group_sizes)
        return multiply(rows, w, group_sizes, **rest)

    monkeypatch.setattr(ops, "grouped_dot", noting)
    step = moe_xla.moe_jit(_step(thresholds.last_of_top_k), semantics="exact", compiler_options=QUICK)
    for params, x in (_inputs(jnp.float64), _tied(jnp.float64)):
        sizes.clear()
        jax.block_until_ready(step(params, x))
        jax.effects_barrier()
        probs = scores_of(params, x)
        assert len(sizes) == 4
        np.testing.assert_array_equal(sizes, [(probs >= last(probs)).sum(0)] * len(sizes))


@pytest.mark.usefixtures("x64")
def test_the_report_tells_the_work_that_is_expected():
    (site,) = _sites(_step(thresholds.last_of_top_k), _inputs(jnp.float64))[1]
    rows = TOKENS * thresholds.CHOICES
    assert site.useful_flops == 6 * 2 * rows * MODEL * HIDDEN


@pytest.mark.parametrize("name", ["last_of_top_k", "masked_softmax", "second_of_the_rest", "weights_added"])
def test_tokens_that_are_not_numbers(name):
    """Their scores reach no limit: what the program as written then gives is given."""
    params, x = _inputs(jnp.float32)
    x = x.at[5, 1].set(jnp.nan)
    layer = thresholds.LAYERS[name]
    expected, y = quick_jit(layer)(params, x), moe_xla.moe_jit(layer, compiler_options=QUICK)(params, x)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y[5]).all()


@pytest.mark.parametrize("name", ["second_of_the_rest", "second_normalised", "above_the_second", "masked_softmax"])
@pytest.mark.usefixtures("x64")
def test_every_equation(name):
    params, x = _tied(jnp.float64)
    program = _step(thresholds.LAYERS[name])
    assert moe_xla.verify(program, params, x, semantics="exact", every_equation=True).ok(rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_a_layer_beside_one_that_is_kept():
    def layers(params, x):
        return thresholds.last_of_top_k(params, x) + _also_summed(params, jnp.cos(x))

    step, sites = _sites(_step(layers), _inputs(jnp.float64))
    assert sorted(site.status for site in sites) == ["kept", "rewritten"]
    assert_close(step(*_tied(jnp.float64)), quick_jit(_step(layers))(*_tied(jnp.float64)), 1e-11)


def test_a_backward_scan_that_does_not_know_the_mask():
    """A loop over experts hands on a column of weights for each: no layer is rewritten in its forward pass only."""

    def layers(params, x):
        return lax.scan(lambda x, _: (x + thresholds.loop(params, x), None), x, None, length=2)[0]

    step, sites = _sites(_step(layers), _inputs(jnp.float32))
    assert all(site.status == "kept" for site in sites)
    assert str(step.trace(*_inputs(jnp.float32)).jaxpr) == str(
        jax.jit(_step(layers)).trace(*_inputs(jnp.float32)).jaxpr
    )


@pytest.mark.parametrize("name", ["last_of_top_k", "scanned_layers"])
def test_a_pattern_that_is_not_wanted(name):
    program, inputs = _step(thresholds.LAYERS[name]), _inputs(jnp.float32)
    step = moe_xla.moe_jit(program, patterns=["einsum_dispatch"], compiler_options=QUICK)
    assert not step.explain(*inputs).sites
    assert str(step.trace(*inputs).jaxpr) == str(jax.jit(program).trace(*inputs).jaxpr)


# --- what must stay as it is


def _of_other_scores(params, x):
    probs, other = scores_of(params, x), jax.nn.softmax(x @ params["b2"].T)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= largest(other), probs, 0))


def _strictly_above(params, x):
    """Nothing is above the largest."""
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs > largest(probs), probs, 0.5))


def _best_token_of_each_expert(params, x):
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= probs.max(0), probs, 0))


def _above_a_number(params, x):
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs > 0.1, probs, 0))


def _relu_gates(params, x):
    return dense.summed(dense.every_expert(params, x), jax.nn.relu(x @ params["wg"]))


def _share_of_the_largest(params, x):
    """How many reach half of the largest score is not known beforehand."""
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= 0.5 * largest(probs), probs, 0))


def _unmasked_weights(params, x):
    """The mask only scales: experts that it leaves out count too."""
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= last(probs), 2 * probs, probs))


def _every_expert_reaches_it(params, x):
    probs = scores_of(params, x)
    least = lax.top_k(probs, EXPERTS)[0][..., -1:]
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= least, probs, 0))


def _all_but_the_best(params, x):
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= largest(probs), 0, probs))


def _large_negative_mask(params, x):
    logits = x @ params["wg"]
    return dense.summed(dense.every_expert(params, x), jax.nn.softmax(jnp.where(logits >= last(logits), logits, -5.0)))


def _also_summed(params, x):
    probs, out = scores_of(params, x), dense.every_expert(params, x)
    return dense.summed(out, jnp.where(probs >= last(probs), probs, 0)) + 0.1 * jnp.sin(out).mean(1)


def _straight_through(params, x):
    """The backward pass of the gates asks for the work of every expert."""
    probs = scores_of(params, x)
    chosen = (probs >= last(probs)).astype(x.dtype)
    return dense.summed(dense.every_expert(params, x), probs + lax.stop_gradient(chosen - probs))


def _little_elsewhere(params, x):
    probs = scores_of(params, x)
    return dense.summed(dense.every_expert(params, x), jnp.where(probs >= last(probs), probs, 0) + 1e-3)


def _one_mask_or_another(params, x):
    """Masks of different scores, of which either may choose."""
    probs, other = scores_of(params, x), x @ params["b2"].T
    chosen = (probs >= last(probs)) | (other >= largest(other))
    return dense.summed(dense.every_expert(params, x), jnp.where(chosen, probs, 0))


def _hard_attention(params, x):
    """The token that is attended to most: no weights of experts are multiplied."""
    weight = jax.nn.softmax((x @ params["wg"]) @ (x @ params["wg"]).T)
    return jnp.where(weight >= largest(weight), weight, 0) @ x


def _causal_attention(params, x):
    scores = (x @ params["wg"]) @ (x @ params["wg"]).T
    seen = jnp.arange(TOKENS)[:, None] >= jnp.arange(TOKENS)
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ x


KEPT = {
    function.__name__.lstrip("_"): function
    for function in (
        _of_other_scores,
        _strictly_above,
        _best_token_of_each_expert,
        _above_a_number,
        _relu_gates,
        _share_of_the_largest,
        _unmasked_weights,
        _every_expert_reaches_it,
        _all_but_the_best,
        _large_negative_mask,
        _also_summed,
        _straight_through,
        _little_elsewhere,
        _one_mask_or_another,
        _hard_attention,
        _causal_attention,
    )
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("direction", ["forward", "gradient"])
@pytest.mark.parametrize("name", KEPT)
def test_other_masks_are_untouched(name, direction):
    layer, inputs = KEPT[name], _inputs(jnp.float64)
    program = layer if direction == "forward" else _step(layer)
    step, sites = _sites(program, inputs)
    assert all(site.status == "kept" and site.reason for site in sites)
    assert direction == "gradient" or bool(sites) == (name == "also_summed")
    assert str(step.trace(*inputs).jaxpr) == str(jax.jit(program).trace(*inputs).jaxpr)
    assert_close(step(*inputs), quick_jit(program)(*inputs), 0)
