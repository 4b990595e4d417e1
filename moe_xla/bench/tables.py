"""The measurements as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_xla.bench.layers import Problem
from moe_xla.bench.measure import Measurement
from moe_xla.bench.overhead import Overhead
from moe_xla.report import format_table

_HEADERS = (
    "variant",
    "ms",
    "/ limit",
    "temporary MB",
    "/ limit",
    "compile s",
    "trace s",
    "slot arrays",
    "error",
    "sites",
)
_OVERHEAD_HEADERS = ("step", "compiler", "trace s", "rewriting adds s", "compile s", "/ naive", "sites")


def layer_table(problem: Problem, measurements: dict[str, Measurement]) -> str:
    """The measurements of one problem as text, with the reasons why a layer is not what was asked for."""
    rows = [
        (
            name,
            f"{1e3 * m.seconds:.1f}",
            _ratio(m.seconds_ratio),
            f"{m.temporary_bytes / 1e6:.1f}",
            _ratio(m.temporary_ratio),
            f"{m.compile_seconds:.2f}",
            f"{m.trace_seconds:.2f}",
            str(m.slot_arrays),
            "-" if m.error is None else f"{m.error:.0e}",
            _sites(m.sites),
        )
        for name, m in measurements.items()
    ]
    title = f"{problem.form} layer, value and gradients, {_sizes(problem)}"
    return "\n".join([title, format_table(_HEADERS, rows), *_reasons(measurements.items())])


def overhead_table(problem: Problem, overheads: Sequence[Overhead]) -> str:
    """What `--overhead` measured, as text."""
    rows = [
        (
            o.step,
            o.compiler,
            f"{o.trace_seconds:.2f}",
            f"{o.added_seconds:.2f}",
            f"{o.compile_seconds:.2f}",
            _ratio(o.compile_ratio),
            _sites(o.sites),
        )
        for o in overheads
    ]
    reasons = _reasons((f"{o.step}, {o.compiler}", o) for o in overheads)
    title = f"step with {problem.form} layers, {_sizes(problem)}"
    return "\n".join([title, format_table(_OVERHEAD_HEADERS, rows), *reasons])


def _sizes(problem: Problem) -> str:
    letters = {
        "T": problem.tokens,
        "d": problem.model,
        "f": problem.hidden,
        "E": problem.experts,
        "K": problem.choices,
        "C": problem.capacity,
    }
    return " ".join([*(f"{letter}={size}" for letter, size in letters.items()), problem.dtype])


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _sites(statuses: Sequence[str] | None) -> str:
    if statuses is None:
        return "-"
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "none"


def _reasons(measured: Iterable[tuple[str, Measurement | Overhead]]) -> list[str]:
    return [f"{name}: {line}" for name, m in measured for line in m.unmet]
