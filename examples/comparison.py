"""Trains with several compiled steps and sets what was measured side by side.

In: steps `(state, batch) -> (state, loss)` under `jax.jit` or `moe_jit`.  Out: a `Run` of each,
a table and a plot.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from moe_xla.report import format_table


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; `compile_seconds` counts tracing, lowering and compiling."""

    name: str
    executable: Any
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
      program: what ran.
      losses: one for each step.
      seconds: time of each step.
    """

    program: Program
    losses: list[float]
    seconds: list[float]

    @property
    def name(self) -> str:
        """What compiled the step."""
        return self.program.name

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    @property
    def temporary_bytes(self) -> int:
        """Most memory that the step holds besides its arguments and results."""
        return int(self.program.executable.memory_analysis().temp_size_in_bytes)


def compiled(name: str, step: Any, state: Any, batch: np.ndarray) -> Program:
    """Compiles `step` for arguments like these."""
    start = time.perf_counter()
    executable = step.lower(state, batch).compile()
    return Program(name, executable, time.perf_counter() - start)


def train(program: Program, state: Any, batches: Sequence[np.ndarray]) -> Run:
    """Runs the step over the batches with a progress bar; `state` is donated."""
    losses, seconds = [], []
    with tqdm(batches, desc=f"{program.name:18}", unit="step") as progress:
        for batch in progress:
            start = time.perf_counter()
            state, loss = jax.block_until_ready(program.executable(state, batch))
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss))
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return Run(program, losses, seconds)


def table(runs: Sequence[Run]) -> str:
    """What was measured; speed-ups are over the first run."""
    headers = ("run", "step time", "speed-up", "peak temporary memory", "compile time", "final loss")
    rows = [
        (
            run.name,
            f"{1e3 * run.step_seconds:.0f} ms",
            f"{runs[0].step_seconds / run.step_seconds:.2f} x",
            f"{run.temporary_bytes / 1e6:.0f} MB",
            f"{run.program.compile_seconds:.1f} s",
            f"{run.losses[-1]:.4f}",
        )
        for run in runs
    ]
    return format_table(headers, rows)


def largest_difference(run: Run, reference: Run) -> float:
    """Largest difference between the losses of two runs at the same step; NaN if either has one."""
    return float(np.abs(np.subtract(run.losses, reference.losses)).max())


def plot(runs: Sequence[Run], path: str) -> None:
    """Writes an image with the losses over steps and the median step times."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, times = figure.subplots(1, 2)
    # Later runs lie on earlier ones where they agree: thinner lines keep all of them visible.
    widths = np.linspace(5, 1.5, len(runs))
    for run, width in zip(runs, widths, strict=True):
        losses.plot(run.losses, linewidth=width, label=run.name)
    losses.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    losses.legend()
    bars = times.barh(
        [run.name for run in runs], [run.step_seconds for run in runs], color=[f"C{i}" for i in range(len(runs))]
    )
    times.bar_label(bars, [f"{run.step_seconds:.2f} s" for run in runs], padding=3)
    times.invert_yaxis()
    times.margins(x=0.15)
    times.set(xlabel="seconds", title="Median time of a step")
    figure.savefig(path, dpi=120)
