"""Runs the variants of one layer side by side.

In: a `Problem` and the names of variants.  Out: a `Measurement` of each.  The variants take turns, so that a busy
machine slows all of them; their results are compared before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moe_xla.api import MoeJit, moe_jit
from moe_xla.bench.layers import (
    Layer,
    Params,
    Problem,
    dense_arguments,
    dense_layer,
    layer_arguments,
    naive_layer,
    ragged_layer,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the comparison.

    Attributes:
      layer: what is measured.
      compiler: `jax.jit` or `moe_jit` with its keywords.
      arguments: parameters and input for the layer.
      reference: the variant that computes the same, if there is one.
    """

    layer: Layer
    compiler: Callable[[Callable[..., Any]], Any] = jax.jit
    arguments: Callable[[Problem, jax.Array], tuple[Params, jax.Array]] = layer_arguments
    reference: str | None = None


COMPILERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "naive": jax.jit,
    "exact": functools.partial(moe_jit, semantics="exact"),
    "dropless": functools.partial(moe_jit, semantics="dropless"),
}
LIMIT = "limit"
VARIANTS = {
    "naive": Variant(naive_layer),
    "exact": Variant(naive_layer, COMPILERS["exact"], reference="naive"),
    "dropless": Variant(naive_layer, COMPILERS["dropless"], reference="ragged_dot"),
    "ragged_dot": Variant(ragged_layer),
    LIMIT: Variant(dense_layer, arguments=dense_arguments),
}


def value_and_gradients(layer: Layer, problem: Problem) -> Callable[[Params, jax.Array], Any]:
    """`(params, x) -> (loss, gradients of both)` for a loss that reads all of the layer's output."""

    def loss(params: Params, x: jax.Array) -> jax.Array:
        y, balance = layer(params, x, problem)
        return jnp.square(y.astype(jnp.float32)).mean() + 0.01 * balance

    return jax.value_and_grad(loss, argnums=(0, 1))


@dataclasses.dataclass
class Measurement:
    """What was measured of one variant; ratios are to the limit, None without it.

    Attributes:
      seconds: median time of a call.
      temporary_bytes: memory that XLA reserves for temporaries.
      trace_seconds, compile_seconds: of one compilation, lowering counted with compiling.
      slot_arrays: how many results in the compiled program have T·E·C or E·C·d elements.
      slot_shapes: the distinct shapes among them.
      error: largest difference to the reference variant, relative to the largest magnitude of each result.
      sites: status of each layer that the compiler found, None for a program it did not see.
      unmet: why a layer is not what was asked for.
    """

    seconds: float
    seconds_ratio: float | None
    temporary_bytes: int
    temporary_ratio: float | None
    trace_seconds: float
    compile_seconds: float
    slot_arrays: int
    slot_shapes: list[str]
    error: float | None
    sites: list[str] | None
    unmet: list[str]


@dataclasses.dataclass
class Compiled:
    """A compiled program with the time that each stage took."""

    program: Any
    trace_seconds: float
    compile_seconds: float
    sites: list[str] | None
    unmet: list[str]

    @property
    def temporary_bytes(self) -> int:
        """Memory that XLA reserves for temporaries."""
        return int(self.program.memory_analysis().temp_size_in_bytes)


def compiled(compiler: Callable[..., Any], fn: Callable[..., Any], args: Sequence[Any]) -> Compiled:
    """Traces and compiles `fn` for `args`, nothing cached from earlier programs."""
    jax.clear_caches()
    step = compiler(fn)
    trace_seconds, traced = timed(lambda: step.trace(*args))
    compile_seconds, program = timed(lambda: traced.lower().compile())
    if not isinstance(step, MoeJit):
        return Compiled(program, trace_seconds, compile_seconds, None, [])
    report = step.explain(*args)
    statuses = [site.status for site in report.sites]
    return Compiled(program, trace_seconds, compile_seconds, statuses, list(report.unmet()))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the result of `call()` is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def interleaved_seconds(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """`repeats` times of each call, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timed(call)[0])
    return seconds


_RESULT = re.compile(r"^\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) [\w-]+\(", re.MULTILINE)
_SHAPE = re.compile(r"\b[a-z]+\d*(?:e\dm\d\w*)?\[([\d,]*)\]")


def slot_shapes(hlo: str, problem: Problem) -> list[str]:
    """Shapes of all results in the text of a compiled program that have as many elements as a mask or a buffer.

    A padded buffer can have the size of an innocent array, so the shapes are reported and not just their number.
    """
    slots = problem.experts * problem.capacity
    sizes = {problem.tokens * slots, slots * problem.model}
    shapes = [shape for result in _RESULT.findall(hlo) for shape in _SHAPE.finditer(result)]
    return [shape[0] for shape in shapes if math.prod(map(int, filter(None, shape[1].split(",")))) in sizes]


def largest_error(actual: Any, expected: Any) -> float:
    """Largest difference of two trees, relative to the largest magnitude of each expected leaf."""

    def error(a: jax.Array, b: jax.Array) -> float:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30))

    return float(max(jax.tree.leaves(jax.tree.map(error, actual, expected))))


def measurements(problem: Problem, names: Sequence[str], repeats: int, seed: int) -> dict[str, Measurement]:
    """Compiles the named variants, compares their results and times them in turns."""
    programs: dict[str, Compiled] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        variant = VARIANTS[name]
        args = variant.arguments(problem, jax.random.key(seed))
        programs[name] = compiled(variant.compiler, value_and_gradients(variant.layer, problem), args)
        calls[name] = functools.partial(programs[name].program, *args)
    # The first call of each is slower, and its time is not counted.
    results = {name: timed(call)[1] for name, call in calls.items()}
    errors = {name: _error_of(name, results) for name in names}
    del results
    seconds = {name: statistics.median(taken) for name, taken in interleaved_seconds(calls, repeats).items()}
    return {
        name: _measurement(problem, seconds[name], program, errors[name], seconds.get(LIMIT), programs.get(LIMIT))
        for name, program in programs.items()
    }


def _error_of(name: str, results: dict[str, Any]) -> float | None:
    reference = VARIANTS[name].reference
    return largest_error(results[name], results[reference]) if reference in results else None


def _measurement(
    problem: Problem,
    seconds: float,
    program: Compiled,
    error: float | None,
    limit_seconds: float | None,
    limit: Compiled | None,
) -> Measurement:
    shapes = slot_shapes(program.program.as_text(), problem)
    return Measurement(
        seconds=seconds,
        seconds_ratio=limit_seconds and seconds / limit_seconds,
        temporary_bytes=program.temporary_bytes,
        temporary_ratio=program.temporary_bytes / limit.temporary_bytes if limit else None,
        trace_seconds=program.trace_seconds,
        compile_seconds=program.compile_seconds,
        slot_arrays=len(shapes),
        slot_shapes=sorted(set(shapes)),
        error=error,
        sites=program.sites,
        unmet=program.unmet,
    )
