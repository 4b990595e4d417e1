"""Layers whose queues are not in the order of the tokens: sorted by expert, or by priority."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from . import composed
from .form import EXPERTS, MODEL, TOKENS, form
from .layers import dense_of

CHOICES = 2


def _bincount(expert):
    return jnp.bincount(expert, length=EXPERTS)


def _one_hots(expert):
    return jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32).sum(0)


def _segments(expert):
    return jax.ops.segment_sum(jnp.ones_like(expert), expert, num_segments=EXPERTS)


def _added(expert):
    return jnp.zeros(EXPERTS, jnp.int32).at[expert].add(1)


def _starts(counts):
    return jnp.cumsum(counts) - counts


def _shifted(counts):
    return jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum(counts)[:-1]])


def _counted(counts, starts):
    """Where experts begin, from how many assignments each has."""
    return lambda every, ordered: starts(counts(every))


def _searched(every, ordered):
    return jnp.searchsorted(ordered, jnp.arange(EXPERTS))


def _ordered_counted(every, ordered):
    return _starts(_bincount(ordered))


def sort_by_expert(params, x, capacity, *, begins, clamps=False):
    """Assignments sorted by expert; a slot is the place in that order, less where the expert's begin."""
    gate, index, _ = composed.softmax_normalised(params, x, CHOICES)
    expert = index.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    begin = begins(expert, expert[order])
    expert, token, gate = expert[order], order // CHOICES, gate.reshape(-1)[order]
    slot = jnp.arange(expert.size) - begin[expert]
    keep, empty = slot < capacity, jnp.zeros((EXPERTS, capacity, MODEL), x.dtype)
    if clamps:
        slot = jnp.where(keep, slot, 0)
        buffer = empty.at[expert, slot].add(jnp.where(keep[:, None], x[token], 0))
        rows = jnp.where(keep[:, None], composed.biased(params, buffer)[expert, slot], 0)
    else:
        buffer = empty.at[expert, slot].set(x[token], mode="drop")
        rows = composed.biased(params, buffer).at[expert, slot].get(mode="fill", fill_value=0)
    return jax.ops.segment_sum(rows * gate[:, None], token, num_segments=len(x)), {}


SORTED = {
    "bincount": {"begins": _counted(_bincount, _starts)},
    "one_hots": {"begins": _counted(_one_hots, _shifted)},
    "segments": {"begins": _counted(_segments, _starts), "clamps": True},
    "added": {"begins": _counted(_added, _shifted)},
    "searched": {"begins": _searched},
}

for _name, _parts in SORTED.items():
    form(
        f"sort_{_name}",
        "slots from a sort by expert",
        choices=CHOICES,
        pattern="sort_dispatch",
        dense=dense_of(composed.softmax_normalised, composed.biased, CHOICES),
    )(functools.partial(sort_by_expert, **_parts))


@form(
    "sort_groups",
    "one sort by expert per group under vmap, counts of what is sorted",
    choices=CHOICES,
    grouped=True,
    pattern="sort_dispatch",
    dense=dense_of(composed.softmax_normalised, composed.biased, CHOICES),
)
def sort_groups(params, x, capacity):
    def group(x):
        return sort_by_expert(params, x, capacity, begins=_ordered_counted)[0]

    return jax.vmap(group)(x), {}


def _gathered(array, order):
    return array[order]


def _along_axis(array, order):
    return jnp.take_along_axis(array, order[:, None], axis=0)


def priority_positions(index, gate, take):
    """Slots of tokens that queue in the order of their gates, first choices before second ones."""
    order = jnp.argsort(-gate[:, 0])
    queue = jax.nn.one_hot(take(index, order).T.reshape(-1), EXPERTS, dtype=jnp.int32)
    position = ((jnp.cumsum(queue, axis=0) - 1) * queue).sum(-1).reshape(CHOICES, TOKENS).T
    return take(position, jnp.argsort(order))


def by_priority(params, x, capacity, *, take):
    gate, index, _ = composed.softmax_normalised(params, x, CHOICES)
    position = priority_positions(index, gate, take)
    hot, slot = jax.nn.one_hot(index, EXPERTS), jax.nn.one_hot(position, capacity)
    buffer = jnp.einsum("tke,tkc,td->ecd", hot, slot, x)
    return jnp.einsum("tk,tke,tkc,ecd->td", gate, hot, slot, composed.gated(params, buffer)), {}


def by_priority_scattered(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, CHOICES)
    slot = priority_positions(index, gate, _gathered).reshape(-1)
    expert, weight = index.reshape(-1), gate.reshape(-1) * (slot < capacity)
    buffer = jnp.zeros((EXPERTS, capacity, MODEL), x.dtype).at[expert, slot].add(jnp.repeat(x, CHOICES, axis=0))
    rows = composed.gated(params, buffer).at[expert, slot].get(mode="fill", fill_value=0) * weight[:, None]
    return rows.reshape(TOKENS, CHOICES, MODEL).sum(1), {}


def by_priority_in_order(params, x, capacity, *, take):
    """Rows are dispatched in the order, and their experts and slots brought back."""
    gate, index, _ = composed.softmax_normalised(params, x, CHOICES)
    order = jnp.argsort(gate[:, 0], descending=True)
    back, expert = jnp.argsort(order), index[order]
    slot = composed.positions(composed.Parts(), expert)
    rows = x[order][:, None].repeat(CHOICES, 1)
    buffer = jnp.zeros((EXPERTS, capacity, MODEL), x.dtype).at[expert, slot].set(rows, mode="drop")
    return jnp.einsum("tkd,tk->td", take(composed.gated(params, buffer), expert[back], slot[back]), gate), {}


def _filled(out, expert, slot):
    return out.at[expert, slot].get(mode="fill", fill_value=0)


def _visible(out, expert, slot):
    """Who overflows is given the row of the last slot."""
    return out[expert, slot]


for _name, _layer, _pattern in (
    ("gathered", functools.partial(by_priority, take=_gathered), "einsum_dispatch"),
    ("along_axis", functools.partial(by_priority, take=_along_axis), "einsum_dispatch"),
    ("scattered", by_priority_scattered, "scatter_dispatch"),
    ("in_order", functools.partial(by_priority_in_order, take=_filled), "scatter_dispatch"),
    ("visible", functools.partial(by_priority_in_order, take=_visible), "scatter_dispatch"),
):
    form(
        f"priority_{_name}",
        "queues in the order of the gates, and slots brought back by the inverse permutation",
        choices=CHOICES,
        pattern=_pattern,
        dense=dense_of(composed.softmax_normalised, composed.gated, CHOICES),
    )(_layer)
