"""Trains the naive byte-level Mixture-of-Experts transformer three times, and only what compiles its step differs.

    python examples/train_bytes.py
    python examples/train_bytes.py --steps=20 --layers=6 --scan

`jax.jit` runs the step as `naive_moe` says it; `moe_jit` rewrites its Mixture-of-Experts layers to grouped
matmuls, once dropping the tokens that the naive layers drop (`exact`) and once dropping none (`dropless`).  Same
parameters, same text.
Prints what `moe_jit` did and a table, writes a plot, and fails if the losses of `exact` are not those of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import comparison
import jax
import naive_moe
import numpy as np
import optax
import stdlib_text
from absl import app, flags

from moe_xla import moe_jit

ALLOWED_DIFFERENCE = 1e-3

_STEPS = flags.DEFINE_integer("steps", 100, "Training steps of each run.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a step; a multiple of --sequence.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Peak learning rate of AdamW.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the parameters and the batches.")
_PLOT = flags.DEFINE_string("plot", "train_bytes.png", "Where the plot is written.")
_DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
_CONFIG = {
    field.name: _DEFINE[type(field.default)](field.name, field.default, f"`{field.name}` of naive_moe.Config.")
    for field in dataclasses.fields(naive_moe.Config)
}


def train_step(
    state: tuple[Any, optax.OptState],
    batch: jax.Array,
    *,
    config: naive_moe.Config,
    optimizer: optax.GradientTransformation,
) -> tuple[tuple[Any, optax.OptState], jax.Array]:
    """One step of the optimizer on `batch` [B, S + 1]; returns the new state and the cross-entropy before it."""
    params, optimizer_state = state
    gradient = jax.value_and_grad(naive_moe.loss, has_aux=True)
    (_, metrics), gradients = gradient(params, batch, config)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), metrics["cross_entropy"]


def compare(
    config: naive_moe.Config, batches: Sequence[np.ndarray], learning_rate: float, seed: int
) -> list[comparison.Run]:
    """Trains under `jax.jit`, `exact` and `dropless`, and prints what `moe_jit` made of the step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, len(batches) // 10, len(batches))
    optimizer = optax.adamw(schedule)
    step = functools.partial(train_step, config=config, optimizer=optimizer)
    compiled: dict[str, Any] = {
        "jax.jit": jax.jit(step, donate_argnums=0),
        "moe_jit, exact": moe_jit(step, semantics="exact", donate_argnums=0),
        "moe_jit, dropless": moe_jit(step, semantics="dropless", donate_argnums=0),
    }

    def initial_state() -> tuple[Any, optax.OptState]:
        params = naive_moe.init(jax.random.key(seed), config)
        return params, optimizer.init(params)

    for name in ("moe_jit, exact", "moe_jit, dropless"):
        print(f"{name}: {compiled[name].explain(initial_state(), batches[0])}\n", flush=True)
    return [comparison.train(name, step, initial_state(), batches) for name, step in compiled.items()]


def main(argv: Sequence[str]) -> None:
    """Compares the runs that the flags describe."""
    if len(argv) > 1:
        raise app.UsageError(f"flags only, got {argv[1]!r}")
    config = naive_moe.Config(**{name: flag.value for name, flag in _CONFIG.items()})
    sequences = _TOKENS.value // config.sequence
    text = stdlib_text.read_text()
    batches = list(stdlib_text.batches(text, _STEPS.value, sequences, config.sequence + 1, _SEED.value))
    print(
        f"{config.layers} layers, {config.experts} experts, top-{config.choices}, {sequences * config.sequence} tokens "
        f"a step, on {len(text) / 1e6:.1f} MB of Python\n"
    )
    runs = compare(config, batches, _LEARNING_RATE.value, _SEED.value)
    comparison.plot(runs, _PLOT.value)
    print(f"\n{comparison.table(runs)}\n\nlosses and step times: {_PLOT.value}")
    difference = comparison.largest_difference(runs[1], runs[0])
    verdict = f"largest difference between the losses of exact and jax.jit: {difference:.1e}"
    if not difference <= ALLOWED_DIFFERENCE:
        sys.exit(f"FAILED: {verdict}, more than the {ALLOWED_DIFFERENCE} allowed")
    print(f"{verdict}, over {_STEPS.value} steps; at most {ALLOWED_DIFFERENCE} is allowed")


if __name__ == "__main__":
    app.run(main)
