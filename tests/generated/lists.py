"""Layers that run each expert on a list of its tokens, made by `jnp.nonzero(mask, size=capacity)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from . import parts
from .parts import Params

if TYPE_CHECKING:
    from .programs import Program

# What stands behind the last token of a list, whose rows are dropped: a token out of range, whose row reads zero, or
# reads the last token; or the first token, under a mask.
BEHIND = ("far", "clamped", "first")
MISSES = ("list_unmasked", "list_rolled", "list_of_next")


def _listed(p: Program, x: jax.Array, gate: jax.Array, mask: jax.Array, own: Params, capacity: int) -> tuple:
    """The tokens `[c]` of one expert, and what it adds to them `[c, d]`; `mask` [t, k] is where it is chosen."""
    chosen, weight = mask.any(-1), jnp.where(mask, gate, 0).sum(-1)
    (tokens,) = jnp.nonzero(chosen, size=capacity, fill_value=0 if p.behind == "first" else p.tokens)
    if p.near_miss == "list_rolled":
        tokens = jnp.roll(tokens, 1)
    if p.behind == "far":
        rows, weight = (a.at[tokens].get(mode="fill", fill_value=0) for a in (x, weight))
    else:
        rows, weight = x[tokens], weight[tokens]
    out = parts.one_expert(p, own, rows) * weight[:, None]
    if p.behind == "first" and p.near_miss != "list_unmasked":
        out = jnp.where((jnp.arange(capacity) < chosen.sum())[:, None], out, 0)
    return tokens, out


def _mapped(p: Program, x: jax.Array, own: Params, run: Callable) -> jax.Array:
    def added(e, own):
        tokens, out = run(e, own)
        return jnp.zeros_like(x).at[tokens].add(out, mode="drop")

    return jax.vmap(added)(jnp.arange(p.experts), own).sum(0)


def _batched(p: Program, x: jax.Array, own: Params, run: Callable) -> jax.Array:
    tokens, out = jax.vmap(run)(jnp.arange(p.experts), own)
    return jnp.zeros_like(x).at[tokens].add(out)


def _unrolled(p: Program, x: jax.Array, own: Params, run: Callable) -> jax.Array:
    y = jnp.zeros_like(x)
    for e in range(p.experts):
        tokens, out = run(e, {name: array[e] for name, array in own.items()})
        y = y.at[tokens].add(out)
    return y


def _scanned(p: Program, x: jax.Array, own: Params, run: Callable) -> jax.Array:
    def step(y, expert):
        tokens, out = run(*expert)
        return y.at[tokens].add(out, mode="drop"), None

    return lax.scan(step, jnp.zeros_like(x), (jnp.arange(p.experts), own))[0]


WALKS: dict[str, Callable] = {"mapped": _mapped, "batched": _batched, "unrolled": _unrolled, "scanned": _scanned}


def by_list(p: Program, params: Params, x: jax.Array, gate: jax.Array, index: jax.Array, valid, capacity: int) -> tuple:
    """(y, aux) of a layer whose router gave `gate` and `index`, [t, k]."""
    index = index if valid is None else jnp.where(valid[:, None], index, p.experts)  # padding: no such expert

    def run(e, own: Params) -> tuple:
        mask = index == ((e + 1) % p.experts if p.near_miss == "list_of_next" else e)
        return _listed(p, x, gate, mask, own, capacity)

    y = WALKS[p.walk](p, x, parts.own_params(params), run)
    if p.near_miss == "use_rate":
        held = [jnp.minimum((index == e).any(-1).sum(), capacity) for e in range(p.experts)]
        return y, {"use": jnp.stack(held).sum().astype(x.dtype) / capacity}
    return y, {}
