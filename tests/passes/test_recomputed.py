"""Scans over layers without `jax.checkpoint` whose layers loop over experts: the backward body computes them again."""

from __future__ import annotations

import functools

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import moe_xla
from moe_xla.passes.leftover import does_work_of_every_expert
from moe_xla.passes.roll import rolled
from tests.forms import dense
from tests.forms.check import QUICK, assert_close, quick_jit
from tests.forms.form import EXPERTS, TOKENS, init_layer

DEPTH = 3
LAYER = "loop_where"


def _inputs(dtype=jnp.float64):
    return init_layer(np.random.default_rng(4), dtype, (TOKENS,))


def _gradient(layers):
    def loss(params, x):
        y = layers(params, x)
        return jnp.square(y).mean() + y.mean(), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def _expert_layer(params, x):
    return dense.LAYERS[LAYER](params, x)


def _stacked(params):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[..., ::-1], -leaf]), params)


def _layers(name, around=lambda layer: layer, **options):
    """Three layers, each with weights of its own."""

    def layers(params, x):
        layer = around(dense.LAYERS[name])
        return lax.scan(lambda x, p: (x + layer(p, x), None), x, _stacked(params), **options)[0]

    return layers


def _assert_rewritten(program, inputs, tolerance=1e-11):
    step = moe_xla.moe_jit(program, semantics="exact", compiler_options=QUICK)
    sites = step.explain(*inputs).sites
    assert [(s.status, s.tokens, s.experts) for s in sites] == [("rewritten", TOKENS, EXPERTS)]
    assert_close(step(*inputs), quick_jit(program)(*inputs), tolerance)


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


@pytest.mark.parametrize("options", [{"unroll": 2}, {"reverse": True}], ids=["unroll", "reverse"])
@pytest.mark.parametrize(
    "name", ["loop_where", "loop_top1", "loop_fori", "loop_scan_weights", "one_hots_summed", "input_gated"]
)
@pytest.mark.usefixtures("x64")
def test_stacked_layers(name, options):
    _assert_rewritten(_gradient(_layers(name, **options)), _inputs())


_POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize("name", ["loop_where", "loop_top1", "one_hots_summed", "input_gated"])
@pytest.mark.usefixtures("x64")
def test_a_policy_keeps_the_work_of_every_expert(name, policy):
    """The backward body is given contractions and makes the choices of them once more."""
    around = functools.partial(jax.checkpoint, policy=getattr(_POLICIES, policy))
    _assert_rewritten(_gradient(_layers(name, around)), _inputs())


@pytest.mark.usefixtures("x64")
def test_weights_in_another_precision():
    """What jax takes out of the layers is converted there, too."""

    def layer(params, x):
        combine, narrow = dense.weights(params, x), x.astype(jnp.float32)

        def body(e, y):
            w1, w2 = (jnp.take(params[name], e, axis=0).astype(jnp.float32) for name in ("w1", "w2"))
            return y + combine[:, e, None] * (jax.nn.silu(narrow @ w1) @ w2)

        return lax.fori_loop(0, EXPERTS, body, jnp.zeros_like(x))

    def layers(params, x):
        return lax.scan(lambda x, _: (x + layer(params, x), None), x, length=DEPTH)[0]

    _assert_rewritten(_gradient(layers), _inputs(), 2e-5)


# --- layers that hold more than arithmetic


def dropout(params, x):
    """Random bits are functions of their keys: those of the forward pass are drawn again."""

    def body(x, key):
        kept = jax.random.bernoulli(key, 0.7, x.shape)
        return x + jnp.where(kept, _expert_layer(params, x), 0), None

    return lax.scan(body, x, jax.random.split(jax.random.key(1), DEPTH))[0]


def carried_key(params, x):
    def body(carry, _):
        key, x = carry
        key, own = jax.random.split(key)
        return (key, x + _expert_layer(params, x + 0.1 * jax.random.normal(own, x.shape, x.dtype))), None

    return lax.scan(body, (jax.random.key(1), x), None, length=DEPTH)[0][1]


def carried_counter(params, x):
    """An integer that is carried along says what a layer does."""

    def body(carry, _):
        number, x = carry
        scale = jnp.where(number % 2 == 0, 1.0, -0.5)
        return (number * 2 + 1, x + scale * _expert_layer(params, x * (number + 1))), None

    return lax.scan(body, (jnp.int32(0), x), None, length=DEPTH)[0][1]


def in_halves(params, x):
    """Half of the carry is what the layer does not change."""

    def body(carry, _):
        left, right = carry
        return (right, left + _expert_layer(params, right)), right.mean()

    (left, right), means = lax.scan(body, (x, -x), None, length=DEPTH)
    return left * right + means.sum()


@pytest.mark.parametrize("layers", [dropout, carried_key, carried_counter, in_halves])
@pytest.mark.usefixtures("x64")
def test_layers_are_computed_again(layers):
    _assert_rewritten(_gradient(layers), _inputs())


@pytest.mark.usefixtures("x64")
def test_choices_are_not_made_again():
    inputs = _inputs()
    program = rolled(jax.make_jaxpr(_gradient(_layers(LAYER)))(*inputs))
    assert program is not None
    assert sum(eqn.primitive.name == "top_k" for eqn in _equations(program.jaxpr)) == 1


@pytest.mark.usefixtures("x64")
def test_second_derivatives():
    """The backward scan is the forward scan of another one."""
    params, x = _inputs()

    def program(params, x):
        gradient = jax.grad(lambda x: jnp.sin(_layers(LAYER)(params, x)).sum())
        return jax.value_and_grad(lambda x: jnp.square(gradient(x)).sum())(x)

    step = moe_xla.moe_jit(program, semantics="exact", compiler_options=QUICK)
    assert_close(step(params, x), quick_jit(program)(params, x), 1e-11)


# --- near misses


def test_work_that_is_left():
    """A contraction whose result has the sizes of an array over all experts, wherever it stands."""

    def program(x, w):
        return lax.scan(lambda x, _: (jnp.einsum("td,edf->etf", x, w).sum((0, 2))[:, None] + x, None), x, length=2)[0]

    closed = jax.make_jaxpr(program)(jnp.ones((5, 3)), jnp.ones((2, 3, 4)))
    assert does_work_of_every_expert(closed, [jnp.ones((5, 2, 4))])
    assert not does_work_of_every_expert(closed, [jnp.ones((5, 3, 4)), jnp.ones((5, 8))])


def printed(params, x):
    def body(x, number):
        jax.debug.print("layer {}", number)
        return x + _expert_layer(params, x), None

    return lax.scan(body, x, jnp.arange(DEPTH))[0]


def drawn_anew(params, x):
    """Numbers from a generator with a state of its own: no two calls give the same."""

    def body(x, _):
        noise = lax.rng_uniform(jnp.zeros((), x.dtype), jnp.ones((), x.dtype), x.shape)
        return x + noise * _expert_layer(params, x), None

    return lax.scan(body, x, None, length=DEPTH)[0]


def printed_once(params, x):
    def body(x, number):
        jax.debug.print("layer {}", number)
        return x + _expert_layer(params, x), None

    return lax.scan(body, x, jnp.arange(1))[0]


@pytest.mark.parametrize("layers", [printed, printed_once, drawn_anew])
@pytest.mark.usefixtures("x64")
def test_what_cannot_be_computed_again_is_left(layers):
    inputs = _inputs()
    program = _gradient(layers)
    before = jax.make_jaxpr(program)(*inputs)
    after = jax.make_jaxpr(moe_xla.rewrite(program, semantics="exact"))(*inputs)
    for name in ("rng_uniform", "debug_callback", "top_k", "dot_general"):
        assert _count(name, after) <= _count(name, before)
    if layers is not drawn_anew:
        step = moe_xla.moe_jit(program, semantics="exact", compiler_options=QUICK)
        assert_close(step(*inputs), quick_jit(program)(*inputs), 1e-11)


def _count(name, closed):
    return sum(eqn.primitive.name == name for eqn in _equations(closed.jaxpr))
