"""Whole layers, each in the style of a well-known code base or of a habit that parts cannot express.

Letters: g groups, s tokens of a group, t tokens, k choices, e experts, c slots, m or d model, f or h hidden.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from . import composed
from .composed import Masks, Parts, one_hot
from .form import (
    BF16,
    EXPERTS,
    FLOAT32,
    GROUP_TOKENS,
    GROUPS,
    MODEL,
    TOKENS,
    form,
    init_layer,
    init_params,
    init_tokens,
)


def pick(expert_of, params, gate, index, x):
    """Reference: every expert on every token of `x[..., m]`, the chosen ones weighted by `gate[..., k]`."""
    flat = x.reshape(-1, x.shape[-1])
    every = expert_of(params, jnp.broadcast_to(flat, (params["wg"].shape[-1], *flat.shape)))
    chosen = every[index.reshape(len(flat), -1), jnp.arange(len(flat))[:, None]]
    return jnp.einsum("tk,tkd->td", gate.reshape(len(flat), -1), chosen).reshape(x.shape)


def dense_of(router, expert_of, choices):
    def dense(params, x):
        gate, index, _ = router(params, x.reshape(-1, x.shape[-1]), choices)
        return pick(expert_of, params, gate, index, x)

    return dense


# --- Switch


@form(
    "switch_flat",
    "cumsum times mask, one-based <=, gate taken after the filter",
    choices=1,
    dense=dense_of(composed.softmax_top_k, composed.mlp, 1),
)
def switch_flat(params, x, capacity):
    probs = jax.nn.softmax(x @ params["wg"], axis=-1)
    index = jnp.argmax(probs, axis=-1)
    mask = one_hot(index, EXPERTS, dtype=x.dtype)
    position = jnp.cumsum(mask, axis=0) * mask
    kept = mask * (position <= capacity)
    gate = jnp.sum(probs * kept, axis=-1)
    slot = jnp.sum(position * kept, axis=-1).astype(jnp.int32) - 1
    dispatch = kept[:, :, None] * one_hot(slot, capacity, dtype=x.dtype)[:, None, :]
    combine = gate[:, None, None] * dispatch
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", dispatch, x), params["w1"]))
    y = jnp.einsum("tec,ecd->td", combine, jnp.einsum("ecf,efd->ecd", hidden, params["w2"]))
    balance = EXPERTS * jnp.sum(mask.mean(0) * probs.mean(0))
    return y, {"balance": balance, "dropped": 1 - kept.sum() / len(x)}


def switch_paper(sliced: bool, params, x, capacity):
    """Positions count from 1 against a float capacity: slot 0 stays empty, or is sliced away."""
    float_capacity = capacity * 1.0
    probs = jax.nn.softmax((x @ params["wg"]).astype(jnp.float32)).astype(x.dtype)
    gate, index = jnp.max(probs, axis=-1), jnp.argmax(probs, axis=-1)
    mask = one_hot(index, EXPERTS, dtype=jnp.float32)
    balance = jnp.mean(jnp.mean(mask, 0) * jnp.mean(probs, 0)) * EXPERTS**2
    position = jnp.cumsum(mask, axis=0) * mask
    mask = mask * jnp.less(position, float_capacity)
    flat = jnp.sum(mask, axis=-1)
    position = jnp.sum(position * mask, axis=-1)
    slots = one_hot(position.astype(jnp.int32), math.ceil(float_capacity), dtype=x.dtype)
    combine = (gate * flat)[:, None, None] * one_hot(index, EXPERTS, dtype=x.dtype)[:, :, None] * slots[:, None, :]
    if sliced:
        combine = combine[..., 1:]
    dispatch = combine.astype(bool)
    buffer = jnp.einsum("td,tec->ecd", x, dispatch)
    y = jnp.einsum("ecd,tec->td", composed.mlp(params, buffer), combine)
    return y, {"balance": balance}


for _name, _sliced in (("switch_paper", False), ("switch_paper_sliced", True)):
    form(
        _name,
        "float capacity, positions from 1, slot 0 " + ("sliced away" if _sliced else "never used"),
        choices=1,
        tight=7,
        loose=TOKENS + 1,
        dense=dense_of(composed.softmax_top_k, composed.mlp, 1),
        tolerance=FLOAT32,
    )(functools.partial(switch_paper, _sliced))


# --- GShard


def gshard(params, x, capacity, *, filtered_offset, dispatch_by, renormalise_after=False, experts_of=None):
    """Top-2 over `x[g,s,m]`; second choices queue behind the first ones, counted before or after the filter."""
    probs = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["wg"]))
    index1 = jnp.argmax(probs, axis=-1)
    mask1 = one_hot(index1, EXPERTS, dtype=x.dtype)
    gate1 = jnp.einsum("gse,gse->gs", probs, mask1)
    without = probs * (1.0 - mask1)
    index2 = jnp.argmax(without, axis=-1)
    mask2 = one_hot(index2, EXPERTS, dtype=x.dtype)
    gate2 = jnp.einsum("gse,gse->gs", without, mask2)
    balance = jnp.mean(probs.mean(1) * mask1.mean(1)) * EXPERTS**2
    if not renormalise_after:
        total = gate1 + gate2 + 1e-9
        gate1, gate2 = gate1 / total, gate2 / total

    position1 = jnp.cumsum(mask1, axis=1) - mask1
    count1 = jnp.sum(mask1, axis=1, keepdims=True)
    asked = mask1.sum() + mask2.sum()
    mask1 = mask1 * (position1 < capacity).astype(mask1.dtype)
    if filtered_offset:
        count1 = jnp.sum(mask1, axis=1, keepdims=True)
    position2 = jnp.cumsum(mask2, axis=1) - mask2 + count1
    mask2 = mask2 * (position2 < capacity).astype(mask2.dtype)
    flat1, flat2 = mask1.sum(-1), mask2.sum(-1)
    slot1 = one_hot(jnp.sum(position1 * mask1, axis=-1).astype(jnp.int32), capacity, dtype=x.dtype)
    slot2 = one_hot(jnp.sum(position2 * mask2, axis=-1).astype(jnp.int32), capacity, dtype=x.dtype)
    if renormalise_after:
        gate1, gate2 = gate1 * flat1, gate2 * flat2
        total = gate1 + gate2
        total = jnp.where(total > 0, total, 1)
        gate1, gate2 = gate1 / total, gate2 / total
    hot1, hot2 = one_hot(index1, EXPERTS, dtype=x.dtype), one_hot(index2, EXPERTS, dtype=x.dtype)
    combine = jnp.einsum("gs,gs,gse,gsc->gsec", gate1, flat1, hot1, slot1)
    combine = combine + jnp.einsum("gs,gs,gse,gsc->gsec", gate2, flat2, hot2, slot2)
    if dispatch_by == "bool":
        dispatch = combine.astype(bool)
    elif dispatch_by == "positive":
        dispatch = (combine > 0).astype(x.dtype)
    else:
        dispatch = jnp.einsum("gse,gsc->gsec", mask1, slot1) + jnp.einsum("gse,gsc->gsec", mask2, slot2)
    buffer = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", buffer, params["w1"]))
    out = jnp.einsum("egch,ehm->egcm", hidden, params["w2"])
    y = jnp.einsum("gsec,egcm->gsm", combine, out)
    return y, {"balance": balance, "over_capacity": 1 - (flat1.sum() + flat2.sum()) / asked}


def _gshard_router(params, x, choices):
    gate, index, probs = composed.softmax_top_k(params, x, choices)
    return gate / (gate.sum(-1, keepdims=True) + 1e-9), index, probs


for _name, _exercises, _options in (
    ("gshard", "offset before the filter, dispatch = bool(combine)", {"filtered_offset": False, "dispatch_by": "bool"}),
    ("gshard_positive", "offset before, combine > 0", {"filtered_offset": False, "dispatch_by": "positive"}),
    ("gshard_masks", "offset before, dispatch from masks", {"filtered_offset": False, "dispatch_by": "masks"}),
    ("gshard_filtered", "offset after the filter, bool(combine)", {"filtered_offset": True, "dispatch_by": "bool"}),
    ("gshard_filtered_masks", "offset after the filter", {"filtered_offset": True, "dispatch_by": "masks"}),
    (
        "gshard_renormalised",
        "gates normalised over what was kept",
        {"filtered_offset": True, "dispatch_by": "positive", "renormalise_after": True},
    ),
):
    _router = composed.softmax_normalised if _options.get("renormalise_after") else _gshard_router
    form(_name, _exercises, choices=2, grouped=True, dense=dense_of(_router, composed.mlp, 2))(
        functools.partial(gshard, **_options)
    )


@form("gshard_flat_int", "ungrouped, integer masks, metrics of the queues", choices=2)
def gshard_flat_int(params, x, capacity):
    logits = x @ params["wg"]
    probs = jax.nn.softmax(logits)
    index1 = jnp.argmax(logits, axis=1)
    mask1 = one_hot(index1, EXPERTS, dtype=jnp.int32)
    index2 = jnp.argmax(jnp.where(mask1 > 0, -jnp.inf, logits), axis=1)
    mask2 = one_hot(index2, EXPERTS, dtype=jnp.int32)
    locations1 = jnp.cumsum(mask1, axis=0) - 1
    locations2 = jnp.cumsum(mask2, axis=0) - 1 + jnp.sum(mask1, axis=0, keepdims=True)
    queue_length = jnp.max(locations2 * mask2)
    counts = mask1.sum(0) + mask2.sum(0)
    mask1 = mask1 * (locations1 < capacity)
    mask2 = mask2 * (locations2 < capacity)
    location1 = jnp.sum(locations1 * mask1, axis=1)
    location2 = jnp.sum(locations2 * mask2, axis=1)
    gates1 = jnp.sum(probs * mask1, axis=1)
    gates2 = jnp.sum(probs * mask2, axis=1)
    total = jnp.maximum(gates1 + gates2, jnp.finfo(x.dtype).eps)
    weights1 = (gates1 / total)[:, None] * mask1
    weights2 = (gates2 / total)[:, None] * mask2
    combine = weights1[:, :, None] * one_hot(location1, capacity, dtype=x.dtype)[:, None, :]
    combine = combine + weights2[:, :, None] * one_hot(location2, capacity, dtype=x.dtype)[:, None, :]
    dispatch = combine > 0
    y = jnp.einsum("sec,ecm->sm", combine, composed.gated(params, jnp.einsum("sec,sm->ecm", dispatch, x)))
    return y, {"counts": counts, "kept": mask1.sum(0) + mask2.sum(0), "queue_length": queue_length}


def _joined_masks(join, filtered, index, mask1, mask2, position1, position2, capacity):
    """hot [t,2,e], position [t,2] and keep [t,2] of first and second choices, put side by side in one of three ways."""
    own = [jnp.sum(p * m, axis=-1) for p, m in ((position1, mask1), (position2, mask2))]
    if join == "masks":
        if filtered:
            mask1, mask2 = mask1 * (position1 < capacity), mask2 * (position2 < capacity)
        return jnp.stack([mask1, mask2], axis=1), jnp.stack(own, axis=1), None
    if join == "stack":
        position = jnp.stack(own, axis=-1)
    elif join == "columns":
        position = jnp.concatenate([own[0][:, None], own[1][:, None]], axis=1)
    else:
        position = jnp.concatenate(own).reshape(2, -1).T
    return one_hot(index, EXPERTS, dtype=jnp.int32), position, position < capacity if filtered else None


def gshard_joined(params, x, capacity, *, join, filtered):
    """Two queues by themselves; one_hot of the positions of both at once."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    mask1, mask2 = (one_hot(index[:, k], EXPERTS, dtype=jnp.int32) for k in range(2))
    position1 = jnp.cumsum(mask1, axis=0) - 1
    position2 = jnp.cumsum(mask2, axis=0) - 1 + mask1.sum(axis=0)
    hot, position, keep = _joined_masks(join, filtered, index, mask1, mask2, position1, position2, capacity)
    slot = one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks(), gate, hot.astype(x.dtype), slot, keep)
    y = jnp.einsum("tec,ecd->td", combine, composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x)))
    return y, {"load": hot.sum((0, 1))}


for _join, _filtered in (("stack", False), ("stack", True), ("columns", True), ("rows", False), ("masks", True)):
    form(
        f"gshard_{_join}{'_filtered' if _filtered else ''}",
        "first and second choices queue apart and are put side by side",
        choices=2,
        dense=dense_of(composed.softmax_normalised, composed.biased, 2),
    )(functools.partial(gshard_joined, join=_join, filtered=_filtered))


@form(
    "grouped_top2_metrics",
    "grouped, metrics of the hidden buffer and of the drops",
    choices=2,
    grouped=True,
    tolerance=FLOAT32,
)
def grouped_top2_metrics(params, x, capacity):
    logits = jnp.einsum("gsm,me->gse", x, params["wg"]).astype(jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    masks, gates, offset, left = [], [], 0.0, probs
    combine = 0.0
    for _ in range(2):
        index = jnp.argmax(left, axis=-1)
        mask = one_hot(index, EXPERTS, dtype=jnp.float32)
        gates.append(jnp.sum(left * mask, axis=-1))
        left = left * (1 - mask)
        masks.append(mask)
    total = gates[0] + gates[1]
    for mask, gate in zip(masks, gates, strict=True):
        position = jnp.cumsum(mask, axis=-2) - mask + offset
        offset = offset + mask.sum(-2, keepdims=True)
        mask = mask * jnp.less(position, capacity)
        slot = jnp.einsum("gse,gse->gs", position, mask)
        weight = (gate / total) * mask.sum(-1)
        weight = jnp.einsum("gs,gse->gse", weight, mask)
        combine = combine + jnp.einsum("gse,gsc->gsec", weight, one_hot(slot.astype(jnp.int32), capacity))
    dispatch = combine.astype(bool).astype(x.dtype)
    combine = combine.astype(x.dtype)
    buffer = jnp.einsum("gsec,gsm->gecm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("gecm,emh->gech", buffer, params["w1"]))
    out = jnp.einsum("gech,ehm->gecm", hidden, params["w2"])
    y = jnp.einsum("gecm,gsec->gsm", out, combine)
    largest = jnp.max(hidden, axis=(0, 2))
    aux = {
        "dead_units": jnp.mean((largest <= 0).astype(x.dtype)),
        "over_capacity": 1 - dispatch.sum() / (2 * GROUPS * GROUP_TOKENS),
        "load": dispatch.sum(axis=(0, 1, 3)),
        "balance": jnp.mean(masks[0].mean(1) * probs.mean(1)),
    }
    return y, aux


@form(
    "queued_choices",
    "three choices, each queued behind the counts of all earlier ones, ranks read by einsum",
    choices=3,
    dense=dense_of(composed.softmax_argmax, composed.biased, 3),
)
def queued_choices(params, x, capacity):
    gates, indices, _ = composed.softmax_argmax(params, x, 3)
    total, dispatch, combine = jnp.zeros((1, EXPERTS), x.dtype), 0, 0
    for k in range(3):
        mask = one_hot(indices[:, k], EXPERTS, dtype=x.dtype)
        position = jnp.einsum("te,te->t", jnp.cumsum(mask, axis=0) - mask + total, mask)
        total = total + mask.sum(axis=0, keepdims=True)
        slot = one_hot(position.astype(jnp.int32), capacity, dtype=x.dtype) * (position < capacity)[:, None]
        term = jnp.einsum("te,tc->tec", mask, slot)
        dispatch, combine = dispatch + term, combine + gates[:, k, None, None] * term
    out = composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x))
    return jnp.einsum("ecd,tec->td", out, combine), {"asked": total[0]}


# --- token-major and choice-major layers with batch rows or groups


def batch_rows(params, x, capacity, *, scatter):
    """`x[b,s,m]`; a row of the batch has its own capacity; C + 1 slots of which slot 0 is sliced away."""
    rows, length, _ = x.shape
    logits = x @ params["wg"]
    _, index = lax.top_k(logits, 2)
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(x.dtype)
    mask = one_hot(index, EXPERTS, dtype=jnp.int32)
    fused = mask.reshape(rows, length * 2, EXPERTS)
    count = jnp.cumsum(fused, axis=1)
    kept = mask * jnp.less_equal(count.reshape(mask.shape), capacity)
    kept_bse = jnp.sum(kept, axis=2)
    if scatter:
        weights = jnp.einsum("bse,bske->bsk", probs, mask)
        gates = jnp.zeros_like(probs)
        gates = gates.at[jnp.arange(rows)[:, None, None], jnp.arange(length)[None, :, None], index].set(weights)
    else:
        gates = probs
    gates = gates * kept_bse
    position = jnp.sum((fused * count).reshape(mask.shape), axis=2) * kept_bse
    slots = one_hot(position, capacity + 1, dtype=jnp.int32)
    combine = (gates[..., None] * slots)[..., 1:]
    dispatch = combine.astype(bool)
    buffer = jnp.einsum("BSM,BSEC->EBCM", x, dispatch)
    hidden = jax.nn.silu(jnp.einsum("EBCM,EMH->EBCH", buffer, params["w1"]))
    hidden = hidden * jnp.einsum("EBCM,EMH->EBCH", buffer, params["w3"])
    out = jnp.einsum("EBCH,EHM->EBCM", hidden, params["w2"])
    y = jnp.einsum("EBCM,BSEC->BSM", out, combine)
    density = jnp.mean(one_hot(index, EXPERTS, dtype=x.dtype).sum(2), axis=1)
    return y, {"balance": jnp.mean(density * probs.mean(1)) * EXPERTS**2}


form(
    "batch_rows",
    "MaxText style: int masks, C+1 slots sliced [1:]",
    choices=2,
    grouped=True,
    tolerance=FLOAT32,
    dense=dense_of(composed.gate_by_einsum, composed.gated, 2),
)(functools.partial(batch_rows, scatter=False))
form(
    "batch_rows_scatter",
    "MaxText style, gates scattered into [b,s,e]",
    choices=2,
    grouped=True,
    tolerance=FLOAT32,
    dense=dense_of(composed.gate_by_einsum, composed.gated, 2),
)(functools.partial(batch_rows, scatter=True))


@form(
    "vision",
    "V-MoE style: choice-major, only the width of one_hot drops, gates are probs x dispatch",
    choices=2,
    grouped=True,
    dense=dense_of(composed.softmax_top_k, composed.biased, 2),
)
def vision(params, x, capacity):
    probs = jax.nn.softmax(x @ params["wg"])
    groups, length, _ = probs.shape
    _, index = lax.top_k(probs, 2)
    queue = one_hot(index.transpose(0, 2, 1).reshape(groups, 2 * length), EXPERTS, dtype=jnp.int32)
    priority = jnp.cumsum(queue, axis=1) * queue - 1
    priority = priority.reshape(groups, 2, length, EXPERTS).transpose(0, 2, 1, 3).max(axis=2)
    dispatch = one_hot(priority, capacity, dtype=bool)
    combine = jnp.einsum("gse,gsec->gsec", probs, dispatch)
    buffer = jnp.einsum("gsec,gsm->egcm", dispatch, x).reshape(EXPERTS, groups * capacity, -1)
    out = composed.biased(params, buffer).reshape(EXPERTS, groups, capacity, -1)
    y = jnp.einsum("gsec,egcm->gsm", combine, out)
    importance = probs.sum(axis=1)
    spread = jnp.var(importance, axis=-1) / jnp.mean(importance, axis=-1) ** 2
    return y, {"importance": spread.mean()}


@form(
    "masked_priority",
    "flaxformer style: float priority - 1.0, all-to-all layout",
    choices=2,
    grouped=True,
    dense=dense_of(composed.softmax_top_k, composed.mlp, 2),
)
def masked_priority(params, x, capacity):
    groups, length, model = x.shape
    logits = jnp.einsum("gtd,de->gte", x, params["wg"])
    probs = jax.nn.softmax(logits, axis=-1)
    _, index = lax.top_k(probs, 2)
    index = jnp.swapaxes(index, 1, 2).reshape(groups, -1)
    mask = one_hot(index, EXPERTS, dtype=jnp.int32)
    priority = jnp.cumsum(mask, axis=1) * mask - 1.0
    priority = priority.reshape(groups, 2, length, EXPERTS)
    priority = jnp.max(jnp.swapaxes(priority, 1, 2), axis=2)
    dispatch = one_hot(priority, capacity, dtype=jnp.bool_)
    combine = jnp.einsum("...te,...tec->...tec", probs, dispatch)
    buffer = jnp.einsum("gtm,gtec->gecm", x, dispatch)
    buffer = buffer.transpose(1, 0, 2, 3).reshape(EXPERTS, groups * capacity, model)
    out = jax.vmap(lambda w1, w2, rows: jax.nn.relu(rows @ w1) @ w2)(params["w1"], params["w2"], buffer)
    out = out.reshape(EXPERTS, groups, capacity, model).transpose(1, 0, 2, 3)
    y = jnp.einsum("gecm,gtec->gtm", out, combine)
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    chosen = jnp.max(mask.reshape(groups, 2, length, EXPERTS), axis=1)
    balance = jnp.mean(chosen.astype(x.dtype).mean(1) * probs.mean(1)) * EXPERTS**2
    return y, {"z_loss": z_loss, "balance": balance}


@form(
    "outer_groups",
    "AXLearn style: masks of rank five, float positions, kernels as left operands",
    choices=2,
    groups=4,
    tokens=4 * GROUP_TOKENS,
    init=lambda rng, dtype: init_layer(rng, dtype, (2, 2, GROUP_TOKENS)),
    dense=dense_of(composed.softmax_top_k, composed.mlp, 2),
)
def outer_groups(params, x, capacity):
    outer, groups, length, _ = x.shape
    probs = jax.nn.softmax(jnp.einsum("ogsm,me->ogse", x, params["wg"]))
    gate, index = lax.top_k(probs, 2)
    index = index.swapaxes(-1, -2).reshape(outer, groups, 2 * length)
    gate = gate.swapaxes(-1, -2).reshape(outer, groups, 2 * length)
    mask = one_hot(index, EXPERTS, dtype=jnp.float32)
    position = jnp.cumsum(mask, axis=-2) * mask - 1.0
    slots = one_hot(position, capacity, dtype=x.dtype)
    combine = gate[..., None, None] * slots
    combine = combine.reshape(outer, groups, 2, length, EXPERTS, capacity).sum(axis=2)
    dispatch = slots.reshape(outer, groups, 2, length, EXPERTS, capacity).sum(axis=2).astype(bool)
    buffer = jnp.einsum("ogsec,ogsm->oegcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("emh,oegcm->oegch", params["w1"], buffer))
    out = jnp.einsum("ehm,oegch->oegcm", params["w2"], hidden)
    out = jnp.einsum("oegcm->ogecm", out)
    return jnp.einsum("ogecm,ogsec->ogsm", out, combine), {}


@form(
    "multi_hot",
    "choices summed before the cumsum over tokens, (p > 0) & (p <= C)",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.mlp, 2),
)
def multi_hot(params, x, capacity):
    gate, index, probs = composed.softmax_normalised(params, x, 2)
    chosen = one_hot(index, EXPERTS, dtype=jnp.int32)
    weights = jnp.sum(chosen * gate[..., None], axis=1)
    mask = jnp.sum(chosen, axis=1)
    position = jnp.cumsum(mask, axis=0) * mask
    valid = (position > 0) & (position <= capacity)
    dispatch = one_hot(position - 1, capacity, dtype=x.dtype) * valid[..., None]
    combine = dispatch * weights[..., None]
    y = jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x)))
    after = dispatch.sum(-1)
    balance = EXPERTS * jnp.sum(lax.stop_gradient(after.mean(0)) * probs.mean(0))
    return y, {"balance_after": balance, "dropped": 1 - after.sum() / mask.sum()}


@form(
    "multi_hot_exclusive",
    "choices summed, exclusive float cumsum, where(.., -1)",
    choices=3,
    dense=dense_of(composed.sigmoid_normalised, composed.gated, 3),
)
def multi_hot_exclusive(params, x, capacity):
    gate, index, _ = composed.sigmoid_normalised(params, x, 3)
    hot = one_hot(index, EXPERTS, dtype=x.dtype)
    weights = jnp.einsum("tk,tke->te", gate, hot)
    mask = jnp.einsum("tke->te", hot)
    position = jnp.cumsum(mask, axis=0) - mask
    position = jnp.where((mask > 0) & (position < capacity), position, -1)
    dispatch = one_hot(position.astype(jnp.int32), capacity, dtype=x.dtype)
    buffer = jnp.einsum("tec,td->ecd", dispatch, x)
    return jnp.einsum("te,tec,ecd->td", weights, dispatch, composed.gated(params, buffer)), {"load": mask.sum(0)}


@form(
    "experts_leading",
    "router, ranks and masks with experts as the leading axis",
    choices=1,
    dense=dense_of(composed.softmax_top_k, composed.mlp, 1),
)
def experts_leading(params, x, capacity):
    probs_et = jax.nn.softmax(jnp.einsum("de,td->et", params["wg"], x), axis=0)
    index = jnp.argmax(probs_et, axis=0)
    mask_et = one_hot(index, EXPERTS, axis=0, dtype=jnp.int32)
    position = jnp.sum((jnp.cumsum(mask_et, axis=1) - 1) * mask_et, axis=0)
    gate = jnp.max(probs_et, axis=0) * (position < capacity)
    slot_ct = one_hot(position, capacity, axis=0, dtype=x.dtype)
    dispatch_ect = mask_et[:, None, :] * slot_ct[None, :, :]
    buffer = jnp.einsum("ect,td->ecd", dispatch_ect, x)
    y = jnp.einsum("ecd,ect,t->td", composed.mlp(params, buffer), dispatch_ect, gate)
    return y, {"balance": EXPERTS * jnp.sum(mask_et.mean(1) * probs_et.mean(1))}


@form(
    "assignment_rows",
    "everything per assignment: rows repeated, masks [a,e,c], token sum at the end",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.gated, 2),
)
def assignment_rows(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    rows = jnp.repeat(x, 2, axis=0)
    hot = one_hot(index.reshape(-1), EXPERTS, dtype=jnp.int32)
    position = jnp.sum(jnp.cumsum(hot, axis=0) * hot, axis=-1) - 1
    mask = (hot[:, :, None] * one_hot(position, capacity, dtype=jnp.int32)[:, None, :]).astype(x.dtype)
    out = composed.gated(params, jnp.einsum("aec,ad->ecd", mask, rows))
    back = jnp.einsum("aec,ecd->ad", mask, out) * gate.reshape(-1)[:, None]
    return back.reshape(TOKENS, 2, MODEL).sum(axis=1), {}


# --- reshapes of the buffer


@form(
    "matmul_masks",
    "masks as [t, e*c] matrices, the buffer reshaped",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.biased, 2),
)
def matmul_masks(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch = jnp.einsum("tke,tkc->tec", hot, slot).reshape(len(x), EXPERTS * capacity)
    combine = jnp.einsum("tk,tke,tkc->tec", gate, hot, slot).reshape(len(x), EXPERTS * capacity)
    buffer = (dispatch.T @ x).reshape(EXPERTS, capacity, MODEL)
    out = composed.biased(params, buffer).reshape(EXPERTS * capacity, MODEL)
    return combine @ out, {"kept": dispatch.sum()}


def _eight_experts(rng, dtype):
    return init_params(rng, dtype, experts=8), init_tokens(rng, dtype, (TOKENS,))


def _split(masks, params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    hot = one_hot(index, 8, dtype=jnp.int32)
    queue = hot.reshape(-1, 8)
    position = jnp.sum((jnp.cumsum(queue, axis=0) - 1) * queue, axis=-1).reshape(index.shape)
    hot, slot = hot.astype(x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(masks, gate, hot, slot, position < capacity)
    return dispatch, combine


@form(
    "experts_split",
    "buffer [e,c,d] reshaped to [devices, e/devices, c, d]",
    choices=2,
    experts=8,
    tight=10,
    init=_eight_experts,
    dense=dense_of(composed.softmax_normalised, functools.partial(composed.mlp, activation=jax.nn.gelu), 2),
)
def experts_split(params, x, capacity):
    dispatch, combine = _split(Masks(), params, x, capacity)
    buffer = jnp.einsum("tec,td->ecd", dispatch, x).reshape(4, 2, capacity, MODEL)
    w1, w2 = params["w1"].reshape(4, 2, MODEL, -1), params["w2"].reshape(4, 2, -1, MODEL)
    hidden = jax.nn.gelu(jnp.einsum("pecd,pedf->pecf", buffer, w1))
    out = jnp.einsum("pecf,pefd->pecd", hidden, w2)
    return jnp.einsum("tec,ecd->td", combine, out.reshape(8, capacity, MODEL)), {}


@form(
    "masks_split",
    "masks [t, devices, e/devices, c]",
    choices=2,
    experts=8,
    tight=10,
    init=_eight_experts,
    dense=dense_of(composed.softmax_normalised, composed.mlp, 2),
)
def masks_split(params, x, capacity):
    dispatch, combine = _split(Masks("product_sum"), params, x, capacity)
    dispatch = dispatch.reshape(len(x), 4, 2, capacity)
    buffer = jnp.einsum("tpec,td->pecd", dispatch, x).reshape(8, capacity, MODEL)
    out = composed.mlp(params, buffer).reshape(4, 2, capacity, MODEL)
    return jnp.einsum("pecd,tpec->td", out, combine.reshape(len(x), 4, 2, capacity)), {}


@form(
    "slots_merged",
    "hidden buffer as [e*c, f] between the matmuls",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.biased, 2),
)
def slots_merged(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(order="choice"), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks(), gate, hot, slot, None)
    buffer = jnp.einsum("tec,td->ecd", dispatch, x)
    hidden = jnp.matmul(buffer, params["w1"]) + params["b1"][:, None]
    hidden = jax.nn.gelu(hidden.reshape(EXPERTS * capacity, -1)).reshape(EXPERTS, capacity, -1)
    out = (jnp.matmul(hidden, params["w2"]) + params["b2"][:, None]).reshape(-1, MODEL)
    return jnp.einsum("ts,sd->td", combine.reshape(len(x), -1), out), {}


# --- groups by vmap, by reshape, by flattening


def vmapped_groups(parts: Parts, params, x, capacity):
    y, aux = jax.vmap(lambda rows: composed.layer(parts, params, rows, capacity))(x)
    return y, {name: value.mean() for name, value in aux.items()}


for _name, _parts in (
    ("vmap_switch", Parts(1, composed.softmax_argmax, rank="cumsum", overflow="one_based")),
    (
        "vmap_width",
        Parts(overflow="width", order="choice", rank_dtype="float32", rank="cumsum", experts=composed.biased),
    ),
    ("vmap_take", Parts(sample="take", rank="lax_cumsum", overflow="where_capacity", experts=composed.gated)),
    (
        "vmap_scan",
        Parts(rank="associative_scan", order="choice", masks=Masks("combine_bool"), experts=composed.vmapped),
    ),
    ("vmap_bias", Parts(router=composed.sigmoid_scaled_choice_bias, overflow="first_slot_sliced")),
):
    form(
        _name,
        "groups by vmap",
        choices=_parts.choices,
        grouped=True,
        dense=lambda params, x, parts=_parts: jax.vmap(functools.partial(composed.dense, parts, params))(x),
    )(functools.partial(vmapped_groups, _parts))


@form(
    "vmap_twice",
    "a vmap over batch rows around a vmap over their groups",
    choices=2,
    groups=4,
    tokens=4 * GROUP_TOKENS,
    init=lambda rng, dtype: init_layer(rng, dtype, (2, 2, GROUP_TOKENS)),
    dense=dense_of(composed.softmax_normalised, composed.gated, 2),
)
def vmap_twice(params, x, capacity):
    parts = Parts(order="choice", experts=composed.gated)
    y, aux = jax.vmap(jax.vmap(lambda rows: composed.layer(parts, params, rows, capacity)))(x)
    return y, {"balance": aux["balance"].mean()}


@form(
    "groups_by_reshape",
    "x[t,d] reshaped into groups and back, masks 'gsec' in another order",
    choices=2,
    groups=GROUPS,
    tokens=GROUPS * GROUP_TOKENS,
    init=lambda rng, dtype: init_layer(rng, dtype, (GROUPS * GROUP_TOKENS,)),
    dense=dense_of(composed.softmax_normalised, composed.mlp, 2),
)
def groups_by_reshape(params, x, capacity):
    grouped = x.reshape(GROUPS, GROUP_TOKENS, MODEL)
    gate, index, _ = composed.softmax_normalised(params, grouped, 2)
    hot = one_hot(index, EXPERTS, dtype=x.dtype)
    queue = hot.reshape(GROUPS, GROUP_TOKENS * 2, EXPERTS)
    position = jnp.einsum("gae,gae->ga", jnp.cumsum(queue, axis=1) - queue, queue).reshape(index.shape)
    slot = one_hot(position.astype(jnp.int32), capacity, dtype=x.dtype)
    dispatch = jnp.einsum("gskc,gske->egcs", slot, hot)
    combine = jnp.einsum("gskc,gske,gsk->cgse", slot, hot, gate)
    buffer = jnp.einsum("egcs,gsm->gecm", dispatch, grouped)
    hidden = jax.nn.relu(jnp.einsum("gecm,emh->gech", buffer, params["w1"]))
    out = jnp.einsum("gech,ehm->cegm", hidden, params["w2"])
    return jnp.einsum("cegm,cgse->gsm", out, combine).reshape(x.shape), {}


@form(
    "flattened_batch",
    "x[b,l,d] flattened into one queue, residual added",
    choices=2,
    tokens=GROUPS * GROUP_TOKENS,
    tight=23,
    init=lambda rng, dtype: init_layer(rng, dtype, (GROUPS, GROUP_TOKENS)),
    dense=lambda params, x: x + dense_of(composed.softmax_normalised, composed.gated, 2)(params, x),
)
def flattened_batch(params, x, capacity):
    y, aux = composed.layer(Parts(experts=composed.gated, overflow="iota"), params, x.reshape(-1, MODEL), capacity)
    return x + y.reshape(x.shape), aux


# --- einsums of many operands, odd masks


@form(
    "einsum_direct",
    "no mask [t,e,c] by name: four-operand einsums dispatch and combine",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.mlp, 2),
)
def einsum_direct(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(), index)
    keep = (position < capacity).astype(x.dtype)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    buffer = jnp.einsum("tk,tke,tkc,td->ecd", keep, hot, slot, x)
    return jnp.einsum("tk,tke,tkc,ecd->td", gate * keep, hot, slot, composed.mlp(params, buffer)), {}


@form(
    "vmap_masks",
    "vmap over experts of mask.T @ x, mlp, mask @ rows",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.mlp, 2),
)
def vmap_masks(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(rank="cumsum"), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks(layout="etc"), gate, hot, slot, position < capacity)

    def expert(mask_tc, weights_tc, w1, w2):
        return weights_tc @ (jax.nn.relu((mask_tc.T @ x) @ w1) @ w2)

    return jax.vmap(expert)(dispatch, combine, params["w1"], params["w2"]).sum(axis=0), {}


@form(
    "gate_on_input",
    "the gate multiplies the rows that go in, not those that come out",
    choices=2,
    dense=lambda params, x: _gate_on_input_dense(params, x),
)
def gate_on_input(params, x, capacity):
    gate, index, _ = composed.sigmoid_normalised(params, x, 2)
    position = composed.positions(Parts(order="choice"), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks(), gate, hot, slot, position < capacity)
    out = composed.biased(params, jnp.einsum("tec,td->ecd", combine, x))
    return jnp.einsum("tec,ecd->td", dispatch, out), {}


def _gate_on_input_dense(params, x):
    gate, index, _ = composed.sigmoid_normalised(params, x, 2)
    return sum(
        pick(composed.biased, params, jnp.ones_like(gate[:, :1]), index[:, k : k + 1], gate[:, k : k + 1] * x)
        for k in range(2)
    )


@form(
    "dropped_pass_through",
    "a token that lost all its choices keeps its input",
    choices=1,
    dense=dense_of(composed.softmax_top_k, composed.gated, 1),
)
def dropped_pass_through(params, x, capacity):
    gate, index, _ = composed.softmax_top_k(params, x, 1)
    position = composed.positions(Parts(1), index)
    slot, keep = one_hot(position, capacity, dtype=x.dtype), position < capacity
    dispatch, combine = composed.build_masks(Masks(), gate, one_hot(index, EXPERTS, dtype=x.dtype), slot, keep)
    y = jnp.einsum("tec,ecd->td", combine, composed.gated(params, jnp.einsum("tec,td->ecd", dispatch, x)))
    return y + x * (1 - dispatch.sum(axis=(1, 2)))[:, None], {}


@form(
    "keep_in_dispatch_only",
    "overflow dropped from dispatch by a comparison, from combine by the width of one_hot; biases fill empty slots",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.biased, 2),
)
def keep_in_dispatch_only(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch = jnp.einsum("tk,tke,tkc->tec", (position < capacity).astype(x.dtype), hot, slot)
    combine = jnp.einsum("tk,tke,tkc->tec", gate, hot, slot)
    return jnp.einsum("tec,ecd->td", combine, composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


@form(
    "clipped_slots",
    "positions clipped into range, overflow masked by keep",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.mlp, 2),
)
def clipped_slots(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(), index)
    keep = (position < capacity).astype(x.dtype)
    slot = one_hot(jnp.clip(position, 0, capacity - 1), capacity, dtype=x.dtype) * keep[..., None]
    dispatch, combine = composed.build_masks(Masks(), gate, one_hot(index, EXPERTS, dtype=x.dtype), slot, None)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


# --- metrics


@form("load_metrics", "loads, drop fractions and losses before and after the filter", choices=2)
def load_metrics(params, x, capacity):
    gate, index, probs = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(order="choice"), index)
    keep = position < capacity
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks(), gate, hot, slot, keep)
    y = jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x)))
    before, after = hot.sum(1), dispatch.sum(axis=2)
    aux = {
        "load_before": before.sum(0),
        "load_after": after.sum(0),
        "dropped": 1.0 - keep.astype(x.dtype).mean(),
        "dropped_by_mask": 1.0 - dispatch.sum() / (2 * len(x)),
        "dropped_per_expert": before.sum(0) - after.sum(0),
        "tokens_lost": jnp.sum(after.sum(1) == 0),
        "balance_before": EXPERTS * jnp.sum(before.mean(0) * probs.mean(0)),
        "balance_after": EXPERTS * jnp.sum(after.mean(0) * probs.mean(0)),
        "kept_weight": combine.sum(axis=(1, 2)),
        "longest_queue": jnp.max(position) + 1,
    }
    return y, aux


@form("dead_units", "largest activation per expert and hidden unit, from the padded buffer", choices=2)
def dead_units(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks("combine_bool"), gate, hot, slot, position < capacity)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", dispatch, x), params["w1"]))
    y = jnp.einsum("tec,ecd->td", combine, jnp.einsum("ecf,efd->ecd", hidden, params["w2"]))
    largest = jnp.max(lax.stop_gradient(hidden), axis=1)
    return y, {"dead": jnp.mean((largest == 0).astype(x.dtype)), "largest": largest}


@form("active_units", "how often a hidden unit is active, counted over the padded buffer", choices=2)
def active_units(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    position = composed.positions(Parts(), index)
    hot, slot = one_hot(index, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(Masks(), gate, hot, slot, None)
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", dispatch, x), params["w1"]))
    y = jnp.einsum("tec,ecd->td", combine, jnp.einsum("ecf,efd->ecd", hidden, params["w2"]))
    return y, {"active": jnp.sum(hidden > 0, axis=1), "l1": jnp.sum(jnp.abs(hidden))}


# --- dtypes


def _bf16(shape):
    def init(rng, dtype):
        del dtype
        params, x = init_layer(rng, jnp.bfloat16, shape)
        return params, x

    return init


@form(
    "all_bf16",
    "bf16 parameters and activations, float32 router and masks",
    choices=2,
    init=_bf16((TOKENS,)),
    tolerance=BF16,
    dense=lambda params, x: dense_of(composed.float32_router, composed.gated, 2)(params, x).astype(jnp.bfloat16),
)
def all_bf16(params, x, capacity):
    parts = Parts(router=composed.float32_router, experts=composed.gated, order="choice")
    gate, index, probs = parts.router(params, x, 2)
    position = composed.positions(parts, index)
    hot, slot = one_hot(index, EXPERTS), one_hot(position, capacity)
    dispatch, combine = composed.build_masks(Masks(), gate, hot, slot, position < capacity)
    buffer = jnp.einsum("tec,td->ecd", dispatch.astype(jnp.bfloat16), x)
    y = jnp.einsum("tec,ecd->td", combine.astype(jnp.bfloat16), composed.gated(params, buffer))
    return y, {"balance": EXPERTS * jnp.sum(hot.sum(1).mean(0) * probs.mean(0))}


@form(
    "int_mask_bf16",
    "int32 mask x bf16 rows, combined in float32, cast back",
    choices=2,
    init=_bf16((TOKENS,)),
    tolerance=BF16,
    dense=lambda params, x: dense_of(composed.float32_router, composed.mlp, 2)(params, x).astype(jnp.bfloat16),
)
def int_mask_bf16(params, x, capacity):
    gate, index, _ = composed.float32_router(params, x, 2)
    position = composed.positions(Parts(rank="cumsum"), index)
    hot, slot = one_hot(index, EXPERTS, dtype=jnp.int32), one_hot(position, capacity, dtype=jnp.int32)
    dispatch = jnp.einsum("tke,tkc->tec", hot, slot)
    combine = jnp.einsum("tk,tke,tkc->tec", gate, hot, slot)
    out = composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))
    return jnp.einsum("tec,ecd->td", combine, out.astype(jnp.float32)).astype(x.dtype), {}


@form(
    "float_positions",
    "float positions into one_hot with -1.0 as none",
    choices=2,
    dense=dense_of(composed.softmax_top_k, composed.mlp, 2),
)
def float_positions(params, x, capacity):
    gate, index, _ = composed.softmax_top_k(params, x, 2)
    queue = one_hot(index.T.reshape(-1), EXPERTS, dtype=jnp.float32)
    position = jnp.sum(jnp.cumsum(queue, axis=0) * queue, axis=-1) - 1.0
    position = jnp.where(position < capacity, position, -1.0).reshape(2, len(x))
    hot, slot = one_hot(index.T, EXPERTS, dtype=x.dtype), one_hot(position, capacity, dtype=x.dtype)
    dispatch = jnp.einsum("kte,ktc->tec", hot, slot)
    combine = jnp.einsum("kt,kte,ktc->tec", gate.T, hot, slot)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


@form(
    "lax_only",
    "written with lax: dot_general, iota comparison, reduce",
    choices=1,
    dense=dense_of(composed.softmax_top_k, composed.mlp, 1),
)
def lax_only(params, x, capacity):
    probs = jax.nn.softmax(lax.dot(x, params["wg"]))
    gate, index = lax.top_k(probs, 1)
    gate, index = gate[:, 0], index[:, 0]
    mask = lax.eq(
        lax.broadcast_in_dim(index, (len(x), EXPERTS), (0,)), lax.broadcasted_iota(jnp.int32, (len(x), EXPERTS), 1)
    )
    queue = lax.cumsum(mask.astype(jnp.int32), axis=0)
    position = lax.select(mask, queue, lax.full_like(queue, 0)).sum(1) - 1
    slots = lax.broadcasted_iota(jnp.int32, (len(x), EXPERTS, capacity), 2)
    dispatch = mask[:, :, None] & (slots == position[:, None, None])
    dispatch = dispatch.astype(x.dtype)
    buffer = lax.dot_general(dispatch, x, (((0,), (0,)), ((), ())))
    hidden = lax.max(lax.dot_general(buffer, params["w1"], (((2,), (1,)), ((0,), (0,)))), jnp.zeros((), x.dtype))
    out = lax.dot_general(params["w2"], hidden, (((1,), (2,)), ((0,), (0,))))  # [e,d,c]
    y = lax.dot_general(dispatch * gate[:, None, None], out, (((1, 2), (0, 2)), ((), ())))
    return y, {}


# --- around the layer


@form(
    "shared_expert",
    "a shared expert beside the routed ones, residual, dropout from a key",
    choices=2,
    dense=lambda params, x: _around(params, x, dense_of(composed.sigmoid_normalised, composed.gated, 2)(params, x)),
)
def shared_expert(params, x, capacity):
    parts = Parts(router=composed.sigmoid_normalised, experts=composed.gated, overflow="one_based")
    y, aux = composed.layer(parts, params, x, capacity)
    return _around(params, x, y), aux


def _around(params, x, routed):
    shared = jax.nn.silu(x @ params["shared1"]) @ params["shared2"]
    keep = jax.random.bernoulli(jax.random.key(11), 0.8, x.shape)
    return x + jnp.where(keep, (routed + shared) / 0.8, 0).astype(x.dtype)


@form(
    "inner_jits",
    "router, masks and experts each under their own jax.jit",
    choices=2,
    dense=dense_of(composed.softmax_normalised, composed.gated, 2),
)
def inner_jits(params, x, capacity):
    @jax.jit
    def route(params, x):
        return composed.softmax_normalised(params, x, 2)

    @jax.jit
    def masks(gate, index):
        position = composed.positions(Parts(rank="cumsum", order="choice"), index)
        hot, slot = one_hot(index, EXPERTS, dtype=gate.dtype), one_hot(position, capacity, dtype=gate.dtype)
        return composed.build_masks(Masks(), gate, hot, slot, jnp.where(position < capacity, True, False))

    gate, index, _ = route(params, x)
    dispatch, combine = masks(gate, index)
    out = jax.jit(composed.gated)(params, jax.jit(functools.partial(jnp.einsum, "tec,td->ecd"))(dispatch, x))
    return jnp.einsum("tec,ecd->td", combine, out), {"kept": dispatch.sum()}
