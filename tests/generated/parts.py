"""The steps of a generated layer: each in the ways in which people write it, and in some that only look the same.

A step takes the program's choices first.  Arrays may have an axis of groups in front.  Letters: g groups, t tokens,
k choices, e experts, c slots, d model, f hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from tests.forms.composed import OVERFLOW as COMPOSED_OVERFLOW

if TYPE_CHECKING:
    from .programs import Program

one_hot = jax.nn.one_hot
Params = dict[str, jax.Array]


class Spelling:
    """Writes einsums in equal ways: the operands in another order, their axes transposed, as a tensordot or a matmul.

    `seed` 0 writes them as they are given.  The letter g is left out where the program has no groups.
    """

    def __init__(self, seed: int, grouped: bool) -> None:
        self._random = random.Random(seed) if seed else None
        self._grouped = grouped

    def __call__(self, subscripts: str, *operands: jax.Array) -> jax.Array:
        if not self._grouped:
            subscripts = subscripts.replace("g", "")
        inputs, output = subscripts.split("->")
        terms = list(zip(inputs.split(","), operands, strict=True))
        if self._random is None:
            return jnp.einsum(subscripts, *operands)
        if self._random.random() < 0.5:
            self._random.shuffle(terms)
        terms = [self._transposed(*term) if self._random.random() < 0.3 else term for term in terms]
        way = self._random.choice(["einsum", "einsum", "tensordot", "matmul"])
        if way != "einsum" and _is_plain_contraction([letters for letters, _ in terms], output):
            return (_tensordot if way == "tensordot" else _matmul)(terms, output)
        written = "".join(self._random.sample(output, len(output))) if self._random.random() < 0.3 else output
        result = jnp.einsum(",".join(letters for letters, _ in terms) + "->" + written, *(a for _, a in terms))
        return result.transpose([written.index(letter) for letter in output])

    def _transposed(self, letters: str, operand: jax.Array) -> tuple[str, jax.Array]:
        order = self._random.sample(range(len(letters)), len(letters))
        return "".join(letters[i] for i in order), operand.transpose(order)


def _is_plain_contraction(inputs: list[str], output: str) -> bool:
    """Two operands that share letters, all of which are summed, and nothing else is."""
    if len(inputs) != 2:
        return False
    shared = set(inputs[0]) & set(inputs[1])
    return bool(shared) and not shared & set(output) and set(inputs[0]) ^ set(inputs[1]) == set(output)


def _tensordot(terms: list[tuple[str, jax.Array]], output: str) -> jax.Array:
    (left, a), (right, b) = terms
    shared = [letter for letter in left if letter in right]
    result = jnp.tensordot(a, b, axes=([left.index(s) for s in shared], [right.index(s) for s in shared]))
    letters = [letter for letter in left + right if letter not in shared]
    return result.transpose([letters.index(letter) for letter in output])


def _matmul(terms: list[tuple[str, jax.Array]], output: str) -> jax.Array:
    """Both operands flattened to matrices."""
    (left, a), (right, b) = terms
    shared = [letter for letter in left if letter in right]
    rows, columns = [s for s in left if s not in shared], [s for s in right if s not in shared]
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    a = a.transpose([left.index(s) for s in rows + shared]).reshape(-1, _product(sizes[s] for s in shared))
    b = b.transpose([right.index(s) for s in shared + columns]).reshape(a.shape[1], -1)
    result = (a @ b).reshape([sizes[s] for s in rows + columns])
    return result.transpose([(rows + columns).index(letter) for letter in output])


def _product(sizes) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


# --- derivatives that are not wanted

DETACHED = ("gates", "dispatch", "combine", "buffer", "hidden", "out")


def detached(p: Program, place: str, array: jax.Array) -> jax.Array:
    """An array without its derivative, where the program takes it off at that place."""
    return lax.stop_gradient(array) if p.detached == place else array


# --- routers: scores, then a choice, then the gates of the chosen


def scores_of(p: Program, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scores by which experts are chosen and weighted, probabilities for the auxiliary loss), both [..., t, e]."""
    logits = x @ params["wg"]
    if p.noise:
        logits = logits + 0.3 * jax.random.normal(jax.random.key(3), logits.shape, logits.dtype)
    probs = jax.nn.softmax(logits, axis=-1)
    return {"softmax": probs, "sigmoid": jax.nn.sigmoid(logits), "chosen_softmax": logits}[p.scores], probs


def _top_k(p: Program, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.top_k(scores, p.choices)


def _argsort(p: Program, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ascending: the surest expert is the last choice."""
    index = jnp.argsort(scores, axis=-1)[..., -p.choices :]
    return jnp.take_along_axis(scores, index, axis=-1), index


def _argmax(p: Program, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Repeated, those chosen so far multiplied by zero (`argmax`) or set to -inf (`argmax_inf`)."""
    left, values, indices = scores, [], []
    for _ in range(p.choices):
        index = jnp.argmax(left, axis=-1)
        values.append(jnp.max(left, axis=-1))
        indices.append(index)
        chosen = one_hot(index, p.experts, dtype=scores.dtype)
        left = left * (1 - chosen) if p.chooser == "argmax" else jnp.where(chosen > 0, -jnp.inf, left)
    return jnp.stack(values, -1), jnp.stack(indices, -1)


def _group_limited(p: Program, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Only experts of the best half of the expert groups can be chosen (at least K of them)."""
    groups = 3 if p.experts % 3 == 0 else 2
    size = p.experts // groups
    best, _ = lax.top_k(scores.reshape(*scores.shape[:-1], groups, size), min(2, size))
    _, chosen = lax.top_k(best.sum(-1), max(groups // 2, -(-p.choices // size)))
    allowed = one_hot(chosen, groups, dtype=scores.dtype).sum(-2)
    return lax.top_k(jnp.where(jnp.repeat(allowed, size, axis=-1) > 0, scores, -jnp.inf), p.choices)


CHOOSERS: dict[str, Callable] = {
    "top_k": _top_k,
    "argmax": _argmax,
    "argmax_inf": _argmax,
    "argsort": _argsort,
    "group_limited": _group_limited,
}


def route(p: Program, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """gate [..., t, k], index [..., t, k] and probabilities [..., t, e]."""
    scores, probs = scores_of(p, params, x)
    wanted = scores + lax.stop_gradient(params["choice_bias"]) if p.choice_bias else scores
    values, index = CHOOSERS[p.chooser](p, wanted)
    if p.pick == "values":
        gate = values
    elif p.pick == "take":
        gate = jnp.take_along_axis(scores, index, axis=-1)
    else:
        gate = jnp.einsum("...e,...ke->...k", scores, one_hot(index, p.experts, dtype=scores.dtype))
    if p.scores == "chosen_softmax":
        gate = jax.nn.softmax(gate, axis=-1)
    if p.near_miss == "signed_gates":
        gate = gate - 0.3
    return gate, index, probs


def normalised(gate: jax.Array) -> jax.Array:
    total = gate.sum(-1, keepdims=True)
    return gate / jnp.where(total > 0, total, 1)


def valid_tokens(p: Program, x: jax.Array) -> jax.Array | None:
    """Which tokens are no padding, [..., t]; None where all are valid."""
    if p.padding == "none":
        return None
    if p.padding == "periodic":
        return jnp.broadcast_to(jnp.arange(x.shape[-2]) % 4 != 1, x.shape[:-1])
    return x[..., 0] > -0.3


# --- ranks: queue [..., a, e] -> the number of earlier assignments of each expert, one too many for `after`


def _cumsum(queue: jax.Array) -> jax.Array:
    return jnp.cumsum(queue, axis=-2)


def _shifted(queue: jax.Array) -> jax.Array:
    before = [(0, 0)] * (queue.ndim - 2) + [(1, 0), (0, 0)]
    return jnp.pad(queue, before)[..., :-1, :]


RANKS: dict[str, Callable] = {
    "minus_self": lambda queue: _cumsum(queue) - queue,
    "inside": lambda queue: _cumsum(queue) - 1,
    "after": _cumsum,
    "lax": lambda queue: lax.cumsum(queue, axis=queue.ndim - 2) - 1,
    "pad": lambda queue: _cumsum(_shifted(queue)),
    "pad_after": lambda queue: _shifted(_cumsum(queue)),
    "concatenate": lambda queue: jnp.concatenate(
        [jnp.zeros_like(queue[..., :1, :]), _cumsum(queue)[..., :-1, :]], axis=-2
    ),
}

# --- samples: the rank at the assignment's own expert, from rank [..., a, e], queue [..., a, e], index [..., a]

SAMPLES: dict[str, Callable] = {
    "sum": lambda rank, queue, own: (rank * queue).sum(-1),
    "max": lambda rank, queue, own: (rank * queue).max(-1),
    "einsum": lambda rank, queue, own: jnp.einsum("...e,...e->...", rank, queue),
    "take": lambda rank, queue, own: jnp.take_along_axis(rank, own[..., None], axis=-1)[..., 0],
    "where": lambda rank, queue, own: jnp.where(queue > 0, rank, 0).sum(-1),
}


def _read(p: Program, queue: jax.Array, own: jax.Array, offset: jax.Array | int = 0) -> jax.Array:
    position = SAMPLES[p.sample](RANKS[p.rank](queue) + offset, queue, own)
    return position - 1 if p.rank == "after" else position


# --- queues: (hot [..., t, k, e], index [..., t, k], capacity) -> position [..., t, k], from 0


def _one_queue(p: Program, hot: jax.Array, index: jax.Array, capacity: int) -> jax.Array:
    """Token after token, or all first choices before all second ones."""
    if p.order == "choice":
        hot, index = hot.swapaxes(-3, -2), index.swapaxes(-2, -1)
    queue = hot.reshape(*index.shape[:-2], -1, p.experts)
    position = _read(p, queue, index.reshape(*index.shape[:-2], -1)).reshape(index.shape)
    return position.swapaxes(-2, -1) if p.order == "choice" else position


def _queue_each(p: Program, hot: jax.Array, index: jax.Array, capacity: int) -> jax.Array:
    """A queue for each choice, behind the earlier ones: all of them (`offset`), or those that were kept."""
    offset, columns = 0, []
    for k in range(p.choices):
        queue = hot[..., k, :]
        columns.append(_read(p, queue, index[..., k], offset))
        kept = queue if p.order == "offset" else queue * (_cumsum(queue) - queue + offset < capacity)
        offset = offset + kept.sum(-2, keepdims=True)
    return jnp.stack(columns, axis=-1)


def _multi_hot(p: Program, hot: jax.Array, index: jax.Array, capacity: int) -> jax.Array:
    """One row of the queue for each token; its experts are distinct."""
    mask = hot.sum(-2)
    return jnp.take_along_axis(_cumsum(mask) - mask, index, axis=-1)


QUEUES: dict[str, Callable] = {
    "token": _one_queue,
    "choice": _one_queue,
    "offset": _queue_each,
    "offset_kept": _queue_each,
    "multi_hot": _multi_hot,
}


def _own(rank: jax.Array, hot: jax.Array) -> jax.Array:
    return (rank * hot).sum(-1)


def _behind(offset_of: Callable) -> Callable:
    """Each choice behind an offset that is not the count of the earlier ones."""

    def position(p: Program, hot: jax.Array, index: jax.Array) -> jax.Array:
        counts = hot.sum(-3, keepdims=True)
        earlier = jnp.cumsum(counts, axis=-2) - counts
        return _own(jnp.cumsum(hot, axis=-3) - hot + offset_of(earlier, counts), hot)

    return position


def _flat(p: Program, hot: jax.Array, index: jax.Array) -> jax.Array:
    queue = hot.reshape(*index.shape[:-2], -1, p.experts)
    return _own(_cumsum(queue) - queue, queue).reshape(index.shape)


def _other_index(p: Program, hot: jax.Array, index: jax.Array) -> jax.Array:
    """Counted by one index, read at another."""
    rank = jnp.cumsum(jnp.roll(hot, 1, axis=-1), axis=-3) - 1
    return jnp.maximum(_own(rank, hot), 0)


def _flipped_queue(p: Program, hot: jax.Array, index: jax.Array) -> jax.Array:
    return _flat(p, jnp.flip(hot, -3), jnp.flip(index, -2))


def _blocks(p: Program, hot: jax.Array, index: jax.Array) -> jax.Array:
    """The second half of the tokens starts the count anew."""
    half = hot.shape[-3] // 2
    parts = (hot[..., :half, :, :], index[..., :half, :]), (hot[..., half:, :, :], index[..., half:, :])
    return jnp.concatenate([_flat(p, *part) for part in parts], axis=-2)


QUEUE_MISSES: dict[str, Callable] = {
    "per_choice": _behind(lambda earlier, counts: 0),
    "offset_less_one": _behind(lambda earlier, counts: jnp.maximum(earlier - 1, 0)),
    "offset_of_neighbour": _behind(lambda earlier, counts: jnp.roll(earlier, 1, axis=-1)),
    "offset_of_own": _behind(lambda earlier, counts: jnp.where(earlier > 0, counts, 0)),
    "double_cumsum": lambda p, hot, index: _own(jnp.cumsum(jnp.cumsum(hot, axis=-3), axis=-2) - 1, hot),
    "other_index": _other_index,
    "over_experts": lambda p, hot, index: _own(jnp.cumsum(hot, axis=-1) - 1, hot),
    "halved": lambda p, hot, index: _flat(p, hot, index) // 2,
    "shuffled": _flipped_queue,
    "blocks": _blocks,
    "reversed": lambda p, hot, index: jnp.flip(_flipped_queue(p, hot, index), -2),
    "every_other_slot": lambda p, hot, index: 2 * _flat(p, hot, index),
    "from_slot_three": lambda p, hot, index: _flat(p, hot, index) + 3,
}


def positions(p: Program, index: jax.Array, valid: jax.Array | None, capacity: int) -> jax.Array:
    """Position of every assignment in its expert's queue, from 0; any number where the token is padding."""
    hot = one_hot(index, p.experts, dtype=jnp.dtype(p.rank_dtype))
    if valid is not None and p.near_miss != "padding_counted":
        hot = hot * valid[..., None, None].astype(hot.dtype)
    if p.near_miss in QUEUE_MISSES:
        return QUEUE_MISSES[p.near_miss](p, hot, index)
    return QUEUES[p.order](p, hot, index, capacity)


# --- overflow: (position [..., t, k], capacity, dtype) -> (slot one-hot [..., t, k, c], keep [..., t, k] or None)


def _clamped(position, capacity, dtype):
    keep = position < capacity
    return one_hot(jnp.minimum(position, capacity - 1), capacity, dtype=dtype) * keep[..., None].astype(dtype), keep


OVERFLOW: dict[str, Callable] = {**COMPOSED_OVERFLOW, "clamped": _clamped}

OVERFLOW_MISSES: dict[str, Callable] = {
    "clamp": lambda position, capacity: jnp.minimum(position, capacity - 1),
    "ring": lambda position, capacity: position % capacity,
    "to_slot_zero": lambda position, capacity: jnp.where(position < capacity, position, 0),
}


def slots(p: Program, position: jax.Array, capacity: int, dtype) -> tuple[jax.Array, jax.Array | None]:
    if p.near_miss in OVERFLOW_MISSES:
        return one_hot(OVERFLOW_MISSES[p.near_miss](position, capacity), capacity, dtype=dtype), None
    return OVERFLOW[p.overflow](position, capacity, dtype)


# --- masks: (gate [..., t, k], expert [..., t, k, e], slot [..., t, k, c]) -> (dispatch, combine) [..., t, e, c]


def _masks_einsum(p, write, gate, expert, slot):
    return write("gtke,gtkc->gtec", expert, slot), write("gtk,gtke,gtkc->gtec", gate, expert, slot)


def _masks_product(p, write, gate, expert, slot):
    product = expert[..., :, None] * slot[..., None, :]
    return product.sum(-3), (gate[..., None, None] * product).sum(-3)


def _masks_gated_product(p, write, gate, expert, slot):
    product = expert[..., :, None] * slot[..., None, :]
    return product.sum(-3), write("gtk,gtkec->gtec", gate, product)


def _masks_unrolled(p, write, gate, expert, slot):
    dispatch = combine = 0
    for k in range(p.choices):
        term = write("gte,gtc->gtec", expert[..., k, :], slot[..., k, :])
        dispatch, combine = dispatch + term, combine + gate[..., k, None, None] * term
    return dispatch, combine


def _masks_weights(p, write, gate, expert, slot):
    dispatch = write("gtke,gtkc->gtec", expert, slot)
    return dispatch, write("gtk,gtke->gte", gate, expert)[..., None] * dispatch


def _masks_where(p, write, gate, expert, slot):
    cell = (expert > 0)[..., :, None] & (slot > 0)[..., None, :]
    return jnp.any(cell, axis=-3), jnp.where(cell, gate[..., None, None], 0).sum(-3)


def _masks_of_combine(nonzero: Callable) -> Callable:
    def masks(p, write, gate, expert, slot):
        combine = write("gtk,gtke,gtkc->gtec", gate, expert, slot)
        return nonzero(combine), combine

    return masks


MASKS: dict[str, Callable] = {
    "einsum": _masks_einsum,
    "product": _masks_product,
    "gated_product": _masks_gated_product,
    "unrolled": _masks_unrolled,
    "weights": _masks_weights,
    "where": _masks_where,
    "positive": _masks_of_combine(lambda combine: combine > 0),
    "bool": _masks_of_combine(lambda combine: combine.astype(bool)),
    "nonzero": _masks_of_combine(lambda combine: jnp.not_equal(combine, 0)),
}

# --- experts: a function of rows [..., d] with the parameters of one expert, or of a whole buffer

ACTIVATIONS: dict[str, Callable] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "one_plus_tanh": lambda h: 1 + jnp.tanh(h),  # empty slots do not stay zero
    "softplus": jax.nn.softplus,
}
EXPERT_PARAMS = ("w1", "w2", "w3", "b1", "b2")


def _network(p: Program, params: Params, rows: jax.Array, dot: Callable, bias: Callable) -> jax.Array:
    hidden = dot(rows, "w1")
    if p.biases:
        hidden = hidden + bias("b1")
    hidden = ACTIVATIONS[p.activation](hidden)
    if p.matrices == 3:
        hidden = hidden * dot(rows, "w3")
    out = dot(detached(p, "hidden", hidden), "w2")
    return out + bias("b2") if p.biases else out


def one_expert(p: Program, params: Params, rows: jax.Array) -> jax.Array:
    """`params` are those of one expert, without the axis e."""
    return _network(p, params, rows, lambda a, name: a @ params[name], lambda name: params[name])


def own_params(params: Params) -> Params:
    return {name: params[name] for name in EXPERT_PARAMS if name in params}


def experts(p: Program, write: Spelling, params: Params, buffer: jax.Array, axes: str) -> jax.Array:
    """All experts on a buffer whose axes are `axes`, one of ecd, gecd, egcd."""
    params, place = own_params(params), axes.index("e")
    if p.batching == "vmap":
        run = jax.vmap(lambda own, rows: one_expert(p, own, rows), in_axes=(0, place), out_axes=place)
        return run(params, buffer)
    if p.batching == "loop":
        rows = [lax.index_in_dim(buffer, e, place, keepdims=False) for e in range(p.experts)]
        each = [one_expert(p, {n: a[e] for n, a in params.items()}, rows[e]) for e in range(p.experts)]
        return jnp.stack(each, axis=place)

    def spread(name: str) -> jax.Array:
        """The parameter with axes of length 1 between e and its last ones."""
        array = params[name]
        return array.reshape(array.shape[0], *(1,) * (len(axes) - place - 1 - (array.ndim - 1)), *array.shape[1:])

    def dot(rows: jax.Array, name: str) -> jax.Array:
        if p.batching == "matmul":
            return rows @ spread(name)
        a, b = ("d", "f") if name != "w2" else ("f", "d")
        return write(f"{axes[:-1]}{a},e{a}{b}->{axes[:-1]}{b}", rows, params[name])

    return _network(p, params, buffer, dot, spread)


# --- what the buffer goes through before the experts, in programs that only look like layers


def _slot_embedding(buffer: jax.Array) -> jax.Array:
    return buffer + jnp.sin(jnp.arange(buffer.shape[-2], dtype=buffer.dtype))[:, None]


def _first_slots(buffer: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(buffer.shape[-2])[:, None] < 1, buffer, 0.5 * buffer)


BUFFER_MISSES: dict[str, Callable] = {
    "slot_softmax": lambda buffer: jax.nn.softmax(buffer, axis=-2),
    "slot_mean": lambda buffer: buffer - buffer.mean(-2, keepdims=True),
    "slot_embedding": _slot_embedding,
    "first_slots": _first_slots,
    "slot_cumsum": lambda buffer: jnp.cumsum(buffer, axis=-2),
    "slot_reverse": lambda buffer: jnp.flip(buffer, -2),
    "slot_sort": lambda buffer: jnp.sort(buffer, axis=-2),
    "expert_roll": lambda buffer: jnp.roll(buffer, 1, axis=-3),
    "expert_sum": lambda buffer: buffer + buffer.sum(-3, keepdims=True),
}

# --- scatter dispatch: (rows' source x_td, e_a, slot_a, capacity) -> buffer_ecd


def _zeros(p: Program, x: jax.Array, capacity: int) -> jax.Array:
    return jnp.zeros((p.experts, capacity, x.shape[-1]), x.dtype)


def _put_drop(p, x, e, slot, capacity):
    return _zeros(p, x, capacity).at[e, slot].set(jnp.repeat(x, p.choices, axis=0), mode="drop")


def _put_add(p, x, e, slot, capacity):
    return _zeros(p, x, capacity).at[e, slot].add(jnp.repeat(x, p.choices, axis=0))


def _put_far(p, x, e, slot, capacity):
    place = jnp.where(slot < capacity, slot, capacity)
    return _zeros(p, x, capacity).at[e, place].set(jnp.repeat(x, p.choices, axis=0))


def _put_clamped(p, x, e, slot, capacity):
    rows = jnp.where((slot < capacity)[:, None], jnp.repeat(x, p.choices, axis=0), 0)
    return _zeros(p, x, capacity).at[e, jnp.minimum(slot, capacity - 1)].add(rows)


def _put_zero(p, x, e, slot, capacity):
    keep = slot < capacity
    rows = jnp.repeat(x, p.choices, axis=0) * keep[:, None]
    return _zeros(p, x, capacity).at[e, jnp.where(keep, slot, 0)].add(rows)


def _put_spare(p, x, e, slot, capacity):
    rows = jnp.repeat(x, p.choices, axis=0)
    return _zeros(p, x, capacity + 1).at[e, jnp.minimum(slot, capacity)].add(rows)[:, :capacity]


def _put_flat(p, x, e, slot, capacity):
    place = jnp.where(slot < capacity, e * capacity + slot, p.experts * capacity)
    buffer = jnp.zeros((p.experts * capacity, x.shape[-1]), x.dtype)
    buffer = buffer.at[place].set(jnp.repeat(x, p.choices, axis=0), mode="drop")
    return buffer.reshape(p.experts, capacity, x.shape[-1])


def _put_by_token(p, x, e, slot, capacity):
    return _zeros(p, x, capacity).at[e, slot].set(x[jnp.arange(e.size) // p.choices], mode="drop")


def _put_each_choice(p, x, e, slot, capacity):
    buffer = _zeros(p, x, capacity)
    for k in range(p.choices):
        buffer = buffer.at[e.reshape(-1, p.choices)[:, k], slot.reshape(-1, p.choices)[:, k]].add(x, mode="drop")
    return buffer


PUTS: dict[str, Callable] = {
    "drop": _put_drop,
    "add": _put_add,
    "far": _put_far,
    "clamped": _put_clamped,
    "zero": _put_zero,
    "spare": _put_spare,
    "flat": _put_flat,
    "by_token": _put_by_token,
    "each_choice": _put_each_choice,
}

# --- gather combine: (out_ecd, weight_a, e_a, slot_a, capacity) -> weighted rows_ad


def _take_fill(p, out, weight, e, slot, capacity):
    return out.at[e, slot].get(mode="fill", fill_value=0) * weight[:, None]


def _take_masked(p, out, weight, e, slot, capacity):
    return out[e, slot] * (weight * (slot < capacity))[:, None]


def _take_where(p, out, weight, e, slot, capacity):
    return jnp.where((slot < capacity)[:, None], out[e, slot] * weight[:, None], 0)


def _take_zero(p, out, weight, e, slot, capacity):
    keep = slot < capacity
    return jnp.where(keep[:, None], out[e, jnp.where(keep, slot, 0)], 0) * weight[:, None]


def _take_flat(p, out, weight, e, slot, capacity):
    keep = slot < capacity
    rows = out.reshape(p.experts * capacity, -1)[jnp.where(keep, e * capacity + slot, 0)]
    return jnp.where(keep[:, None], rows, 0) * weight[:, None]


def _take_taken(p, out, weight, e, slot, capacity):
    keep = slot < capacity
    rows = jnp.take(out.reshape(p.experts * capacity, -1), jnp.where(keep, e * capacity + slot, 0), axis=0)
    return rows * (weight * keep)[:, None]


def _take_visible(p, out, weight, e, slot, capacity):
    """What overflows reads the row of the last slot."""
    return out[e, slot] * weight[:, None]


TAKES: dict[str, Callable] = {
    "visible": _take_visible,
    "fill": _take_fill,
    "masked": _take_masked,
    "where": _take_where,
    "zero": _take_zero,
    "flat": _take_flat,
    "taken": _take_taken,
}


def _sum_segments(p, rows):
    return jax.ops.segment_sum(rows, jnp.arange(len(rows)) // p.choices, num_segments=len(rows) // p.choices)


def _sum_scatter(p, rows):
    tokens = len(rows) // p.choices
    return jnp.zeros((tokens, rows.shape[-1]), rows.dtype).at[jnp.arange(len(rows)) // p.choices].add(rows)


SUMS: dict[str, Callable] = {
    "reshape": lambda p, rows: rows.reshape(-1, p.choices, rows.shape[-1]).sum(1),
    "segments": _sum_segments,
    "scatter": _sum_scatter,
}

# --- without slots: (write, params, x_td, gate_tk, index_tk, probs_te) -> y_td


def _weights(p, write, gate, index):
    return write("gtk,gtke->gte", gate, one_hot(index, p.experts, dtype=gate.dtype))


def _every(p, write, params, x):
    """Every expert on every token, [e, t, d]."""
    return experts(p, write, params, jnp.broadcast_to(x, (p.experts, *x.shape)), "ecd")


def _dense_all(p, write, params, x, gate, index, probs):
    return write("gte,getd->gtd", _weights(p, write, gate, index), _every(p, write, params, x))


def _dense_softmax(p, write, params, x, gate, index, probs):
    """The gates are a softmax over scores that are -inf wherever not chosen."""
    chosen = one_hot(index, p.experts, dtype=x.dtype).sum(-2) > 0
    weights = jax.nn.softmax(jnp.where(chosen, jnp.log(probs), -jnp.inf), axis=-1)
    return write("gte,getd->gtd", weights, _every(p, write, params, x))


def _dense_set(p, write, params, x, gate, index, probs):
    weights = jnp.zeros_like(probs).at[jnp.arange(len(x))[:, None], index].set(gate)
    return write("gte,getd->gtd", weights, _every(p, write, params, x))


def _dense_take(p, write, params, x, gate, index, probs):
    every = _every(p, write, params, x).swapaxes(0, 1)
    return write("gtk,gtkd->gtd", gate, jnp.take_along_axis(every, index[..., None], axis=1))


def _dense_threshold(p, write, params, x, gate, index, probs):
    """All experts as probable as the last of the chosen ones."""
    weights = jnp.where(probs >= lax.top_k(probs, p.choices)[0][..., -1:], probs, 0)
    return write("gte,getd->gtd", normalised(weights), _every(p, write, params, x))


def _dense_maxima(p, write, params, x, gate, index, probs):
    """The same, by repeated maxima of what is not chosen yet."""
    left, chosen = probs, jnp.zeros(probs.shape, bool)
    for _ in range(p.choices):
        best = left >= left.max(-1, keepdims=True)
        left, chosen = jnp.where(best, -jnp.inf, left), chosen | best
    return write("gte,getd->gtd", probs * chosen, _every(p, write, params, x))


def _dense_loop(p, write, params, x, gate, index, probs):
    own, y = own_params(params), jnp.zeros_like(x)
    for e in range(p.experts):
        weight = jnp.where(index == e, gate, 0).sum(-1, keepdims=True)
        y = y + weight * one_expert(p, {name: array[e] for name, array in own.items()}, x)
    return y


def _dense_gather(p, write, params, x, gate, index, probs):
    """The weights of its experts are gathered for each assignment."""
    own = {name: array[index.reshape(-1)] for name, array in own_params(params).items()}
    rows = jax.vmap(lambda own, row: one_expert(p, own, row))(own, jnp.repeat(x, p.choices, axis=0))
    return write("gtk,gtkd->gtd", gate, rows.reshape(*index.shape, -1))


def _dense_soft(p, write, params, x, gate, index, probs):
    """A soft mixture: all weights count."""
    return write("gte,getd->gtd", probs + _weights(p, write, gate, index), _every(p, write, params, x))


DENSE: dict[str, Callable] = {
    "dense_all": _dense_all,
    "dense_softmax": _dense_softmax,
    "dense_set": _dense_set,
    "dense_take": _dense_take,
    "dense_threshold": _dense_threshold,
    "dense_maxima": _dense_maxima,
    "dense_loop": _dense_loop,
    "dense_gather": _dense_gather,
}
DENSE_MISSES: dict[str, Callable] = {"soft_mixture": _dense_soft}
