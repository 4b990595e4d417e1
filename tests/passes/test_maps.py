"""Scans over tokens, of which each picks its experts by numbers of its own, become operations on all tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import moe_xla
from tests.forms import dense, maps
from tests.forms.check import QUICK, assert_close, quick_jit
from tests.forms.dense import CHOICES
from tests.forms.form import EXPERTS, TOKENS, init_layer
from tests.forms.switches import branches_of

pytestmark = pytest.mark.usefixtures("x64")


def _inputs():
    return init_layer(np.random.default_rng(7), jnp.float64, (TOKENS,))


def _gradient(layer):
    return jax.value_and_grad(lambda params, x: jnp.sin(layer(params, x)).sum(), argnums=(0, 1))


def _rewritten(program):
    """The step, and what became of its layers; it gives what the program gives."""
    step = moe_xla.moe_jit(program, semantics="exact", compiler_options=QUICK)
    sites = step.explain(*_inputs()).sites
    assert_close(step(*_inputs()), quick_jit(program)(*_inputs()), 1e-11)
    return step, [(s.status, s.tokens, s.experts, s.choices) for s in sites]


def _scans(step):
    return str(step.trace(*_inputs()).jaxpr).count(" scan[")


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("map_switch", lambda layer: layer),
        ("map_switch", jax.checkpoint),
        ("scan_switch_of_pairs", lambda layer: layer),
        ("map_matrices", jax.checkpoint),
        ("map_of_loops", jax.checkpoint),
    ],
)
def test_in_a_scan_over_layers(name, around):
    def layers(params, x):
        layer = around(dense.LAYERS[name])
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params)
        return lax.scan(lambda x, p: (x + layer(p, x), None), x, stacked)[0]

    _, found = _rewritten(_gradient(layers))
    assert set(found) == {("rewritten", TOKENS, EXPERTS, CHOICES)}


def test_tokens_in_chunks():
    """Each iteration takes as many tokens as the user says, and finds its experts' rows among them."""

    def layer(params, x):
        gate, index = dense.route(params, x)

        def token(each):
            h, i, g = each
            return sum(g[k] * lax.switch(i[k], branches_of(params), h) for k in range(CHOICES))

        return lax.map(token, (x, index, gate), batch_size=8)

    _, found = _rewritten(layer)
    assert {status for status, *_ in found} == {"rewritten"}


# --- scans that stay


def state_of_the_last_token(params, x):
    """What a token gets depends on what the one before it got."""
    _, index = dense.route(params, x)

    def token(state, each):
        h, i = each
        state = lax.switch(i[0], branches_of(params), h + state)
        return state, state

    return lax.scan(token, jnp.zeros_like(x[0]), (x, index))[1]


def experts_or_nothing(params, x):
    """A mixture of depths: a token that is not picked goes on as it is."""
    picked = x[:, 0] > 0
    return lax.map(lambda each: lax.cond(each[1], branches_of(params)[0], lambda h: h, each[0]), (x, picked))


def branches_of_many_kinds(params, x):
    """No two branches are one function of different weights."""
    _, index = dense.route(params, x)
    kinds = [jnp.sin, jnp.tanh, lambda h: h @ params["wg"] @ params["wg"].T, jnp.cos, branches_of(params)[0]]
    return lax.map(lambda each: lax.switch(each[1][0], kinds, each[0]), (x, index))


def noisy(params, x):
    """Random bits of one token after the other are not those of all tokens."""
    _, index = dense.route(params, x)

    def token(each):
        h, i, key = each
        return maps.one(params, h + jax.random.normal(key, h.shape, h.dtype), i[0])

    return lax.map(token, (x, index, jax.random.split(jax.random.key(0), len(x))))


@pytest.mark.parametrize("layer", [state_of_the_last_token, experts_or_nothing, branches_of_many_kinds, noisy])
def test_what_stays_as_it_is_written(layer):
    for program in (layer, _gradient(layer)):
        step = moe_xla.moe_jit(program, semantics="exact", compiler_options=QUICK)
        assert [s for s in step.explain(*_inputs()).sites if s.status == "rewritten" and s.tokens > 1] == []
        assert _scans(step) == str(jax.make_jaxpr(program)(*_inputs())).count(" scan[")
        assert_close(step(*_inputs()), quick_jit(program)(*_inputs()), 1e-12)


def test_other_scans_stay_beside_a_layer():
    def both(params, x):
        return branches_of_many_kinds(params, dense.LAYERS["map_switch"](params, x))

    step, found = _rewritten(both)
    assert found == [("rewritten", TOKENS, EXPERTS, CHOICES)]
    assert _scans(step) == 1
