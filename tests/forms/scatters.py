"""Layers that scatter rows into their slots and gather them back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import composed
from .composed import Parts
from .form import EXPERTS, MODEL, form
from .layers import dense_of

CHOICES = 2


def _zeros(capacity, x, experts=EXPERTS):
    return jnp.zeros((experts, capacity, MODEL), x.dtype)


def _drop(x, e, slot, capacity):
    return _zeros(capacity, x).at[e, slot].set(jnp.repeat(x, CHOICES, axis=0), mode="drop")


def _add(x, e, slot, capacity):
    return _zeros(capacity, x).at[e, slot].add(jnp.repeat(x, CHOICES, axis=0))


def _far_slot(x, e, slot, capacity):
    return _zeros(capacity, x).at[e, jnp.where(slot < capacity, slot, capacity)].set(jnp.repeat(x, CHOICES, axis=0))


def _clamped(x, e, slot, capacity):
    keep = (slot < capacity)[:, None]
    rows = jnp.where(keep, jnp.repeat(x, CHOICES, axis=0), 0)
    return _zeros(capacity, x).at[e, jnp.minimum(slot, capacity - 1)].add(rows)


def _to_slot_zero(x, e, slot, capacity):
    keep = slot < capacity
    rows = jnp.repeat(x, CHOICES, axis=0) * keep[:, None]
    return _zeros(capacity, x).at[e, jnp.where(keep, slot, 0)].add(rows)


def _spare_slot(x, e, slot, capacity):
    rows = jnp.repeat(x, CHOICES, axis=0)
    return _zeros(capacity + 1, x).at[e, jnp.minimum(slot, capacity)].add(rows)[:, :capacity]


def _flat(x, e, slot, capacity):
    place = jnp.where(slot < capacity, e * capacity + slot, EXPERTS * capacity)
    buffer = jnp.zeros((EXPERTS * capacity, MODEL), x.dtype)
    rows = jnp.repeat(x, CHOICES, axis=0)
    return buffer.at[place].set(rows, mode="drop").reshape(EXPERTS, capacity, MODEL)


def _by_token_id(x, e, slot, capacity):
    token = jnp.arange(e.size) // CHOICES
    return _zeros(capacity, x).at[e, slot].set(x[token], mode="drop")


def _over_choices(x, e, slot, capacity):
    buffer = _zeros(capacity, x)
    e, slot = e.reshape(-1, CHOICES), slot.reshape(-1, CHOICES)
    for k in range(CHOICES):
        buffer = buffer.at[e[:, k], slot[:, k]].add(x, mode="drop")
    return buffer


def _fill(out, weight, e, slot, capacity):
    return out.at[e, slot].get(mode="fill", fill_value=0) * weight[:, None]


def _masked(out, weight, e, slot, capacity):
    return out[e, slot] * (weight * (slot < capacity))[:, None]


def _where(out, weight, e, slot, capacity):
    return jnp.where((slot < capacity)[:, None], out[e, slot] * weight[:, None], 0)


def _from_slot_zero(out, weight, e, slot, capacity):
    keep = slot < capacity
    return jnp.where(keep[:, None], out[e, jnp.where(keep, slot, 0)], 0) * weight[:, None]


def _flat_where(out, weight, e, slot, capacity):
    keep = slot < capacity
    rows = out.reshape(EXPERTS * capacity, MODEL)[jnp.where(keep, e * capacity + slot, 0)]
    return jnp.where(keep[:, None], rows, 0) * weight[:, None]


def _taken(out, weight, e, slot, capacity):
    keep = slot < capacity
    rows = jnp.take(out.reshape(EXPERTS * capacity, MODEL), jnp.where(keep, e * capacity + slot, 0), axis=0)
    return rows * (weight * keep)[:, None]


def _visible(out, weight, e, slot, capacity):
    """A slot out of range reads the last one: who overflows is given the row of another token."""
    return out[e, slot] * weight[:, None]


def _tokens_summed(rows):
    return rows.reshape(-1, CHOICES, MODEL).sum(axis=1)


def _segments_summed(rows):
    token = jnp.arange(len(rows)) // CHOICES
    return jax.ops.segment_sum(rows, token, num_segments=len(rows) // CHOICES)


def scattered(params, x, capacity, *, dispatch, combine, summed=_tokens_summed, experts=composed.biased):
    gate, index, probs = composed.softmax_normalised(params, x, CHOICES)
    slot = composed.positions(Parts(), index).reshape(-1)
    e, weight = index.reshape(-1), gate.reshape(-1)
    rows = combine(experts(params, dispatch(x, e, slot, capacity)), weight, e, slot, capacity)
    load = jnp.zeros(EXPERTS, x.dtype).at[e].add(1)
    return summed(rows), {"balance": jnp.sum(load / e.size * probs.mean(0)) * EXPERTS}


FORMS = {
    "drop": (_drop, _fill, {}),
    "add": (_add, _masked, {}),
    "far_slot": (_far_slot, _where, {}),
    "clamped": (_clamped, _where, {}),
    "to_slot_zero": (_to_slot_zero, _from_slot_zero, {}),
    "spare_slot": (_spare_slot, _masked, {}),
    "flat": (_flat, _flat_where, {}),
    "taken": (_by_token_id, _taken, {}),
    "over_choices": (_over_choices, _fill, {}),
    "segments": (_drop, _masked, {"summed": _segments_summed}),
    "gated": (_drop, _fill, {"experts": composed.gated}),
    "visible": (_drop, _visible, {}),
}

for _name, (_dispatch, _combine, _rest) in FORMS.items():
    form(
        f"scatter_{_name}",
        "rows scattered into slots and gathered back",
        choices=CHOICES,
        pattern="scatter_dispatch",
        dense=dense_of(composed.softmax_normalised, _rest.get("experts", composed.biased), CHOICES),
    )(functools.partial(scattered, dispatch=_dispatch, combine=_combine, **_rest))


@form(
    "scatter_groups",
    "a vmap over groups of a layer that scatters and gathers",
    choices=CHOICES,
    grouped=True,
    pattern="scatter_dispatch",
    dense=dense_of(composed.softmax_normalised, composed.gated, CHOICES),
)
def scatter_groups(params, x, capacity):
    layer = functools.partial(scattered, dispatch=_drop, combine=_fill, experts=composed.gated)
    y, aux = jax.vmap(lambda rows: layer(params, rows, capacity))(x)
    return y, {"balance": aux["balance"].mean()}


@form(
    "scatter_groups_visible",
    "a vmap over groups of a layer in which who overflows is given the row of another token",
    choices=CHOICES,
    grouped=True,
    pattern="scatter_dispatch",
    dense=dense_of(composed.softmax_normalised, composed.gated, CHOICES),
)
def scatter_groups_visible(params, x, capacity):
    layer = functools.partial(scattered, dispatch=_drop, combine=_visible, experts=composed.gated)
    y, aux = jax.vmap(lambda rows: layer(params, rows, capacity))(x)
    return y, {"balance": aux["balance"].mean()}
