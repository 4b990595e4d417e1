"""Programs around the layer: several layers, scan over stacked weights, rematerialisation, gradient accumulation.

A dropped assignment in one layer changes the routing of the next, so these agree only if every layer is right.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import composed, layers
from .composed import Masks, Parts
from .form import GROUP_TOKENS, GROUPS, MODEL, TOKENS, add, form, init_layer, init_params, init_tokens, mixed_loss

LAYERS = 4  # of a stack

ORDINARY = Parts(experts=composed.biased)
WIDTH = Parts(overflow="width", order="choice", rank="cumsum", rank_dtype="float32", experts=composed.gated)
SWITCH = Parts(1, composed.softmax_argmax, masks=Masks("combine_bool"))


def _init_stack(rng, dtype, shape=(TOKENS,), stacked=True, count=LAYERS):
    x = init_tokens(rng, dtype, shape)
    every = [init_params(rng, dtype) for _ in range(count)]
    if stacked:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *every), x
    return {f"layer{i}": params for i, params in enumerate(every)}, x


def _block(parts, capacity, params, x):
    """One residual block, normalised so that a stack of them stays tame."""
    scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    y, aux = composed.layer(parts, params, x * scale, capacity)
    return x + y, aux["balance"]


def _dense_block(parts, params, x):
    scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return x + composed.dense(parts, params, x * scale)


def _dense_stack(parts, params, x):
    for i in range(LAYERS):
        x = _dense_block(parts, jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
    return x


# --- several layers in one program


@form(
    "two_layers",
    "two layers, of different kinds",
    choices=2,
    sites=2,
    init=functools.partial(_init_stack, stacked=False, count=2),
    dense=lambda params, x: _dense_block(WIDTH, params["layer1"], _dense_block(ORDINARY, params["layer0"], x)),
)
def two_layers(params, x, capacity):
    x, first = _block(ORDINARY, capacity, params["layer0"], x)
    x, second = _block(WIDTH, capacity, params["layer1"], x)
    return x, {"balance": first + second}


@form(
    "three_layers_shared_weights",
    "the same weights three times over",
    choices=2,
    sites=3,
    dense=lambda params, x: _dense_block(WIDTH, params, _dense_block(WIDTH, params, _dense_block(WIDTH, params, x))),
)
def three_layers_shared_weights(params, x, capacity):
    balance = 0.0
    for _ in range(3):
        x, more = _block(WIDTH, capacity, params, x)
        balance = balance + more
    return x, {"balance": balance}


def _attention(params, x_bld):
    """Causal attention with one head; its masks are none of the compiler's business."""
    q, k, v = x_bld @ params["shared1"], x_bld @ params["shared1"][:, ::-1], x_bld
    scores = jnp.einsum("bqf,bkf->bqk", q, k) / 3.0
    length = x_bld.shape[1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("bqk,bkd->bqd", weights, v)


@form(
    "transformer",
    "attention, a flattened layer, embedding by one_hot, cross-entropy by one_hot",
    choices=2,
    tokens=GROUPS * GROUP_TOKENS,
    tight=23,
    init=functools.partial(_init_stack, shape=(GROUPS, GROUP_TOKENS), stacked=False, count=1),
    mixes_tokens=True,
)
def transformer(params, x, capacity):
    params = params["layer0"]
    ids = (jnp.arange(GROUPS * GROUP_TOKENS) * 7 % 12).reshape(GROUPS, GROUP_TOKENS)
    table = jnp.tile(params["wg"], (2, 3))[:, :MODEL]
    x = x + jnp.einsum("blv,vd->bld", jax.nn.one_hot(ids, len(table), dtype=x.dtype), table)
    x = x + _attention(params, x)
    y, balance = _block(ORDINARY, capacity, params, x.reshape(-1, MODEL))
    y = y.reshape(x.shape)
    log_probs = jax.nn.log_softmax(jnp.einsum("bld,vd->blv", y, table))
    targets = jax.nn.one_hot(jnp.roll(ids, -1, axis=1), len(table), dtype=x.dtype)
    return y, {"balance": balance, "loss": -jnp.sum(log_probs * targets, axis=-1).mean()}


# --- stacks under scan and rematerialisation


def _stack(parts, wrap, params, x, capacity):
    """Layers under `lax.scan`; `wrap` turns the block into what the scan runs, or the whole scan into another."""
    block_wrap, scan_wrap = wrap

    def block(x, params):
        return _block(parts, capacity, params, x)

    def run(params, x):
        return lax.scan(block_wrap(block), x, params)

    x, balance = scan_wrap(run)(params, x)
    return x, {"balance": balance.sum()}


def _same(fn):
    return fn


def _remat(policy=None, **options):
    return functools.partial(jax.checkpoint, policy=policy, **options)


_policies = jax.checkpoint_policies

for _name, _exercises, _parts, _wrap in (
    ("scan", "stacked weights", ORDINARY, (_same, _same)),
    ("scan_width", "stacked weights, only the width drops", WIDTH, (_same, _same)),
    ("scan_switch", "stacked weights, K=1", SWITCH, (_same, _same)),
    ("scan_where", "positions beyond the capacity are -1", Parts(overflow="where_minus_one"), (_same, _same)),
    ("scan_of_remat", "every block rematerialised", ORDINARY, (_remat(prevent_cse=False), _same)),
    ("scan_of_remat_width", "every block rematerialised", WIDTH, (_remat(), _same)),
    (
        "scan_of_remat_dots",
        "policy dots_saveable",
        ORDINARY,
        (_remat(_policies.dots_saveable, prevent_cse=False), _same),
    ),
    ("scan_of_remat_nothing", "policy nothing_saveable", WIDTH, (_remat(_policies.nothing_saveable), _same)),
    ("remat_of_scan", "the whole scan rematerialised", ORDINARY, (_same, _remat())),
    ("remat_of_scan_of_remat", "both", WIDTH, (_remat(prevent_cse=False), _remat())),
):
    add(
        _name,
        functools.partial(_stack, _parts, _wrap),
        _exercises,
        choices=_parts.choices,
        init=_init_stack,
        dense=functools.partial(_dense_stack, _parts),
    )


@form(
    "scan_grouped",
    "stacked weights, groups explicit in the einsums",
    choices=2,
    grouped=True,
    init=functools.partial(_init_stack, shape=(GROUPS, GROUP_TOKENS)),
)
def scan_grouped(params, x, capacity):
    def block(carry, params):
        x, balance = carry
        y, aux = layers.gshard(params, 0.5 * x, capacity, filtered_offset=False, dispatch_by="bool")
        return (0.5 * (x + y), balance + aux["balance"]), aux["over_capacity"]

    (x, balance), over = lax.scan(block, (x, jnp.zeros((), x.dtype)), params)
    return x, {"balance": balance, "over_capacity": over}


@form("scan_unrolled", "scan with unroll=2 and reverse, layers numbered", choices=2, init=_init_stack)
def scan_unrolled(params, x, capacity):
    def block(x, layer):
        number, params = layer
        y, balance = _block(WIDTH, capacity, params, x)
        return x + (y - x) / (1.0 + number.astype(x.dtype)), balance

    x, balance = lax.scan(block, x, (jnp.arange(LAYERS), params), reverse=True, unroll=2)
    return x, {"balance": balance.mean()}


def _named_mlp(params, buffer):
    hidden = checkpoint_name(jnp.einsum("ecd,edf->ecf", buffer, params["w1"]), "hidden")
    return jnp.einsum("ecf,efd->ecd", jax.nn.gelu(hidden), params["w2"])


NAMED = Parts(experts=_named_mlp)

for _name, _policy in (
    ("remat", None),
    ("remat_nothing", _policies.nothing_saveable),
    ("remat_everything", _policies.everything_saveable),
    ("remat_dots", _policies.dots_saveable),
    ("remat_dots_no_batch", _policies.dots_with_no_batch_dims_saveable),
    ("remat_names", _policies.save_only_these_names("hidden")),
    ("remat_any_but_names", _policies.save_any_names_but_these("hidden")),
):

    def _rematerialised(policy, params, x, capacity):
        block = jax.checkpoint(functools.partial(composed.layer, NAMED, capacity=capacity), policy=policy)
        return block(params, x)

    add(
        _name,
        functools.partial(_rematerialised, _policy),
        "jax.checkpoint, policy " + _name.removeprefix("remat").strip("_"),
        choices=2,
        dense=functools.partial(composed.dense, NAMED),
    )


@form(
    "scan_of_remat_names",
    "scan of remat, only the hidden buffer saved by name",
    choices=2,
    init=_init_stack,
    dense=functools.partial(_dense_stack, NAMED),
)
def scan_of_remat_names(params, x, capacity):
    policy = _policies.save_only_these_names("hidden")
    return _stack(NAMED, (_remat(policy, prevent_cse=False), _same), params, x, capacity)


@form("remat_experts", "only the experts rematerialised", choices=2, dense=functools.partial(composed.dense, WIDTH))
def remat_experts(params, x, capacity):
    parts = Parts(**{**vars(WIDTH), "experts": jax.checkpoint(composed.gated)})
    return composed.layer(parts, params, x, capacity)


# --- gradient accumulation

MICROBATCHES = 4


def _microbatches(x):
    return x.reshape(MICROBATCHES, TOKENS, MODEL)


def _forward_microbatches(params, x, capacity):
    def body(total, rows):
        y, aux = composed.layer(ORDINARY, params, rows, capacity)
        return total + aux["balance"], y

    balance, y = lax.scan(body, jnp.zeros((), x.dtype), _microbatches(x))
    return y, {"balance": balance}


def _accumulated_step(capacity):
    """Gradients of the microbatches added up in a scan, as a training step does it."""

    def loss(params, rows):
        y, aux = composed.layer(ORDINARY, params, rows, capacity)
        return mixed_loss(y, aux), (y, aux)

    def step(params, x):
        def body(carry, rows):
            total, gradients = carry
            (value, (y, aux)), more = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, rows)
            gradients = jax.tree.map(jnp.add, gradients, more[0])
            return (total + value, gradients), (y, aux, more[1])

        start = (jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, params))
        (total, gradients), (y, aux, for_x) = lax.scan(body, start, _microbatches(x))
        gradients = jax.tree.map(lambda g: g / MICROBATCHES, gradients)
        return (total / MICROBATCHES, (y, aux)), (gradients, for_x)

    return step


add(
    "accumulation",
    _forward_microbatches,
    "scan over microbatches, gradients added up inside",
    choices=2,
    rows=MICROBATCHES * TOKENS,
    init=lambda rng, dtype: init_layer(rng, dtype, (MICROBATCHES * TOKENS,)),
    own_step=_accumulated_step,
    dense=lambda params, x: _microbatches(composed.dense(ORDINARY, params, x)),
)
add(
    "microbatches",
    _forward_microbatches,
    "scan over microbatches, differentiated from outside",
    choices=2,
    rows=MICROBATCHES * TOKENS,
    init=lambda rng, dtype: init_layer(rng, dtype, (MICROBATCHES * TOKENS,)),
    dense=lambda params, x: _microbatches(composed.dense(ORDINARY, params, x)),
)
