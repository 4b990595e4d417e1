"""Many programs in one go: drawn by hypothesis, judged, and counted."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

import hypothesis
import jax

from .judge import Verdict, judge
from .programs import Program, programs

# What jax and XLA keep of a program is of no use to the next ones.
CLEAR_EVERY = 50


def run_programs(
    number: int,
    seed: int,
    on_wrong: Callable[[Program, Exception], None] | None = None,
    on_judged: Callable[[list[Verdict]], None] | None = None,
    stops: bool = False,
) -> list[Verdict]:
    """Verdicts of `number` different programs; equal seeds draw equal programs.

    The first wrong program is made smaller and raised, printed by its choices; with `on_wrong` every wrong one is
    given to it as it was drawn, and the run goes on.  `stops` draws programs that stop derivatives, too.
    """
    verdicts: dict[Program, list[Verdict]] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if on_wrong is None else [])],
    )
    @hypothesis.given(program=programs(stops))
    def is_right(program: Program) -> None:
        hypothesis.assume(program not in verdicts)
        try:
            judged = judge(program)
        except Exception as error:
            if on_wrong is None:
                raise
            on_wrong(program, error)
            judged = []
        verdicts[program] = judged
        if on_judged is not None:
            on_judged(judged)
        if len(verdicts) % CLEAR_EVERY == 0:
            jax.clear_caches()

    is_right()
    return [verdict for judged in verdicts.values() for verdict in judged]


def meant(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those of programs that the compiler is meant to rewrite."""
    return [verdict for verdict in verdicts if verdict.program.is_meant]


def rewritten_share(verdicts: Iterable[Verdict]) -> float:
    """The share of the programs meant to be rewritten, each in both semantics, that were."""
    asked = meant(verdicts)
    return sum(verdict.is_rewritten for verdict in asked) / max(len(asked), 1)


def refusals(verdicts: Iterable[Verdict]) -> list[str]:
    """A line for each program that was meant to be rewritten and was not."""
    return [
        f"{verdict.semantics}: {verdict.program}: {'; '.join(verdict.reasons) or f'{len(verdict.sites)} sites'}"
        for verdict in meant(verdicts)
        if not verdict.is_rewritten
    ]


def table(verdicts: Iterable[Verdict]) -> list[str]:
    """A line for each choice: how many of the meant programs were rewritten, for each of its values."""
    lines, asked = [], meant(verdicts)
    for field in dataclasses.fields(Program):
        counts = collections.defaultdict(lambda: [0, 0])
        for verdict in asked:
            count = counts[getattr(verdict.program, field.name)]
            count[0] += verdict.is_rewritten
            count[1] += 1
        if len(counts) > 1 and field.name not in ("seed", "spelling"):
            shares = ", ".join(f"{value} {done}/{of}" for value, (done, of) in sorted(counts.items()))
            lines.append(f"  {field.name}: {shares}")
    return lines
