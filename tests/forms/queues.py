"""Layers whose choices queue one after the other, each behind what the earlier ones kept, and with padding tokens.

Letters: g groups, s tokens of a group, t tokens, e experts, c slots, m or d model, h hidden.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import composed
from .composed import one_hot
from .form import EXPERTS, form
from .layers import dense_of


def paddings(x):
    """Which tokens of `x[..., s, m]` are padding, as numbers: every fifth."""
    return (jnp.arange(x.shape[-2]) % 5 == 4).astype(x.dtype)


def dense_but_paddings(router, expert_of, choices):
    dense = dense_of(router, expert_of, choices)
    return lambda params, x: dense(params, x) * (1.0 - paddings(x))[:, None]


def queues_of_kept(params, x, capacity, *, dtype, dispatch_by, padded=False):
    """Repeated argmax over `x[g,s,m]`; each choice queues behind what the earlier ones kept."""
    gates = left = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["wg"]))
    offset, combine, dispatch = jnp.zeros((x.shape[0], 1, EXPERTS), dtype), 0.0, 0.0
    for _ in range(3):
        index = jnp.argmax(left, axis=-1)
        mask = one_hot(index, EXPERTS, dtype=dtype)
        if padded:
            mask = mask * (1.0 - paddings(x)).astype(dtype)[:, None]
        left = left * (1 - mask.astype(x.dtype))
        gate = jnp.einsum("gse,gse->gs", gates, mask.astype(x.dtype))
        position = jnp.cumsum(mask, axis=1) - mask + offset
        mask = mask * (position < capacity).astype(dtype)
        offset = offset + jnp.sum(mask, axis=1, keepdims=True)
        own, flat = jnp.einsum("gse,gse->gs", position, mask), mask.sum(-1).astype(x.dtype)
        hot = flat[..., None] * one_hot(index, EXPERTS, dtype=x.dtype)
        term = jnp.einsum("gse,gsc->gsec", hot, one_hot(own.astype(jnp.int32), capacity, dtype=x.dtype))
        dispatch, combine = dispatch + term, combine + gate[..., None, None] * term
    if dispatch_by == "bool":
        dispatch = combine.astype(bool).astype(x.dtype)
    buffer = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", buffer, params["w1"]))
    out = jnp.einsum("egch,ehm->egcm", hidden, params["w2"])
    return jnp.einsum("gsec,egcm->gsm", combine, out), {"kept": offset.astype(x.dtype).mean()}


for _name, _dtype, _dispatch, _padded in (
    ("", jnp.int32, "bool", False),
    ("_float", jnp.float32, "masks", False),
    ("_padded", jnp.int32, "bool", True),
    ("_padded_float", jnp.float32, "masks", True),
):
    form(
        f"queues_of_kept{_name}",
        "three choices, each queued behind what the earlier ones kept" + ", paddings are numbers" * _padded,
        choices=3,
        grouped=True,
        tight=11,
        dense=(dense_but_paddings if _padded else dense_of)(composed.softmax_argmax, composed.mlp, 3),
    )(functools.partial(queues_of_kept, dtype=_dtype, dispatch_by=_dispatch, padded=_padded))


def index_of_padding(params, x, capacity, *, choices, negated):
    """Indices of padding tokens are made negative by arithmetic, so that one_hot drops them."""
    probs = jax.nn.softmax(x @ params["wg"])
    _, index = jax.lax.top_k(probs, choices)
    keep = (1.0 - paddings(x))[:, None]
    index = index * (2 * keep - 1) + (keep - 1) if negated else index - EXPERTS * (1 - keep.astype(jnp.int32))
    hot = one_hot(index.T.reshape(-1), EXPERTS, dtype=jnp.int32)
    position = (jnp.cumsum(hot, axis=0) * hot - 1.0).reshape(choices, len(x), EXPERTS).max(0)
    dispatch = one_hot(position, capacity, dtype=jnp.bool_)
    combine = jnp.einsum("te,tec->tec", probs * keep, dispatch)
    out = composed.biased(params, jnp.einsum("td,tec->ecd", x, dispatch))
    return jnp.einsum("ecd,tec->td", out, combine), {"load": hot.sum(0)}


for _name, _choices, _negated in (("", 2, True), ("_top1", 1, True), ("_shifted", 2, False)):
    form(
        f"index_of_padding{_name}",
        "indices of padding tokens are made negative by arithmetic",
        choices=_choices,
        tight={1: 7, 2: 11}[_choices],
        dense=dense_but_paddings(composed.softmax_top_k, composed.biased, _choices),
    )(functools.partial(index_of_padding, choices=_choices, negated=_negated))


@form(
    "priority_of_groups",
    "groups in an order of priority, float positions brought back by its inverse, put side by side with indices",
    choices=2,
    grouped=True,
    dense=dense_of(composed.softmax_top_k, composed.biased, 2),
    pattern="scatter_dispatch",
)
def priority_of_groups(params, x, capacity):
    groups, length, model = x.shape
    gate, index = jax.lax.top_k(jax.nn.softmax(x @ params["wg"]), 2)
    order = jnp.argsort(-gate[..., 0], axis=-1)
    index = jnp.take_along_axis(index, order[..., None], axis=1)
    flat = index.swapaxes(1, 2).reshape(groups, -1)
    hot = one_hot(flat, EXPERTS, dtype=jnp.int32)
    position = (jnp.cumsum(hot, axis=1) * hot - 1.0).max(-1).reshape(groups, 2, length).swapaxes(1, 2)
    back = jnp.argsort(order, axis=-1)[..., None]
    index, position = jnp.take_along_axis(index, back, axis=1), jnp.take_along_axis(position, back, axis=1)
    gate = gate * (position < capacity)
    places = jnp.stack([index, position], axis=-1).astype(jnp.int32).reshape(groups, -1, 2)
    buffer = jax.vmap(
        lambda at, rows: jnp.zeros((EXPERTS, capacity, model), x.dtype).at[at[:, 0], at[:, 1]].add(rows, mode="drop")
    )(places, jnp.repeat(x, 2, axis=1))
    out = jax.vmap(functools.partial(composed.biased, params))(buffer)
    rows = jax.vmap(lambda out, at: out.at[at[:, 0], at[:, 1]].get(mode="fill", fill_value=0))(out, places)
    return jnp.einsum("gskm,gsk->gsm", rows.reshape(groups, length, 2, model), gate), {"load": hot.sum((0, 1))}


@form(
    "tokens_left_behind",
    "how many tokens got a slot, and the largest weight of each, as maxima of masks over experts and slots",
    choices=2,
    grouped=True,
    dense=dense_of(composed.softmax_top_k, composed.biased, 2),
)
def tokens_left_behind(params, x, capacity):
    groups, length, _ = x.shape
    gate, index = jax.lax.top_k(jax.nn.softmax(x @ params["wg"]), 2)
    hot = one_hot(index.swapaxes(1, 2).reshape(groups, -1), EXPERTS, dtype=jnp.int32)
    position = (jnp.cumsum(hot, axis=1) * hot - 1).max(-1).reshape(groups, 2, length).swapaxes(1, 2)
    expert, slot = (one_hot(i, n, dtype=jnp.int32) for i, n in ((index, EXPERTS), (position, capacity)))
    dispatch = jnp.einsum("gske,gskc->gsec", expert, slot)
    combine = jnp.einsum("gsk,gske,gskc->gsec", gate, expert.astype(x.dtype), slot.astype(x.dtype))
    found = jnp.max(dispatch, axis=(-1, -2)), jnp.max(dispatch.astype(bool), axis=(-1, -2))
    out = jax.vmap(functools.partial(composed.biased, params))(jnp.einsum("gsm,gsec->gecm", x, dispatch))
    aux = {
        "left_behind": 1.0 - found[0].sum() / x[..., 0].size,
        "with_slot": found[1].sum(),
        "largest": jax.lax.stop_gradient(combine).max((-1, -2)),
        "smallest": jax.lax.stop_gradient(-combine).max((-1, -2)),
    }
    return jnp.einsum("gecm,gsec->gsm", out, combine), aux


@form(
    "maxima_by_stages",
    "largest activations of each expert, as maxima over groups and slots one after the other",
    choices=2,
    grouped=True,
    dense=dense_of(composed.softmax_top_k, composed.mlp, 2),
)
def maxima_by_stages(params, x, capacity):
    gate, index = jax.lax.top_k(jax.nn.softmax(x @ params["wg"]), 2)
    expert = one_hot(index, EXPERTS)
    slot = one_hot(jax.vmap(functools.partial(composed.positions, composed.Parts()))(index), capacity)
    dispatch = jnp.einsum("gske,gskc->gsec", expert, slot)
    hidden = jnp.einsum("egcm,emh->egch", jnp.einsum("gsec,gsm->egcm", dispatch, x), params["w1"])
    seen = jax.lax.stop_gradient(hidden)
    filled = jnp.einsum("gsec->egc", dispatch)[..., None]
    aux = {
        "dead": (jnp.max(jnp.max(seen, axis=1), axis=1) <= 0).sum(),
        "largest": jnp.max(jnp.max(seen, axis=2), axis=1),
        "largest_of_filled": jnp.max(jnp.max(seen - 10 * (1 - filled), axis=1), axis=1),
        "active": jnp.any(jnp.any(seen > 0.5, axis=1), axis=1).sum(0),
    }
    out = jnp.einsum("egch,ehm->egcm", jax.nn.relu(hidden), params["w2"])
    return jnp.einsum("egcm,gsec,gsk,gske->gsm", out, dispatch, gate, expert), aux
