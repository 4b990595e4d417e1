"""Naive Mixture-of-Experts programs as values: a `Program` is a set of choices, `build` makes it runnable.

`programs()` is the hypothesis strategy that draws them.  A program prints as the choices that are not the defaults, so
a failure can be copied into a test as it stands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from . import lists, parts
from .parts import Params, Spelling, one_hot

GROUPS, LAYERS, BATCH = 2, 2, 2

# Near-misses by what is asked of the compiler:
# two assignments that are kept share a slot, so that nothing may be rewritten
COLLIDES = (
    *("per_choice", "offset_less_one", "offset_of_neighbour", "offset_of_own", "double_cumsum", "other_index"),
    *("over_experts", "halved", "shuffled", "blocks"),
)
# the same, but only where the capacity overflows: never exact
OVERFLOW_COLLIDES = tuple(parts.OVERFLOW_MISSES)
# the outputs tell the capacity beyond overflow: never dropless
NEEDS_CAPACITY = (
    *("slot_softmax", "slot_mean", "slot_embedding", "first_slots", "slot_cumsum", "slot_reverse", "slot_sort"),
    *("use_rate", "dispatch_returned", "longest_over_capacity"),
)
# rewritten or not, but right
EITHER = (
    *("reversed", "every_other_slot", "from_slot_three", "expert_roll", "expert_sum", "signed_gates"),
    *("padding_counted", "padding_unmasked", "soft_mixture", "every_read", "twice_dispatched"),
    *("other_combine", "next_slot", "other_token", *lists.MISSES),
)
NEAR_MISSES = (*COLLIDES, *OVERFLOW_COLLIDES, *NEEDS_CAPACITY, *EITHER)

# Layers that are run as written today, though nothing forbids to rewrite them: the choices that together stop it.
# Their numbers are checked like all others; that they are rewritten is not asked for.
GAPS: tuple[Mapping[str, tuple], ...] = (
    {"around": ("cond",)},
    {"around": ("checkpoint_dots",)},
    {"around": ("sliced",)},
    {"around": ("checkpoint_experts",), "order": ("offset",)},
    {"around": ("checkpoint_experts",), "masks": ("positive", "bool", "nonzero")},
    {"batching": ("loop",)},
    {"order": ("multi_hot", "offset_kept")},
    {"order": ("offset",), "family": ("scatter",)},
    {"order": ("offset",), "rank_dtype": ("float32", "float64"), "around": ("map", "scan", "scan_checkpoint")},
    {"sample": ("take",), "rank": ("minus_self", "pad", "pad_after", "concatenate")},
    {"sample": ("max",), "padding": ("periodic", "data")},
    {"overflow": ("first_slot_sliced",), "padding": ("periodic", "data")},
    {"metrics": ("queue",), "padding": ("periodic", "data")},
    {"around": ("scan_checkpoint",), "padding": ("periodic", "data")},
    {"overflow": ("clamped",), "rank_dtype": ("float32", "float64")},
    {"order": ("offset",), "masks": ("where",)},
    {"family": ("scatter",), "padding": ("periodic", "data")},
    {"family": ("scatter",), "chooser": ("argmax", "argmax_inf", "argsort")},
    {"family": ("scatter",), "put": ("each_choice",), "take": ("visible",)},
    {
        "family": ("scatter",),
        "around": ("scan", "scan_checkpoint"),
        "take": ("masked", "where", "zero", "flat", "taken"),
    },
    {"grouped": (True,), "masks": ("product", "gated_product", "where")},
    {"grouped": (True,), "masks": ("weights",), "biases": (True,)},
    {"family": ("list",), "chooser": ("argmax", "argmax_inf")},
    {"family": ("list",), "around": ("scan", "map"), "walk": ("unrolled", "scanned")},
)
TAKE_MISSES = ("next_slot", "other_token")


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """The choices that make a program; the defaults are the most ordinary ones.

    Attributes:
      tokens, experts, choices, model, hidden: sizes; tokens are those of one group, batch row and layer.
      room: the capacity: `tight` (some assignments drop), `tokens` (C = T) or `loose` (nothing can overflow).
      grouped: a groups axis in every einsum.
      scores, chooser, choice_bias, pick, noise: the router, see `parts.route`.
      gates: `raw`, or normalised `before` or `after` assignments are dropped.
      padding: tokens that are padding and take no slot: `none`, `periodic`, or told by the `data`.
      order, rank, sample, rank_dtype: positions in the queues, see `parts.positions`.
      overflow: see `parts.OVERFLOW`.
      keep_on: what the comparison with the capacity is multiplied into: `both`, `gates`, `experts` or `none`.
      family: `einsum`, `scatter`, `list`, or a family of `parts.DENSE`, which have no slots.
      masks, mask_dtype: dispatch and combine masks, see `parts.MASKS`.
      axes: axes of the buffer where there are groups.
      spelling: seed of the ways in which einsums are written, see `parts.Spelling`.
      put, take, total: scatter, gather and sum over choices of the family `scatter`.
      walk, behind: how the experts follow each other, and what stands behind their lists, in the family `list`.
      matrices, activation, biases, batching: the experts.
      detached: where derivatives are stopped, see `parts.DETACHED`, if anywhere.
      around: control flow around the layer, see `AROUND`.
      taken: what the program returns, see `build`.
      loss: `square`, or a `sum`, whose cotangent is a constant.
      metrics: what is returned beside the output.
      near_miss: the one step that differs from a layer that can be rewritten, if any.
      seed: of parameters and inputs.
    """

    tokens: int = 8
    experts: int = 4
    choices: int = 2
    model: int = 3
    hidden: int = 5
    room: str = "tight"
    grouped: bool = False
    scores: str = "softmax"
    chooser: str = "top_k"
    choice_bias: bool = False
    pick: str = "values"
    noise: bool = False
    gates: str = "raw"
    padding: str = "none"
    order: str = "token"
    rank: str = "minus_self"
    sample: str = "sum"
    rank_dtype: str = "int32"
    overflow: str = "less"
    keep_on: str = "both"
    family: str = "einsum"
    masks: str = "einsum"
    mask_dtype: str = "x"
    axes: str = "gecd"
    spelling: int = 0
    put: str = "drop"
    take: str = "fill"
    total: str = "reshape"
    walk: str = "mapped"
    behind: str = "far"
    matrices: int = 2
    activation: str = "relu"
    biases: bool = False
    batching: str = "einsum"
    detached: str = "none"
    around: str = "plain"
    taken: str = "step"
    loss: str = "square"
    metrics: str = "none"
    near_miss: str = "none"
    seed: int = 0

    def __repr__(self) -> str:
        changed = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Program({', '.join(changed)})"

    @property
    def loose(self) -> int:
        """A capacity that nothing overflows; some near-misses leave slots unused."""
        return self.tokens * self.choices * (2 if self.near_miss == "every_other_slot" else 1) + 3 * (
            self.near_miss in ("from_slot_three", "next_slot")
        )

    @property
    def capacity(self) -> int:
        if self.room == "loose":
            return self.loose
        if self.room == "tokens":
            return self.tokens
        capacity = max(2, round(0.6 * self.tokens * self.choices / self.experts))
        if self.near_miss in NEEDS_CAPACITY:
            # A capacity that equals another size cannot be told from it where counts are divided by it.
            while capacity in (self.tokens, self.experts, self.choices, GROUPS, LAYERS, BATCH):
                capacity += 1
        return capacity

    @property
    def layers(self) -> int:
        """Sites that a report of this program has where all of them are found."""
        return LAYERS if self.around in ("stack", "sliced") else 1

    @property
    def has_slots(self) -> bool:
        return self.family in ("einsum", "scatter", "list")

    @property
    def is_meant(self) -> bool:
        """Whether the compiler is meant to rewrite every layer, in both semantics."""
        return self.near_miss == "none" and self.has_slots and not any(map(self._has, GAPS))

    def _has(self, choices: Mapping[str, tuple]) -> bool:
        return all(getattr(self, name) in values for name, values in choices.items())


# --- the layer


def layer(p: Program, params: Params, x: jax.Array, capacity: int) -> tuple[jax.Array, Params]:
    """(y, aux) of one layer on `x`, [t, d] or [g, t, d]."""
    write = Spelling(p.spelling, p.grouped)
    valid = parts.valid_tokens(p, x)
    gate, index, probs = parts.route(p, params, x)
    if p.gates == "before":
        gate = parts.normalised(gate)
    gate = parts.detached(p, "gates", gate)
    first = one_hot(index[..., 0], p.experts, dtype=x.dtype)
    aux = {"balance": p.experts * jnp.mean(jnp.sum(first.mean(-2) * probs.mean(-2), axis=-1))}
    if p.metrics == "load":
        aux["load"] = one_hot(index, p.experts, dtype=x.dtype).sum((-3, -2))
    if not p.has_slots:
        if valid is not None:
            gate = gate * valid[..., None].astype(gate.dtype)
        y = _dense(p, write, params, x, gate, index, probs)
        if p.near_miss == "every_read":
            aux["every"] = parts.experts(p, write, params, jnp.broadcast_to(x, (p.experts, *x.shape)), "ecd").mean(1)
        return y, aux
    if p.family == "list":
        y, more = lists.by_list(p, params, x, gate, index, valid, capacity)
        return y, aux | more
    position = parts.positions(p, index, valid, capacity)
    if p.near_miss == "longest_over_capacity":
        aux["longest"] = (position.max() + 1.0) / capacity
    run = _by_einsum if p.family == "einsum" else _by_scatter
    y, more = run(p, write, params, x, gate, index, position, valid, capacity)
    return y, aux | more


def _dense(p, write, params, x, gate, index, probs):
    return (parts.DENSE | parts.DENSE_MISSES)[p.near_miss if p.near_miss in parts.DENSE_MISSES else p.family](
        p, write, params, x, gate, index, probs
    )


def _by_einsum(p, write, params, x, gate, index, position, valid, capacity):
    expert = one_hot(index, p.experts, dtype=x.dtype)
    if valid is not None and p.near_miss != "padding_unmasked":
        expert = expert * valid[..., None, None].astype(x.dtype)
    slot, keep = parts.slots(p, position, capacity, x.dtype)
    kept = slot.sum(-1) if keep is None else keep.astype(x.dtype)
    if p.gates == "after":
        gate = parts.normalised(gate * kept)
    if keep is not None and p.keep_on in ("both", "gates"):
        gate = gate * kept
    if keep is not None and p.keep_on in ("both", "experts"):
        expert = expert * kept[..., None]
    dispatch, combine = parts.MASKS[p.masks](p, write, gate, expert, slot)
    if p.near_miss == "other_combine":
        combine = jnp.roll(combine, 1, axis=-2)
    if p.near_miss == "twice_dispatched":
        dispatch = 2 * dispatch
    dispatch, combine = parts.detached(p, "dispatch", dispatch), parts.detached(p, "combine", combine)
    aux = _metrics(p, kept, dispatch, position, capacity)
    dtype = {"x": x.dtype, "bool": bool, "int": jnp.int32}[p.mask_dtype]
    axes = p.axes if p.grouped else "ecd"
    buffer = parts.detached(p, "buffer", write(f"gtec,gtd->{axes}", dispatch.astype(dtype), x))
    buffer = parts.BUFFER_MISSES.get(p.near_miss, lambda buffer: buffer)(buffer)
    run = functools.partial(parts.experts, p, write, axes=axes)
    if p.around == "checkpoint_experts":
        run = jax.checkpoint(run)
    return write(f"gtec,{axes}->gtd", combine, parts.detached(p, "out", run(params, buffer))), aux


def _metrics(p, kept, dispatch, position, capacity) -> Params:
    aux = {}
    if p.metrics == "dropped":
        aux["dropped"] = 1 - kept.mean()
    if p.metrics == "kept_load":
        aux["kept_load"] = dispatch.astype(kept.dtype).sum((-3, -1))
    if p.metrics == "queue":
        aux["queue"] = position.max()
    if p.near_miss == "use_rate":
        aux["use"] = dispatch.astype(kept.dtype).sum((-3, -1)) / capacity
    if p.near_miss == "dispatch_returned":
        aux["dispatch"] = dispatch
    return aux


def _by_scatter(p, write, params, x, gate, index, position, valid, capacity):
    position = position.astype(jnp.int32)
    if p.near_miss in parts.OVERFLOW_MISSES:
        position = parts.OVERFLOW_MISSES[p.near_miss](position, capacity)
    if valid is not None:
        gate = gate * valid[:, None].astype(gate.dtype)
    keep = position < capacity
    if p.gates == "after":
        gate = parts.normalised(gate * keep)
    e, slot = index.reshape(-1), position.reshape(-1)
    goes_to = e
    if valid is not None and p.near_miss != "padding_unmasked":
        goes_to = jnp.where(valid[:, None], index, p.experts).reshape(-1)  # padding: no such expert
    buffer = parts.detached(p, "buffer", parts.PUTS[p.put](p, x, goes_to, slot, capacity))
    buffer = parts.BUFFER_MISSES.get(p.near_miss, lambda buffer: buffer)(buffer)
    run = functools.partial(parts.experts, p, write, axes="ecd")
    out = parts.detached(p, "out", (jax.checkpoint(run) if p.around == "checkpoint_experts" else run)(params, buffer))
    if p.near_miss == "next_slot":
        slot = slot + 1
    if p.near_miss == "other_token":
        e, slot = e[::-1], slot[::-1]
    rows = parts.TAKES[p.take](p, out, gate.reshape(-1), e, slot, capacity)
    aux = {"dropped": 1 - keep.mean(dtype=x.dtype)} if p.metrics == "dropped" else {}
    if p.near_miss == "use_rate":
        aux["use"] = keep.sum().astype(x.dtype) / capacity
    if p.metrics == "queue":
        aux["queue"] = position.max()
    return parts.SUMS[p.total](p, rows), aux


# --- control flow around it: (layer of one capacity [l], params, x) -> (y, aux)


def _residual(run: Callable, params: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    y, aux = run(params, x)
    return x + y, aux


def _scan(wrap: Callable) -> Callable:
    def scan(runs, params, x):
        return lax.scan(lambda x, params: wrap(functools.partial(_residual, runs[0]))(params, x), x, params)

    return scan


def _stack(runs, params, x):
    """Layers one after another, each with a capacity of its own."""
    every = []
    for run, own in zip(runs, params, strict=True):
        x, aux = _residual(run, own, x)
        every.append(aux)
    return x, every


def _sliced(runs, params, x):
    """The same, with the parameters of all layers in one array."""
    return _stack(runs, [jax.tree.map(lambda a, n=n: a[n], params) for n in range(LAYERS)], x)


def _cond(runs, params, x):
    shapes = jax.eval_shape(runs[0], params, x)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return lax.cond(x.sum() > -1e6, lambda params, x: runs[0](params, x), lambda params, x: empty, params, x)


AROUND: dict[str, Callable] = {
    "plain": lambda runs, params, x: runs[0](params, x),
    "jit": lambda runs, params, x: jax.jit(runs[0])(params, x),
    "checkpoint": lambda runs, params, x: jax.checkpoint(runs[0])(params, x),
    "checkpoint_dots": lambda runs, params, x: jax.checkpoint(runs[0], policy=jax.checkpoint_policies.dots_saveable)(
        params, x
    ),
    "checkpoint_experts": lambda runs, params, x: runs[0](params, x),
    "scan": _scan(lambda run: run),
    "scan_checkpoint": _scan(lambda run: jax.checkpoint(run, prevent_cse=False)),
    "stack": _stack,
    "sliced": _sliced,
    "vmap": lambda runs, params, x: jax.vmap(lambda rows: runs[0](params, rows))(x),
    "map": lambda runs, params, x: lax.map(lambda rows: runs[0](params, rows), x),
    "cond": _cond,
}


def _loss(p: Program, y: jax.Array, aux) -> jax.Array:
    total = jnp.sum(y) if p.loss == "sum" else jnp.mean(jnp.square(y)) + jnp.mean(y)
    for leaf in jax.tree.leaves(aux):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            total = total + 0.03 * jnp.mean(leaf)  # no fraction of a capacity
    return total


def build(p: Program, capacities: Sequence[int] | None = None) -> Callable:
    """The program `(params, x) -> outputs` at a capacity for each layer, its own by default.

    `taken` says what is returned: `step` loss, outputs and all gradients; `forward` the outputs; `grad` gradients
    alone; `params` and `x` value and gradients of these alone; `outside` is the loss, see `finish`.
    """
    capacities = capacities or [p.capacity] * p.layers
    runs = [functools.partial(layer, p, capacity=capacity) for capacity in capacities]

    def forward(params: Params, x: jax.Array):
        return AROUND[p.around](runs, params, x)

    def loss(params: Params, x: jax.Array):
        y, aux = forward(params, x)
        return _loss(p, y, aux), (y, aux)

    def only_loss(params: Params, x: jax.Array) -> jax.Array:
        return loss(params, x)[0]

    return {
        "step": jax.value_and_grad(loss, argnums=(0, 1), has_aux=True),
        "forward": forward,
        "grad": jax.grad(only_loss, argnums=(0, 1)),
        "params": jax.value_and_grad(loss, has_aux=True),
        "x": jax.value_and_grad(loss, argnums=1, has_aux=True),
        "outside": only_loss,
    }[p.taken]


def finish(p: Program, fn: Callable) -> Callable:
    """`fn`, the program or its rewrite, as it is run: `outside` is differentiated only now."""
    return jax.value_and_grad(fn, argnums=(0, 1)) if p.taken == "outside" else fn


def inputs(p: Program) -> tuple[Params, jax.Array]:
    """(params, x) in float64; the mean of x is off zero, which loads the experts unevenly."""
    rng = np.random.default_rng(p.seed)
    shapes = {"wg": (p.model, p.experts), "w1": (p.experts, p.model, p.hidden), "w2": (p.experts, p.hidden, p.model)}
    if p.choice_bias:
        shapes["choice_bias"] = (p.experts,)
    if p.matrices == 3:
        shapes["w3"] = shapes["w1"]
    if p.biases:
        shapes |= {"b1": (p.experts, p.hidden), "b2": (p.experts, p.model)}
    stacked = (LAYERS,) if p.around in ("scan", "scan_checkpoint", "stack", "sliced") else ()
    params = {name: jnp.asarray(0.6 * rng.normal(size=stacked + shape)) for name, shape in shapes.items()}
    if p.around == "stack":
        params = [{name: array[n] for name, array in params.items()} for n in range(LAYERS)]
    batched = (BATCH,) if p.around in ("vmap", "map") else ()
    shape = (*batched, *((GROUPS,) if p.grouped else ()), p.tokens, p.model)
    return params, jnp.asarray(rng.normal(size=shape) + 0.4)


# --- the strategy

# (tokens, experts, model, hidden): few, so that jax traces its own functions less often; some sizes coincide.
SIZES = (
    *((8, 4, 3, 5), (6, 3, 2, 4), (8, 2, 3, 5), (12, 5, 4, 3)),
    *((12, 6, 3, 4), (16, 4, 4, 6), (9, 5, 3, 5), (6, 6, 6, 6)),
)


def _router(draw, sizes) -> dict:
    scores = draw(st.sampled_from(["softmax", "sigmoid", "chosen_softmax"]))
    bias = draw(st.sampled_from([False, False, True]))
    choosers = ["top_k", "top_k", "argmax_inf", "argsort"]
    if scores != "chosen_softmax" and not bias:
        choosers.append("argmax")  # masks by zero, so no score may be negative
    if sizes["experts"] in (4, 6):
        choosers.append("group_limited")
    return {
        "scores": scores,
        "choice_bias": bias,
        "chooser": draw(st.sampled_from(choosers)),
        "pick": draw(st.sampled_from(["take", "einsum"] if bias else ["values", "take", "einsum"])),
        "noise": draw(st.sampled_from([False] * 7 + [True])),
        "gates": draw(st.sampled_from(["raw", "before", "after"])),
        "padding": draw(st.sampled_from(["none", "none", "none", "periodic", "data"])),
    }


def _queues(draw) -> dict:
    return {
        "order": draw(st.sampled_from(["token", "choice", "offset"] * 3 + ["offset_kept", "multi_hot"])),
        "rank": draw(st.sampled_from(list(parts.RANKS))),
        "sample": draw(st.sampled_from(list(parts.SAMPLES))),
        "rank_dtype": draw(st.sampled_from(["int32", "float32", "float64"])),
        "overflow": draw(st.sampled_from(list(parts.OVERFLOW))),
    }


def _experts(draw) -> dict:
    return {
        "matrices": draw(st.sampled_from([2, 3])),
        "activation": draw(st.sampled_from(list(parts.ACTIVATIONS))),
        "biases": draw(st.booleans()),
        "batching": draw(st.sampled_from(["einsum", "einsum", "matmul", "vmap"] * 2 + ["loop"])),
    }


def _einsum_family(draw, grouped: bool) -> dict:
    return {
        "keep_on": draw(st.sampled_from(["both", "gates", "experts", "none"])),
        "masks": draw(st.sampled_from(list(parts.MASKS))),
        "mask_dtype": draw(st.sampled_from(["x", "x", "bool", "int"])),
        "axes": draw(st.sampled_from(["gecd", "egcd"])) if grouped else "gecd",
        "metrics": draw(st.sampled_from(["none", "load", "kept_load", "dropped", "queue"])),
    }


def _scatter_family(draw) -> dict:
    return {
        "put": draw(st.sampled_from(list(parts.PUTS))),
        "take": draw(st.sampled_from(list(parts.TAKES))),
        "total": draw(st.sampled_from(list(parts.SUMS))),
        "metrics": draw(st.sampled_from(["none", "load", "dropped", "queue"])),
    }


def _detachable(family: str) -> tuple[str, ...]:
    """The places at which derivatives can be stopped, of those that a family has."""
    places = {"einsum": parts.DETACHED, "scatter": ("gates", "buffer", "hidden", "out")}
    return places.get(family, ("gates", "hidden"))


def _near_misses(chosen: dict) -> list[str]:
    """The near-misses that mean something for the choices made so far."""
    family, padded = chosen["family"], chosen["padding"] != "none"
    if family == "list":
        return [*lists.MISSES, "use_rate"]
    if family not in ("einsum", "scatter"):
        return [*parts.DENSE_MISSES, "every_read"]
    names = [*parts.OVERFLOW_MISSES, *parts.BUFFER_MISSES, "reversed", "every_other_slot", "from_slot_three"]
    names += ["other_index", "over_experts", "halved", "shuffled", "blocks", "use_rate", "longest_over_capacity"]
    names += ["signed_gates"]
    if chosen["choices"] > 1:
        names += ["per_choice", "offset_less_one", "offset_of_neighbour", "offset_of_own", "double_cumsum"]
    if padded:
        names += ["padding_counted", "padding_unmasked"]
    names += ["dispatch_returned", "other_combine", "twice_dispatched"] if family == "einsum" else TAKE_MISSES
    return names


@st.composite
def programs(draw: st.DrawFn, stops: bool = False) -> Program:
    """Any program whose choices fit together; every fourth is a near-miss, every tenth stops derivatives if asked."""
    sizes = dict(zip(("tokens", "experts", "model", "hidden"), draw(st.sampled_from(SIZES)), strict=True))
    chosen = {**sizes, "choices": min(draw(st.sampled_from([2, 1, 2, 3])), sizes["experts"])}
    families = ["einsum"] * 6 + ["scatter"] * 3 + ["list"] + [draw(st.sampled_from(list(parts.DENSE)))]
    chosen["family"] = draw(st.sampled_from(families))
    chosen |= _router(draw, sizes)
    chosen["room"] = draw(st.sampled_from(["tight", "tight", "tight", "tokens", "loose"]))
    around = [name for name in AROUND if name != "checkpoint_experts"]
    if chosen["family"] == "einsum":
        chosen["grouped"] = draw(st.sampled_from([False, False, True]))
        chosen |= _queues(draw) | _einsum_family(draw, chosen["grouped"])
        around.append("checkpoint_experts")
    elif chosen["family"] == "scatter":
        chosen |= _queues(draw) | _scatter_family(draw)
        around.append("checkpoint_experts")
    else:
        chosen["metrics"] = draw(st.sampled_from(["none", "load"]))
    if chosen["family"] == "list":
        chosen |= {"walk": draw(st.sampled_from(list(lists.WALKS))), "behind": draw(st.sampled_from(lists.BEHIND))}
    chosen |= _experts(draw)
    if stops:
        chosen["detached"] = draw(
            st.sampled_from(["none"] * 9 + [draw(st.sampled_from(_detachable(chosen["family"])))])
        )
    chosen["around"] = draw(st.sampled_from(["plain", "plain", "plain", *around]))
    chosen["taken"] = draw(st.sampled_from(["step", "step", "step", "forward", "grad", "params", "x", "outside"]))
    chosen["loss"] = draw(st.sampled_from(["square", "square", "sum"]))
    chosen["spelling"] = draw(st.sampled_from([0, 0, *range(1, 20)]))
    chosen["seed"] = draw(st.integers(0, 99))
    if draw(st.sampled_from([False, False, False, True])):
        chosen["near_miss"] = draw(st.sampled_from(_near_misses(chosen)))
    if chosen.get("near_miss") in NEEDS_CAPACITY:
        chosen |= {"room": "tight", "taken": "step"}  # all that could tell the capacity is returned
    if chosen.get("near_miss") in COLLIDES and chosen["family"] == "scatter":
        chosen["put"] = "add"  # of rows that are set in one slot, jax does not say which stays
    return Program(**_ordinary_where_unread(chosen))


def _ordinary_where_unread(chosen: dict) -> dict:
    """Choices that another one makes meaningless are left at their defaults, so that equal programs are equal."""
    miss, drop = chosen.get("near_miss", "none"), set()
    if miss in parts.QUEUE_MISSES:
        drop |= {"order", "rank", "sample"}
    if chosen.get("order") == "multi_hot":
        drop |= {"rank", "sample"}
    if miss in parts.OVERFLOW_MISSES or chosen["family"] == "scatter":
        drop |= {"overflow"}
    if chosen["family"] == "list":
        drop |= {"batching"} | ({"gates"} if chosen["gates"] == "after" else set())
    return {name: value for name, value in chosen.items() if name not in drop}
