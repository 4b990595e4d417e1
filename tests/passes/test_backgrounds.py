"""What empty slots hold, where an array over slots is laid out in another way before it is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from tests.forms.check import QUICK, assert_close, quick_jit
from tests.forms.form import EXPERTS, TOKENS, init_layer

CAPACITY = 7

pytestmark = pytest.mark.usefixtures("x64")


def _layer(look, params, x):
    """Experts with biases; `look` makes an output of the weights [t, e, c] and of the slots [e, c, d]."""
    probs = jax.nn.softmax(x @ params["wg"])
    chosen = jax.nn.one_hot(probs.argmax(-1), EXPERTS, dtype=jnp.int32)
    position = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(-1)
    mask = jax.nn.one_hot(position, CAPACITY, dtype=x.dtype)[:, None] * chosen[..., None]
    rows = jnp.einsum("tec,td->ecd", mask, x)
    hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", rows, params["w1"]) + params["b1"][:, None])
    out = jnp.einsum("ecf,efd->ecd", hidden, params["w2"]) + params["b2"][:, None]
    return look(mask * probs.max(-1)[:, None, None], out)


def _beside_zeros(out):
    """[e, c, 2, d]: the slots, and zeros."""
    return jnp.pad(out[:, :, None], ((0, 0), (0, 0), (0, 1), (0, 0)))


def padded(weights, out):
    return jnp.einsum("tec,ecod->td", weights, _beside_zeros(out))


def padded_exponentials(weights, out):
    return jnp.einsum("tec,ecod->td", weights, jnp.exp(_beside_zeros(out)))


def padded_total(weights, out):
    return jnp.einsum("tec,ecd->td", weights, out) + jnp.exp(_beside_zeros(out)).sum((1, 2)).mean(0)


def padded_mean(weights, out):
    return jnp.einsum("tec,ecd->td", weights, out) + jnp.cos(_beside_zeros(out)).mean()


def padded_features(weights, out):
    wide = jnp.exp(jnp.pad(out, ((0, 0), (0, 0), (1, 2))))
    return jnp.einsum("tec,ecd->td", weights, wide) + wide.mean()


def more_slots(weights, out):
    more = jnp.exp(jnp.pad(out, ((0, 0), (0, 2), (0, 0))))
    return jnp.einsum("tec,ecd->td", weights, more[:, :CAPACITY]) + more.mean()


def beside_their_negatives(weights, out):
    both = jnp.exp(jnp.stack([out, -out], axis=2))
    return jnp.einsum("tec,ecod->td", weights, both) + both.mean()


@pytest.mark.parametrize(
    "look",
    [
        padded,
        padded_exponentials,
        padded_total,
        padded_mean,
        padded_features,
        more_slots,
        beside_their_negatives,
    ],
)
def test_empty_slots_laid_out(look):
    inputs = init_layer(np.random.default_rng(5), jnp.float64, (TOKENS,))

    def loss(params, x):
        y = _layer(look, params, x)
        return jnp.sin(y).sum(), y

    step = moe_xla.moe_jit(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), semantics="exact", compiler_options=QUICK
    )
    assert_close(step(*inputs), quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*inputs), 1e-11)
    forward = moe_xla.moe_jit(_layer, semantics="exact", static_argnums=0, compiler_options=QUICK)
    assert_close(forward(look, *inputs), quick_jit(lambda *args: _layer(look, *args))(*inputs), 1e-11)
    if look in (padded, padded_exponentials, padded_total, padded_mean):
        assert [s.status for s in forward.explain(look, *inputs).sites] == ["rewritten"]
