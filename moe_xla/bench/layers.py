"""The layers that the benchmark compares: naive ones in many forms, a hand-written one, and the limit.

Each is a function `(params, x [T, d], problem) -> (y [T, d], load-balancing loss)`, written as its users write it; the
limit takes a row for each assignment.  `Problem` holds the sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
Layer = Callable[[Params, jax.Array, "Problem"], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of the layer, in the letters of the tables: T tokens, d model, f hidden, E experts, K choices."""

    tokens: int = 4096
    model: int = 512
    hidden: int = 1024
    experts: int = 8
    choices: int = 2
    capacity_factor: float = 1.25
    form: str = "top_k"
    dtype: str = "float32"

    @property
    def assignments(self) -> int:
        """A = T·K."""
        return self.tokens * self.choices

    @property
    def capacity(self) -> int:
        """C, the slots of one expert in the naive layer."""
        return math.ceil(self.capacity_factor * self.assignments / self.experts)


def route(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Probabilities [T, E], gates [T, K] and chosen experts [T, K]; several gates of a token sum to one."""
    probs = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    gates, chosen = jax.lax.top_k(probs, problem.choices)
    if problem.choices > 1:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    return probs, gates, chosen


def balance_loss(probs: jax.Array, first: jax.Array) -> jax.Array:
    """Load-balancing loss of Switch Transformer (arXiv:2101.03961, eq. 4); `first` [T, E] marks first choices."""
    return probs.shape[1] * (first.mean(axis=0) * probs.mean(axis=0)).sum()


def padded_experts(params: Params, x: jax.Array, dispatch: jax.Array, combine: jax.Array) -> jax.Array:
    """Two-matrix MLPs over the padded buffer that the masks [T, E, C] lead into and out of."""
    buffer = jnp.einsum("tec,td->ecd", dispatch.astype(x.dtype), x)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, params["up"]))
    buffer = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
    return jnp.einsum("tec,ecd->td", combine.astype(x.dtype), buffer)


def top_k_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-K with all first choices queued before the second ones, as in V-MoE (arXiv:2106.05974)."""
    tokens, experts, choices = problem.tokens, problem.experts, problem.choices
    probs, gates, chosen = route(params, x, problem)
    onehot = jax.nn.one_hot(chosen, experts)  # [T, K, E]
    queue = onehot.transpose(1, 0, 2).reshape(choices * tokens, experts)
    position = (jnp.cumsum(queue, axis=0) - queue).reshape(choices, tokens, experts).transpose(1, 0, 2)
    position = (position * onehot).sum(axis=-1).astype(jnp.int32)  # [T, K]
    kept = position < problem.capacity
    slot = jax.nn.one_hot(position, problem.capacity) * kept[..., None]  # [T, K, C]
    dispatch = jnp.einsum("tke,tkc->tec", onehot, slot)
    combine = jnp.einsum("tk,tke,tkc->tec", gates, onehot, slot)
    return padded_experts(params, x, dispatch, combine), balance_loss(probs, onehot[:, 0])


def gshard_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-2 by repeated argmax, as in Algorithm 1 of GShard (arXiv:2006.16668) without its random second expert."""
    experts, capacity = problem.experts, problem.capacity
    probs = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    first = jax.nn.one_hot(jnp.argmax(probs, axis=-1), experts)
    second = jax.nn.one_hot(jnp.argmax(probs * (1 - first), axis=-1), experts)
    first_gate, second_gate = (probs * first).sum(axis=-1), (probs * second).sum(axis=-1)
    total = first_gate + second_gate

    balance = balance_loss(probs, first)
    first_place = (jnp.cumsum(first, axis=0) - first) * first
    second_place = (jnp.cumsum(second, axis=0) - second + first.sum(axis=0)) * second
    first, second = first * (first_place < capacity), second * (second_place < capacity)

    def mask(chosen: jax.Array, place: jax.Array, gate: jax.Array) -> jax.Array:
        slot = jax.nn.one_hot(place.sum(axis=-1).astype(jnp.int32), capacity)
        return jnp.einsum("te,tc->tec", (gate / total)[:, None] * chosen, slot)

    combine = mask(first, first_place, first_gate) + mask(second, second_place, second_gate)
    return padded_experts(params, x, combine > 0, combine), balance


def switch_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-1, as in Switch Transformer (arXiv:2101.03961): one-based positions, overflow by the width of a one_hot."""
    probs = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    onehot = jax.nn.one_hot(jnp.argmax(probs, axis=-1), problem.experts)
    position = (jnp.cumsum(onehot, axis=0) * onehot).sum(axis=-1).astype(jnp.int32) - 1
    dispatch = jnp.einsum("te,tc->tec", onehot, jax.nn.one_hot(position, problem.capacity))
    combine = probs.max(axis=-1)[:, None, None] * dispatch
    return padded_experts(params, x, dispatch, combine), balance_loss(probs, onehot)


def scatter_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-K by scatter and gather: slots counted token by token, overflow dropped by the scatter."""
    probs, gates, chosen = route(params, x, problem)
    expert = chosen.reshape(-1)
    queue = jax.nn.one_hot(expert, problem.experts, dtype=jnp.int32)
    slot = ((jnp.cumsum(queue, axis=0) - 1) * queue).sum(axis=-1)
    rows = jnp.repeat(x, problem.choices, axis=0)
    return _scattered(params, rows, gates.reshape(-1), expert, slot, problem), _first_choice_loss(probs, chosen)


def sort_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-K with slots from a stable sort by expert, scattered and gathered in that order."""
    probs, gates, chosen = route(params, x, problem)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    counts = jnp.bincount(chosen.reshape(-1), length=problem.experts)
    expert, token = chosen.reshape(-1)[order], order // problem.choices
    slot = jnp.arange(order.size) - (jnp.cumsum(counts) - counts)[expert]
    y = _scattered(params, x[token], gates.reshape(-1)[order], expert, slot, problem, token)
    return y, _first_choice_loss(probs, chosen)


def _scattered(
    params: Params,
    rows: jax.Array,
    gates: jax.Array,
    expert: jax.Array,
    slot: jax.Array,
    problem: Problem,
    token: jax.Array | None = None,
) -> jax.Array:
    """Experts on rows [A, d] scattered into slots; `token` says whose they are, by default K in a row."""
    empty = jnp.zeros((problem.experts, problem.capacity, problem.model), rows.dtype)
    buffer = empty.at[expert, slot].set(rows, mode="drop")
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", buffer, params["up"]))
    out = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
    rows = out.at[expert, slot].get(mode="fill", fill_value=0) * gates[:, None].astype(rows.dtype)
    if token is None:
        return rows.reshape(problem.tokens, problem.choices, problem.model).sum(axis=1)
    return jax.ops.segment_sum(rows, token, num_segments=problem.tokens)


def every_expert_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-K of every expert on every token, without a capacity."""
    probs, gates, chosen = route(params, x, problem)
    weights = jnp.einsum("tk,tke->te", gates, jax.nn.one_hot(chosen, problem.experts)).astype(x.dtype)
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", x, params["up"]))
    out = jnp.einsum("tef,efd->ted", hidden, params["down"])
    return jnp.einsum("ted,te->td", out, weights), _first_choice_loss(probs, chosen)


def loop_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-K by a Python loop over experts, each on every token, without a capacity."""
    probs, gates, chosen = route(params, x, problem)
    y = jnp.zeros_like(x)
    for e in range(problem.experts):
        weight = jnp.where(chosen == e, gates, 0).sum(axis=-1).astype(x.dtype)
        y = y + weight[:, None] * (jax.nn.gelu(x @ params["up"][e]) @ params["down"][e])
    return y, _first_choice_loss(probs, chosen)


def gather_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Top-K with the matrices of its experts gathered for every token, without a capacity."""
    probs, gates, chosen = route(params, x, problem)
    hidden = jax.nn.gelu(jnp.einsum("td,tkdf->tkf", x, params["up"][chosen]))
    out = jnp.einsum("tkf,tkfd->tkd", hidden, params["down"][chosen])
    return jnp.einsum("tkd,tk->td", out, gates.astype(x.dtype)), _first_choice_loss(probs, chosen)


def _first_choice_loss(probs: jax.Array, chosen: jax.Array) -> jax.Array:
    return balance_loss(probs, jax.nn.one_hot(chosen[:, 0], probs.shape[1]))


def ragged_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """The dropless layer that one writes by hand today: sort the rows by expert, `jax.lax.ragged_dot`, un-sort."""
    probs, gates, chosen = route(params, x, problem)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=problem.experts).astype(jnp.int32)
    rows = x[order // problem.choices]
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], sizes))
    rows = jax.lax.ragged_dot(hidden, params["down"], sizes)
    by_choice = rows[jnp.argsort(order)].reshape(problem.tokens, problem.choices, problem.model)
    y = jnp.einsum("tk,tkd->td", gates.astype(x.dtype), by_choice)
    return y, _first_choice_loss(probs, chosen)


def dense_layer(params: Params, rows: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """The limit: one MLP over A rows."""
    del problem
    return jax.nn.gelu(rows @ params["up"]) @ params["down"], jnp.zeros(())


FORMS: dict[str, Layer] = {
    "top_k": top_k_layer,
    "gshard": gshard_layer,
    "switch": switch_layer,
    "scatter": scatter_layer,
    "sort": sort_layer,
    "every_expert": every_expert_layer,
    "loop": loop_layer,
    "gather": gather_layer,
}
FORM_CHOICES = {"gshard": 2, "switch": 1}
WITHOUT_CAPACITY = frozenset({"every_expert", "loop", "gather"})


def naive_layer(params: Params, x: jax.Array, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """The naive layer in the problem's form."""
    return FORMS[problem.form](params, x, problem)


def layer_arguments(problem: Problem, key: jax.Array) -> tuple[Params, jax.Array]:
    """Parameters and input [T, d] of a Mixture-of-Experts layer."""
    experts, d, f = problem.experts, problem.model, problem.hidden
    shapes = {"router": (d, experts), "up": (experts, d, f), "down": (experts, f, d)}
    return _random_arguments(shapes, problem.tokens, problem, key)


def dense_arguments(problem: Problem, key: jax.Array) -> tuple[Params, jax.Array]:
    """Parameters and rows [A, d] of the limit."""
    shapes = {"up": (problem.model, problem.hidden), "down": (problem.hidden, problem.model)}
    return _random_arguments(shapes, problem.assignments, problem, key)


def _random_arguments(
    shapes: Mapping[str, tuple[int, ...]], rows: int, problem: Problem, key: jax.Array
) -> tuple[Params, jax.Array]:
    x_key, *param_keys = jax.random.split(key, 1 + len(shapes))
    params = {
        name: (jax.random.normal(param_key, shape) / math.sqrt(shape[-2])).astype(problem.dtype)
        for param_key, (name, shape) in zip(param_keys, shapes.items(), strict=True)
    }
    return params, jax.random.normal(x_key, (rows, problem.model)).astype(problem.dtype)
