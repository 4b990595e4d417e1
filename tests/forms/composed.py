"""Layers put together from interchangeable parts: router x ranks x overflow x masks x experts.

Every part is one of the ways in which people write that step.  Letters: t tokens, k choices, e experts, c slots,
d model, f hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .form import BF16, EXPERTS, add

one_hot = jax.nn.one_hot


# --- routers: (params, x_td, choices) -> (gate_tk, index_tk, probs_te)


def softmax_top_k(params, x, choices):
    probs = jax.nn.softmax(x @ params["wg"])
    gate, index = lax.top_k(probs, choices)
    return gate, index, probs


def softmax_normalised(params, x, choices):
    gate, index, probs = softmax_top_k(params, x, choices)
    return gate / gate.sum(-1, keepdims=True), index, probs


def top_k_softmax(params, x, choices):
    logits = jnp.einsum("td,de->te", x, params["wg"])
    chosen, index = lax.top_k(logits, choices)
    return jax.nn.softmax(chosen, axis=-1), index, jax.nn.softmax(logits)


def sigmoid_normalised(params, x, choices):
    scores = jax.nn.sigmoid(x @ params["wg"])
    gate, index = lax.top_k(scores, choices)
    return gate / (gate.sum(-1, keepdims=True) + 1e-9), index, scores


def sigmoid_scaled_choice_bias(params, x, choices):
    """The bias decides who is chosen, never how much the choice counts."""
    scores = jax.nn.sigmoid(x @ params["wg"])
    _, index = lax.top_k(scores + lax.stop_gradient(params["choice_bias"]), choices)
    gate = jnp.take_along_axis(scores, index, axis=-1)
    return 2.5 * gate / gate.sum(-1, keepdims=True), index, scores


def softmax_argmax(params, x, choices):
    """Repeated argmax, each time with the experts chosen so far masked out."""
    probs = jax.nn.softmax(x @ params["wg"])
    left, gates, indices = probs, [], []
    for _ in range(choices):
        index = jnp.argmax(left, axis=-1)
        chosen = one_hot(index, probs.shape[-1], dtype=probs.dtype)
        gates.append(jnp.sum(probs * chosen, axis=-1))
        indices.append(index)
        left = left * (1 - chosen)
    return jnp.stack(gates, -1), jnp.stack(indices, -1), probs


def argmax_minus_infinity(params, x, choices):
    logits = x @ params["wg"]
    probs = jax.nn.softmax(logits)
    gates, indices = [], []
    for _ in range(choices):
        index = jnp.argmax(logits, axis=-1)
        indices.append(index)
        gates.append(jnp.take_along_axis(probs, index[:, None], axis=-1)[:, 0])
        logits = jnp.where(one_hot(index, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    gate = jnp.stack(gates, -1)
    return gate / gate.sum(-1, keepdims=True), jnp.stack(indices, -1), probs


def gate_by_einsum(params, x, choices):
    probs = jax.nn.softmax(x @ params["wg"])
    _, index = lax.top_k(probs, choices)
    gate = jnp.einsum("te,tke->tk", probs, one_hot(index, probs.shape[-1], dtype=probs.dtype))
    return gate, index, probs


def float32_router(params, x, choices):
    probs = jax.nn.softmax(x.astype(jnp.float32) @ params["wg"].astype(jnp.float32))
    gate, index = lax.top_k(probs, choices)
    return gate / jnp.sum(gate, axis=-1, keepdims=True), index, probs


def noisy(params, x, choices):
    """Multiplicative jitter on the input and noise on the logits, both from fixed keys."""
    jitter_key, noise_key = jax.random.split(jax.random.key(3))
    jittered = x * jax.random.uniform(jitter_key, x.shape, x.dtype, 0.9, 1.1)
    logits = jittered @ params["wg"]
    logits = logits + 0.3 * jax.random.normal(noise_key, logits.shape, logits.dtype)
    return softmax_top_k({"wg": jnp.eye(logits.shape[-1], dtype=logits.dtype)}, logits, choices)


# --- queues: the order in which assignments queue for their expert: one-hots [t,k,e] <-> a queue [a,e]


def _to_queue(chosen_tke, order):
    tokens, choices, experts = chosen_tke.shape
    if order == "choice":  # all first choices before all second ones
        return chosen_tke.transpose(1, 0, 2).reshape(choices * tokens, experts)
    return chosen_tke.reshape(tokens * choices, experts)


def _from_queue(queue, tokens, choices, order):
    if order == "choice":
        return queue.reshape(choices, tokens, *queue.shape[1:]).swapaxes(0, 1)
    return queue.reshape(tokens, choices, *queue.shape[1:])


# --- ranks: queue [a,e] -> the number of earlier assignments of each expert, one too many where `inclusive`


def _cumsum(queue):
    return jnp.cumsum(queue, axis=0)


RANKS: dict[str, tuple[bool, Callable]] = {
    "cumsum": (True, _cumsum),
    "lax_cumsum": (True, functools.partial(lax.cumsum, axis=0)),
    "associative_scan": (True, functools.partial(lax.associative_scan, jnp.add)),
    "minus_self": (False, lambda queue: jnp.cumsum(queue, axis=0) - queue),
    "pad_slice": (False, lambda queue: jnp.cumsum(jnp.pad(queue, ((1, 0), (0, 0)))[:-1], axis=0)),
    "slice_pad": (False, lambda queue: jnp.pad(jnp.cumsum(queue, axis=0), ((1, 0), (0, 0)))[:-1]),
    "concatenate": (False, lambda queue: jnp.concatenate([jnp.zeros_like(queue[:1]), _cumsum(queue)[:-1]])),
}

# --- sample: the rank at the assignment's own expert: (rank [a,e], queue [a,e], index [a]) -> [a]

SAMPLE: dict[str, Callable] = {
    "sum": lambda rank, queue, index: (rank * queue).sum(-1),
    "max": lambda rank, queue, index: (rank * queue).max(-1),
    "einsum": lambda rank, queue, index: jnp.einsum("ae,ae->a", rank, queue),
    "take": lambda rank, queue, index: jnp.take_along_axis(rank, index[:, None], axis=1)[:, 0],
    "where": lambda rank, queue, index: jnp.where(queue > 0, rank, 0).sum(-1),
}

# --- overflow: (position [t,k] from 0, capacity, dtype) -> (slot one-hot [t,k,c], keep [t,k] or None)


def _compare(keep_of):
    def overflow(position, capacity, dtype):
        keep = keep_of(position, capacity)
        return one_hot(position, capacity, dtype=dtype), keep

    return overflow


def _only_width(position, capacity, dtype):
    return one_hot(position, capacity, dtype=dtype), None


def _where_capacity(position, capacity, dtype):
    return one_hot(jnp.where(position < capacity, position, capacity), capacity, dtype=dtype), None


def _where_minus_one(position, capacity, dtype):
    keep = position < capacity
    return one_hot(jnp.where(keep, position, -1), capacity, dtype=dtype), keep


def _last_slot_sliced(position, capacity, dtype):
    position = jnp.minimum(position, capacity)
    return one_hot(position, capacity + 1, dtype=dtype)[..., :capacity], None


def _last_slot_where(position, capacity, dtype):
    position = jnp.where(position < capacity, position, capacity)
    return one_hot(position, capacity + 1, dtype=dtype)[..., :-1], None


def _first_slot_sliced(position, capacity, dtype):
    keep = position + 1 <= capacity
    return one_hot((position + 1) * keep, capacity + 1, dtype=dtype)[..., 1:], None


def _compare_iota(position, capacity, dtype):
    slots = jnp.arange(capacity, dtype=position.dtype)
    return (position[..., None] == slots).astype(dtype), None


OVERFLOW: dict[str, Callable] = {
    "less": _compare(lambda position, capacity: position < capacity),
    "less_equal": _compare(lambda position, capacity: position <= capacity - 1),
    "one_based": _compare(lambda position, capacity: position + 1 <= capacity),
    "one_based_less": _compare(lambda position, capacity: (position + 1) < capacity + 1),
    "greater": _compare(lambda position, capacity: capacity > position),
    "not_greater_equal": _compare(lambda position, capacity: ~(position >= capacity)),
    "float_capacity": _compare(lambda position, capacity: position < float(capacity)),
    "float_fraction": _compare(lambda position, capacity: position.astype(jnp.float32) < capacity - 0.5),
    "width": _only_width,
    "iota": _compare_iota,
    "where_capacity": _where_capacity,
    "where_minus_one": _where_minus_one,
    "last_slot_sliced": _last_slot_sliced,
    "last_slot_where": _last_slot_where,
    "first_slot_sliced": _first_slot_sliced,
}

# --- masks: (gate_tk, expert_tke, slot_tkc, keep_tk or None, x dtype) -> (dispatch, combine), axes in `layout` order


@dataclasses.dataclass(frozen=True)
class Masks:
    build: str = "einsum"
    dtype: str = "x"
    layout: str = "tec"


def _kept(gate, expert, keep):
    if keep is None:
        return gate, expert
    return gate * keep.astype(gate.dtype), expert * keep[..., None].astype(expert.dtype)


def build_masks(how: Masks, gate, expert, slot, keep):
    out = how.layout
    gate, expert = _kept(gate, expert, keep)
    slot = slot.astype(expert.dtype)
    if how.build == "einsum":
        dispatch = jnp.einsum(f"tke,tkc->{out}", expert, slot)
        combine = jnp.einsum(f"tk,tke,tkc->{out}", gate, expert, slot)
    elif how.build == "einsum_reversed":
        dispatch = jnp.einsum(f"tkc,tke->{out}", slot, expert)
        combine = jnp.einsum(f"tkc,tke,tk->{out}", slot, expert, gate)
    elif how.build == "four_operands":
        valid = jnp.ones_like(gate) if keep is None else keep.astype(gate.dtype)
        dispatch = jnp.einsum(f"tk,tke,tkc->{out}", valid, expert, slot)
        combine = jnp.einsum(f"tke,tk,tkc,tk->{out}", expert, gate, slot, valid)
    elif how.build in ("product_sum", "product_max"):
        product = expert[..., :, None] * slot[..., None, :]
        reduce = jnp.sum if how.build == "product_sum" else jnp.max
        dispatch = _permute(reduce(product, axis=1), out)
        combine = _permute(reduce(gate[..., None, None].astype(product.dtype) * product, axis=1), out)
    elif how.build == "gated_product":
        product = expert[..., :, None] * slot[..., None, :]
        dispatch = _permute(product.sum(1), out)
        combine = jnp.einsum(f"tk,tkec->{out}", gate, product)
    elif how.build == "unrolled":
        terms = [expert[:, k, :, None] * slot[:, k, None, :] for k in range(gate.shape[1])]
        dispatch = _permute(functools.reduce(jnp.add, terms), out)
        combine = _permute(sum(gate[:, k, None, None] * term for k, term in enumerate(terms)), out)
    elif how.build == "weights_times_mask":
        weights = jnp.einsum("tk,tke->te", gate, expert)
        dispatch = jnp.einsum(f"tke,tkc->{out}", expert, slot)
        combine = jnp.einsum(f"te,{out}->{out}", weights, dispatch)
    elif how.build in ("combine_positive", "combine_bool", "combine_nonzero"):
        combine = jnp.einsum(f"tk,tke,tkc->{out}", gate, expert, slot)
        dispatch = {
            "combine_positive": lambda: combine > 0,
            "combine_bool": lambda: combine.astype(bool),
            "combine_nonzero": lambda: jnp.not_equal(combine, 0),
        }[how.build]()
    elif how.build == "logical_any":
        product = expert.astype(bool)[..., :, None] & slot.astype(bool)[..., None, :]
        dispatch = _permute(jnp.any(product, axis=1), out)
        combine = jnp.einsum(f"tk,tkec->{out}", gate, product.astype(gate.dtype))
    else:
        raise ValueError(how.build)
    if how.dtype != "x":
        dispatch = dispatch.astype(
            {"bool": bool, "int": jnp.int32, "bf16": jnp.bfloat16, "f32": jnp.float32}[how.dtype]
        )
    return dispatch, combine


def _permute(mask_tec, layout):
    return mask_tec.transpose(*("tec".index(axis) for axis in layout))


# --- experts: (params, buffer_ecd) -> buffer_ecd


def mlp(params, buffer, activation=jax.nn.relu):
    return jnp.einsum("ecf,efd->ecd", activation(jnp.einsum("ecd,edf->ecf", buffer, params["w1"])), params["w2"])


def biased(params, buffer, activation=jax.nn.gelu):
    hidden = activation(jnp.einsum("ecd,edf->ecf", buffer, params["w1"]) + params["b1"][:, None])
    return jnp.einsum("ecf,efd->ecd", hidden, params["w2"]) + params["b2"][:, None, :]


def gated(params, buffer):
    gate = jax.nn.silu(jnp.einsum("ecd,edf->ecf", buffer, params["w1"]))
    return jnp.einsum("ecf,efd->ecd", gate * jnp.einsum("ecd,edf->ecf", buffer, params["w3"]), params["w2"])


def background(params, buffer):
    """An activation that is not zero at zero: empty slots hold 1 + tanh(bias)."""
    return biased(params, buffer, lambda h: 1 + jnp.tanh(h))


@jax.custom_jvp
def clipped_square(h):
    return jnp.square(jnp.clip(h, -2, 2))


@clipped_square.defjvp
def _clipped_square_jvp(primals, tangents):
    (h,), (dh,) = primals, tangents
    return clipped_square(h), 2 * jnp.clip(h, -2, 2) * dh  # straight through the clip


@jax.custom_vjp
def scaled_backward(h):
    return jnp.tanh(h)


scaled_backward.defvjp(lambda h: (jnp.tanh(h), h), lambda h, g: (0.5 * g * (1 - jnp.tanh(h) ** 2),))


def scaled(params, buffer):
    return mlp(params, buffer, jax.nn.gelu) * params["scale"][:, None, None]


def vmapped(params, buffer):
    def expert(w1, b1, w2, z):
        return jax.nn.gelu(z @ w1 + b1) @ w2

    return jax.vmap(expert)(params["w1"], params["b1"], params["w2"], buffer)


def vmapped_params(params, buffer):
    weights = {name: params[name] for name in ("w1", "w2", "w3")}
    return jax.vmap(lambda w, z: (jax.nn.silu(z @ w["w1"]) * (z @ w["w3"])) @ w["w2"])(weights, buffer)


def batch_matmul(params, buffer):
    return jnp.matmul(jax.nn.relu(jnp.matmul(buffer, params["w1"])), params["w2"])


def weights_first(params, buffer):
    """The kernels as left operands, the buffer transposed in between."""
    hidden = jax.nn.leaky_relu(jnp.einsum("edf,ecd->efc", params["w1"], buffer))
    return jnp.einsum("efd,efc->ecd", params["w2"], hidden)


def bf16_experts(params, buffer):
    weights = {name: params[name].astype(jnp.bfloat16) for name in ("w1", "w2", "w3")}
    return gated(weights, buffer.astype(jnp.bfloat16))


def preferred_type(params, buffer):
    weights = {name: params[name].astype(jnp.bfloat16) for name in ("w1", "w2")}
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    hidden = jax.nn.gelu(dot("ecd,edf->ecf", buffer.astype(jnp.bfloat16), weights["w1"]))
    return dot("ecf,efd->ecd", hidden.astype(jnp.bfloat16), weights["w2"])


def named(params, buffer):
    from jax.ad_checkpoint import checkpoint_name

    hidden = checkpoint_name(jnp.einsum("ecd,edf->ecf", buffer, params["w1"]), "expert_hidden")
    hidden = checkpoint_name(jax.nn.relu(hidden), "expert_active")
    return checkpoint_name(jnp.einsum("ecf,efd->ecd", hidden, params["w2"]), "expert_out")


def custom_jvp_activation(params, buffer):
    return biased(params, buffer, clipped_square)


def custom_vjp_activation(params, buffer):
    return biased(params, buffer, scaled_backward)


# --- the layer


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a layer; the defaults are the most ordinary ones."""

    choices: int = 2
    router: Callable = softmax_normalised
    order: str = "token"
    rank: str = "minus_self"
    rank_dtype: str = "int32"
    sample: str = "sum"
    minus_one: str = "inside"
    overflow: str = "less"
    masks: Masks = Masks()
    experts: Callable = mlp


def positions(parts: Parts, index_tk, experts=EXPERTS):
    """Position of every assignment in its expert's queue, counted from 0."""
    tokens, choices = index_tk.shape
    queue = _to_queue(one_hot(index_tk, experts, dtype=jnp.dtype(parts.rank_dtype)), parts.order)
    own = (index_tk.T if parts.order == "choice" else index_tk).reshape(-1)
    inclusive, rank_of = RANKS[parts.rank]
    rank, sample = rank_of(queue), SAMPLE[parts.sample]
    if not inclusive:
        position = sample(rank, queue, own)
    elif parts.minus_one == "inside":
        position = sample(rank - 1, queue, own)
    elif parts.minus_one == "after":
        position = sample(rank, queue, own) - 1
    elif parts.minus_one == "masked":
        position = (rank * queue - queue).sum(-1)
    elif parts.minus_one == "spread":  # -1 at every expert that was not chosen, then the largest
        position = (rank * queue - 1).max(-1)
    else:
        raise ValueError(parts.minus_one)
    return _from_queue(position, tokens, choices, parts.order)


def layer(parts: Parts, params, x, capacity):
    gate, index, probs = parts.router(params, x, parts.choices)
    experts = probs.shape[-1]
    position = positions(parts, index, experts)
    dtype = gate.dtype
    slot, keep = OVERFLOW[parts.overflow](position, capacity, dtype)
    expert = one_hot(index, experts, dtype=dtype)
    dispatch, combine = build_masks(parts.masks, gate, expert, slot, keep)
    out = parts.masks.layout
    buffer = jnp.einsum(f"{out},td->ecd", dispatch, x)
    y = jnp.einsum(f"{out},ecd->td", combine, parts.experts(params, buffer))
    load = expert[:, 0].mean(0)
    return y.astype(x.dtype), {"balance": experts * jnp.sum(load * probs.mean(0))}


def dense(parts: Parts, params, x):
    """Every expert on every token, the chosen ones picked and weighted."""
    gate, index, _ = parts.router(params, x, parts.choices)
    every = parts.experts(params, jnp.broadcast_to(x, (params["wg"].shape[-1], *x.shape)))
    picked = every[index, jnp.arange(x.shape[0])[:, None]]
    return jnp.einsum("tk,tkd->td", gate, picked).astype(x.dtype)


TABLE: list[tuple[str, str, Parts]] = [
    # routers and choices
    ("switch", "K=1, top_k", Parts(1, softmax_top_k)),
    ("switch_argmax", "K=1, argmax, one-based ranks", Parts(1, softmax_argmax, rank="cumsum", minus_one="after")),
    ("top2", "K=2, token-major, comparison", Parts()),
    ("top2_choice_major", "first choices queue before second ones", Parts(order="choice")),
    ("top3", "K=3", Parts(3, softmax_top_k, order="choice")),
    ("top3_argmax", "three argmaxes with -inf", Parts(3, argmax_minus_infinity)),
    ("top2_softmax_of_chosen", "softmax over the chosen logits", Parts(router=top_k_softmax)),
    ("top2_sigmoid", "normalised sigmoid gates", Parts(router=sigmoid_normalised)),
    ("top2_choice_bias", "bias for choosing only, scaled gates", Parts(router=sigmoid_scaled_choice_bias)),
    ("top2_argmax", "repeated argmax", Parts(router=softmax_argmax)),
    ("top2_gate_einsum", "gates from the full probabilities", Parts(router=gate_by_einsum)),
    ("top2_noisy", "jitter and noise from keys", Parts(router=noisy)),
    # ranks
    ("rank_f32", "float32 ranks", Parts(rank_dtype="float32", rank="cumsum")),
    ("rank_f32_exclusive", "float32 ranks less the own row", Parts(rank_dtype="float32", order="choice")),
    ("rank_lax_cumsum", "lax.cumsum", Parts(rank="lax_cumsum", order="choice")),
    ("rank_associative_scan", "associative_scan", Parts(rank="associative_scan")),
    (
        "rank_associative_scan_f32",
        "associative_scan in float32, choice-major",
        Parts(rank="associative_scan", rank_dtype="float32", order="choice"),
    ),
    ("rank_pad_slice", "exclusive by pad, slice, cumsum", Parts(rank="pad_slice")),
    ("rank_slice_pad", "exclusive by cumsum, pad, slice", Parts(rank="slice_pad", order="choice")),
    ("rank_concatenate", "exclusive by concatenate", Parts(rank="concatenate")),
    ("sample_take", "rank read by take_along_axis", Parts(sample="take", rank="cumsum")),
    ("sample_take_after", "take_along_axis, then minus one", Parts(sample="take", rank="cumsum", minus_one="after")),
    ("sample_einsum", "rank read by einsum", Parts(sample="einsum", rank_dtype="float32", order="choice")),
    ("sample_max", "rank read by max over experts", Parts(sample="max", rank="cumsum", minus_one="after")),
    ("sample_where", "rank read by where and sum", Parts(sample="where", rank="cumsum")),
    ("minus_masked", "minus one through the mask", Parts(rank="cumsum", minus_one="masked")),
    ("minus_spread", "-1 wherever not chosen", Parts(rank="cumsum", minus_one="spread", order="choice")),
    # overflow
    ("overflow_width", "no comparison, only the width of one_hot", Parts(overflow="width")),
    (
        "overflow_width_choice_major",
        "width only, choice-major, float32 ranks",
        Parts(overflow="width", order="choice", rank="cumsum", rank_dtype="float32", minus_one="after"),
    ),
    ("overflow_less_equal", "<= capacity - 1", Parts(overflow="less_equal")),
    ("overflow_one_based", "position + 1 <= capacity", Parts(overflow="one_based")),
    ("overflow_one_based_less", "position + 1 < capacity + 1", Parts(overflow="one_based_less")),
    ("overflow_greater", "capacity > position", Parts(overflow="greater")),
    ("overflow_not_ge", "not (position >= capacity)", Parts(overflow="not_greater_equal", order="choice")),
    ("overflow_float", "float capacity", Parts(overflow="float_capacity", rank_dtype="float32")),
    ("overflow_float_fraction", "float positions, fractional capacity", Parts(overflow="float_fraction")),
    ("overflow_iota", "one-hot by comparison with arange", Parts(overflow="iota")),
    ("overflow_where_capacity", "where(.., capacity)", Parts(overflow="where_capacity")),
    ("overflow_where_minus_one", "where(.., -1)", Parts(overflow="where_minus_one", order="choice")),
    ("overflow_last_slot", "minimum, then slot C sliced away", Parts(overflow="last_slot_sliced")),
    ("overflow_last_slot_where", "where, then slot C sliced away", Parts(overflow="last_slot_where")),
    ("overflow_first_slot", "slot 0 sliced away", Parts(overflow="first_slot_sliced")),
    # masks
    ("mask_bool", "bool dispatch", Parts(masks=Masks(dtype="bool"))),
    ("mask_int", "int dispatch", Parts(masks=Masks("product_sum", "int"))),
    ("mask_bf16", "bf16 dispatch", Parts(masks=Masks("product_sum", "bf16"))),
    ("mask_f32", "float32 dispatch", Parts(masks=Masks("product_max", "f32"))),
    ("mask_reversed", "operands reversed, [c,t,e]", Parts(masks=Masks("einsum_reversed", layout="cte"))),
    ("mask_four_operands", "four-operand einsum, [e,t,c]", Parts(masks=Masks("four_operands", layout="etc"))),
    ("mask_product_sum", "outer product, sum over choices, [e,c,t]", Parts(masks=Masks("product_sum", layout="ect"))),
    ("mask_product_max", "outer product, max over choices", Parts(masks=Masks("product_max"))),
    ("mask_gated_product", "mask [t,k,e,c] used twice", Parts(masks=Masks("gated_product", layout="tce"))),
    ("mask_unrolled", "one product per choice, added up", Parts(masks=Masks("unrolled"), order="choice")),
    ("mask_weights", "weights [t,e] times dispatch", Parts(masks=Masks("weights_times_mask"), overflow="width")),
    ("mask_combine_positive", "dispatch = combine > 0", Parts(masks=Masks("combine_positive"))),
    ("mask_combine_bool", "dispatch = combine.astype(bool)", Parts(masks=Masks("combine_bool", layout="cet"))),
    ("mask_combine_nonzero", "dispatch = combine != 0", Parts(masks=Masks("combine_nonzero"), overflow="width")),
    ("mask_logical", "bool and, any over choices", Parts(masks=Masks("logical_any"))),
    # experts
    ("experts_gelu_bias", "biases", Parts(experts=biased)),
    ("experts_gated", "three matrices, silu", Parts(experts=gated, order="choice")),
    ("experts_background", "empty slots do not stay zero", Parts(experts=background)),
    ("experts_custom_jvp", "user's custom_jvp activation", Parts(experts=custom_jvp_activation)),
    ("experts_custom_vjp", "user's custom_vjp activation", Parts(experts=custom_vjp_activation)),
    ("experts_scaled", "per-expert scale", Parts(experts=scaled)),
    ("experts_vmap", "vmap over experts", Parts(experts=vmapped)),
    ("experts_vmap_params", "vmap over a dict of weights", Parts(experts=vmapped_params)),
    ("experts_matmul", "jnp.matmul", Parts(experts=batch_matmul)),
    ("experts_weights_first", "kernels as left operands", Parts(experts=weights_first)),
    ("experts_bf16", "bf16 experts, f32 router", Parts(router=float32_router, experts=bf16_experts)),
    ("experts_preferred", "preferred_element_type", Parts(router=float32_router, experts=preferred_type)),
    ("experts_named", "checkpoint_name inside", Parts(experts=named)),
]

for _name, _exercises, _parts in TABLE:
    add(
        _name,
        functools.partial(layer, _parts),
        _exercises,
        choices=_parts.choices,
        dense=functools.partial(dense, _parts),
        tolerance=BF16 if _parts.experts in (bf16_experts, preferred_type) else None,
    )
