"""What the tests of all frameworks share: sizes, routing, and how a rewritten step is compared with the untouched.

Letters: B sequences of S tokens, T = B·S tokens, d model, f hidden, E experts, K choices, C capacity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moe_xla
from tests.forms.check import QUICK, assert_close, quick_jit

BATCH, SEQUENCE, MODEL, HIDDEN = 3, 10, 8, 12
TOKENS = BATCH * SEQUENCE
EXPERTS, CHOICES = 4, 2
TIGHT = 11  # slots of an expert: some assignments are dropped
LOOSE = TOKENS  # none is: a token's experts are distinct
TOLERANCE = 5e-5


class Masks(NamedTuple):
    """`dispatch` and `combine` are [T, E, C]; `balance` is the load-balancing loss of Switch (arXiv:2101.03961)."""

    dispatch: jax.Array
    combine: jax.Array
    balance: jax.Array


def einsum_masks(logits: jax.Array, capacity: int) -> Masks:
    """The masks of top-K routing by `logits` [T, E]; all first choices queue before the second ones."""
    probs = jax.nn.softmax(logits)
    gate, chosen = jax.lax.top_k(probs, CHOICES)
    hot = jax.nn.one_hot(chosen, EXPERTS)
    queue = hot.swapaxes(0, 1).reshape(-1, EXPERTS)
    position = (jnp.cumsum(queue, axis=0) - queue).reshape(CHOICES, -1, EXPERTS).swapaxes(0, 1)
    slot = jax.nn.one_hot((position * hot).sum(-1).astype(jnp.int32), capacity)
    dispatch = jnp.einsum("tke,tkc->tec", hot, slot)
    combine = jnp.einsum("tk,tke,tkc->tec", gate / gate.sum(-1, keepdims=True), hot, slot)
    return Masks(dispatch, combine, EXPERTS * jnp.sum(hot[:, 0].mean(0) * probs.mean(0)))


def dense_weights(logits: jax.Array) -> jax.Array:
    """[..., E]: the softmax over each token's chosen logits, zero for the other experts."""
    top, chosen = jax.lax.top_k(logits, CHOICES)
    return jnp.sum(jax.nn.one_hot(chosen, EXPERTS) * jax.nn.softmax(top)[..., None], axis=-2)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def batch() -> dict[str, jax.Array]:
    """Inputs [B, S, d] and targets of the same shape."""
    return {"inputs": normal(0, BATCH, SEQUENCE, MODEL), "targets": normal(1, BATCH, SEQUENCE, MODEL)}


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(outputs - targets))


def assert_step(
    step: Callable[..., Any], inputs: tuple[Any, ...], *, sites: int = 1, bounded: bool = True, tol: float = TOLERANCE
) -> None:
    """Every layer of `step(capacity, *inputs)` is rewritten in both semantics, and its outputs stay what they were.

    `exact` is compared with the untouched step, `dropless` with the untouched step at a capacity that nothing
    overflows.  Of a step that does not depend on its capacity, with `bounded=False`, one is compared.
    """
    tight, loose = (functools.partial(step, capacity) for capacity in (TIGHT, LOOSE))
    untouched = {"exact": quick_jit(tight)(*inputs)}
    if bounded:
        untouched["dropless"] = quick_jit(loose)(*inputs)
        assert _differ(*untouched.values()), "nothing is dropped at the tight capacity"
    for semantics in ("exact", "dropless"):
        rewritten = moe_xla.moe_jit(tight, semantics=semantics, compiler_options=QUICK)
        report = rewritten.explain(*inputs)
        assert [site.status for site in report.sites] == ["rewritten"] * sites, str(report)
        if bounded:
            assert {site.semantics for site in report.sites} == {semantics}, str(report)
        if semantics in untouched:
            assert_close(_numeric(rewritten(*inputs)), _numeric(untouched[semantics]), tol)


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(_numeric(one)), jax.tree.leaves(_numeric(other)), strict=True)
    return any(float(jnp.abs(a - b).max()) > 1e-3 for a, b in pairs)


def _numeric(tree: Any) -> Any:
    """`tree` with its random keys as their data."""
    return jax.tree.map(_data, tree)


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
