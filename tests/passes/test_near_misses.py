"""Programs that look like capacity-based layers, or hold one, and must not be rewritten, or not in full.

A wrong number is the worst a compiler can do, so each of these is compared with the untouched program.  They are
sorted by what is asked of the compiler:

- `NO_LAYER`: nothing to find; the program comes back as it was.
- `COLLISIONS`: slots that are not unique; nothing may be rewritten.
- `OPAQUE`: a layer whose padded buffer is read in a way that only the buffer can answer; refused, with the reason.
- `NEEDS_CAPACITY`: a layer whose outputs depend on the capacity beyond overflow; never `dropless`.
- `EITHER`: unusual layers; rewritten or kept, but right.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import moe_xla
from tests.forms import composed
from tests.forms.check import QUICK, assert_close, max_errors, quick_jit, shapes
from tests.forms.form import EXPERTS, HIDDEN, MODEL, TOKENS, init_layer, mixed_loss

CAPACITY = 13
LOOSE = 2 * TOKENS
SEMANTICS = ("exact", "dropless")
HERE = Path(__file__).name

one_hot = jax.nn.one_hot
every_semantics = pytest.mark.parametrize("semantics", SEMANTICS)
every_direction = pytest.mark.parametrize("direction", ["forward", "gradient"])
# Refusals are decided in the forward pass; one of each kind is enough where nothing is to be found.
each_way = pytest.mark.parametrize(("direction", "semantics"), [("forward", "exact"), ("gradient", "dropless")])


def _inputs(dtype=jnp.float32):
    return init_layer(np.random.default_rng(5), dtype, (TOKENS,))


def _program(layer, capacity, direction):
    def forward(params, x):
        return layer(params, x, capacity)

    def loss(params, x):
        y, aux = forward(params, x)
        return mixed_loss(y, aux), (y, aux)

    return forward if direction == "forward" else jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def _rewritten(program, semantics, inputs):
    """(outputs, sites) of the rewritten program; a site that calls itself rewritten may leave no slot array."""
    step = moe_xla.moe_jit(program, semantics=semantics, compiler_options=QUICK)
    sites = step.explain(*inputs).sites
    if any(site.status == "rewritten" for site in sites) and all(site.status != "kept" for site in sites):
        masks = {
            f"{name}{list(shape)}"
            for shape, name in shapes(step.trace(*inputs).jaxpr.jaxpr)
            if CAPACITY in shape and {TOKENS, 2 * TOKENS, EXPERTS} & set(shape)
        }
        assert not masks, "arrays over slots in a program whose site is said to be rewritten"
    return step(*inputs), sites


def _assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# --- programs without a layer


def soft_moe(params, x, capacity):
    """Every slot is a convex mix of all tokens; the same einsums as with one-hot masks."""
    logits = jnp.einsum("td,dec->tec", x, jnp.stack([params["wg"] * (1 + 0.1 * c) for c in range(capacity)], axis=-1))
    dispatch = jax.nn.softmax(logits, axis=0)
    combine = jax.nn.softmax(logits.reshape(len(x), -1), axis=-1).reshape(logits.shape)
    buffer = jnp.einsum("tec,td->ecd", dispatch, x)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, buffer)), {}


def expert_choice(params, x, capacity):
    """Experts choose tokens: the one-hot runs over tokens."""
    scores = jax.nn.softmax(x @ params["wg"]).T
    gate, index = lax.top_k(scores, capacity)
    mask = one_hot(index, len(x), dtype=x.dtype)
    out = composed.mlp(params, jnp.einsum("ect,td->ecd", mask, x))
    return jnp.einsum("ect,ec,ecd->td", mask, gate, out), {}


def expert_choice_sorted(params, x, capacity):
    """Experts choose tokens by sorting, with gathers and a scatter back."""
    scores = jax.nn.softmax(x @ params["wg"])
    order = jnp.argsort(-scores, axis=0)[:capacity].T
    out = composed.mlp(params, x[order]) * jnp.take_along_axis(scores.T, order, axis=1)[..., None]
    return jnp.zeros_like(x).at[order.reshape(-1)].add(out.reshape(-1, MODEL)), {}


def embedding(params, x, capacity):
    """A table read and written by one_hot."""
    ids = (jnp.arange(len(x)) * 7) % EXPERTS
    hot = one_hot(ids, EXPERTS, dtype=x.dtype)
    counts = jnp.cumsum(hot, axis=0)
    return x + hot @ params["b2"], {"counts": counts[-1], "mean": (hot.T @ x).sum()}


def cross_entropy(params, x, capacity):
    logits = x @ params["wg"]
    targets = jnp.argmax(jnp.roll(x, 1, axis=0)[:, :EXPERTS], axis=-1)
    loss = -jnp.sum(jax.nn.log_softmax(logits) * one_hot(targets, EXPERTS, dtype=x.dtype), axis=-1)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == targets)
    return jnp.exp(logits), {"loss": loss.mean(), "accuracy": accuracy}


def attention(params, x, capacity):
    """Causal, with a local window and segments compared with segments."""
    queries, keys = x @ params["shared1"], x @ params["shared1"][:, ::-1]
    position = jnp.arange(len(x))
    segment = jnp.cumsum(position % 11 == 0)
    allowed = (position[:, None] >= position[None]) & (position[:, None] - position[None] < capacity)
    allowed = allowed & (segment[:, None] == segment[None])
    weights = jax.nn.softmax(jnp.where(allowed, queries @ keys.T, -1e9))
    return weights @ x, {}


def masked_language_model(params, x, capacity):
    """Masked positions gathered by a one-hot over positions: ranks, a width, and no experts."""
    masked = (jnp.arange(len(x)) % 3 == 0).astype(jnp.int32)
    slot = jnp.where(masked > 0, jnp.cumsum(masked) - 1, -1)
    gather = one_hot(slot, capacity, dtype=x.dtype)
    return gather @ jnp.tanh(gather.T @ x @ params["shared1"]) @ params["shared2"], {}


def dense_mixture(params, x, capacity):
    """Every expert on every token, weighted by the whole softmax."""
    probs = jax.nn.softmax(x @ params["wg"])
    every = composed.mlp(params, jnp.broadcast_to(x, (EXPERTS, *x.shape)))
    return jnp.einsum("te,etd->td", probs, every), {}


def histogram(params, x, capacity):
    """Ranks within bins, returned."""
    bins = one_hot(jnp.argmax(x, axis=-1), MODEL, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(bins, axis=0) - 1) * bins, axis=-1)
    return x * rank[:, None].astype(x.dtype), {"counts": bins.sum(0), "fits": rank < capacity}


NO_LAYER = (
    soft_moe,
    expert_choice,
    expert_choice_sorted,
    embedding,
    cross_entropy,
    attention,
    masked_language_model,
    dense_mixture,
    histogram,
)


@each_way
@pytest.mark.parametrize("layer", NO_LAYER, ids=lambda layer: layer.__name__)
def test_no_layer_is_untouched(layer, direction, semantics):
    inputs = _inputs()
    program = _program(layer, CAPACITY, direction)
    outputs, sites = _rewritten(program, semantics, inputs)
    assert not [site for site in sites if site.status != "kept"]
    _assert_same_bits(outputs, quick_jit(program)(*inputs))


@pytest.mark.parametrize("layer", NO_LAYER, ids=lambda layer: layer.__name__)
def test_no_layer_keeps_its_jaxpr(layer):
    inputs = _inputs()
    program = _program(layer, CAPACITY, "forward")
    assert str(jax.make_jaxpr(moe_xla.rewrite(program))(*inputs)) == str(jax.make_jaxpr(program)(*inputs))


# --- an ordinary layer with one part exchanged


def _hot(index, dtype=jnp.int32):
    return one_hot(index, EXPERTS, dtype=dtype)


def _queue(index_tk, experts=EXPERTS):
    """Positions in token-major order, from 0."""
    queue = one_hot(index_tk.reshape(-1), experts, dtype=jnp.int32)
    return jnp.sum((jnp.cumsum(queue, axis=0) - 1) * queue, axis=-1).reshape(index_tk.shape)


def _ordinary_slots(index, capacity):
    position = _queue(index)
    return position, position < capacity


def _layer(*, choices=2, slots=_ordinary_slots, experts=composed.mlp, extra_slots=0, route=None, metrics=None):
    """A layer whose positions, experts, router or metrics are given.

    `slots(index, capacity) -> (position, keep or None)`; `metrics(dispatch, combine, position, capacity) -> dict`.
    """
    route = route or composed.softmax_normalised

    def layer(params, x, capacity):
        gate, index, _ = route(params, x, choices)
        position, keep = slots(index, capacity)
        slot = one_hot(position, capacity + extra_slots, dtype=x.dtype)
        dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, keep)
        out = experts(params, jnp.einsum("tec,td->ecd", dispatch, x))
        y = jnp.einsum("tec,ecd->td", combine, out)
        return y, {} if metrics is None else metrics(dispatch, combine, position, capacity)

    return layer


def _slots(position_of, keep=True):
    def slots(index, capacity):
        position = position_of(index)
        return position, (position < capacity) if keep else None

    return slots


def _per_choice(index):
    """Each choice has a queue of its own, but they share the slots."""
    queue = _hot(index)
    return jnp.sum((jnp.cumsum(queue, axis=0) - 1) * queue, axis=-1)


def _twice(index):
    """A cumsum of the cumsum."""
    queue = _hot(index.reshape(-1))
    rank = jnp.cumsum(jnp.cumsum(queue, axis=0), axis=0) - 1
    return jnp.sum(rank * queue, axis=-1).reshape(index.shape) % CAPACITY


def _offset(offset_of):
    """Second choices behind an offset which is not the count of the first ones."""

    def position(index):
        first, second = _hot(index[:, 0]), _hot(index[:, 1])
        position1 = jnp.cumsum(first, axis=0) - first
        position2 = jnp.cumsum(second, axis=0) - second + offset_of(first, second)
        return jnp.stack([jnp.sum(position1 * first, -1), jnp.sum(position2 * second, -1)], axis=1)

    return position


def _kept(position, mask, capacity=CAPACITY):
    return (mask * (position < capacity)).sum(0)


def _behind(offset_of):
    """All choices in queues of their own, each behind an offset that `offset_of(positions, masks)` makes of the
    earlier ones."""

    def position(index):
        positions, masks = [], []
        for k in range(index.shape[1]):
            mask = _hot(index[:, k])
            positions.append(jnp.cumsum(mask, axis=0) - mask + (offset_of(positions, masks) if k else 0))
            masks.append(mask)
        return jnp.stack([jnp.sum(p * m, -1) for p, m in zip(positions, masks, strict=True)], axis=1)

    return position


def _shuffled(index):
    """Ranks of the assignments in another order, laid upon them as they stand."""
    return _queue(index[::-1])


def _twice_in_order(index):
    """Ranks in an order of priority, brought back by the order itself and not by its inverse."""
    order = jnp.argsort(jnp.sin(3.0 * jnp.arange(TOKENS) + index[:, 0]))
    return (_queue(index[order]) * 1.0)[order].astype(jnp.int32)


def _other_index(index):
    """Counted by one index, read at another."""
    queue = _hot(index.reshape(-1))
    rank = jnp.cumsum(queue, axis=0) - 1
    other = _hot((index.reshape(-1) + 1) % EXPERTS)
    return jnp.maximum(jnp.sum(rank * other, axis=-1), 0).reshape(index.shape)


def _over_experts(index):
    """The cumsum runs over the experts."""
    queue = _hot(index.reshape(-1))
    return jnp.sum(jnp.cumsum(queue, axis=1) * queue, axis=-1).reshape(index.shape) - 1


def _inclusive_of_first(index):
    """Multi-hot cumsum read at the own expert, but of the first choices only."""
    mask = _hot(index[:, 0])
    rank = jnp.cumsum(mask, axis=0) - mask
    return jnp.take_along_axis(rank, index, axis=1)


def _within_blocks(index):
    """Every eighth token starts the count anew."""
    padded = jnp.pad(_hot(index), ((0, 48 - TOKENS), (0, 0), (0, 0))).reshape(6, 16, EXPERTS)
    rank = (jnp.cumsum(padded, axis=1) - 1).reshape(48, 2, EXPERTS)[:TOKENS]
    return jnp.sum(rank * _hot(index), axis=-1)


def _minimum(index, capacity):
    """What overflows lands in the last slot."""
    return jnp.minimum(_queue(index), capacity - 1), None


def _clip(index, capacity):
    return jnp.clip(_queue(index), 0, capacity - 1), None


def _to_slot_zero(index, capacity):
    """What overflows lands in slot 0, unmasked."""
    position = _queue(index)
    return position * (position < capacity), None


def _where_zero(index, capacity):
    position = _queue(index)
    return jnp.where(position < capacity, position, 0), None


def _ring(index, capacity):
    """What overflows starts again at slot 0."""
    return _queue(index) % capacity, None


def _last_slot_kept(index, capacity):
    """Slot C collects what overflows, and is not sliced away."""
    return jnp.minimum(_queue(index), capacity), None


def _constant(index, capacity):
    return jnp.zeros_like(index), None


def _by_token(index, capacity):
    return jnp.broadcast_to(jnp.arange(TOKENS)[:, None] % capacity, index.shape), None


COLLISIONS = {
    "per_choice": _slots(_per_choice),
    "per_choice_width": _slots(_per_choice, keep=False),
    "double_cumsum": _slots(_twice),
    "halved": _slots(lambda index: _queue(index) // 2),
    "offset_one_less": _slots(_offset(lambda first, second: first.sum(0) - 1)),
    "offset_of_second": _slots(_offset(lambda first, second: second.sum(0) // 2)),
    "offset_constant": _slots(_offset(lambda first, second: 3)),
    "offset_of_neighbour": _slots(_offset(lambda first, second: jnp.roll(first.sum(0), 1))),
    "offset_of_half": _slots(_offset(lambda first, second: first[: TOKENS // 2].sum(0))),
    "offset_is_mean": _slots(_offset(lambda first, second: first.sum() // EXPERTS)),
    "behind_fewer_kept": _slots(_behind(lambda p, m: _kept(p[0], m[0], CAPACITY // 2))),
    "behind_kept_from_three": _slots(_behind(lambda p, m: (m[0] * (p[0] >= 3)).sum(0))),
    "behind_kept_but_one": _slots(_behind(lambda p, m: (m[0] * (p[0] != 3)).sum(0))),
    "behind_kept_of_half": _slots(_behind(lambda p, m: _kept(p[0], m[0] * (jnp.arange(TOKENS) % 2)[:, None]))),
    "behind_kept_by_token": _slots(_behind(lambda p, m: _kept(p[0] + jnp.arange(TOKENS)[:, None] // 4, m[0]))),
    "behind_first_only": _slots(_behind(lambda p, m: _kept(p[0], m[0]))),
    "behind_last_only": _slots(_behind(lambda p, m: _kept(p[-1], m[-1]))),
    "behind_largest": _slots(_behind(lambda p, m: jnp.stack([_kept(*pm) for pm in zip(p, m, strict=True)]).max(0))),
    "behind_second_by_neighbour": _slots(_behind(lambda p, m: _kept(p[0], m[0]) + _kept(p[-1] + 9, m[-1]))),
    "shuffled": _slots(_shuffled),
    "twice_in_order": _slots(_twice_in_order),
    "other_index": _slots(_other_index),
    "over_experts": _slots(_over_experts),
    "first_choices_only": _slots(_inclusive_of_first),
    "within_blocks": _slots(_within_blocks),
    "constant": _constant,
    "by_token": _by_token,
}
# Slots that collide only where the capacity overflows: never exact, and with nothing that overflows an ordinary layer.
OVERFLOW_COLLIDES = {
    "minimum": _minimum,
    "clip": _clip,
    "to_slot_zero": _to_slot_zero,
    "where_zero": _where_zero,
    "ring": _ring,
    "last_slot_kept": _last_slot_kept,
}


# Second choices are queued right here; the third ones are not.
THREE_CHOICES = {"behind_first_only", "behind_last_only", "behind_largest", "behind_second_by_neighbour"}


@pytest.mark.parametrize("name", [*COLLISIONS, *OVERFLOW_COLLIDES])
def test_slots_collide(name):
    """The programs themselves: two assignments that are kept share a slot."""
    _, index, _ = composed.softmax_normalised(*_inputs(), _choices(name))
    position, keep = (COLLISIONS | OVERFLOW_COLLIDES)[name](index, CAPACITY)
    kept = (position >= 0) & (position < CAPACITY + _extra_slots(name)) & (True if keep is None else keep)
    cells = np.asarray(index * 1000 + position)[np.asarray(kept)]
    assert len(set(cells.tolist())) < len(cells)


def _extra_slots(name):
    return int(name == "last_slot_kept")


def _choices(name):
    return 3 if name in THREE_CHOICES else 2


@each_way
@pytest.mark.parametrize("name", COLLISIONS)
def test_colliding_slots_are_kept(name, direction, semantics):
    inputs = _inputs()
    program = _program(_layer(slots=COLLISIONS[name], choices=_choices(name)), CAPACITY, direction)
    outputs, sites = _rewritten(program, semantics, inputs)
    assert not [site for site in sites if site.status != "kept"]
    _assert_same_bits(outputs, quick_jit(program)(*inputs))


@every_semantics
@pytest.mark.parametrize("misread", [True, False])
def test_queues_behind_another_groups_count_are_kept(misread, semantics):
    """Second choices of every group queue behind the first ones of group 0; behind their own group's they are found."""
    params, x = _inputs()
    x = jnp.stack([x, x[::-1] + 0.3])

    def program(params, x):
        probs = jax.nn.softmax(x @ params["wg"])
        first, second = (_hot(lax.top_k(probs, 2)[1][..., k]) for k in range(2))
        count = first.sum(1, keepdims=True)
        positions = jnp.cumsum(first, 1) - first, jnp.cumsum(second, 1) - second + (count[:1] if misread else count)
        dispatch = combine = 0.0
        for mask, position in zip((first, second), positions, strict=True):
            mask = (mask * (position < CAPACITY)).astype(x.dtype)
            term = jnp.einsum("gte,gtc->gtec", mask, one_hot((position * mask).sum(-1).astype(jnp.int32), CAPACITY))
            dispatch, combine = dispatch + term, combine + term * (probs * mask).sum(-1)[..., None, None]
        hidden = jax.nn.relu(jnp.einsum("gtec,gtd,edf->gecf", dispatch, x, params["w1"]))
        return jnp.einsum("gtec,gecf,efd->gtd", combine, hidden, params["w2"])

    outputs, sites = _rewritten(program, semantics, (params, x))
    assert [site.status for site in sites] == ["kept" if misread else "rewritten"]
    if misread:
        _assert_same_bits(outputs, quick_jit(program)(params, x))


@every_semantics
@pytest.mark.parametrize("name", OVERFLOW_COLLIDES)
def test_slots_that_collide_on_overflow_are_never_exact(name, semantics):
    inputs = _inputs()
    layer = _layer(slots=OVERFLOW_COLLIDES[name], extra_slots=_extra_slots(name))
    program = _program(layer, CAPACITY, "gradient")
    outputs, sites = _rewritten(program, semantics, inputs)
    if semantics == "dropless" and any(site.semantics == "dropless" for site in sites):
        assert_close(outputs, quick_jit(_program(layer, LOOSE, "gradient"))(*inputs), 2e-5)
    else:
        assert not [site for site in sites if site.status != "kept"]
        _assert_same_bits(outputs, quick_jit(program)(*inputs))


def _narrow(dtype):
    def position(index):
        queue = _hot(index.reshape(-1), dtype)
        rank = jnp.cumsum(queue, axis=0)
        return (jnp.sum(rank * queue, axis=-1) - 1).astype(jnp.int32).reshape(index.shape)

    return position


@every_semantics
@pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", 700), ("int8", 400), ("float8_e4m3fn", 100)])
def test_ranks_too_long_for_their_dtype_are_kept(dtype, tokens, semantics):
    """Beyond what the dtype counts exactly, slots collide or wrap."""
    params, x = init_layer(np.random.default_rng(5), jnp.float32, (tokens,))
    program = _program(_layer(choices=1, slots=_slots(_narrow(jnp.dtype(dtype)))), tokens // 3, "forward")
    step = moe_xla.moe_jit(program, semantics=semantics, compiler_options=QUICK)
    assert not [site for site in step.explain(params, x).sites if site.status != "kept"]
    _assert_same_bits(step(params, x), quick_jit(program)(params, x))


@every_semantics
@pytest.mark.parametrize("given", ["position", "masks"])
def test_slots_of_unknown_origin_are_kept(given, semantics):
    """Positions or masks that come in as arguments prove nothing."""
    params, x = _inputs()
    _, index, _ = composed.softmax_normalised(params, x, 2)

    def from_position(params, x, position):
        return _layer(slots=lambda index, capacity: (position, position < capacity))(params, x, CAPACITY)

    def from_masks(params, x, dispatch):
        out = composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))
        return jnp.einsum("tec,ecd->td", dispatch, out), {}

    position = _queue(index)
    masks = jnp.einsum("tke,tkc->tec", _hot(index, x.dtype), one_hot(position, CAPACITY, dtype=x.dtype))
    program, extra = (from_position, position // 2) if given == "position" else (from_masks, masks)
    step = moe_xla.moe_jit(program, semantics=semantics, compiler_options=QUICK)
    assert not [site for site in step.explain(params, x, extra).sites if site.status != "kept"]
    _assert_same_bits(step(params, x, extra), quick_jit(program)(params, x, extra))


@every_semantics
def test_positions_carried_by_a_loop_are_kept_or_right(semantics):
    """Counters carried over microbatches: the second microbatch queues behind the first in the same slots."""
    params, x = _inputs()

    def program(params, x):
        def body(counts, rows):
            gate, index, _ = composed.softmax_normalised(params, rows, 2)
            queue = _hot(index.reshape(-1))
            position = jnp.sum((jnp.cumsum(queue, axis=0) - 1 + counts) * queue, axis=-1).reshape(index.shape)
            slot = one_hot(position, CAPACITY, dtype=x.dtype)
            dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
            out = composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, rows))
            return counts + queue.sum(0), jnp.einsum("tec,ecd->td", combine, out)

        return lax.scan(body, jnp.zeros(EXPERTS, jnp.int32), x[:40].reshape(4, 10, MODEL))

    outputs, sites = _rewritten(program, semantics, (params, x))
    if not any(site.semantics == "dropless" for site in sites):
        assert_close(outputs, quick_jit(program)(params, x), 2e-5)


# --- opaque operations on the padded buffer: each marks the line that must be named


def sorted_slots(params, buffer):
    return composed.mlp(params, jnp.sort(buffer, axis=1))  # stops here


def summed_slots(params, buffer):
    return composed.mlp(params, jnp.cumsum(buffer, axis=1))  # stops here


def permuted_slots(params, buffer):
    permutation = (jnp.arange(buffer.shape[1]) * 5) % buffer.shape[1]
    return composed.mlp(params, buffer[:, permutation])  # stops here


def reversed_slots(params, buffer):
    return composed.mlp(params, buffer[:, ::-1])  # stops here


def convolved_slots(params, buffer):
    kernel = params["w1"][0, :3, :1][:, None]
    rows = jnp.moveaxis(buffer, 2, 1).reshape(-1, 1, buffer.shape[1])
    rows = lax.conv_general_dilated(rows, kernel.reshape(1, 1, 3), (1,), "SAME")  # stops here
    return composed.mlp(params, jnp.moveaxis(rows.reshape(EXPERTS, MODEL, -1), 1, 2))


def slot_dropout(params, buffer):
    """The random bits are laid out over slots: no rewrite reproduces them but by building them."""
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", buffer, params["w1"]))
    keep = jax.random.bernoulli(jax.random.key(2), 0.7, hidden.shape)
    hidden = jnp.where(keep, hidden / 0.7, 0)
    return jnp.einsum("ecf,efd->ecd", hidden, params["w2"])


def largest_slot(params, buffer):
    best = jnp.argmax(buffer.sum(-1), axis=1)  # stops here
    return composed.mlp(params, buffer) * (1 + best[:, None, None]).astype(buffer.dtype)


OPAQUE = {
    "sort": (sorted_slots, {"sort"}),
    "cumsum": (summed_slots, {"cumsum"}),
    "permutation": (permuted_slots, None),
    "reverse": (reversed_slots, {"rev"}),
    "convolution": (convolved_slots, {"conv_general_dilated"}),
    "dropout": (slot_dropout, None),
    "argmax": (largest_slot, {"argmax"}),
}


def _marked_line(function):
    lines, first = inspect.getsourcelines(function)
    marked = [first + number for number, line in enumerate(lines) if "# stops here" in line]
    return marked[0] if marked else None


@every_semantics
@every_direction
@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_buffers_are_refused(name, direction, semantics):
    experts, primitives = OPAQUE[name]
    inputs = _inputs()
    program = _program(_layer(experts=experts), CAPACITY, direction)
    outputs, sites = _rewritten(program, semantics, inputs)
    assert len(sites) == 1
    (site,) = sites
    assert site.status in ("kept", "padded")
    assert site.semantics != "dropless"
    assert site.reason
    assert site.primitive
    assert (site.tokens, site.experts, site.choices, site.capacity) == (TOKENS, EXPERTS, 2, CAPACITY)
    assert HERE in site.reason_source
    if direction == "forward":
        assert primitives is None or site.primitive in primitives
        line = _marked_line(experts)
        assert line is None or f"{HERE}:{line}" in site.reason_source
    expected = quick_jit(program)(*inputs)
    if site.status == "kept":
        _assert_same_bits(outputs, expected)
    else:
        assert_close(outputs, expected, 2e-5)


# --- layers that need the capacity beyond overflow


def slot_softmax(params, buffer):
    return composed.mlp(params, jax.nn.softmax(buffer, axis=1))


def slot_norm(params, buffer):
    mean = buffer.mean(axis=1, keepdims=True)
    variance = jnp.square(buffer - mean).mean(axis=1, keepdims=True)
    return composed.mlp(params, (buffer - mean) * lax.rsqrt(variance + 1e-5))


def slot_embedding(params, buffer):
    table = jnp.sin(jnp.arange(buffer.shape[1] * MODEL, dtype=buffer.dtype)).reshape(-1, MODEL)
    return composed.mlp(params, buffer + table)


def slot_mixing(params, buffer):
    mixer = jnp.cos(jnp.arange(buffer.shape[1] ** 2, dtype=buffer.dtype)).reshape(2 * (buffer.shape[1],))
    return composed.mlp(params, jnp.einsum("ecd,cb->ebd", buffer, mixer))


def slot_mean(params, buffer):
    """Empty slots hold zero, but they count: the mean depends on how many there are."""
    return composed.mlp(params, buffer - buffer.mean(axis=1, keepdims=True))


def _use_rate(dispatch, combine, position, capacity):
    return {"use": dispatch.sum() / (EXPERTS * capacity)}


def _overflow(dispatch, combine, position, capacity):
    return {"over": jax.nn.relu(dispatch.sum((0, 2)) * 1.5 - capacity)}


def _longest_queue(measured):
    return lambda dispatch, combine, position, capacity: {"longest": measured(position.max() + 1.0, capacity)}


def first_slots_only(params, buffer):
    return composed.mlp(params, buffer.at[:, 3:].multiply(0.5))


def _half(dispatch, combine, position, capacity):
    return {"half": position < capacity // 2, "rate": (position < capacity / 2).astype(combine.dtype).mean()}


def _returned(name):
    def metrics(dispatch, combine, position, capacity):
        return {
            "dispatch": lambda: {"dispatch": dispatch},
            "combine": lambda: {"combine": combine},
            "slots_used": lambda: {"slots_used": dispatch.sum(axis=(0, 1))},
            "last_slot": lambda: {"last_slot": dispatch[:, :, -1].sum()},
            "token_of_slot": lambda: {"token": jnp.argmax(dispatch, axis=0)},
            "kept_slot": lambda: {"slot": jnp.argmax(dispatch.sum(1), axis=-1)},
        }[name]()

    return metrics


def _buffer_returned(params, x, capacity):
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    slot = one_hot(_queue(index), capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    buffer = jnp.einsum("tec,td->ecd", dispatch, x)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, buffer)), {"buffer": buffer}


def _capacity_per_expert(index, capacity):
    limits = jnp.array([capacity, capacity - 4, capacity - 2, capacity, 3])
    position = _queue(index)
    return position, position < limits[index]


def _second_threshold(index, capacity):
    """Second choices are dropped earlier than first ones."""
    position = _queue(index)
    return position, position < jnp.array([capacity, capacity // 2])


NEEDS_CAPACITY = {
    "slot_softmax": _layer(experts=slot_softmax),
    "slot_norm": _layer(experts=slot_norm),
    "slot_embedding": _layer(experts=slot_embedding),
    "slot_mixing": _layer(experts=slot_mixing),
    "slot_mean": _layer(experts=slot_mean),
    "mask_mean": _layer(metrics=lambda dispatch, combine, position, capacity: {"mean": dispatch.mean()}),
    "use_rate": _layer(metrics=_use_rate),
    "overflow": _layer(metrics=_overflow),
    "longest_queue_over_capacity": _layer(metrics=_longest_queue(lambda n, capacity: n / capacity)),
    "longest_queue_scaled": _layer(metrics=_longest_queue(lambda n, capacity: n * (1 / capacity))),
    "longest_queue_less_capacity": _layer(metrics=_longest_queue(lambda n, capacity: n - capacity)),
    "first_slots_only": _layer(experts=first_slots_only),
    "half_full": _layer(metrics=_half),
    "dispatch_returned": _layer(metrics=_returned("dispatch")),
    "combine_returned": _layer(metrics=_returned("combine")),
    "slots_used_returned": _layer(metrics=_returned("slots_used")),
    "last_slot_returned": _layer(metrics=_returned("last_slot")),
    "token_of_slot_returned": _layer(metrics=_returned("token_of_slot")),
    "buffer_returned": _buffer_returned,
    "capacity_per_expert": _layer(slots=_capacity_per_expert),
    "second_threshold": _layer(slots=_second_threshold),
}


@every_semantics
@every_direction
@pytest.mark.parametrize("name", NEEDS_CAPACITY)
def test_capacity_that_matters_is_kept(name, direction, semantics):
    """Never dropless; whatever it becomes, the drops and the outputs are those of the untouched program."""
    inputs = _inputs()
    program = _program(NEEDS_CAPACITY[name], CAPACITY, direction)
    outputs, sites = _rewritten(program, semantics, inputs)
    assert not [site for site in sites if site.semantics == "dropless"]
    if semantics == "dropless":
        assert sites
        for site in sites:
            assert site.reason
            assert site.primitive
            assert "/tests/" in site.reason_source
    assert_close(outputs, quick_jit(program)(*inputs), 2e-5)


def test_slots_of_all_experts_that_are_as_many_as_tokens():
    """A number by which what is kept is divided may be that of the slots, though it is that of the tokens too."""
    capacity, tokens = 4, 4 * EXPERTS

    def layer(params, x):
        gate, index, _ = composed.softmax_normalised(params, x, 1)
        slot, e = composed.positions(composed.Parts(choices=1), index).reshape(-1), index.reshape(-1)
        buffer = jnp.zeros((EXPERTS, capacity, MODEL), x.dtype).at[e, slot].set(x, mode="drop")
        rows = composed.mlp(params, buffer).at[e, slot].get(mode="fill", fill_value=0)
        return rows * gate, (slot < capacity).sum() / (EXPERTS * capacity), (slot < capacity).mean()

    inputs = init_layer(np.random.default_rng(0), jnp.float32, (tokens,))
    sites = moe_xla.moe_jit(layer, semantics="dropless").explain(*inputs).sites
    assert [(site.status, site.semantics, site.primitive) for site in sites] == [("rewritten", "exact", "div")]
    mean = moe_xla.moe_jit(lambda *args: layer(*args)[::2], semantics="dropless").explain(*inputs).sites
    assert [(site.status, site.semantics) for site in mean] == [("rewritten", "dropless")]


@pytest.mark.parametrize(("capacity", "scale"), [(20, "divide"), (2 * TOKENS // EXPERTS, "divide"), (20, "multiply")])
def test_capacity_that_other_sizes_make_too(capacity, scale):
    """20 = 2 * 2 * 5 is a product of sizes, 1 / 20 a weight as people write it: still the capacity."""

    def use(dispatch, combine, position, capacity):
        loads = dispatch.sum((0, 2))
        return {"use": loads / capacity if scale == "divide" else loads * (1 / capacity)}

    inputs = _inputs()
    program = _program(_layer(metrics=use), capacity, "forward")
    outputs, sites = _rewritten(program, "dropless", inputs)
    assert [site.semantics for site in sites] == ["exact"]
    assert_close(outputs, quick_jit(program)(*inputs), 2e-5)


def _two_layers(first_metric, second_metric):
    """Two layers of which each returns a metric; their sum over 2 is returned too."""

    def layer(params, x, capacity):
        y, first = _layer(metrics=first_metric)(params, x, capacity)
        y, second = _layer(metrics=second_metric)(params, jnp.tanh(y), capacity)
        return y, {"mean": (sum(first.values()) + sum(second.values())) / 2}

    return layer


def test_capacity_is_seen_behind_an_exact_layer():
    """What flows out of an exact layer depends on its queue; the next layer's counts are followed all the same."""

    def mean_over_slots(dispatch, combine, position, capacity):
        return {"mean": dispatch.sum(0).mean()}

    inputs = _inputs()
    program = _program(_two_layers(mean_over_slots, mean_over_slots), CAPACITY, "gradient")
    outputs, sites = _rewritten(program, "dropless", inputs)
    assert [site.semantics for site in sites] == ["exact", "exact"]
    assert_close(outputs, quick_jit(program)(*inputs), 2e-5)


@pytest.mark.usefixtures("x64")
def test_means_over_layers_and_dead_metrics_ask_nothing_of_the_capacity():
    """Three layers' losses are averaged; a mean over slots is computed, but nobody reads it."""

    def balance(dispatch, combine, position, capacity):
        _ = dispatch.sum(0).mean()
        return {"balance": EXPERTS * jnp.square(dispatch.sum((0, 2)) / (2 * TOKENS)).sum()}

    def layer(params, x, capacity):
        losses = []
        for _ in range(3):
            x, metrics = _layer(metrics=balance)(params, jnp.tanh(x), capacity)
            losses.append(metrics["balance"])
        return x, {"balance": sum(losses) / len(losses)}

    inputs = _inputs(jnp.float64)
    outputs, sites = _rewritten(_program(layer, CAPACITY, "gradient"), "dropless", inputs)
    assert [site.semantics for site in sites] == ["dropless"] * 3
    assert_close(outputs, quick_jit(_program(layer, LOOSE, "gradient"))(*inputs), 1e-10)


# --- unusual layers: rewritten or kept, but right


def padding_mask(params, x, capacity):
    """Every fifth token is padding: it takes no slot and gets nothing."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    valid = (jnp.arange(len(x)) % 5 != 0).astype(jnp.int32)
    queue = (_hot(index) * valid[:, None, None]).reshape(-1, EXPERTS)
    position = jnp.sum((jnp.cumsum(queue, axis=0) - 1) * queue, axis=-1).reshape(index.shape)
    slot = one_hot(position, capacity, dtype=x.dtype)
    expert = queue.reshape(*index.shape, EXPERTS).astype(x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, expert, slot, position < capacity)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


def weighted_padding(weight_of):
    """Numbers for paddings are multiplied into the one-hots that are counted and dispatched by."""

    def layer(params, x, capacity):
        gate, index, _ = composed.softmax_normalised(params, x, 2)
        weight = weight_of(x, (jnp.arange(len(x)) % 5 == 0).astype(x.dtype))
        queue = (_hot(index, x.dtype) * weight[:, None, None]).reshape(-1, EXPERTS)
        position = jnp.sum((jnp.cumsum(queue, axis=0) - queue) * queue, axis=-1).reshape(index.shape)
        slot = one_hot(position.astype(jnp.int32), capacity, dtype=x.dtype)
        expert = queue.reshape(*index.shape, EXPERTS)
        dispatch, combine = composed.build_masks(composed.Masks(), gate, expert, slot, position < capacity)
        return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}

    return layer


def shifted_padding(index_of):
    """Arithmetic takes the indices of padding tokens elsewhere, off the experts or not."""

    def layer(params, x, capacity):
        probs = jax.nn.softmax(x @ params["wg"])
        index = index_of(lax.top_k(probs, 2)[1], (jnp.arange(len(x)) % 5 == 0).astype(x.dtype)[:, None])
        hot = one_hot(index.T.reshape(-1), EXPERTS, dtype=jnp.int32)
        position = (jnp.cumsum(hot, axis=0) * hot - 1).reshape(2, len(x), EXPERTS).max(0)
        dispatch = one_hot(position, capacity, dtype=x.dtype)
        out = composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x))
        return jnp.einsum("tec,te,ecd->td", dispatch, probs, out), {}

    return layer


def random_second_choice(params, x, capacity):
    """The second choice is dispatched with a probability that grows with its gate."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    wanted = 2 * gate[:, 1] > jax.random.uniform(jax.random.key(4), (len(x),), x.dtype)
    first, second = _hot(index[:, 0]), _hot(index[:, 1]) * wanted[:, None]
    position1 = jnp.sum((jnp.cumsum(first, axis=0) - first) * first, axis=-1)
    position2 = jnp.sum((jnp.cumsum(second, axis=0) - second + first.sum(0)) * second, axis=-1)
    expert = jnp.stack([first, second], axis=1).astype(x.dtype)
    position = jnp.stack([position1, position2], axis=1)
    slot = one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, expert, slot, position < capacity)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


def prioritised(params, x, capacity):
    """The surest tokens queue first, whatever their place in the batch."""
    gate, index, _ = composed.softmax_top_k(params, x, 2)
    order = jnp.argsort(-gate[:, 0])
    back = jnp.argsort(order)
    position = _queue(index[order])[back]
    slot = one_hot(position, capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


def signed_gates(dispatch_of, experts, gate_of):
    """Gates that may be negative or zero, and a dispatch mask made from them."""

    def layer(params, x, capacity):
        logits = x @ params["wg"]
        chosen, index = lax.top_k(logits, 2)
        gate = gate_of(chosen)
        slot = one_hot(_queue(index), capacity, dtype=x.dtype)
        combine = jnp.einsum("tk,tke,tkc->tec", gate, _hot(index, x.dtype), slot)
        buffer = jnp.einsum("tec,td->ecd", dispatch_of(combine).astype(x.dtype), x)
        return jnp.einsum("tec,ecd->td", combine, experts(params, buffer)), {}

    return layer


def largest_hidden(of_hidden):
    """Metrics of hidden units `[e, c, f]` by maxima over one axis after the other."""

    def layer(params, x, capacity):
        gate, index, _ = composed.softmax_normalised(params, x, 2)
        slot = one_hot(_queue(index), capacity, dtype=x.dtype)
        dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
        hidden = jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", dispatch, x), params["w1"])
        out = jnp.einsum("ecf,efd->ecd", jax.nn.relu(hidden), params["w2"])
        return jnp.einsum("tec,ecd->td", combine, out), {"largest": of_hidden(lax.stop_gradient(hidden))}

    return layer


LARGEST = {
    "by_experts": lambda hidden: hidden.max(0).max(0),
    "by_features": lambda hidden: hidden.max(2).max(1),
    "of_negated": lambda hidden: (-hidden.max(1)).max(0),
    "of_negated_by_experts": lambda hidden: (-hidden.max(0)).max(0),
    "of_smallest": lambda hidden: hidden.min(0).max(0),
    "any_of_all": lambda hidden: (hidden > 0).all(1).any(0).sum(),
    "any_by_experts": lambda hidden: (hidden > 0.5).any(0).any(0).sum(),
    "seen_twice": lambda hidden: hidden.max(0).max(0) + hidden.max(0).sum(),
}


def largest_weights(experts, shared):
    """The largest weight of a token over few cells: where its choices fill them all, nothing is left at zero."""

    def layer(params, x, capacity):
        params = {**params, "wg": params["wg"][:, :experts]} | {k: params[k][:experts] for k in ("w1", "w2")}
        chosen, index = lax.top_k(x @ params["wg"], 2)
        queue = one_hot(index.reshape(-1), experts, dtype=jnp.int32)
        position = jnp.sum((jnp.cumsum(queue, axis=0) - 1) * queue, axis=-1).reshape(index.shape)
        slot = one_hot(position, capacity, dtype=x.dtype)
        combine = jnp.einsum("tk,tke,tkc->tec", jnp.tanh(chosen - 3), one_hot(index, experts, dtype=x.dtype), slot)
        buffer = jnp.einsum("tec,td->ecd", (combine != 0).astype(x.dtype), x)
        largest = lax.stop_gradient(combine.max((1, 2)) if shared else combine.max(2).max(1))
        return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, buffer)), {"largest": largest}

    return layer


def same_expert_twice(multi_hot):
    """Two noisy argmaxes that may agree: a token can hold two slots of one expert."""

    def layer(params, x, capacity):
        logits = x @ params["wg"]
        index = jnp.stack([jnp.argmax(logits, -1), jnp.argmax(logits + jnp.sin(7 * logits), -1)], axis=1)
        gate = jnp.take_along_axis(jax.nn.softmax(logits), index, axis=1)
        if multi_hot:
            mask = _hot(index).sum(1)
            position = jnp.where(mask > 0, jnp.cumsum(mask, axis=0) - mask, -1)
            dispatch = one_hot(position, capacity, dtype=x.dtype)
            combine = dispatch * jnp.einsum("tk,tke->te", gate, _hot(index, x.dtype))[..., None]
        else:
            slot = one_hot(_queue(index), capacity, dtype=x.dtype)
            dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
        out = composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x))
        return jnp.einsum("tec,ecd->td", combine, out), {}

    return layer


def multi_hot_by_threshold(params, x, capacity):
    """As many experts as clear a threshold, so K is unknown."""
    probs = jax.nn.softmax(x @ params["wg"])
    mask = (probs > 0.15).astype(jnp.int32)
    position = jnp.where(mask > 0, jnp.cumsum(mask, axis=0) - 1, -1)
    dispatch = one_hot(position, capacity, dtype=x.dtype)
    combine = dispatch * probs[..., None]
    return jnp.einsum("tec,ecd->td", combine, composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


def separate_buffers(params, x, capacity):
    """Every choice has its own queue and its own buffer."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    y = 0
    for k in range(2):
        position = _queue(index[:, k : k + 1])
        slot = one_hot(position, capacity // 2, dtype=x.dtype)
        expert = _hot(index[:, k : k + 1], x.dtype)
        dispatch, combine = composed.build_masks(composed.Masks(), gate[:, k : k + 1], expert, slot, None)
        y = y + jnp.einsum("tec,ecd->td", combine, composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x)))
    return y, {}


def reversed_queue(params, x, capacity):
    """The last token queues first."""
    return _layer(slots=_slots(lambda index: _queue(index[::-1])[::-1]))(params, x, capacity)


def every_other_slot(params, x, capacity):
    return _layer(slots=_slots(lambda index: 2 * _queue(index)))(params, x, capacity)


def from_slot_three(params, x, capacity):
    return _layer(slots=_slots(lambda index: _queue(index) + 3))(params, x, capacity)


def zeros_around_the_slots(params, x, capacity):
    """Rows of zeros in front of and behind the slots, where the buffer holds what experts make of nothing."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    slot = one_hot(_queue(index), capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    out = jnp.pad(composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x)), ((0, 0), (1, 1), (0, 0)))
    return jnp.einsum("tec,ecd->td", jnp.pad(combine, ((0, 0), (0, 0), (1, 1))), out), {}


def two_buffers_one_routing(params, x, capacity):
    """One routing dispatches two inputs into two buffers."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    slot = one_hot(_queue(index), capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    left = composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))
    right = composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, jnp.roll(x, 1, axis=1)))
    return jnp.einsum("tec,ecd->td", combine, left * right), {}


def buffer_meets_masks(params, x, capacity):
    """Buffers of two routings multiplied cell by cell: a cell holds rows of two different tokens."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    other = (index + 1) % EXPERTS
    slot, other_slot = (one_hot(_queue(i), capacity, dtype=x.dtype) for i in (index, other))
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    second, _ = composed.build_masks(composed.Masks(), gate, _hot(other, x.dtype), other_slot, None)
    buffer = jnp.einsum("tec,td->ecd", dispatch, x) * (1 + jnp.einsum("tec,td->ecd", second, x))
    return jnp.einsum("tec,ecd->td", combine, composed.mlp(params, buffer)), {}


def combined_by_another_mask(params, x, capacity):
    """Rows go in by one routing and come out by another."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    _, other, _ = composed.softmax_normalised(params, jnp.roll(x, 1, axis=0), 2)
    slot, other_slot = (one_hot(_queue(i), capacity, dtype=x.dtype) for i in (index, other))
    dispatch, _ = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    _, combine = composed.build_masks(composed.Masks(), gate, _hot(other, x.dtype), other_slot, None)
    return jnp.einsum("tec,ecd->td", combine, composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x))), {}


def expert_mixing(params, x, capacity):
    """The experts' outputs are mixed over the expert axis, slot by slot."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    slot = one_hot(_queue(index), capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    out = composed.mlp(params, jnp.einsum("tec,td->ecd", dispatch, x))
    out = jnp.einsum("ecd,eb->bcd", out, params["wg"][:EXPERTS])
    return jnp.einsum("tec,ecd->td", combine, out), {}


def rolled_experts(params, x, capacity):
    """Each expert computes on its neighbour's rows."""
    return _layer(experts=lambda params, buffer: composed.biased(params, jnp.roll(buffer, 1, axis=0)))(
        params, x, capacity
    )


def divided_by_load(params, x, capacity):
    """An expert's outputs over the number of its rows; biases fill the empty slots."""
    gate, index, _ = composed.softmax_normalised(params, x, 2)
    slot = one_hot(_queue(index), capacity, dtype=x.dtype)
    dispatch, combine = composed.build_masks(composed.Masks(), gate, _hot(index, x.dtype), slot, None)
    load = jnp.maximum(dispatch.sum((0, 2)), 1)
    out = composed.biased(params, jnp.einsum("tec,td->ecd", dispatch, x)) / load[:, None, None]
    return jnp.einsum("tec,ecd->td", combine, out), {}


def _scattered(put, take, position=_queue):
    """Rows put into slots by `put(zeros, e, slot, rows)`, and read by `take(out, e, slot)`."""

    def layer(params, x, capacity):
        gate, index, _ = composed.softmax_normalised(params, x, 2)
        e, slot = index.reshape(-1), position(index).reshape(-1)
        buffer = put(jnp.zeros((EXPERTS, capacity, MODEL), x.dtype), e, slot, jnp.repeat(x, 2, axis=0))
        rows = take(composed.biased(params, buffer), e, slot) * gate.reshape(-1)[:, None]
        return rows.reshape(-1, 2, MODEL).sum(1), {}

    return layer


def _put(buffer, e, slot, rows):
    return buffer.at[e, slot].set(rows, mode="drop")


def _put_last(buffer, e, slot, rows):
    """What overflows is written over the last slot."""
    return buffer.at[e, jnp.minimum(slot, buffer.shape[1] - 1)].set(rows)


def _put_spare(buffer, e, slot, rows):
    """What overflows goes to a slot that nobody reads."""
    wide = jnp.zeros((EXPERTS, buffer.shape[1] + 1, MODEL), rows.dtype)
    return wide.at[e, jnp.minimum(slot, buffer.shape[1])].set(rows)[:, :-1]


def _take(out, e, slot):
    return out.at[e, slot].get(mode="fill", fill_value=0)


def _take_last(out, e, slot):
    """What overflows reads the row of the last slot."""
    return out.at[e, slot].get(mode="clip")


def _take_promised(out, e, slot):
    return out.at[e, jnp.minimum(slot, out.shape[1] - 1)].get(mode="promise_in_bounds")


def padded_scatter(take, weight_of):
    """Every fifth token is padding and takes no slot, but may read one."""

    def layer(params, x, capacity):
        gate, index, _ = composed.softmax_normalised(params, x, 2)
        valid = jnp.repeat(jnp.arange(len(x)) % 5 != 0, 2)
        e = index.reshape(-1)
        queue = _hot(e) * valid[:, None]
        counted = jnp.take_along_axis(jnp.cumsum(queue, axis=0), e[:, None], axis=1)[:, 0]
        slot = jnp.where(valid, counted - 1, capacity)
        buffer = _put(jnp.zeros((EXPERTS, capacity, MODEL), x.dtype), e, slot, jnp.repeat(x, 2, axis=0))
        rows = take(composed.biased(params, buffer), e, slot, counted - 1)
        return (rows * (gate.reshape(-1) * weight_of(valid))[:, None]).reshape(-1, 2, MODEL).sum(1), {}

    return layer


PADDED = {
    "masked": padded_scatter(lambda out, e, slot, counted: _take_last(out, e, slot), lambda valid: valid),
    "masked_counted": padded_scatter(lambda out, e, slot, counted: _take_last(out, e, counted), lambda valid: valid),
    "seen": padded_scatter(lambda out, e, slot, counted: _take_last(out, e, slot), jnp.ones_like),
    "seen_counted": padded_scatter(lambda out, e, slot, counted: _take_last(out, e, counted), jnp.ones_like),
    "first_only": padded_scatter(
        lambda out, e, slot, counted: jnp.where((jnp.arange(len(e)) % 2 == 0)[:, None], _take_last(out, e, counted), 0),
        lambda valid: valid,
    ),
}


def _behind_first(index):
    return _offset(lambda first, second: first.sum(0))(index)


SCATTERED = {
    "take_beyond": _scattered(_put, lambda out, e, slot: _take(out, e, jnp.minimum(slot, out.shape[1] + 2))),
    "take_last_or_next": _scattered(_put, lambda out, e, slot: out[e, jnp.minimum(slot + 1, out.shape[1] - 1)]),
    "take_last_behind_first": _scattered(_put, _take_last, position=_behind_first),
    "take_last_per_choice": _scattered(_put, _take_last, position=_per_choice),
    "take_last_of_next": _scattered(_put, lambda out, e, slot: _take_last(out, (e + 1) % EXPERTS, slot)),
    "put_spare_take_last": _scattered(_put_spare, _take_last),
    **{f"padded_{name}": layer for name, layer in PADDED.items()},
    "put_last": _scattered(_put_last, _take),
    "add_last": _scattered(lambda z, e, slot, rows: z.at[e, jnp.minimum(slot, z.shape[1] - 1)].add(rows), _take),
    "put_spare": _scattered(_put_spare, _take),
    "put_clipped": _scattered(lambda z, e, slot, rows: z.at[e, slot].set(rows, mode="clip"), _take),
    "put_on_ones": _scattered(lambda z, e, slot, rows: (z + 1).at[e, slot].set(rows, mode="drop"), _take),
    "add_on_ones": _scattered(lambda z, e, slot, rows: (z + 1).at[e, slot].add(rows, mode="drop"), _take),
    "put_twice": _scattered(lambda z, e, slot, rows: _put(_put(z, e, slot, rows), e, slot + 1, 2 * rows), _take),
    "take_last": _scattered(_put, _take_last),
    "take_promised": _scattered(_put, _take_promised),
    "take_nan": _scattered(_put, lambda out, e, slot: jnp.nan_to_num(out.at[e, slot].get(mode="fill"), nan=0.5)),
    "take_next_expert": _scattered(_put, lambda out, e, slot: _take(out, (e + 1) % EXPERTS, slot)),
    "take_next_slot": _scattered(_put, lambda out, e, slot: _take(out, e, slot + 1)),
    "take_other_token": _scattered(_put, lambda out, e, slot: _take(out, e[::-1], slot[::-1])),
    "colliding": _scattered(_put, _take, position=_per_choice),
    "colliding_sum": _scattered(
        lambda z, e, slot, rows: z.at[e, slot].add(rows, mode="drop"), _take, position=_per_choice
    ),
    "flat_overflow": _scattered(
        lambda z, e, slot, rows: z.reshape(-1, MODEL).at[e * z.shape[1] + slot].add(rows).reshape(z.shape), _take
    ),
    "wrapped": _scattered(_put, _take, position=lambda index: _queue(index) - 1),
}
EITHER = {
    "padding_mask": padding_mask,
    "padding_kept": weighted_padding(lambda x, pad: 1.0 - pad),
    "padding_negated": weighted_padding(lambda x, pad: 1.0 - 2 * pad),
    "padding_halved": weighted_padding(lambda x, pad: 1.0 - 0.5 * pad),
    "padding_doubled": weighted_padding(lambda x, pad: 1.0 + pad),
    "padding_of_numbers": weighted_padding(lambda x, pad: jnp.round(jnp.abs(x[:, 0]))),
    "padding_below_experts": shifted_padding(lambda index, pad: index - EXPERTS * pad),
    "padding_above_experts": shifted_padding(lambda index, pad: index * (1 + pad) + EXPERTS * pad),
    "padding_among_experts": shifted_padding(lambda index, pad: index - 2 * pad),
    "padding_reflected": shifted_padding(lambda index, pad: index * (1 - 2 * pad)),
    "padding_turned": shifted_padding(lambda index, pad: index * (1 - 2 * pad) + (EXPERTS - 1) * pad),
    "padding_on_expert_two": shifted_padding(lambda index, pad: index * (1 - pad) + 2 * pad),
    "random_second_choice": random_second_choice,
    "prioritised": prioritised,
    "signed_positive": signed_gates(lambda combine: combine > 0, composed.biased, jnp.tanh),
    "signed_bool": signed_gates(lambda combine: combine.astype(bool), composed.biased, jnp.tanh),
    "signed_above": signed_gates(lambda combine: combine > 0.5, composed.background, jax.nn.sigmoid),
    "zero_bool": signed_gates(lambda combine: combine.astype(bool), composed.background, lambda g: jax.nn.relu(g - 1)),
    "zero_positive": signed_gates(lambda combine: combine > 0, composed.background, lambda g: jax.nn.relu(g - 1)),
    **{f"hidden_{name}": largest_hidden(of_hidden) for name, of_hidden in LARGEST.items()},
    "largest_weights": largest_weights(EXPERTS, True),
    "largest_of_two": largest_weights(2, True),
    "largest_by_expert": largest_weights(EXPERTS, False),
    "same_expert_twice": same_expert_twice(False),
    "same_expert_twice_multi_hot": same_expert_twice(True),
    "threshold": multi_hot_by_threshold,
    "separate_buffers": separate_buffers,
    "reversed_queue": reversed_queue,
    "every_other_slot": every_other_slot,
    "from_slot_three": from_slot_three,
    "zeros_around_the_slots": zeros_around_the_slots,
    "two_buffers": two_buffers_one_routing,
    "buffer_meets_masks": buffer_meets_masks,
    "combined_by_another_mask": combined_by_another_mask,
    "expert_mixing": expert_mixing,
    "rolled_experts": rolled_experts,
    "divided_by_load": divided_by_load,
    "kept_slot_returned": _layer(metrics=_returned("kept_slot")),
    "short_bf16_ranks": _layer(slots=_slots(_narrow(jnp.bfloat16))),
    "short_int8_ranks": _layer(slots=_slots(_narrow(jnp.int8))),
    **SCATTERED,
}
# A token's output depends on which other tokens share its slots, or on the capacity itself: not dropless.
NEVER_DROPLESS = {
    "buffer_meets_masks",
    "combined_by_another_mask",
    "kept_slot_returned",
    "hidden_of_negated_by_experts",
    "hidden_seen_twice",
}


@every_semantics
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EITHER)
def test_unusual_layers_are_right(name, semantics):
    inputs = _inputs(jnp.float64)
    program = _program(EITHER[name], CAPACITY, "gradient")
    outputs, sites = _rewritten(program, semantics, inputs)
    asked = {site.semantics for site in sites if site.status != "kept"}
    dropless = asked == {"dropless"} and all(site.status != "kept" for site in sites)
    assert not (dropless and name in NEVER_DROPLESS)
    assert semantics == "dropless" or "dropless" not in asked
    expected = quick_jit(_program(EITHER[name], LOOSE if dropless else CAPACITY, "gradient"))(*inputs)
    assert_close(outputs, expected, 1e-10)


# --- a good layer beside a bad one


@every_semantics
@every_direction
@pytest.mark.usefixtures("x64")
def test_refused_layer_does_not_stop_the_other(direction, semantics):
    params, x = _inputs(jnp.float64)

    def both(capacity_of_good):
        def layer(params, x, capacity):
            good, _ = _layer(experts=composed.biased)(params, x, capacity_of_good)
            bad, _ = _layer(slots=_slots(_per_choice))(params, jnp.tanh(good), capacity)
            return good + bad, {}

        return _program(layer, CAPACITY, direction)

    outputs, sites = _rewritten(both(11), semantics, (params, x))
    rewritten = [site for site in sites if site.status == "rewritten"]
    assert [(site.capacity, site.semantics) for site in rewritten] == [(11, semantics)]
    assert all(site.status == "kept" for site in sites if site not in rewritten)
    expected = quick_jit(both(11 if semantics == "exact" else LOOSE))(params, x)
    assert_close(outputs, expected, 1e-10)


def test_strict_refuses_loudly():
    inputs = _inputs()
    for layer in (_layer(experts=sorted_slots), soft_moe):
        with pytest.raises(moe_xla.RewriteError):
            moe_xla.moe_jit(_program(layer, CAPACITY, "forward"), strict=True)(*inputs)


# --- the programs themselves


def _own_rows(layer, capacity):
    return jax.tree.leaves(quick_jit(_program(layer, capacity, "forward"))(*_inputs()))


@pytest.mark.parametrize("name", EITHER)
def test_unusual_layers_drop(name):
    """The capacity is one at which a wrong rewrite would show."""
    errors = max_errors(_own_rows(EITHER[name], CAPACITY)[:1], _own_rows(EITHER[name], LOOSE)[:1])
    assert max(error for _, error in errors) > 1e-3


def test_sizes_are_distinct():
    assert len({CAPACITY, TOKENS, EXPERTS, MODEL, HIDDEN, 2 * TOKENS}) == 6


def test_masks_of_very_many_terms_are_kept():
    """Twelve choices added up one by one have 144 products in the gradient: refused before they are worked out."""
    experts, choices, tokens = 16, 12, 20
    _, x = init_layer(np.random.default_rng(5), jnp.float32, (tokens,))
    wg = jnp.asarray(np.random.default_rng(6).normal(size=(MODEL, experts)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(7).normal(size=(experts, MODEL, MODEL)), jnp.float32)

    def loss(wg, w, x):
        gate, index = lax.top_k(jax.nn.softmax(x @ wg), choices)
        position = _queue(index, experts)
        combine = sum(
            gate[:, k, None, None]
            * one_hot(index[:, k], experts)[:, :, None]
            * one_hot(position[:, k], CAPACITY)[:, None]
            for k in range(choices)
        )
        out = jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", combine > 0, x), w)
        return jnp.square(jnp.einsum("tec,ecf->tf", combine, jnp.tanh(out))).sum()

    program = jax.value_and_grad(loss, argnums=(0, 1, 2))
    outputs, sites = _rewritten(program, "exact", (wg, w, x))
    assert [(site.status, site.reason) for site in sites] == [("kept", "a product of sums of 12 and 12 terms")]
    assert_close(outputs, quick_jit(program)(wg, w, x), 2e-5)


@pytest.mark.parametrize("semantics", ["exact", "dropless"])
def test_positions_in_a_type_that_does_not_hold_them(semantics):
    """bfloat16 holds whole numbers up to 256: longer queues have several assignments in one slot."""
    tokens, capacity = 700, 300
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(tokens, 4)), jnp.float32)
    router = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(2, 4, 4)), jnp.float32)

    def layer(w, x):
        queue = jax.nn.one_hot((x @ router).argmax(-1), 2, dtype=jnp.int32)
        position = ((jnp.cumsum(queue, axis=0) - 1) * queue).sum(-1).astype(jnp.bfloat16)
        slot = jax.nn.one_hot(position.astype(jnp.int32), capacity)
        mask = jnp.einsum("te,tc->tec", queue * (position < capacity)[:, None].astype(x.dtype), slot)
        rows = jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", mask, x), w)
        return jnp.einsum("tec,ecd->td", mask, rows)

    step = moe_xla.moe_jit(layer, semantics=semantics, compiler_options=QUICK)
    assert all(site.status == "kept" for site in step.explain(w, x).sites)
    assert_close(step(w, x), quick_jit(layer)(w, x), 1e-5)
