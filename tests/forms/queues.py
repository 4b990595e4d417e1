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


def queues_of_kept(params, x, capacity, *, dtype, dispatch_by):
    """Repeated argmax over `x[g,s,m]`; each choice queues behind what the earlier ones kept."""
    gates = left = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, params["wg"]))
    offset, combine, dispatch = jnp.zeros((x.shape[0], 1, EXPERTS), dtype), 0.0, 0.0
    for _ in range(3):
        index = jnp.argmax(left, axis=-1)
        mask = one_hot(index, EXPERTS, dtype=dtype)
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


for _name, _dtype, _dispatch in (("", jnp.int32, "bool"), ("_float", jnp.float32, "masks")):
    form(
        f"queues_of_kept{_name}",
        "three choices, each queued behind what the earlier ones kept",
        choices=3,
        grouped=True,
        tight=11,
        dense=dense_of(composed.softmax_argmax, composed.mlp, 3),
    )(functools.partial(queues_of_kept, dtype=_dtype, dispatch_by=_dispatch))
