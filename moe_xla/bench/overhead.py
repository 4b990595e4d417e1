"""What rewriting adds to tracing and compiling a deep training step; nothing is run.

In: a `Problem` and a number of layers.  Out: an `Overhead` for each compiler, with the layers unrolled and scanned.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moe_xla.bench.layers import Params, Problem, layer_arguments, naive_layer
from moe_xla.bench.measure import COMPILERS, Compiled, compiled


@dataclasses.dataclass
class Overhead:
    """Compiling one deep step; `added_seconds` is tracing beyond the naive step's, medians throughout."""

    step: str
    compiler: str
    trace_seconds: float
    added_seconds: float
    compile_seconds: float
    compile_ratio: float
    sites: list[str] | None
    unmet: list[str]


def deep_step(problem: Problem, scanned: bool) -> Callable[[Any, jax.Array], Any]:
    """A training step `(params, x) -> (params, loss)` over residual layers, whose parameters are a list or stacked."""

    def block(x: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
        y, balance = naive_layer(params, x, problem)
        return x + y, balance

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if scanned:
            x, balances = jax.lax.scan(block, x, params)
            return jnp.square(x).mean() + 0.01 * balances.mean()
        total = jnp.zeros(())
        for layer_params in params:
            x, balance = block(x, layer_params)
            total = total + balance
        return jnp.square(x).mean() + 0.01 * total / len(params)

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    return step


def deep_arguments(problem: Problem, layers: int, scanned: bool) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Shapes of the arguments of `deep_step`: nothing is run."""
    params, x = jax.eval_shape(lambda: layer_arguments(problem, jax.random.key(0)))
    if not scanned:
        return [params] * layers, x
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype), params), x


def overheads(problem: Problem, layers: int, repeats: int) -> list[Overhead]:
    """Traces and compiles the deep step with each compiler, `repeats` times in turns."""
    found = []
    for name, scanned in (("unrolled", False), ("scanned", True)):
        args = deep_arguments(problem, layers, scanned)
        # A new function each time: jax keeps the trace of one that it has seen.
        rounds = [
            {compiler: compiled(COMPILERS[compiler], deep_step(problem, scanned), args) for compiler in COMPILERS}
            for _ in range(repeats)
        ]
        found += _medians(f"{layers} layers {name}", rounds)
    return found


def _medians(step: str, rounds: Sequence[dict[str, Compiled]]) -> list[Overhead]:
    trace = {name: statistics.median(r[name].trace_seconds for r in rounds) for name in COMPILERS}
    compiling = {name: statistics.median(r[name].compile_seconds for r in rounds) for name in COMPILERS}
    return [
        Overhead(
            step=step,
            compiler=name,
            trace_seconds=trace[name],
            added_seconds=trace[name] - trace["naive"],
            compile_seconds=compiling[name],
            compile_ratio=compiling[name] / compiling["naive"],
            sites=rounds[0][name].sites,
            unmet=rounds[0][name].unmet,
        )
        for name in COMPILERS
    ]
