"""Trains the naive byte-level Mixture-of-Experts transformer three times, and only what compiles its step differs.

    python examples/train_bytes.py
    python examples/train_bytes.py --steps=20 --layers=6 --scan

`jax.jit` runs the step as `naive_moe` says it; `moe_jit` rewrites its Mixture-of-Experts layers to grouped matmuls,
once dropping the tokens that the naive layers drop (`exact`) and once dropping none (`dropless`).  All three start from
the same parameters and read the same text.  Prints what `moe_jit` did and a table, writes a plot, and fails if the
losses of `exact` are not those of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags

import comparison
import naive_moe
import stdlib_text
from moe_xla import MoeJit, moe_jit

State = tuple[naive_moe.Tree, optax.OptState]

# Rounding sends a few tokens to another expert and the runs drift apart, faster at a higher learning rate.
ALLOWED_DIFFERENCE = 1e-3

_STEPS = flags.DEFINE_integer("steps", 100, "Training steps of each run.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a step; a multiple of --sequence.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-4, "Of AdamW.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the parameters and the batches.")
_PLOT = flags.DEFINE_string("plot", "train_bytes.png", "Where the plot is written.")
_DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
_CONFIG = {
    field.name: _DEFINE[type(field.default)](field.name, field.default, f"`{field.name}` of naive_moe.Config.")
    for field in dataclasses.fields(naive_moe.Config)
}
flags.register_multi_flags_validator(
    ["tokens", "sequence"],
    lambda values: values["tokens"] % values["sequence"] == 0,
    "--tokens must be a multiple of --sequence",
)


def train_step(
    state: State, batch: jax.Array, *, config: naive_moe.Config, optimizer: optax.GradientTransformation
) -> tuple[State, jax.Array]:
    """One step of the optimizer on `batch` [B, S + 1]; returns the new state and the cross-entropy before it."""
    params, optimizer_state = state
    gradient = jax.value_and_grad(naive_moe.loss, has_aux=True)
    (_, metrics), gradients = gradient(params, batch, config)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), metrics["cross_entropy"]


def compare(
    config: naive_moe.Config, optimizer: optax.GradientTransformation, batches: Sequence[np.ndarray], seed: int
) -> list[comparison.Run]:
    """Trains under `jax.jit`, `exact` and `dropless`, in this order, and prints what `moe_jit` made of the step."""
    step = functools.partial(train_step, config=config, optimizer=optimizer)
    steps: dict[str, Any] = {
        "jax.jit": jax.jit(step, donate_argnums=0),
        "moe_jit, exact": moe_jit(step, semantics="exact", donate_argnums=0),
        "moe_jit, dropless": moe_jit(step, semantics="dropless", donate_argnums=0),
    }

    def initial_state() -> State:
        params = naive_moe.init(jax.random.key(seed), config)
        return params, optimizer.init(params)

    state = initial_state()
    programs = [comparison.compiled(name, step, state, batches[0]) for name, step in steps.items()]
    for name, step in steps.items():
        if isinstance(step, MoeJit):
            print(f"{name}: {step.explain(state, batches[0])}\n", flush=True)
    return [comparison.train(program, initial_state(), batches) for program in programs]


def main(argv: Sequence[str]) -> None:
    """Compares the runs that the flags describe."""
    if len(argv) > 1:
        raise app.UsageError(f"flags only, got {argv[1]!r}")
    logging.getLogger("jax").setLevel(logging.WARNING)  # else it tells of each kind of device that is not here
    config = naive_moe.Config(**{name: flag.value for name, flag in _CONFIG.items()})
    text = stdlib_text.read_text()
    sequences = _TOKENS.value // config.sequence
    batches = list(stdlib_text.batches(text, _STEPS.value, sequences, config.sequence + 1, _SEED.value))
    print(
        f"{config.layers} layers, {config.experts} experts, top-{config.choices}, {_TOKENS.value} tokens a step, "
        f"on {len(text) / 1e6:.1f} MB of Python\n",
        flush=True,
    )
    runs = compare(config, optax.adamw(_LEARNING_RATE.value), batches, _SEED.value)
    comparison.plot(runs, _PLOT.value)
    print(f"\n{comparison.table(runs)}\n\nlosses and step times: {_PLOT.value}")
    difference = comparison.largest_difference(runs[1], runs[0])
    verdict = f"losses of exact and of jax.jit differ by {difference:.1e} at most"
    if not difference <= ALLOWED_DIFFERENCE:
        sys.exit(f"FAILED: {verdict}; {ALLOWED_DIFFERENCE} is allowed")
    print(f"{verdict}, over {_STEPS.value} steps; {ALLOWED_DIFFERENCE} is allowed")


if __name__ == "__main__":
    app.run(main)
