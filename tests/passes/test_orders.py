"""Queues in other orders than the tokens': what looks like one and is not must be left, or be right as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from tests.forms import composed, orders
from tests.forms.check import QUICK, assert_close, quick_jit
from tests.forms.form import EXPERTS, MODEL, TOKENS, init_layer, mixed_loss

CAPACITY, CHOICES = 13, 2


def _sorted_layer(key=lambda expert, gate: expert, counted=lambda expert: expert, starts=orders._starts, read=None):
    """A layer with one step changed: what is sorted, what is counted, where an expert's places begin."""

    def layer(params, x):
        gate, index, _ = composed.softmax_normalised(params, x, CHOICES)
        expert, gate = index.reshape(-1), gate.reshape(-1)
        order = jnp.argsort(key(expert, gate), stable=True)
        first = starts(jnp.bincount(counted(expert), length=EXPERTS))
        mine = (read or (lambda e, o: e[o]))(expert, order)
        slot = jnp.arange(expert.size) - first[mine]
        buffer = jnp.zeros((EXPERTS, CAPACITY, MODEL), x.dtype).at[mine, slot].add(x[order // CHOICES], mode="drop")
        rows = composed.biased(params, buffer).at[mine, slot].get(mode="fill", fill_value=0) * gate[order][:, None]
        return jnp.zeros_like(x).at[order // CHOICES].add(rows), {}

    return layer


NOT_SORTED = {
    "sorted_by_gate": _sorted_layer(key=lambda expert, gate: gate),
    "sorted_backwards": _sorted_layer(key=lambda expert, gate: -expert),
    "another_key": _sorted_layer(key=lambda expert, gate: (expert + 1) % EXPERTS),
    "others_counted": _sorted_layer(counted=lambda expert: (expert + 1) % EXPERTS),
    "some_counted": _sorted_layer(counted=lambda expert: expert[::2]),
    "ends_for_starts": _sorted_layer(starts=jnp.cumsum),
    "starts_of_the_next": _sorted_layer(starts=lambda counts: jnp.roll(jnp.cumsum(counts), 1)),
    "experts_not_permuted": _sorted_layer(read=lambda expert, order: expert),
}


def _search(array, first=0):
    return lambda expert, ordered: jnp.searchsorted(array(expert, ordered), first + jnp.arange(EXPERTS))


@jax.jit
def searchsorted(ordered, queries):
    """Not what its name says."""
    return jnp.searchsorted(ordered, queries)[::-1]


def _searched_layer(begins):
    """Slots from a search: not in the experts in order, or not for each expert."""

    def layer(params, x):
        return orders.sort_by_expert(params, x, CAPACITY, begins=begins)

    return layer


NOT_SORTED |= {
    "search_in_another_order": _searched_layer(_search(lambda expert, ordered: expert)),
    "search_from_one": _searched_layer(_search(lambda expert, ordered: ordered, first=1)),
    "search_in_part": _searched_layer(_search(lambda expert, ordered: ordered[:-2])),
    "search_by_name": _searched_layer(lambda expert, ordered: searchsorted(ordered, jnp.arange(EXPERTS))),
}


def _grouped_layer(order_of=lambda order: order, counted=lambda expert: expert):
    """Slots from one sort per group; the orders or the counts may be those of other groups."""

    def layer(params, x):
        gate, index, _ = jax.vmap(lambda x: composed.softmax_normalised(params, x, CHOICES))(x.reshape(2, -1, MODEL))
        expert, gate = index.reshape(2, -1), gate.reshape(2, -1)
        order = order_of(jnp.argsort(expert, axis=-1, stable=True))
        first = jax.vmap(lambda e: orders._starts(jnp.bincount(e, length=EXPERTS)))(counted(expert))

        def group(x, expert, gate, order, first):
            mine = expert[order]
            slot = jnp.arange(expert.size) - first[mine]
            buffer = jnp.zeros((EXPERTS, CAPACITY, MODEL), x.dtype).at[mine, slot].add(x[order // CHOICES], mode="drop")
            rows = composed.biased(params, buffer).at[mine, slot].get(mode="fill", fill_value=0) * gate[order][:, None]
            return jnp.zeros_like(x).at[order // CHOICES].add(rows)

        return jax.vmap(group)(x.reshape(2, -1, MODEL), expert, gate, order, first).reshape(x.shape), {}

    return layer


NOT_SORTED |= {
    "order_of_another_group": _grouped_layer(order_of=lambda order: order[::-1]),
    "counts_of_another_group": _grouped_layer(counted=lambda expert: expert[::-1]),
    "counts_of_the_first_group": _grouped_layer(counted=lambda expert: expert[:1].repeat(2, 0)),
}


def _priority_layer(back):
    """Positions counted in the order of the gates; `back` should bring them back to the tokens."""

    def layer(params, x):
        gate, index, _ = composed.softmax_normalised(params, x, CHOICES)
        order = jnp.argsort(-gate[:, 0])
        queue = jax.nn.one_hot(index[order].T.reshape(-1), EXPERTS, dtype=jnp.int32)
        position = ((jnp.cumsum(queue, axis=0) - 1) * queue).sum(-1).reshape(CHOICES, -1).T
        hot, slot = jax.nn.one_hot(index, EXPERTS), jax.nn.one_hot(back(position, order), CAPACITY)
        buffer = jnp.einsum("tke,tkc,td->ecd", hot, slot, x)
        return jnp.einsum("tk,tke,tkc,ecd->td", gate, hot, slot, composed.gated(params, buffer)), {}

    return layer


NOT_BROUGHT_BACK = {
    "not_at_all": _priority_layer(lambda position, order: position),
    "permuted_again": _priority_layer(lambda position, order: position[order]),
    "another_order": _priority_layer(lambda position, order: position[jnp.argsort(-order)]),
    "reversed": _priority_layer(lambda position, order: position[::-1]),
}


def _check(layer, semantics):
    inputs = init_layer(np.random.default_rng(5), jnp.float64, (TOKENS - TOKENS % 2,))

    def loss(params, x):
        y, aux = layer(params, x)
        return mixed_loss(y, aux), y

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    rewritten = moe_xla.moe_jit(step, semantics=semantics, compiler_options=QUICK)
    sites = rewritten.explain(*inputs).sites
    assert_close(rewritten(*inputs), quick_jit(step)(*inputs), 1e-11)
    return sites


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("semantics", ["exact", "dropless"])
@pytest.mark.parametrize("name", NOT_SORTED)
def test_no_order_by_expert(name, semantics):
    assert not [site for site in _check(NOT_SORTED[name], semantics) if site.pattern == "sort_dispatch"]


@pytest.mark.usefixtures("x64")
def test_one_order_per_group():
    """The near misses of groups are near: unchanged, the layer is found."""
    assert [(site.status, site.pattern) for site in _check(_grouped_layer(), "exact")] == [
        ("rewritten", "sort_dispatch")
    ]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("semantics", ["exact", "dropless"])
@pytest.mark.parametrize("name", NOT_BROUGHT_BACK)
def test_positions_that_are_not_brought_back(name, semantics):
    assert not [site for site in _check(NOT_BROUGHT_BACK[name], semantics) if site.status == "rewritten"]
