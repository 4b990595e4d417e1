"""A numeric guard beside the proofs: is each rewritten layer, on numbers, the layer as written?

In: a traced program, what is asked of each of its sites, and either nothing (random inputs are drawn from shapes and
dtypes, with fixed seeds) or the user's inputs.  Out: an `Outcome` for each site: how many arrays were compared, how far
they differ, and why, where nothing could be judged.

What is compared is said in `recover.lower.probed`: the arrays that stand for a site's rows, forward and backward, each
computed from the same arrays in both ways, once more with the rows of one token made large (which must move no place
that they do not move as written), and once more with weights rounded otherwise (which tells an ill-conditioned array).
A dropless layer differs from the one as written by its overflow, and rightly.  So it is compared with choices of
experts that load them evenly; where the capacity is too small even for those, and on the user's inputs, it is compared
in the exact semantics, which shares all rules with it but the folding of capacity tests.

A difference on random inputs counts if it is seen on every probe: a rounding that flips a comparison is seen on one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jax import numpy as jnp

from moe_xla.passes._jax import source_of
from moe_xla.passes.recover.interpret import Recovery
from moe_xla.passes.recover.lower.probed import Finding, Probe, Queue, Score, Unprobed
from moe_xla.passes.recover.nodes import is_boolean, is_extended, is_floating
from moe_xla.passes.recover.session import Path, Session

# Programs that take more as written are not run on probes, which run them about six times: floating-point operations on
# a CPU and on an accelerator, and bytes of all arrays together.
LARGEST_FLOPS_OF_CPUS = 3e10
LARGEST_FLOPS = 1e13
LARGEST_BYTES = 8e9
_PROBES = 2
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
_QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_AS_EXACT = " (in the exact semantics, as even loads overflow)"
_AS_EXACT_ON_INPUTS = " (in the exact semantics)"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a probe needs to know of a rewritten program.

    Attributes:
      modes: what is asked of each site, `"off"` for those that are left as written.
      default: what is asked of all others.
      backend: name of the backend of `moe_xla.ops`.
      token_rows: numbers of tokens and of assignments of the layers.
      experts: the least number of experts: random integers of the first probe are below it.
    """

    modes: Mapping[Path, str]
    default: str
    backend: str
    token_rows: frozenset[int]
    experts: int

    @property
    def is_dropless(self) -> bool:
        """Whether any site may be dropless."""
        return "dropless" in (self.default, *self.modes.values())

    def mode(self, site: Path) -> str:
        """What is asked of a site."""
        return self.modes.get(site, self.default)

    def as_exact(self) -> Plan:
        """The same with exact sites in place of dropless ones."""
        modes = {site: "exact" if mode == "dropless" else mode for site, mode in self.modes.items()}
        return dataclasses.replace(self, modes=modes, default="exact")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What probing says of one site.

    Attributes:
      arrays: how many arrays were compared, and could be judged.
      one_token: how many of them with the rows of one token made large.
      unjudged: how many could not be judged: zero, not finite or ill-conditioned.
      error: largest difference of an array, relative to the array as written (root mean squares).
      difference: what differs, or None.
      reason: why nothing was compared, or None.
      note: in which semantics the site was compared, where that is not the one it has.
    """

    arrays: int = 0
    one_token: int = 0
    unjudged: int = 0
    error: float = 0.0
    difference: str | None = None
    reason: str | None = None
    note: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether anything was compared."""
        return self.arrays > 0

    def __str__(self) -> str:
        if self.difference is not None:
            return self.difference + self.note
        if not self.is_judged:
            return f"nothing was judged: {self.reason or 'all arrays were zero, not finite or ill-conditioned'}"
        skipped = f", {self.unjudged} could not be judged" if self.unjudged else ""
        agree = "array agrees" if self.arrays == 1 else "arrays agree"
        agreed = f"{self.arrays} {agree} to {self.error:.1e}, {self.one_token} with one token changed"
        return f"{agreed}{skipped}{self.note}"


def probe(closed: jex.core.ClosedJaxpr, plan: Plan, inputs: Sequence[Any] | None = None) -> Callable[[Path], Outcome]:
    """Compares the sites of a program; the result gives the outcome of a site by any of its names.

    Args:
      closed: the traced program.
      plan: what is asked of its sites.
      inputs: its flat inputs, concrete; random ones if not given.
    """
    reason = _too_large(closed)
    if reason is not None:
        return lambda site: Outcome(reason=reason)
    note = _AS_EXACT if inputs is None else _AS_EXACT_ON_INPUTS
    direct = None if inputs is not None or not plan.is_dropless else _compared(closed, plan, None)

    @functools.cache
    def exact() -> Callable[[Path], Outcome]:
        return _compared(closed, plan.as_exact(), inputs)

    def outcome(site: Path) -> Outcome:
        if plan.mode(site) != "dropless":
            return exact()(site)
        found = direct(site) if direct is not None else Outcome()
        return found if found.is_judged else dataclasses.replace(exact()(site), note=note)

    return outcome


def _compared(closed: jex.core.ClosedJaxpr, plan: Plan, inputs: Sequence[Any] | None) -> Callable[[Path], Outcome]:
    """Compares the sites in the semantics that is asked of them."""
    session = Session(dict(plan.modes), plan.default)
    recovery = Recovery(session)
    try:
        findings, scores = _measured(closed, recovery, plan, inputs)
    except Unprobed as error:
        reason = str(error)
        return lambda site: Outcome(reason=reason)
    except Exception as error:  # a probe that cannot run must never stop the user's step
        failure = f"the probe failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return lambda site: Outcome(reason=failure)
    finally:
        recovery.release()

    def outcome(site: Path) -> Outcome:
        root = session.root(site)
        if plan.mode(site) == "dropless" and _overflows(session, root, findings, scores):
            return Outcome(reason="even loads overflow the capacity")
        mine = [
            i for i, f in enumerate(findings) if isinstance(f, Finding) and root in {session.root(s) for s in f.sites}
        ]
        return _outcome([findings[i] for i in mine], [[s[i] for i in mine] for s in scores], inputs is None)  # type: ignore[misc]

    return outcome


def _overflows(
    session: Session, root: Path, findings: Sequence[Finding | Queue], scores: Sequence[Sequence[Score]]
) -> bool:
    """Whether the queues of a layer, one behind the other, may be longer than its capacity on any probe."""
    lengths: dict[Any, float] = {}
    for i, queue in enumerate(findings):
        if isinstance(queue, Queue) and session.root(queue.site) == root:
            lengths[queue.key] = max(lengths.get(queue.key, 0.0), *(probe[i].error for probe in scores))
    bounds = [t.bound for t in session.dropless_thresholds().get(root, ())]
    return sum(lengths.values()) > min(bounds, default=math.inf)


def _measured(
    closed: jex.core.ClosedJaxpr, recovery: Recovery, plan: Plan, inputs: Sequence[Any] | None
) -> tuple[list[Finding | Queue], list[list[Score]]]:
    """What was measured, and the scores of each probe."""
    program, findings = _program(closed, recovery, plan)
    with jax.ensure_compile_time_eval():  # an enclosing transformation would trace all of this
        draws = [inputs] if inputs is not None else [_drawn(closed, plan, number) for number in range(_PROBES)]
        run = _compiled(program)
        scores = [_scores(run, _constants(closed, number), values) for number, values in enumerate(draws)]
        silent = any(not any(s[i].judged for s in scores) for i in range(len(findings)))
        if silent and inputs is None:  # positive tokens, for roots and logarithms
            scores.append(_scores(run, _constants(closed, _PROBES), _drawn(closed, plan, _PROBES)))
    return findings, scores


def _program(
    closed: jex.core.ClosedJaxpr, recovery: Recovery, plan: Plan
) -> tuple[jex.core.ClosedJaxpr, list[Finding | Queue]]:
    """The comparison as a jaxpr over the constants and inputs of the program as written, and what it measures."""
    jaxpr = closed.jaxpr
    consts = [recovery.closed_over(*pair) for pair in zip(jaxpr.constvars, closed.consts, strict=True)]
    given = [recovery.input(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    outputs = recovery.walk(jaxpr, consts, given)
    recovery.session.unite_recomputed()
    findings: list[Finding | Queue] = []

    def compared(*values: Any) -> Any:
        arrays = dict(zip((*consts, *given), values, strict=True))
        emission = Probe(recovery, arrays, plan.backend, plan.token_rows, plan.is_dropless)
        emission.results(outputs)
        findings.extend(emission.findings)
        return emission.scores

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (*jaxpr.constvars, *jaxpr.invars)]
    return jax.make_jaxpr(compared)(*avals), findings


def _compiled(program: jex.core.ClosedJaxpr) -> Callable[..., Any]:
    """The comparison, ready to run; it runs a few times only, so that compiling it is most of the cost."""
    lowered = jax.jit(jex.core.jaxpr_as_fun(program)).lower(*program.in_avals)
    try:
        return lowered.compile(_QUICK if jax.default_backend() == "cpu" else None)
    except jax.errors.JaxRuntimeError:  # an option that this version of XLA does not have
        return lowered.compile()


def _scores(run: Callable[..., Any], constants: Sequence[Any], values: Sequence[Any]) -> list[Score]:
    (rows,) = jax.device_get(run(*constants, *values))
    return [Score(*map(float, row)) for row in rows]


def _outcome(findings: Sequence[Finding], scores: Sequence[Sequence[Score]], random: bool) -> Outcome:
    """The outcome of one site's findings, with their scores on each probe."""
    by_finding = [[s for s in probes if s.judged] for probes in zip(*scores, strict=True)]
    judged = [(f, s) for f, s in zip(findings, by_finding, strict=True) if s]
    if not findings:
        return Outcome(reason="the rewritten layer computes no array that the program as written computes otherwise")
    lines = [line for f, s in judged if (line := _difference(f, s, all if random else any)) is not None]
    return Outcome(
        arrays=len(judged),
        one_token=sum(any(x.moved for x in s) for _, s in judged),
        unjudged=len(findings) - len(judged),
        error=max((min(x.error for x in s) if random else max(x.error for x in s) for _, s in judged), default=0.0),
        difference=lines[0] if lines else None,
    )


def _difference(finding: Finding, scores: Sequence[Score], agree: Callable[[Iterator[bool]], bool]) -> str | None:
    """How an array differs on the probes that judged it."""
    place = f"{finding.type} of {finding.step.name}"
    line = source_of(finding.step.source)
    place += f" at {line}" if line else ""
    if agree(bool(s.differs) for s in scores):
        error = max(s.error for s in scores)
        return f"the rewritten layer differs from the layer as written by {error:.2g} (relative) in {place}"
    if agree(bool(s.leaks) for s in scores):
        leak = max(s.leak for s in scores)
        return f"one token's rows move others in the rewritten layer, by {leak:.2g} (relative) in {place}"
    return None


# ---------------------------------------------------------------------------------------------------- inputs


def _constants(closed: jex.core.ClosedJaxpr, number: int) -> list[Any]:
    """The program's constants; random ones for those that an enclosing transformation traces."""
    rng = np.random.default_rng([number, 1])
    return [
        _array(rng, jax.typeof(c), 2, number == _PROBES) if isinstance(c, jax.core.Tracer) else c for c in closed.consts
    ]


def _drawn(closed: jex.core.ClosedJaxpr, plan: Plan, number: int) -> list[Any]:
    """Random inputs of probe `number`: integers below the number of experts first, then below the smallest table."""
    rng = np.random.default_rng(number)
    high = plan.experts if number != 1 else _smallest_table(closed.jaxpr, plan.experts)
    avals = [v.aval for v in closed.jaxpr.invars]
    return [_array(rng, a, high, number == _PROBES and _is_of_tokens(a.shape, plan.token_rows)) for a in avals]


def _is_of_tokens(shape: Sequence[int], token_rows: frozenset[int]) -> bool:
    """Whether the first axes are tokens, or nothing tells (fewer than two axes)."""
    return len(shape) < 2 or any(math.prod(shape[: k + 1]) in token_rows for k in range(len(shape)))


def _array(rng: np.random.Generator, aval: Any, high: int, positive: bool) -> Any:
    shape, dtype = tuple(aval.shape), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return _keys(shape, dtype)
    if is_extended(dtype):
        raise Unprobed(f"an input of type {dtype} cannot be drawn")
    if is_boolean(dtype):
        return jax.device_put(rng.random(shape) < 0.8)
    if np.dtype(dtype) == np.uint32:  # as keys of random numbers are written
        return jax.device_put(rng.integers(0, 2**32, shape, np.uint32))
    if not is_floating(dtype):
        return jax.device_put(rng.integers(0, max(high, 2), shape).astype(dtype))
    values = rng.normal(size=shape) / math.sqrt(shape[-2]) if len(shape) > 1 else rng.normal(0.5, 0.3, shape)
    return jax.device_put(np.asarray(np.abs(values) if positive or not shape else values).astype(dtype))


def _keys(shape: tuple[int, ...], dtype: Any) -> Any:
    first = next((k for name in _KEY_IMPLS if (k := jax.random.key(0, impl=name)).dtype == dtype), None)
    if first is None:
        raise Unprobed(f"an input of type {dtype} cannot be drawn")
    return jax.random.split(first, math.prod(shape)).reshape(shape)


def _smallest_table(jaxpr: Any, least: int) -> int:
    """The length of the shortest axis that is read by index anywhere, of those not shorter than `least`."""
    sizes = [
        eqn.invars[0].aval.shape[axis]
        for eqn, _ in _equations(jaxpr)
        if eqn.primitive.name == "gather"
        for axis in eqn.params["dimension_numbers"].start_index_map
    ]
    return min((n for n in sizes if n >= least), default=least)


# ------------------------------------------------------------------------------------------------------ cost


def _too_large(closed: jex.core.ClosedJaxpr) -> str | None:
    """Why a program takes too long or too much memory to be run at its own sizes, which are those of its shapes."""
    flops = size = 0.0
    for eqn, times in _equations(closed.jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            flops += 2.0 * times * depth * math.prod(eqn.outvars[0].aval.shape)
        size += sum(_bytes(v.aval) for v in eqn.outvars)
    size += sum(_bytes(v.aval) for v in closed.jaxpr.invars)
    most = LARGEST_FLOPS_OF_CPUS if jax.default_backend() == "cpu" else LARGEST_FLOPS
    if flops > most:
        return f"the program as written takes {flops:.1e} FLOPs, and probes are run up to {most:.0e}"
    if size > LARGEST_BYTES:
        return f"the program as written makes {size:.1e} bytes of arrays, and probes are run up to {LARGEST_BYTES:.0e}"
    return None


def _bytes(aval: Any) -> int:
    return 0 if is_extended(aval.dtype) else math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations, also of bodies, and how often each runs (those of a `while` at least once)."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        again = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jex.core.jaxprs_in_params(eqn.params):
            yield from _equations(getattr(inner, "jaxpr", inner), again)
