"""Layers without a capacity become work on the chosen experts' rows; what needs every expert stays as it is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import moe_xla
from tests.forms import dense
from tests.forms.check import QUICK, assert_close, quick_jit, shapes
from tests.forms.form import EXPERTS, HIDDEN, MODEL, TOKENS, init_layer

every_layer = pytest.mark.parametrize("name", dense.LAYERS)


def _inputs(dtype):
    return init_layer(np.random.default_rng(3), dtype, (TOKENS,))


def _step(layer):
    def loss(params, x):
        y = layer(params, x)
        return jnp.square(y).mean() + y.mean(), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def _sites(program, inputs, semantics="exact"):
    step = moe_xla.moe_jit(program, semantics=semantics, compiler_options=QUICK)
    return step, step.explain(*inputs).sites


def _wide_arrays(step, inputs):
    """Arrays of the work of every expert, or with a matrix for every assignment."""
    found = []
    for shape, name in shapes(step.trace(*inputs).jaxpr.jaxpr):
        sizes = set(shape)
        rows = sizes & {TOKENS, TOKENS * dense.CHOICES}
        if rows and (({EXPERTS, HIDDEN} <= sizes) or ({MODEL, HIDDEN} <= sizes)):
            found.append(f"{name}{list(shape)}")
    return found


def _assert_rewritten(name, program, inputs, tolerance, semantics="exact"):
    step, sites = _sites(program, inputs, semantics)
    choices = 1 if name in dense.ONE_CHOICE else dense.CHOICES
    pattern = dense.PATTERN.get(name, "dense_experts")
    found = [(s.status, s.pattern, s.tokens, s.experts, s.choices, s.capacity, s.reason) for s in sites]
    assert found == [("rewritten", pattern, TOKENS, EXPERTS, choices, None, None)]
    assert not _wide_arrays(step, inputs)
    assert_close(step(*inputs), quick_jit(program)(*inputs), tolerance)


@every_layer
@pytest.mark.usefixtures("x64")
def test_value_and_gradients(name):
    _assert_rewritten(name, _step(dense.LAYERS[name]), _inputs(jnp.float64), 1e-11)


@every_layer
def test_forward_in_float32(name):
    _assert_rewritten(name, dense.LAYERS[name], _inputs(jnp.float32), 2e-5, "dropless")


# --- what must stay as it is


def _aux_of_every_expert(params, x):
    out = dense.every_expert(params, x)
    return dense.summed(out, dense.weights(params, x)) + 0.1 * jnp.sin(out).mean(1)


def _straight_through(params, x):
    """The backward pass of the gates asks for the work of every expert."""
    probs = jax.nn.softmax(x @ params["wg"])
    hard = dense.weights(params, x)
    return dense.summed(dense.every_expert(params, x), probs + lax.stop_gradient(hard - probs))


def _result(params, x):
    out = dense.every_expert(params, x)
    return dense.summed(out, dense.weights(params, x)), out


def _large_negative_mask(params, x):
    """What is masked by a large negative number has a weight that is small, and not provably zero."""
    logits = x @ params["wg"]
    chosen = dense.one_hot(lax.top_k(logits, dense.CHOICES)[1], x).sum(1)
    return dense.summed(dense.every_expert(params, x), jax.nn.softmax(jnp.where(chosen > 0, logits, -5.0)))


def _mixture(params, x):
    return dense.summed(dense.every_expert(params, x), jax.nn.softmax(x @ params["wg"]))


def _input_gated_biased(params, x):
    """Experts of zero are not zero: those that are not chosen count too."""
    rows = jnp.einsum("td,te->ted", x, dense.weights(params, x))
    hidden = jax.nn.silu(jnp.einsum("ted,edf->tef", rows, params["w1"]) + params["b1"])
    return jnp.einsum("tef,efd->td", hidden, params["w2"])


def _all_chosen(params, x):
    """Every expert is chosen: there is nothing to save."""
    gate, index = lax.top_k(jax.nn.softmax(x @ params["wg"]), EXPERTS)
    return dense.summed(dense.every_expert(params, x), (dense.one_hot(index, x) * gate[..., None]).sum(1))


def _switch_with_identity(params, x):
    """One of the branches is another function: nothing is rolled."""
    _, index = dense.route(params, x)
    branches = [lambda h, e=e: jax.nn.silu(h @ params["w1"][e]) @ params["w2"][e] for e in range(EXPERTS - 1)]
    return jax.vmap(lambda h, i: jax.lax.switch(i, [*branches, lambda h: h], h))(x, index[:, 0])


def _switch_of_vectors(params, x):
    """Branches without a matmul."""
    _, index = dense.route(params, x)
    branches = [lambda h, e=e: h * params["b2"][e] for e in range(EXPERTS)]
    return jax.vmap(lambda h, i: jax.lax.switch(i, branches, h))(x, index[:, 0])


def _switch_and_sum(params, x):
    """What the branches give is chosen from, and summed over all experts."""
    _, index = dense.route(params, x)
    out = [jax.nn.silu(x @ params["w1"][e]) @ params["w2"][e] for e in range(EXPERTS)]
    return jax.lax.select_n(jnp.broadcast_to(index[:, :1], x.shape), *out) + jnp.sin(sum(out))


KEPT = {
    "aux_of_every_expert": _aux_of_every_expert,
    "straight_through": _straight_through,
    "result": _result,
    "large_negative_mask": _large_negative_mask,
    "mixture": _mixture,
    "input_gated_biased": _input_gated_biased,
    "all_chosen": _all_chosen,
    "switch_with_identity": _switch_with_identity,
    "switch_of_vectors": _switch_of_vectors,
    "switch_and_sum": _switch_and_sum,
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("direction", ["forward", "gradient"])
@pytest.mark.parametrize("name", KEPT)
def test_what_needs_every_expert_is_untouched(name, direction):
    layer, inputs = KEPT[name], _inputs(jnp.float64)
    program = layer if direction == "forward" else _step(lambda params, x: jax.tree.leaves(layer(params, x))[0])
    if name == "result" and direction == "gradient":
        program = _step(lambda params, x: sum(jnp.square(leaf).sum() for leaf in layer(params, x)))
    step, sites = _sites(program, inputs)
    assert all(site.status == "kept" and site.reason for site in sites)
    assert str(step.trace(*inputs).jaxpr) == str(jax.jit(program).trace(*inputs).jaxpr)
    assert_close(step(*inputs), quick_jit(program)(*inputs), 0)


def test_a_pattern_that_is_not_wanted():
    inputs = _inputs(jnp.float32)
    wanted = (("gated", "dense_experts"), ("gather_index", "weight_gather"), ("loop_scan", "expert_loop"))
    for name, pattern in wanted:
        others = sorted(set(moe_xla.passes.pipeline.PATTERNS) - {pattern})
        step = moe_xla.moe_jit(dense.LAYERS[name], patterns=others, compiler_options=QUICK)
        assert not step.explain(*inputs).sites
        assert_close(step(*inputs), quick_jit(dense.LAYERS[name])(*inputs), 0)


def test_one_expert_that_is_not_a_number_spoils_its_own_tokens_only():
    params, x = _inputs(jnp.float32)
    params = {**params, "w1": params["w1"].at[2].set(jnp.nan)}
    y = moe_xla.moe_jit(dense.gated, compiler_options=QUICK)(params, x)
    spoilt = (dense.route(params, x)[1] == 2).any(1)
    np.testing.assert_array_equal(np.isnan(y).any(1), spoilt)


# Layers in a scan over layers without checkpoint. Where the backward body would read the work of every expert, it
# computes the forward body again.
SCANNED = (
    *(name for name in dense.LAYERS if name.startswith("loop_")),
    *("one_hots_summed", "gather_index", "gather_tree"),
    *("taken_along_axis", "input_masked", "input_gated", "scanned_layers", "sorted_ranges", "sorted_ranges_back"),
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SCANNED)
@pytest.mark.usefixtures("x64")
def test_in_a_scan_over_layers(name, dtype):
    def layers(params, x):
        return lax.scan(lambda x, _: (x + dense.LAYERS[name](params, x), None), x, None, length=2)[0]

    tolerance = {"float32": 2e-5, "float64": 1e-11}[dtype]
    _assert_rewritten(name, _step(layers), _inputs(dtype), tolerance)


@pytest.mark.parametrize("name", ["one_hots_summed", "taken_along_axis", "gather_index", "loop_where", "loop_fori"])
@pytest.mark.usefixtures("x64")
def test_in_a_scan_over_one_layer(name):
    def layers(params, x):
        stacked = jax.tree.map(lambda leaf: leaf[None], params)
        y, means = lax.scan(lambda x, p: (x + dense.LAYERS[name](p, x), x.mean()), x, stacked)
        return y * means.sum()

    _assert_rewritten(name, _step(layers), _inputs(jnp.float64), 1e-11)


def _flattened(params, x):
    """Tokens in rows of a batch, flattened inside the loss: so is the cotangent."""
    return jnp.sin(dense.one_hots_summed(params, x.reshape(-1, MODEL)).reshape(x.shape))


def _flattened_layers(params, x):
    layer = jax.checkpoint(lambda x, _: (x + _flattened(params, x), None))
    return lax.scan(layer, x, None, length=2)[0]


@pytest.mark.parametrize("layer", [_flattened, _flattened_layers])
@pytest.mark.usefixtures("x64")
def test_tokens_flattened_in_the_loss(layer):
    params, x = init_layer(np.random.default_rng(3), jnp.float64, (3, 10))
    step, sites = _sites(_step(layer), (params, x))
    assert [(s.status, s.tokens, s.experts, s.choices) for s in sites] == [("rewritten", 30, EXPERTS, dense.CHOICES)]
    assert_close(step(params, x), quick_jit(_step(layer))(params, x), 1e-11)


# --- switches

SWITCHES = ("switch_choices", "switch_vmapped_choices", "switch_list", "switch_top1")


@pytest.mark.parametrize("rematerialised", [False, True])
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.usefixtures("x64")
def test_switch_in_a_scan_over_layers(name, rematerialised):
    """Each layer has weights of its own."""

    def layers(params, x):
        def layer(x, params):
            return x + dense.LAYERS[name](params, x), None

        stack = jax.tree.map(lambda p: jnp.stack([p, p / 2]), params)
        return jax.lax.scan(jax.checkpoint(layer) if rematerialised else layer, x, stack)[0]

    _assert_rewritten(name, _step(layers), _inputs(jnp.float64), 1e-11)


@pytest.mark.usefixtures("x64")
def test_switch_of_groups():
    def layer(params, x):
        gate, index = dense.route(params, x)
        branches = [lambda h, e=e: jnp.tanh(h @ params["w1"][e]) @ params["w2"][e] for e in range(EXPERTS)]
        token = lambda h, i, g: sum(g[k] * jax.lax.switch(i[k], branches, h) for k in range(dense.CHOICES))  # noqa: E731
        return jax.vmap(jax.vmap(token))(x, index, gate)

    inputs = init_layer(np.random.default_rng(3), jnp.float64, (3, 10))
    step, sites = _sites(_step(layer), inputs)
    assert [(s.status, s.tokens, s.experts, s.choices) for s in sites] == [("rewritten", 30, EXPERTS, dense.CHOICES)]
    assert_close(step(*inputs), quick_jit(_step(layer))(*inputs), 1e-11)


@pytest.mark.usefixtures("x64")
def test_switch_of_fewer_branches_than_are_chosen_from():
    """jax takes the last branch for all indices beyond it, which the router gives."""

    def layer(params, x):
        gate, index = dense.route(params, x)
        w1, w2 = params["w1"][:3], params["w2"][:3]
        branches = [lambda h, e=e: jax.nn.silu(h @ w1[e]) @ w2[e] for e in range(3)]
        return jax.vmap(lambda h, i, g: g * jax.lax.switch(i, branches, h))(x, index[:, 0], gate[:, 0])

    inputs = _inputs(jnp.float64)
    assert (dense.route(*inputs)[1][:, 0] > 2).any()
    step, sites = _sites(_step(layer), inputs)
    assert [(s.status, s.experts, s.choices) for s in sites] == [("rewritten", 3, 1)]
    assert_close(step(*inputs), quick_jit(_step(layer))(*inputs), 1e-11)


def _guarded(stopped, weight_choice):
    """A loop that spells what a switch under vmap becomes: tokens and weights beside others where a mask is false.

    The weights stand under the mask of the choice `weight_choice`, the tokens and the result under that of the first.
    """

    def layer(params, x):
        _, index = dense.route(params, x)
        y = jnp.zeros_like(x)
        for e in range(EXPERTS):
            mask, other = index[:, :1] == e, index[:, weight_choice, None, None] == e
            w1 = jnp.broadcast_to(params["w1"][e], (len(x), MODEL, HIDDEN))
            h = jnp.einsum("td,tdf->tf", jnp.where(mask, x, stopped(x)), jnp.where(other, w1, stopped(w1)))
            y = jnp.where(mask, jnp.tanh(h) @ params["w2"][e], y)
        return y

    return layer


@pytest.mark.parametrize("weight_choice", [0, 1])
@pytest.mark.parametrize("stopped", [jax.lax.stop_gradient, lambda a: 3 * a], ids=["stopped", "scaled"])
@pytest.mark.usefixtures("x64")
def test_masks_that_agree_and_masks_that_differ(stopped, weight_choice):
    """Only under one mask is a token's row multiplied by the weights that stand there."""
    layer, inputs = _guarded(stopped, weight_choice), _inputs(jnp.float64)
    step, sites = _sites(_step(layer), inputs)
    if weight_choice == 0 and stopped is jax.lax.stop_gradient:
        assert [(s.status, s.reason) for s in sites] == [("rewritten", None)]
    assert_close(step(*inputs), quick_jit(_step(layer))(*inputs), 1e-11)
    rewritten = quick_jit(_step(moe_xla.rewrite(layer, semantics="exact")))
    assert_close(rewritten(*inputs), quick_jit(_step(layer))(*inputs), 1e-11)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.usefixtures("x64")
def test_gradients_of_a_rewritten_switch(name):
    layer, inputs = dense.LAYERS[name], _inputs(jnp.float64)
    rewritten = quick_jit(_step(moe_xla.rewrite(layer, semantics="exact")))
    assert_close(rewritten(*inputs), quick_jit(_step(layer))(*inputs), 1e-11)
