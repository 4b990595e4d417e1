"""Runs the passes in order on one traced program.

In: a closed jaxpr (the user's step, traced) and `PassOptions`.  Out: a `Rewritten`: a function from the flat
inputs to the flat outputs of that jaxpr, and the `Site` values found.  When nothing was rewritten the function
evaluates the jaxpr as it is, equation by equation.

A site that cannot be rewritten as asked is tried again as `exact`, then left as it is written; each step down is a
reason in its `Site`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex

from moe_xla.passes.recover.facts import distinct_of
from moe_xla.passes.recover.interpret import Recovery, describe
from moe_xla.passes.recover.lower import Lowering, Refusal
from moe_xla.passes.recover.nodes import Graph, Rank
from moe_xla.passes.recover.session import Session
from moe_xla.passes.site import KEPT, REWRITTEN, Site

PATTERNS = ("einsum_dispatch",)
SEMANTICS = ("dropless", "exact")
_NEXT_MODE = {"dropless": "exact", "exact": "off"}


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """Validated options of the passes: see `moe_xla.rewrite` for their meaning."""

    semantics: str = "dropless"
    patterns: frozenset[str] = frozenset(PATTERNS)
    backend: str = "auto"


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten program: `evaluate(*flat_inputs) -> flat_outputs`, and what was found in it."""

    evaluate: Callable[..., Sequence[jax.Array]]
    sites: tuple[Site, ...]


@dataclasses.dataclass(frozen=True)
class _Denial:
    reason: str
    primitive: str | None
    source: str | None


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What is known of a site before it is decided what becomes of it."""

    key: tuple[Any, ...]
    source: str | None
    assignments: int
    tokens: int
    experts: int
    capacity: int | None
    removed_bytes: int


def rewrite_jaxpr(closed: jex.core.ClosedJaxpr, options: PassOptions) -> Rewritten:
    """Rewrites the Mixture-of-Experts layers of `closed`; never raises for a program that jax itself accepts."""
    as_written = jex.core.jaxpr_as_fun(closed)
    if "einsum_dispatch" not in options.patterns:
        return Rewritten(as_written, ())
    modes: dict[Any, str] = {}
    denials: dict[Any, _Denial] = {}
    layers: dict[Any, _Layer] = {}
    while True:
        session = Session(modes, options.semantics)
        recovery = Recovery(session)
        inputs = [recovery.input(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
        consts = [recovery.input(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.constvars]
        outputs = recovery.walk(closed.jaxpr, consts, inputs)
        session.unite_recomputed()
        for layer in _layers(session):
            layers.setdefault(layer.key[0], layer)
        if not session.slot_wires:
            return Rewritten(as_written, _sites(layers, modes, denials, options, 0))
        refusal = (
            _unentered(session)
            or _inconsistent_capacity(session)
            or _trial(closed, recovery, consts, inputs, outputs, options.backend)
        )
        if not isinstance(refusal, Refusal):
            evaluate = _evaluator(closed, recovery, consts, inputs, outputs, options.backend)
            return Rewritten(evaluate, _sites(layers, modes, denials, options, refusal))
        _step_down(session, refusal, modes, denials, options.semantics)


def _step_down(
    session: Session, refusal: Refusal, modes: dict[Any, str], denials: dict[Any, _Denial], default: str
) -> None:
    sites = session.bound_together(refusal.sites) or set(session.sources)
    step = refusal.step
    eqn = step.eqn if step is not None and step.outputs else None
    denial = _Denial(
        refusal.reason,
        step.name if eqn is not None and step is not None else None,
        describe(step.source) if step and eqn else None,
    )
    for site in sites:
        mode = modes.get(site, default)
        modes[site] = _NEXT_MODE.get(mode, "off")
        denials[site] = denial


def _unentered(session: Session) -> Refusal | None:
    """A body that runs as written may recompute positions with the capacity; dropless must not differ from it."""
    dropless = frozenset(s for s in session.sources if session.is_dropless(s))
    if session.unentered is None or not dropless:
        return None
    name = session.unentered.name
    return Refusal(dropless, f"queue positions are counted inside {name}, which is run as written", session.unentered)


def _inconsistent_capacity(session: Session) -> Refusal | None:
    """Dropless takes every test of a position against a literal for the capacity; they must agree on one."""
    by_root: dict[Any, list[float]] = {}
    for site, thresholds in session.thresholds.items():
        if session.is_dropless(site):
            by_root.setdefault(session.root(site), []).extend(thresholds)
    for root, thresholds in by_root.items():
        if max(thresholds) - min(thresholds) > 1:
            found = f"{min(thresholds):g} and {max(thresholds):g}"
            return Refusal(frozenset({root}), f"queue positions are compared with different bounds ({found})", None)
    return None


def _run(
    recovery: Recovery, consts: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], backend: str, values: Any
) -> tuple[list[Any], Lowering]:
    lowering = Lowering(recovery, dict(zip([*consts, *inputs], values, strict=True)), backend)
    return lowering.results(outputs), lowering


def _trial(
    closed: Any, recovery: Recovery, consts: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], backend: str
) -> Refusal | int:
    """Emits once on abstract values: the refusal met, or the FLOPs of the grouped matmuls."""
    flops = 0

    def emit(*values: Any) -> list[Any]:
        nonlocal flops
        results, lowering = _run(recovery, consts, inputs, outputs, backend, values)
        flops = lowering.grouped_flops
        return results

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (*closed.jaxpr.constvars, *closed.jaxpr.invars)]
    try:
        results = jax.eval_shape(emit, *avals)
    except Refusal as refusal:
        return refusal
    except Exception as error:  # a fault of ours must never reach the user's step: the layers run as written
        return Refusal(frozenset(), f"internal failure of the lowering: {type(error).__name__}: {error}", None)
    for wire, result in zip(outputs, results, strict=True):
        if result.shape != wire.shape or result.dtype != wire.dtype:
            return Refusal(frozenset(), "internal failure of the lowering: a result of another type", None)
    if flops == 0:
        return Refusal(frozenset(), "no expert matmul was found on the layer's rows", None)
    return flops


def _evaluator(
    closed: Any, recovery: Recovery, consts: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], backend: str
) -> Callable[..., Sequence[jax.Array]]:
    def evaluate(*flat: Any) -> Sequence[jax.Array]:
        results, _ = _run(recovery, consts, inputs, outputs, backend, (*closed.consts, *flat))
        return results

    return evaluate


def _layers(session: Session) -> list[_Layer]:
    """The sites of a walk: queue counts whose positions stand on a slot axis, grouped by layer."""
    groups: dict[Any, list[Any]] = {}
    for wire in session.slot_wires:
        for site in wire.slots:
            members = groups.setdefault(session.root(site), [])
            if site not in members:
                members.append(site)
    return [_layer(session, sorted(members)) for _, members in sorted(groups.items())]


def _layer(session: Session, members: list[Any]) -> _Layer:
    ranks = [(g, n) for g, n in session.ranks if n.site in members]
    assignments = sum({n.site: _count(n) for _, n in ranks if n.site not in session.recomputed}.values())
    choices = max((_choices(g, n) for g, n in ranks), default=1)
    tokens = max((_count(n) // _choices(g, n) for g, n in ranks), default=0)
    thresholds = [t for s in members for t in session.thresholds.get(s, ())]
    sizes = [n for s in members for n in session.slot_sizes.get(s, ())]
    capacity = int(min(thresholds)) if thresholds else (min(sizes) if sizes else None)
    removed = sum(math.prod(w.shape) * w.dtype.itemsize for w in session.slot_wires if set(w.slots) & set(members))
    del choices
    return _Layer(
        tuple(members),
        describe(session.sources[members[0]]),
        assignments,
        tokens,
        max((n.index.size for _, n in ranks), default=0),
        capacity,
        removed,
    )


def _count(rank: Rank) -> int:
    return math.prod(v.size for v in (*rank.batch, *rank.order, *rank.many))


def _choices(graph: Graph, rank: Rank) -> int:
    fact = distinct_of(graph, rank.index.factor)
    return fact.along.size if fact is not None else 1


def _sites(
    layers: dict[Any, _Layer], modes: dict[Any, str], denials: dict[Any, _Denial], options: PassOptions, flops: int
) -> tuple[Site, ...]:
    sites = []
    for _, layer in sorted(layers.items()):
        mode = modes.get(layer.key[0], options.semantics)
        denial = next((denials[s] for s in layer.key if s in denials), None)
        kept = mode == "off"
        sites.append(
            Site(
                status=KEPT if kept else REWRITTEN,
                pattern="einsum_dispatch",
                semantics=None if kept else mode,
                source=layer.source,
                reason=denial.reason if denial else None,
                primitive=denial.primitive if denial else None,
                reason_source=denial.source if denial else None,
                tokens=layer.tokens,
                experts=layer.experts,
                choices=layer.assignments // layer.tokens if layer.tokens else 0,
                capacity=layer.capacity,
                drop_rule="rank >= capacity" if layer.capacity is not None else None,
                backend=None if kept else options.backend,
                useful_flops=0 if kept else flops // max(1, sum(modes.get(x.key[0]) != "off" for x in layers.values())),
                removed_bytes=0 if kept else layer.removed_bytes,
            )
        )
    return tuple(sites)
