"""Layers that make a list of each expert's tokens by `jnp.nonzero(mask, size=capacity)`, and run on these rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from . import composed
from .form import EXPERTS, TOKENS, form
from .layers import dense_of


def _route(params, x, choices=2):
    gate, index, _ = composed.softmax_normalised(params, x, choices)
    return gate, index


def _expert(params, e, rows):
    return jax.nn.silu(rows @ params["w1"][e] + params["b1"][e]) @ params["w2"][e]


def _weight(mask, gate):
    return jnp.where(mask, gate, 0).sum(-1)


def _listed(mask, capacity, fill=TOKENS):
    return jnp.nonzero(mask, size=capacity, fill_value=fill)[0]


def _add_filled(params, x, y, e, mask, gate, capacity):
    """`y` with what expert e makes of its list; rows out of the list are zero, and are dropped."""
    tokens = _listed(mask.any(-1), capacity, len(x))
    rows = _expert(params, e, x.at[tokens].get(mode="fill", fill_value=0))
    weight = _weight(mask, gate).at[tokens].get(mode="fill", fill_value=0)
    return y.at[tokens].add(rows * weight[:, None], mode="drop")


def _experts(params, rows):
    return jnp.einsum(
        "ecf,efd->ecd",
        jax.nn.silu(jnp.einsum("ecd,edf->ecf", rows, params["w1"]) + params["b1"][:, None]),
        params["w2"],
    )


def _lists(name, exercises, *, choices=2, pattern="expert_loop", grouped=False, padded=False):
    dense = None if padded else dense_of(composed.softmax_normalised, _experts, choices)
    return form(f"list_{name}", exercises, choices=choices, pattern=pattern, grouped=grouped, dense=dense)


@_lists("filled", "rows out of a list are zero, and are dropped")
def list_filled(params, x, capacity):
    gate, index = _route(params, x)
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        y = _add_filled(params, x, y, e, index == e, gate, capacity)
    return y, {}


@_lists("clamped", "rows out of a list are those of the last token, and are dropped")
def list_clamped(params, x, capacity):
    gate, index = _route(params, x)
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        mask = index == e
        (tokens,) = jnp.where(mask.sum(-1) > 0, size=capacity, fill_value=TOKENS)
        y = y.at[tokens].add(_expert(params, e, x[tokens]) * _weight(mask, gate)[tokens, None])
    return y, {}


def _masked_rows(params, x, capacity):
    """What expert e adds to y: rows out of its list are those of the first token, under a mask."""
    gate, index = _route(params, x)
    weight = (jax.nn.one_hot(index, EXPERTS, dtype=x.dtype) * gate[..., None]).sum(1)

    def add(y, e):
        mask = (index == e).any(-1)
        (tokens,) = jnp.nonzero(mask, size=capacity)
        used = jnp.arange(capacity) < mask.sum()
        rows = _expert(params, e, x[tokens]) * weight[tokens, e][:, None]
        return y.at[tokens].add(jnp.where(used[:, None], rows, 0))

    return add


@_lists("masked", "rows out of a list are those of the first token, under a mask")
def list_masked(params, x, capacity):
    add, y = _masked_rows(params, x, capacity), jnp.zeros_like(x)
    for e in range(EXPERTS):
        y = add(y, e)
    return y, {}


@_lists("mapped", "the same under a vmap over experts", pattern="scatter_dispatch")
def list_mapped(params, x, capacity):
    add = _masked_rows(params, x, capacity)
    return jax.vmap(lambda e: add(jnp.zeros_like(x), e))(jnp.arange(EXPERTS)).sum(0), {}


@_lists("scanned", "a scan over experts, whose carry is added to by row")
def list_scanned(params, x, capacity):
    gate, index = _route(params, x)

    def run(y, expert):
        w1, b1, w2, e = expert
        mask = index == e
        tokens = _listed(mask.any(-1), capacity)
        rows = jax.nn.silu(x.at[tokens].get(mode="fill", fill_value=0) @ w1 + b1) @ w2
        weight = _weight(mask, gate).at[tokens].get(mode="fill", fill_value=0)
        return y.at[tokens].add(rows * weight[:, None], mode="drop"), None

    experts = (params["w1"], params["b1"], params["w2"], jnp.arange(EXPERTS))
    return lax.scan(run, jnp.zeros_like(x), experts)[0], {}


@_lists("pairs", "a list of tokens and one of choices")
def list_pairs(params, x, capacity):
    gate, index = _route(params, x)
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        token, choice = jnp.nonzero(index == e, size=capacity, fill_value=TOKENS)
        rows = _expert(params, e, x.at[token].get(mode="fill", fill_value=0))
        y = y.at[token].add(rows * gate.at[token, choice].get(mode="fill", fill_value=0)[:, None], mode="drop")
    return y, {}


@_lists("one_choice", "one choice", choices=1)
def list_one_choice(params, x, capacity):
    gate, index = _route(params, x, choices=1)
    gate, index = gate[:, 0], index[:, 0]
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        tokens = _listed(index == e, capacity)
        y = y.at[tokens].add(_expert(params, e, x[tokens]) * gate[tokens][:, None], mode="drop")
    return y, {}


@_lists("padded", "padding tokens are in no list", padded=True)
def list_padded(params, x, capacity):
    gate, index = _route(params, x)
    valid = x[:, 0] > -0.5
    y = jnp.zeros_like(x)
    for e in range(EXPERTS):
        y = _add_filled(params, x, y, e, (index == e) & valid[:, None], gate, capacity)
    return y, {}


@_lists("groups", "a list for each group", pattern="scatter_dispatch", grouped=True)
def list_groups(params, x, capacity):
    def one_group(x):
        gate, index = _route(params, x)

        def run(e):
            return _add_filled(params, x, jnp.zeros_like(x), e, index == e, gate, capacity)

        return jax.vmap(run)(jnp.arange(EXPERTS)).sum(0)

    return jax.vmap(one_group)(x), {}
