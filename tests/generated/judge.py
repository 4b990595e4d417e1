"""Whether the compiler does right by a program: its rewrites against the untouched program, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend

import moe_xla
from moe_xla.passes.site import KEPT, REWRITTEN, Site
from tests.faults import noted_faults
from tests.forms.check import assert_close, quick_jit

from .programs import COLLIDES, NEEDS_CAPACITY, OVERFLOW_COLLIDES, Program, build, finish, inputs

SEMANTICS = ("exact", "dropless")
# Gates over their own sum have gradients that cancel to nothing but rounding, divided by small gates.
TOLERANCE = 1e-7


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program in one semantics; its numbers are right."""

    program: Program
    semantics: str
    sites: tuple[Site, ...]

    @property
    def is_rewritten(self) -> bool:
        """Every layer was found, and is what was asked for."""
        return len(self.sites) == self.program.layers and all(
            site.status == REWRITTEN and site.semantics == self.semantics for site in self.sites
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{site.status}: {site.reason} ({site.primitive})" for site in self.sites if site.reason)


def judge(program: Program) -> list[Verdict]:
    """A verdict for each semantics.

    The untouched program and both rewrites are compiled as one: what they share is then compiled once.

    Raises:
      AssertionError: if an output or a gradient differs from the untouched program, a near-miss was rewritten that
        has no proof, or the passes failed.
    """
    with jax.enable_x64(True), noted_faults() as faults:
        arguments = inputs(program)
        fn = _traced(build(program), arguments)
        steps = {semantics: moe_xla.moe_jit(fn, semantics=semantics) for semantics in SEMANTICS}
        verdicts = [Verdict(program, semantics, step.explain(*arguments).sites) for semantics, step in steps.items()]
        steps = {v.semantics: steps[v.semantics] for v in verdicts if _is_changed(v)}
        wanted = {verdict.semantics: _capacities(verdict) for verdict in verdicts if verdict.semantics in steps}
        untouched = {
            capacities: fn
            if capacities == (program.capacity,) * program.layers
            else _traced(build(program, capacities), arguments)
            for capacities in set(wanted.values())
        }
        every = {name: finish(program, each) for name, each in (untouched | steps).items()}
        results = quick_jit(lambda *args: [run(*args) for run in every.values()])(*arguments)
        outputs = dict(zip(every, results, strict=True))
        for verdict in verdicts:
            _check(verdict, outputs, wanted.get(verdict.semantics))
        assert not faults, faults
        return verdicts


def _is_changed(verdict: Verdict) -> bool:
    """Whether the program that is run is another one than the untouched program."""
    return any(site.status != KEPT for site in verdict.sites)


def _traced(fn: Callable, arguments: tuple) -> Callable:
    """`fn` as its trace, so that it is traced once for all that is done with it."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    run, tree = jax.extend.core.jaxpr_as_fun(closed), jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(tree, run(*jax.tree.leaves(args)))


def _check(verdict: Verdict, outputs: dict[Any, Any], capacities: tuple[int, ...] | None) -> None:
    """Raises where the report claims too much, or, with `capacities`, where the rewritten program is wrong."""
    claims = f"{verdict.semantics} gave {[(site.status, site.semantics) for site in verdict.sites]}"
    if wrong := _unproven(verdict):
        raise AssertionError(f"{claims}: {wrong}")
    if capacities is None:
        return
    try:
        assert_close(outputs[verdict.semantics], outputs[capacities], TOLERANCE)
    except AssertionError as error:
        raise AssertionError(f"{claims}; against capacities {capacities}: {error}") from None


def _capacities(verdict: Verdict) -> tuple[int, ...]:
    """The capacity of each layer in the untouched program that the rewritten one must equal."""
    program = verdict.program
    # A choice without a queue, as in what is left of a layer that is kept, has no capacity.
    dropless = [site.semantics == "dropless" for site in verdict.sites if site.capacity or not program.has_slots]
    if len(dropless) != program.layers:
        assert len(set(dropless)) <= 1, "it is not known which layer is which site"
        dropless = [bool(dropless) and dropless[0]] * program.layers
    return tuple(program.loose if lossless else program.capacity for lossless in dropless)


def _unproven(verdict: Verdict) -> str | None:
    """What the report claims though no proof of it can exist, if anything."""
    miss = verdict.program.near_miss
    done = {site.semantics for site in verdict.sites if site.status != KEPT}
    if verdict.semantics == "exact" and "dropless" in done:
        return "dropless though exact was asked for"
    if miss in COLLIDES and done:
        return "rewritten though slots collide"
    if miss in OVERFLOW_COLLIDES and "exact" in done:
        return "exact though slots collide on overflow"
    if miss in NEEDS_CAPACITY and "dropless" in done:
        return "dropless though the outputs tell the capacity"
    return None
