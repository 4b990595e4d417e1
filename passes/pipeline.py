"""Runs the passes in order on one traced program.

In: a closed jaxpr (the user's step, traced) and `PassOptions`.  Out: a `Rewritten`: a function from the flat
inputs to the flat outputs of that jaxpr, and the `Site` values found.  When nothing was rewritten the function
evaluates the jaxpr as it is, equation by equation.

A site that cannot be rewritten as asked is tried again as `exact`, then left as it is written; each step down is a
reason in its `Site`.  With `probe`, one whose numbers differ from the layer as written is such a site.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.extend as jex
from absl import logging

from moe_xla.passes._jax import array_type
from moe_xla.passes.advice import advice_for
from moe_xla.passes.apart import with_bodies_apart
from moe_xla.passes.leftover import does_work_by_expert, does_work_of_every_expert
from moe_xla.passes.probe import Outcome, Plan, probe
from moe_xla.passes.recover.branches import CONDS
from moe_xla.passes.recover.facts import assignments_of, choices_of, distinct_of
from moe_xla.passes.recover.grouping import leaves_of
from moe_xla.passes.recover.interpret import Recovery, describe
from moe_xla.passes.recover.loads import is_use_of_capacity, numbers_of_layers
from moe_xla.passes.recover.lower import Lowering, Refusal
from moe_xla.passes.recover.nodes import TooLarge, is_floating
from moe_xla.passes.recover.scopes import SCANS
from moe_xla.passes.recover.session import Session
from moe_xla.passes.recover.terms import Const, key_of, term_vars
from moe_xla.passes.recover.values import NoRule
from moe_xla.passes.regroup import PATTERN as RAGGED_DOT
from moe_xla.passes.regroup import regrouped
from moe_xla.passes.roll import may_hold_loops, over_tokens, rolled
from moe_xla.passes.site import KEPT, REWRITTEN, Site

PATTERNS = (
    "einsum_dispatch",
    "scatter_dispatch",
    "sort_dispatch",
    "dense_experts",
    "weight_gather",
    "expert_loop",
    RAGGED_DOT,
)
# Loops over experts are rolled into programs with an axis of experts first.
_LOOPS = frozenset({"expert_loop", "dense_experts"})
_ROLLED_INTO = frozenset({"dense_experts", "weight_gather", "scatter_dispatch"})
_MAPPED_INTO = frozenset({"dense_experts"})
SEMANTICS = ("dropless", "exact")
_RECURSION_LIMIT = 20_000
_LEAST_BUDGET, _BUDGET_PER_EQUATION = 5_000, 20
_NEXT_MODE = {"dropless": "exact", "exact": "off"}


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """Validated options of the passes: see `moe_xla.rewrite` for their meaning."""

    semantics: str = "dropless"
    patterns: frozenset[str] = frozenset(PATTERNS)
    backend: str = "auto"
    probe: bool = False


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten program: `evaluate(*flat_inputs) -> flat_outputs`, and what was found in it.

    `outcomes` says of each site how its numbers compare with the layer as written, where that was asked.
    """

    evaluate: Callable[..., Sequence[jax.Array]]
    sites: tuple[Site, ...]
    outcomes: tuple[Outcome | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Denial:
    reason: str
    primitive: str | None
    source: str | None


_NOT_BOTH = "another pass over the program's loops drops tokens, and this one may be of the same layer"
_NOT_ALONE = _Denial("its arrays come from a layer that is left as it is written", None, None)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What is known of a site before it is decided what becomes of it."""

    key: tuple[Any, ...]
    pattern: str
    source: str | None
    assignments: int
    tokens: int
    experts: int
    capacity: int | None
    removed_bytes: int
    naive_flops: int


@dataclasses.dataclass(frozen=True)
class _Emission:
    """A rewritten program, and what its grouped matmuls cost: FLOPs by layer, tokens by layer, backends."""

    program: jex.core.ClosedJaxpr
    flops: dict[Any, int]
    tokens: dict[Any, int]
    backends: dict[Any, str]


def rewrite_jaxpr(closed: jex.core.ClosedJaxpr, options: PassOptions) -> Rewritten:
    """Rewrites the Mixture-of-Experts layers of `closed`; never raises for a program that jax itself accepts."""
    try:
        return _rewritten_whole(closed, options, probe if options.probe else None)
    except Exception as error:
        _internal("passes", error)
        return Rewritten(jex.core.jaxpr_as_fun(closed), ())


def compare_sites(closed: jex.core.ClosedJaxpr, inputs: Sequence[Any], options: PassOptions) -> Rewritten:
    """As `rewrite_jaxpr`; compares each rewritten site with the layer as written on concrete inputs, and keeps it."""
    return _rewritten_whole(closed, options, functools.partial(probe, inputs=inputs), refuses=False)


_Compare = Callable[[jex.core.ClosedJaxpr, Plan], Callable[[Any], Outcome]]


def _rewritten_whole(
    closed: jex.core.ClosedJaxpr, options: PassOptions, compare: _Compare | None, refuses: bool = True
) -> Rewritten:
    """The program rewritten: bodies that are programs of their own, ragged dots, and the rest."""
    if _has_symbolic_sizes(closed):
        return Rewritten(jex.core.jaxpr_as_fun(closed), ())
    apart = with_bodies_apart(closed, lambda body, why: _rewritten_apart(body, options, why))
    result = _with_products(apart.closed, options, compare, refuses)
    return dataclasses.replace(
        result,
        sites=(*apart.sites, *result.sites),
        outcomes=(*(None for _ in apart.sites), *_by_site(result)),
    )


def _rewritten_apart(body: jex.core.ClosedJaxpr, options: PassOptions, why_exact: str | None) -> Rewritten:
    """A body that is a program of its own, rewritten as `exact` if there is a reason why only so."""
    if why_exact is None or options.semantics == "exact":
        return rewrite_jaxpr(body, options)
    result = rewrite_jaxpr(body, dataclasses.replace(options, semantics="exact"))
    return dataclasses.replace(
        result, sites=tuple(dataclasses.replace(s, reason=s.reason or why_exact) for s in result.sites)
    )


def _by_site(result: Rewritten) -> tuple[Outcome | None, ...]:
    """The outcome of each site; None where none was compared."""
    return result.outcomes or (None,) * len(result.sites)


def _with_products(
    closed: jex.core.ClosedJaxpr, options: PassOptions, compare: _Compare | None, refuses: bool
) -> Rewritten:
    """The program rewritten, and its ragged dots on another backend."""
    if RAGGED_DOT not in options.patterns:
        return _with_loops(closed, options, compare, refuses)
    grouped = regrouped(closed, options.backend, options.semantics)
    result = _with_loops(grouped.closed, options, compare, refuses)
    return dataclasses.replace(
        result,
        sites=(*result.sites, *grouped.sites),
        outcomes=(*_by_site(result), *(None for _ in grouped.sites)),
    )


def _with_loops(
    closed: jex.core.ClosedJaxpr, options: PassOptions, compare: _Compare | None, refuses: bool
) -> Rewritten:
    """The program rewritten as it is, or with its scans over tokens as operations on all of them."""
    result = _with_rolled(closed, options, compare, refuses)
    if not options.patterns >= _LOOPS:
        return result
    tokens = over_tokens(closed, functools.partial(_is_layer, options=options))
    if tokens is not None:
        result = _better(result, _with_rolled(tokens, options, compare, refuses), _MAPPED_INTO)
    return result


def _is_layer(closed: jex.core.ClosedJaxpr, options: PassOptions) -> bool:
    """Whether all of a program that is found is rewritten."""
    sites = _with_rolled(closed, options, None, refuses=False).sites
    return bool(sites) and all(site.status == REWRITTEN for site in sites)


def _with_rolled(
    closed: jex.core.ClosedJaxpr, options: PassOptions, compare: _Compare | None, refuses: bool
) -> Rewritten:
    """The program rewritten as it is, or with its loops over experts rolled first if more layers are found then.

    Where a layer is still kept, backward bodies may have to compute it again.
    """
    result = _rewritten(closed, options, compare, refuses)
    if not options.patterns >= _LOOPS or not may_hold_loops(closed):
        return result
    loops = rolled(closed)
    if loops is not None:
        result = _better(result, _rewritten_loops(loops, options, compare, refuses), _ROLLED_INTO)
    if any(site.status == KEPT for site in result.sites):
        again = rolled(closed, again=True)
        if again is not None:
            other = _rewritten_loops(again, options, compare, refuses, allows_rest=False)
            result = _better(result, other, _ROLLED_INTO if loops is not None else frozenset())
    return result


def _better(result: Rewritten, other: Rewritten, loops: frozenset[str]) -> Rewritten:
    """The one of two rewritings of a program that rewrites more; sites of `other` by patterns `loops` may be loops."""
    known = {site.source for site in result.sites if site.tokens > 1}
    sites = tuple(_of_loop(s) if s.pattern in loops and s.source not in known else s for s in other.sites)
    return Rewritten(other.evaluate, sites, other.outcomes) if _found(sites) > _found(result.sites) else result


def _is_half_dropless(sites: Sequence[Site]) -> bool:
    """Whether some layers drop nothing, while others with a capacity are exact or as written."""
    dropless = [site.semantics == "dropless" for site in sites if site.capacity]
    return any(dropless) and not all(dropless)


def _rewritten_loops(
    rolled_up: jex.core.ClosedJaxpr,
    options: PassOptions,
    compare: _Compare | None,
    refuses: bool,
    allows_rest: bool = True,
) -> Rewritten:
    """The program with its loops rolled, rewritten.

    A pass that a rolled loop makes again is a site of its own: it must drop what the first one drops.
    """
    result = _rewritten(rolled_up, options, compare, refuses, allows_rest)
    if not _is_half_dropless(result.sites):
        return result
    result = _rewritten(rolled_up, dataclasses.replace(options, semantics="exact"), compare, refuses, allows_rest)
    sites = (s if s.reason or not s.capacity else dataclasses.replace(s, reason=_NOT_BOTH) for s in result.sites)
    return dataclasses.replace(result, sites=tuple(sites))


def _found(sites: Sequence[Site]) -> tuple[int, int, bool]:
    """What tells one rewriting of a program from a better one.

    The places whose layers it rewrites, what it keeps, and whether it takes tokens together.
    """
    rewritten = {site.source for site in sites if site.status == REWRITTEN}
    return (
        len(rewritten),
        -sum(site.status != REWRITTEN for site in sites),
        all(site.tokens > 1 for site in sites),
    )


def _of_loop(site: Site) -> Site:
    """A site that was found by rolling a loop."""
    return dataclasses.replace(site, pattern="expert_loop")


def _rewritten(
    closed: jex.core.ClosedJaxpr,
    options: PassOptions,
    compare: _Compare | None,
    refuses: bool,
    allows_rest: bool = True,
) -> Rewritten:
    """The program rewritten; a site of which work on every expert is left must be allowed to have such a rest.

    Where it is not, bodies compute again what others have computed, but for choices; a mask that compares what is
    rounded anew might choose otherwise, and is not looked for.
    """
    as_written = jex.core.jaxpr_as_fun(closed)
    if not options.patterns - {RAGGED_DOT}:
        return Rewritten(as_written, ())
    modes: dict[Any, str] = {}
    denials: dict[Any, _Denial] = {}
    layers: dict[Any, _Layer] = {}
    while True:
        session = Session(modes, options.semantics, masks=allows_rest, budget=_budget(closed))
        with _room_for_graphs():
            result = _attempt(closed, session, layers, options)
            outcomes = _outcomes(closed, result, session, layers, options, compare)
        refusal = result if isinstance(result, Refusal) else _differing(outcomes) if refuses else None
        if refusal is None and isinstance(result, _Emission):
            refusal = _with_rest(session, result.program, _axes_of_pairs(closed, session) if allows_rest else None)
        if refusal is not None:
            _step_down(session, refusal, modes, denials, options.semantics)
        elif isinstance(result, _Emission):
            sites = _sites(layers, modes, denials, options, result, outcomes)
            sites = _with_weighted(closed, session, sites, options)
            in_order = tuple(outcomes.get(key) for key in _wanted(layers, options))
            return Rewritten(_evaluator(closed, result), sites, in_order)
        else:
            sites = _sites(layers, modes, denials, options, None)
            return Rewritten(as_written, _with_weighted(closed, session, sites, options))


def _budget(closed: jex.core.ClosedJaxpr) -> int:
    """How many maps the passes may make of a program: ten times what they ever needed, a few seconds at most."""
    return _LEAST_BUDGET + _BUDGET_PER_EQUATION * _equations(closed.jaxpr)


def _equations(jaxpr: Any) -> int:
    return sum(1 + sum(map(_equations, jex.core.jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _has_bodies(jaxpr: Any) -> bool:
    """Whether a program has bodies of which a forward one hands on to a backward one."""
    inner = (j for eqn in jaxpr.eqns for j in jex.core.jaxprs_in_params(eqn.params))
    return any(eqn.primitive.name in SCANS | CONDS for eqn in jaxpr.eqns) or any(map(_has_bodies, inner))


def _outcomes(
    closed: jex.core.ClosedJaxpr,
    result: _Emission | Refusal | None,
    session: Session,
    layers: dict[Any, _Layer],
    options: PassOptions,
    compare: _Compare | None,
) -> dict[Any, Outcome]:
    """How the numbers of each layer that was rewritten compare with those of the layer as written."""
    if compare is None or not isinstance(result, _Emission):
        return {}
    rewritten = [layer for key, layer in layers.items() if session.mode(key) != "off"]
    rows = {n for layer in rewritten for n in (layer.tokens, layer.assignments) if n > 1} | set(result.tokens.values())
    experts = min((layer.experts for layer in rewritten), default=0)
    outcome = compare(closed, Plan(session.modes, options.semantics, options.backend, frozenset(rows), experts))
    return {layer.key[0]: outcome(layer.key[0]) for layer in rewritten}


def _differing(outcomes: dict[Any, Outcome]) -> Refusal | None:
    """The refusal of the first site whose numbers differ from those of the layer as written."""
    for key, outcome in outcomes.items():
        if outcome.difference is not None:
            return Refusal(frozenset({key}), f"probe: {outcome}", None)
    return None


def _axes_of_pairs(closed: jex.core.ClosedJaxpr, session: Session) -> dict[Any, int]:
    """The layers whose experts are chosen by a mask, which a backward body may not know any more; how many axes their
    pairs of tokens and experts have."""
    if not session.masked or not _has_bodies(closed.jaxpr):
        return {}
    masked = ((index, session.indices.get(index, {})) for index in session.masked)
    return {session.root(s): len(index.shape) for index, sites in masked for s in sites.values()}


def _with_rest(session: Session, program: jex.core.ClosedJaxpr, among: dict[Any, int] | None) -> Refusal | None:
    """The refusal of the first site whose work on every expert, or on all slots, is partly left.

    All sites, or those `among` which are asked for; of these, arrays with more axes than is said there.
    """
    for site in sorted({session.root(s) for s in session.sources if session.mode(s) != "off"}):
        if among is not None and site not in among:
            continue
        wires = [w for w in session.layer_wires if any(session.root(s) == site for s in w.layers)]
        wires = [w for w in wires if among is None or len(w.shape) > among[site]]
        if does_work_of_every_expert(program, wires):
            return Refusal(frozenset({site}), "work on every expert is left in its backward pass", None)
    return None


def _has_symbolic_sizes(closed: jex.core.ClosedJaxpr) -> bool:
    """Whether the program is traced for any size, as `jax.export` does; index notation needs numbers."""
    variables = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
    return any(not isinstance(size, int) for v in variables for size in array_type(v.aval)[0])


@contextlib.contextmanager
def _room_for_graphs() -> Iterator[None]:
    """Settings of Python for a large graph of live nodes.

    Its collector of cycles would walk over all of them again and again, which takes a quarter of the time; its limit
    of recursion is one that a chain of two hundred elementwise operations exceeds.
    """
    enabled, limit = gc.isenabled(), sys.getrecursionlimit()
    gc.disable()
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        if enabled:
            gc.enable()


def _attempt(
    closed: jex.core.ClosedJaxpr, session: Session, layers: dict[Any, _Layer], options: PassOptions
) -> _Emission | Refusal | None:
    """One walk and emission with the modes of `session`: the program, why not, or None where no layer is left."""
    recovery = Recovery(session)
    try:
        return _recovered(closed, recovery, layers, options)
    finally:
        recovery.release()


def _recovered(
    closed: jex.core.ClosedJaxpr, recovery: Recovery, layers: dict[Any, _Layer], options: PassOptions
) -> _Emission | Refusal | None:
    session = recovery.session
    try:
        inputs = [recovery.input(*array_type(v.aval)) for v in closed.jaxpr.invars]
        consts = [recovery.closed_over(*pair) for pair in zip(closed.jaxpr.constvars, closed.consts, strict=True)]
        outputs = recovery.walk(closed.jaxpr, consts, inputs)
    except Exception as error:
        reason = str(error) if isinstance(error, TooLarge) else _internal("lift", error)
        return Refusal(frozenset(), reason, None) if session.sources else None
    session.unite_recomputed()
    found = _layers(session)
    for layer in found:
        layers.setdefault(layer.key[0], layer)
    if not session.layer_wires:
        return None
    unwanted = next((layer for layer in found if layer.pattern not in options.patterns), None)
    if unwanted is not None:
        return Refusal(frozenset(unwanted.key), f"the pattern {unwanted.pattern} is not looked for", None)
    early = _unentered(session) or _inconsistent_capacity(session) or _capacity_in_use(session)
    return early or _emit(closed, recovery, [*consts, *inputs], outputs, options.backend)


def _internal(part: str, error: Exception) -> str:
    """What is said of a fault of ours, which is logged wherever it happens: it must never reach the user's step."""
    reason = f"internal failure of the {part}: {type(error).__name__}: {error}"
    logging.warning("moe_xla: %s; what it concerns runs as written", reason)
    return reason


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
        modes[site] = _NEXT_MODE.get(mode, "off") if any(n.site == site for _, n in session.ranks) else "off"
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
    for root, thresholds in session.dropless_thresholds().items():
        least, most = min(thresholds, key=lambda t: t.bound), max(thresholds, key=lambda t: t.bound)
        if least.bound <= 0:
            return Refusal(frozenset({root}), "no position of the queue is below the bound", least.step)
        if most.bound - least.bound > 1:
            found = f"{least.bound:g} and {most.bound:g}"
            return Refusal(
                frozenset({root}), f"queue positions are compared with different bounds ({found})", least.step
            )
    return None


def _capacity_in_use(session: Session) -> Refusal | None:
    """In dropless, counts of rows must not meet a number that is the capacity."""
    numbers = numbers_of_layers(session)
    for use in session.literal_uses:
        for root in {session.root(s) for key in use.indices for s in session.sites_counting(key)}:
            if root in numbers and is_use_of_capacity(use, numbers[root]):
                reason = f"{use.step.name} of counted rows and {use.number:g}, which may come from the capacity"
                return Refusal(frozenset({root}), reason, use.step)
    return None


def _emit(
    closed: jex.core.ClosedJaxpr, recovery: Recovery, given: Sequence[Any], outputs: Sequence[Any], backend: str
) -> _Emission | Refusal:
    """The rewritten program as a jaxpr over the constants and inputs of the program as written."""
    session = recovery.session
    costs: Sequence[Any] = ()

    @jax.jit  # one equation to evaluate, so that the program is not traced once more
    def rewritten(*values: Any) -> list[Any]:
        nonlocal costs
        lowering = Lowering(recovery, dict(zip(given, values, strict=True)), backend)
        results = lowering.results(outputs)
        costs = lowering.flops, lowering.tokens, lowering.backends
        return results

    variables = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
    try:
        program = jax.make_jaxpr(rewritten)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables))
        _check_types(program.out_avals, outputs)
    except Refusal as refusal:
        return refusal
    except (NoRule, TooLarge) as error:
        return Refusal(frozenset(), str(error), None)
    except Exception as error:
        return Refusal(frozenset(), _internal("lowering", error), None)
    flops, tokens, backends = (_by_layer(session, table) for table in costs)
    idle = frozenset(s for w in session.layer_wires for s in w.layers if not flops.get(session.root(s)))
    if idle:
        return Refusal(idle, "no expert matmul was found on the layer's rows", None)
    return _Emission(
        program,
        {k: sum(v) for k, v in flops.items()},
        {k: max(v) for k, v in tokens.items()},
        {k: ", ".join(sorted(set(v))) for k, v in backends.items()},
    )


def _check_types(found: Sequence[Any], outputs: Sequence[Any]) -> None:
    for wire, aval in zip(outputs, found, strict=True):
        if aval.shape != wire.shape or aval.dtype != wire.dtype:
            raise TypeError(f"a result is {aval.dtype}{aval.shape} instead of {wire.dtype}{wire.shape}")


def _by_layer(session: Session, table: Sequence[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """What the lowering noted of indices, by the layer whose queue the index belongs to."""
    result: dict[Any, list[Any]] = {}
    for key, entry in table:
        for root in {session.root(s) for s in session.sites_of(key)}:
            result.setdefault(root, []).append(entry)
    return result


def _with_weighted(
    closed: jex.core.ClosedJaxpr, session: Session, sites: tuple[Site, ...], options: PassOptions
) -> tuple[Site, ...]:
    """The sites, and the layers whose queues are counts of weighted rows: those are why their slots are not unique."""
    for path in sorted(session.placed):
        count = session.weighted[path]
        if "einsum_dispatch" not in options.patterns or not does_work_by_expert(closed, count.experts):
            continue
        reason, source = count.step.refusal, describe(count.step.source)
        why = {"reason": reason, "primitive": count.step.name, "reason_source": source, "advice": advice_for(reason)}
        unproved = [
            s for s in sites if s.status == KEPT and s.experts == count.experts and "provably" in (s.reason or "")
        ]
        if unproved:
            sites = tuple(dataclasses.replace(s, **why) if s in unproved else s for s in sites)
        elif not any(s.reason == reason and s.experts == count.experts for s in sites):
            found = Site(KEPT, "einsum_dispatch", source=source, experts=count.experts, **why)
            sites = (*sites, dataclasses.replace(found, tokens=count.assignments, choices=1))
    return sites


def _evaluator(closed: jex.core.ClosedJaxpr, emission: _Emission) -> Callable[..., Sequence[jax.Array]]:
    function = jex.core.jaxpr_as_fun(emission.program)
    return lambda *flat: function(*closed.consts, *flat)


def _layers(session: Session) -> list[_Layer]:
    """The sites of a walk: queue counts whose positions stand on a slot axis, grouped by layer."""
    groups: dict[Any, list[Any]] = {}
    for wire in session.layer_wires:
        for site in wire.layers:
            members = groups.setdefault(session.root(site), [])
            if site not in members:
                members.append(site)
    return [_layer(session, sorted(members)) for _, members in sorted(groups.items())]


def _layer(session: Session, members: list[Any]) -> _Layer:
    ranks = [(g, n) for g, n in session.ranks if n.site in members]
    first = [site for site in members if site not in session.recomputed] or members
    choices = _choices(session, first) if not ranks else []
    thresholds = [t.bound for s in members for t in session.thresholds.get(s, ()) if t.bound > 0]
    wires = [w for w in session.layer_wires if w.layers & set(members)]
    return _Layer(
        key=tuple(members),
        pattern="sort_dispatch" if session.sorted & set(members) else _pattern(wires),
        source=describe(session.sources[members[0]]),
        assignments=sum({n.site: assignments_of(n) for _, n in ranks if n.site in first}.values())
        + sum(c.assignments for c in choices),
        tokens=max((assignments_of(n) // choices_of(g, n) for g, n in ranks), default=0)
        or max((c.assignments // c.choices for c in choices), default=0),
        experts=max([n.index.size for _, n in ranks] + [c.experts for c in choices], default=0),
        capacity=int(min(thresholds)) if thresholds else None,
        removed_bytes=sum(math.prod(w.shape) * w.dtype.itemsize for w in wires),
        naive_flops=sum(_dot_flops(step) for sites, step in session.contractions if sites & set(members)),
    )


class _Choice(NamedTuple):
    """How many assignments an index makes, how many for each token, and of how many experts."""

    assignments: int
    choices: int
    experts: int


def _choices(session: Session, sites: Sequence[Any]) -> list[_Choice]:
    """The choices at sites without queues: each index once, as a whole where it is read as a whole."""
    found: dict[Any, tuple[Any, Any]] = {}
    for graph, index in (c for site in sites for c in session.chosen.get(site, ())):
        arrays = frozenset(leaf.wire.number for leaf in leaves_of(graph, index.node))
        found[arrays, key_of(index).places] = graph, index
    whole = {arrays for arrays, places in found if not any(p is not None for p in places)}
    return [
        _choice(graph, index)
        for (arrays, places), (graph, index) in found.items()
        if arrays not in whole or not any(p is not None for p in places)
    ]


def _choice(graph: Any, index: Any) -> _Choice:
    fact = distinct_of(graph, index.factor)
    choices = fact.along.size if fact is not None and not isinstance(fact.along, Const) else 1
    assignments = math.prod(v.size for v in term_vars(index))
    expected = graph.expected.get(index.node, choices)
    return _Choice(assignments // choices * expected, expected, index.size)


def _pattern(wires: Sequence[Any]) -> str:
    """How rows come into the slots; without slots, whether tokens or experts' weights are picked."""
    makers = {getattr(w.step, "name", None) for w in wires if is_floating(w.dtype)}
    if not any(w.slots for w in wires):
        return "weight_gather" if "gather" in makers else "dense_experts"
    filled = {getattr(w.step, "name", None) for w in wires if w.slots and is_floating(w.dtype)}
    return "scatter_dispatch" if makers & {"scatter", "scatter-add"} or "gather" in filled else "einsum_dispatch"


def _dot_flops(step: Any) -> int:
    (contracted, _), _ = step.eqn.params["dimension_numbers"]
    return 2 * math.prod(step.outputs[0].shape) * math.prod(step.inputs[0].shape[i] for i in contracted)


def _sites(
    layers: dict[Any, _Layer],
    modes: dict[Any, str],
    denials: dict[Any, _Denial],
    options: PassOptions,
    emission: _Emission | None,
    outcomes: Mapping[Any, Outcome] = MappingProxyType({}),
) -> tuple[Site, ...]:
    sites = {key: _site(layers[key], modes, denials, options, emission) for key in _wanted(layers, options)}
    return tuple(dataclasses.replace(s, probed=str(outcomes[k]) if k in outcomes else None) for k, s in sites.items())


def _wanted(layers: dict[Any, _Layer], options: PassOptions) -> list[Any]:
    """The layers of the report, by name, in the program's order."""
    return [key for key, layer in sorted(layers.items()) if layer.pattern in options.patterns]


def _site(
    layer: _Layer,
    modes: dict[Any, str],
    denials: dict[Any, _Denial],
    options: PassOptions,
    emission: _Emission | None,
) -> Site:
    root = layer.key[0]
    mode = modes.get(root, options.semantics)
    # a layer that was found before others were left as written may be gone with them
    kept = mode == "off" or emission is None or not emission.flops.get(root)
    denial = next((denials[s] for s in layer.key if s in denials), _NOT_ALONE if kept else None)
    tokens = layer.tokens if kept or emission is None else emission.tokens.get(root, layer.tokens)
    return Site(
        status=KEPT if kept else REWRITTEN,
        pattern=layer.pattern,
        semantics=None if kept else mode,
        source=layer.source,
        reason=denial.reason if denial else None,
        primitive=denial.primitive if denial else None,
        reason_source=denial.source if denial else None,
        advice=advice_for(denial.reason) if denial else None,
        tokens=tokens,
        experts=layer.experts,
        choices=layer.assignments // tokens if tokens else 0,
        capacity=layer.capacity,
        drop_rule="rank >= capacity" if layer.capacity is not None else None,
        backend=None if kept or emission is None else emission.backends.get(root),
        useful_flops=0 if kept or emission is None else emission.flops.get(root, 0),
        naive_flops=layer.naive_flops,
        removed_bytes=0 if kept else layer.removed_bytes,
    )
