"""Lists of each expert's tokens: what looks like one and is not must be left, or be right as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from tests.forms import composed
from tests.forms.check import QUICK, assert_close, quick_jit
from tests.forms.form import EXPERTS, TOKENS, init_layer, mixed_loss
from tests.forms.lists import _expert, _listed, _weight

CAPACITY = 13


def _layer(*, mask=None, fill=TOKENS, tokens=None, weights=None, put=None, read=None, metrics=None):
    """A layer with one step changed: who is listed, what stands behind a list, which rows are read and written."""

    def layer(params, x):
        gate, index, probs = composed.softmax_normalised(params, x, 2)

        def run(e):
            chosen = index == e
            listed = _listed(mask(index, probs, e) if mask else chosen.any(-1), CAPACITY, fill)
            listed = tokens(listed) if tokens else listed
            rows = _expert(params, e, read(x, listed) if read else x.at[listed].get(mode="fill", fill_value=0))
            weight = weights(index, gate, e) if weights else _weight(chosen, gate)
            rows = rows * weight.at[listed].get(mode="fill", fill_value=0)[:, None]
            y = put(jnp.zeros_like(x), listed, rows) if put else jnp.zeros_like(x).at[listed].add(rows, mode="drop")
            return y, metrics(chosen, listed) if metrics else {}

        y, aux = jax.vmap(run)(jnp.arange(EXPERTS))
        return y.sum(0), aux

    return layer


def _next_weights(index, gate, e):
    return _weight(index == (e + 1) % EXPERTS, gate)


def _counted_twice(index, probs, e):
    """Both choices are one, so that a token may stand in a list for either."""
    return (index % 3 == e).any(-1)


NOT_LISTS = {
    "threshold": _layer(mask=lambda index, probs, e: probs[:, e] > 0.2),
    "either_of_two": _layer(mask=lambda index, probs, e: ((index == e) | (index == (e + 1) % EXPERTS)).any(-1)),
    "modulo": _layer(mask=_counted_twice),
    "not_chosen": _layer(mask=lambda index, probs, e: (index != e).all(-1)),
    "behind_is_first_token": _layer(fill=0),
    "behind_is_last_token": _layer(fill=-1),
    "behind_is_some_token": _layer(fill=TOKENS - 3),
    "next_token": _layer(tokens=lambda t: t + 1),
    "halved": _layer(tokens=lambda t: t // 2),
    "reversed": _layer(tokens=lambda t: t[::-1]),
    "rolled": _layer(tokens=lambda t: jnp.roll(t, 1)),
    "sorted": _layer(tokens=lambda t: -jnp.sort(-t)),
    "set": _layer(put=lambda y, t, rows: y.at[t].set(rows, mode="drop")),
    "largest": _layer(put=lambda y, t, rows: y.at[t].max(rows, mode="drop")),
    "in_place": _layer(put=lambda y, t, rows: y.at[: len(t)].add(rows)),
    "tokens_in_order": _layer(read=lambda x, t: x[: len(t)]),
    "another_weight": _layer(weights=_next_weights),
}


def _step(layer):
    def loss(params, x):
        y, aux = layer(params, x)
        return mixed_loss(y, aux), (y, aux)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("semantics", ["exact", "dropless"])
@pytest.mark.parametrize("name", NOT_LISTS)
def test_other_lists_are_left_or_right(name, semantics):
    inputs = init_layer(np.random.default_rng(5), jnp.float64, (TOKENS,))
    step = moe_xla.moe_jit(_step(NOT_LISTS[name]), semantics=semantics, compiler_options=QUICK)
    sites = step.explain(*inputs).sites
    assert name in ("another_weight",) or not any(site.status == "rewritten" for site in sites)
    if not any(site.semantics == "dropless" for site in sites):
        assert_close(step(*inputs), quick_jit(_step(NOT_LISTS[name]))(*inputs), 1e-11)


TELLS_CAPACITY = {
    "used": lambda chosen, listed: {"used": (listed < TOKENS).mean(dtype=float)},
    "overflow": lambda chosen, listed: {"lost": jnp.maximum(chosen.sum() - CAPACITY, 0).astype(float)},
    "last": lambda chosen, listed: {"last": listed[-1]},
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", TELLS_CAPACITY)
def test_lists_that_tell_the_capacity_are_not_dropless(name):
    inputs = init_layer(np.random.default_rng(5), jnp.float64, (TOKENS,))
    layer = _layer(metrics=TELLS_CAPACITY[name])
    step = moe_xla.moe_jit(_step(layer), semantics="dropless", compiler_options=QUICK)
    assert not any(site.semantics == "dropless" for site in step.explain(*inputs).sites)
    assert_close(step(*inputs), quick_jit(_step(layer))(*inputs), 1e-11)
