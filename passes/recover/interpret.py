"""Walks the program once and gives every array its value: the lift of the recover pass.

In: a jaxpr and, per site, what is asked (`"dropless"`, `"exact"`, `"off"`).  Out: the wires of the program's inputs and
outputs, each wire with its step and its value.  Calls are inlined where something inside or flowing in is structured.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.extend.core.primitives as prims
import numpy as np
from absl import logging
from jax import lax

from moe_xla.passes._jax import COMPOSITE, array_type, expansion, scan_counts, source_of
from moe_xla.passes.recover import loads, prefix
from moe_xla.passes.recover.branches import CONDS, BranchEntrance, Switch, SwitchExit
from moe_xla.passes.recover.dense import DenseReader
from moe_xla.passes.recover.facts import (
    bound_of,
    choices_of,
    distinct_of,
    is_nonnegative,
    lower_bound,
    rank_of,
    rank_sites,
    tainting_sites,
)
from moe_xla.passes.recover.grouping import choices_in, leaves_of, matmul_indices
from moe_xla.passes.recover.masks import COMPARISONS, note_mask
from moe_xla.passes.recover.nodes import (
    Ein,
    Graph,
    Leaf,
    Lit,
    Map,
    Node,
    Rank,
    TooLarge,
    freeze,
    is_boolean,
    is_floating,
    is_integer,
    literal,
)
from moe_xla.passes.recover.passage import Passage
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.rules import TABLE, Context, searches
from moe_xla.passes.recover.rules.elementwise import NAMES as ELEMENTWISE
from moe_xla.passes.recover.rules.elementwise import apply, iota_axis
from moe_xla.passes.recover.rules.ranks import WeightedRows, queue_counts, sorted_mask, sorted_position
from moe_xla.passes.recover.rules.searches import is_search
from moe_xla.passes.recover.rules.table import Rule
from moe_xla.passes.recover.scopes import CHECKPOINTS, SCANS, Entrance, Exit, Scope
from moe_xla.passes.recover.session import Path, Session, Weighted
from moe_xla.passes.recover.terms import Factor, Idx, IndexKey, Var, has_idx, key_of, parts_of
from moe_xla.passes.recover.thresholds import MEETINGS, Thresholds, is_made_by_choice, is_over_pairs
from moe_xla.passes.recover.values import (
    Contradiction,
    NoRule,
    Value,
    is_boring,
    literal_of,
    of_literal,
    of_node,
    unconverted,
)

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # jax 0.12
}
# Every element of their results is one of their operands'.
_REARRANGING = frozenset({"concatenate", "stack", "unstack", "split", "slice", "squeeze", "rev", "sort"})
# What differs along an axis of theirs still does.
_PERMUTING = frozenset({"slice", "rev", "sort"})
# Constants of so few elements are looked into: for one number, and for 0, 1, ….
_SMALL, _LARGE = 64, 1 << 20
_JOINING = frozenset({"concatenate", "stack"})
STRUCTURAL = frozenset({"broadcast_in_dim", "transpose", "reshape", "squeeze", "iota"})


class Recovery:
    """The walk over one scope: its graph, and the wires and steps it found."""

    def __init__(self, session: Session, path: Path = (), recomputing: bool = False):
        self.session = session
        self.graph = Graph(self._decide, session.budget)
        self.context = Context(self.graph, session.is_dropless, self._site_of, self._note_rank)
        self.graph.reader = DenseReader(self.context, self._note_dense, self._passed)
        self.entrance: Entrance | None = None
        self.ranges: dict[Wire, prefix.Ranges] = {}
        self.steps: list[Step | Scope | Switch] = []
        self.effects: list[Step | Scope | Switch] = []
        self._thresholds = Thresholds(self.graph, session, self.steps)
        self._path = path
        self._recomputing = recomputing
        self._callers: list[Any] = []
        self._uses: collections.Counter[Any] = collections.Counter()
        self._folded: frozenset[tuple[IndexKey, int]] = frozenset()
        self._matrices: dict[IndexKey, list[Wire]] = {}
        self._step: Step | None = None

    # ---------------------------------------------------------------------------------------------- sites

    def _site_of(self, eqn: Any, index: Idx) -> Path:
        site, session = self._path, self.session
        if session.mode(site) == "off":
            session.unwanted |= {leaf.wire.number for leaf in leaves_of(self.graph, index.node)}
            raise NoRule("this layer is left as it is written")
        self._note_site(site, eqn)
        return site

    def _note_site(self, site: Path, eqn: Any, made: Step | None = None) -> None:
        """Notes the site that an equation shows; one that is computed again is known by what `made` its choice."""
        session, source = self.session, self._source(eqn)
        session.sources.setdefault(site, source)
        known = (source, eqn) if made is None else (made.source, made.eqn)
        session.signatures[site] = (source_of(known[0]), tuple(array_type(v.aval)[0] for v in known[1].outvars))
        if self._recomputing:
            session.recomputed.add(site)

    def _note_rank(self, graph: Graph, rank: Rank, site: Path) -> None:
        """A queue counted twice is one queue: both equations are one layer."""
        self.session.unite(frozenset({rank.site, site}))
        self.session.ranks.append((graph, rank))
        self.session.note_index(rank.index, rank.site)
        for leaf in leaves_of(graph, rank.index.node):
            self.session.choices.setdefault(leaf.wire.number, rank.site)

    def _sites_choosing(self, indices: frozenset[Idx]) -> frozenset[Path]:
        """The sites whose experts are chosen by the indices: a choice without a queue is a site of its own."""
        return frozenset().union(*(self.session.sites_of(key_of(i)) or self._choice_sites(i) for i in indices))

    def _choice_sites(self, index: Idx) -> frozenset[Path]:
        """The sites of a choice, named by the equation that first needed it; none where its queue was refused."""
        session = self.session
        wires = [leaf.wire for leaf in leaves_of(self.graph, index.node)]
        numbers = {wire.number for wire in wires}
        if self._step is None or numbers & session.unwanted:
            return frozenset()
        made = next((w.step for w in wires if isinstance(w.step, Step) and w.step.outputs), None)
        for number in numbers:
            if number not in session.choices:
                session.choices[number] = self._path
                self._note_site(self._path, self._step.eqn, made)
        sites = frozenset(session.choices[n] for n in numbers)
        if sites:
            session.unite(sites)
            session.note_index(index, min(sites))
            session.chosen.setdefault(min(sites), []).append((self.graph, index))
        return sites

    def _note_dense(self, wire: Wire, indices: frozenset[Idx]) -> bool:
        """Whether an array over all experts may be read at chosen ones only; it then is the site's."""
        sites = self._sites_choosing(indices)
        if not sites or any(self.session.mode(s) == "off" for s in sites):
            return False
        self.session.unite(sites)
        if not wire.dense:
            self.session.layer_wires.append(wire)
        wire.dense |= sites
        return True

    def _passed(self, factor: Factor) -> Factor | None:
        """An array of another scan, read there at the chosen experts."""
        return None if self.entrance is None else Passage(self.entrance).read(factor)

    def _source(self, eqn: Any) -> Any:
        """The equation that knows the user's line: library functions of jax are known by the call that holds them."""
        return next((e for e in (eqn, *reversed(self._callers)) if source_of(e) is not None), eqn)

    def _decide(self, graph: Graph, name: str, factor: Factor, bound: float) -> bool | None:
        """Comparisons of a queue position with a literal: what is proved, and in dropless the capacity tests."""
        if name in ("lt", "ge", "max") and bound <= 0 and is_nonnegative(graph, factor):
            return name != "lt"
        fact = rank_of(graph, factor)
        if fact is None:
            return None
        low = lower_bound(graph, fact)
        if not math.isfinite(low):
            return None
        strict = name in ("lt", "ge")
        threshold = (math.ceil(bound) if strict else math.floor(bound) + 1) - 1 - fact.constant
        decided = _always(name, bound, low)
        if decided is not None:
            if min(low, bound) > 1 and name != "max" and fact.is_own(graph):
                self.session.note_threshold(fact.rank.site, threshold, self._step)  # no test of a sign
            return decided
        if not fact.is_own(graph) or name == "max":
            return None
        if threshold <= 0:
            return None  # the sign of a position says whether there is one: no queue has room for nobody
        self.session.note_threshold(fact.rank.site, threshold, self._step)
        if not self.session.is_dropless(fact.rank.site):
            return None
        self._folded |= {(key_of(fact.rank.index), choices_of(graph, fact.rank))}
        return name in ("lt", "le", "min")

    # ------------------------------------------------------------------------------------------- the walk

    def input(self, shape: Sequence[int], dtype: Any, number: int | None = None) -> Wire:
        wire = Wire(tuple(shape), dtype, number=self.session.fresh_number() if number is None else number)
        wire.value = of_node(self.graph.leaf(wire, wire.shape, dtype))
        return wire

    def literal(self, atom: Any) -> Wire:
        wire = Wire(tuple(atom.aval.shape), atom.aval.dtype)
        wire.number = self.session.number(("literal", str(atom.aval.dtype), freeze(atom.val)))
        if wire.shape == () and not hasattr(atom.aval.dtype, "_rules"):
            wire.value = of_literal(self.graph, np.asarray(atom.val), (), atom.aval.dtype)
        else:
            wire.value = of_node(self.graph.leaf(wire, wire.shape, wire.dtype))
        wire.step = Step(atom, ())
        return wire

    def walk(self, jaxpr: Any, consts: Sequence[Wire], inputs: Sequence[Wire]) -> list[Wire]:
        """The wires of the outputs.  An equation whose results nobody reads asks nothing of a layer: it is left out."""
        wires: dict[Any, Wire] = dict(zip(jaxpr.constvars, consts, strict=True))
        wires.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Wire:
            return self.literal(atom) if isinstance(atom, jex.core.Literal) else wires[atom]

        path, uses = self._path, self._uses
        self._uses = _uses(jaxpr)
        for place, eqn in enumerate(jaxpr.eqns):
            if not _is_live(eqn, self._uses):
                continue
            self._path = (*path, place)
            outputs = self._equation(eqn, [read(a) for a in eqn.invars])
            wires.update(zip(eqn.outvars, outputs, strict=True))
        self._path, self._uses = path, uses
        return [read(a) for a in jaxpr.outvars]

    def release(self) -> None:
        """Forgets everything, so that the memory is free at once and Python need not search it for cycles."""
        for step in self.steps:
            for scope in step.branches if isinstance(step, Switch) else [step]:
                if isinstance(scope, Scope):
                    scope.recovery.release()
            for wire in step.outputs:
                wire.value = wire.definition = wire.step = None
        self.graph.release()
        self.graph.reader = None
        self.ranges.clear()

    def _equation(self, eqn: Any, inputs: Sequence[Wire]) -> list[Wire]:
        name = eqn.primitive.name
        inner = _body_of(eqn)
        if inner is not None and self._is_telling(inner, inputs):
            inner = _only_iteration(eqn) if name in SCANS else inner
            consts = [self.constant(c) for c in getattr(inner, "consts", ())]
            self._callers.append(eqn)
            outputs = self.walk(getattr(inner, "jaxpr", inner), consts, inputs)
            self._callers.pop()
            return outputs
        entered = self._entered(eqn, inputs)
        if entered is not None:
            return entered
        step = Step(eqn, tuple(inputs), source=self._source(eqn))
        number = self._number(eqn, inputs)
        step.outputs = tuple(
            Wire(*array_type(v.aval), step, i, number=self.session.number((number, i)))
            for i, v in enumerate(eqn.outvars)
        )
        if eqn.effects:
            self.effects.append(step)
        if name not in INLINED and any(_counts(j) for j in jex.core.jaxprs_in_params(eqn.params)):
            self.session.unentered = self.session.unentered or step
        self._transfer(step)
        if not self._folded:
            self.session.literal_uses += loads.follow(self.graph, step, self.session.is_dropless)
        self.steps.append(step)
        return list(step.outputs)

    def _is_telling(self, body: Any, inputs: Sequence[Wire]) -> bool:
        """Whether an inner function may hold part of a layer, or makes an index or a constant that one may need."""
        is_constant = all(w.value is not None and literal_of(w.value) is not None for w in inputs)
        is_index = bool(inputs) and all(is_integer(w.dtype) for w in inputs)
        return is_constant or is_index or _may_route(body) or not all(is_boring(w.value) for w in inputs)

    def _number(self, eqn: Any, inputs: Sequence[Wire]) -> int:
        """The number of an equation: the same for the same operation on the same arrays."""
        if eqn.effects:
            return self.session.fresh_number()
        return self.session.number((eqn.primitive, freeze(eqn.params), tuple(w.number for w in inputs)))

    # --------------------------------------------------------------------------------------------- scopes

    def adopt(self, wire: Wire, value: Value, unites: bool = True) -> None:
        """Takes a value that was rebuilt from another scope; queues in the branches of a cond are not one layer's."""
        wire.tainted = self._sites_in(value)
        wire.value = value
        if is_boring(value) and value.factor.args == value.pieces[0].axes and isinstance(value.factor.node, Leaf):
            wire.number = value.factor.node.wire.number
        self._note_slots(wire, value, unites)
        wire.changed = wire.changed or any(self.session.is_dropless(s) for s in wire.tainted)
        if value.is_plain and is_floating(value.dtype):
            self._note_matrices(wire, value.factor)
        if is_floating(value.dtype) and self._is_over_experts(value):
            wire.dense |= self._sites_laid_out(value)

    def _sites_laid_out(self, value: Value) -> frozenset[Path]:
        """The sites of the indices by which features of chosen experts stand in an array over all of them."""
        places = {p for piece in value.pieces for a in piece.axes for p in parts_of(a) if isinstance(p, Idx)}
        return frozenset().union(*(self.session.sites_counting(key_of(p)) for p in places))

    def _entered(self, eqn: Any, inputs: Sequence[Wire]) -> list[Wire] | None:
        """The outputs of an equation whose bodies hold, or are given, a layer; None where it runs as written."""
        name = eqn.primitive.name
        if not self.session.enters or name not in SCANS | CHECKPOINTS | CONDS:
            return None
        if name in SCANS and eqn.params["length"] < 2:
            return None
        given = any(w.slots or w.changed for w in inputs)
        chooses = any(map(_chooses, jex.core.jaxprs_in_params(eqn.params))) or any(map(self._is_choice, inputs))
        if not given and not any(_is_structured(w) for w in inputs) and not chooses:
            return None
        found = len(self.session.layer_wires)
        scope: Scope | Switch
        if name in CONDS:
            scope = Switch(eqn, inputs[0], source=self._source(eqn))
            outputs = self._cond(scope, inputs)
        else:
            again = self._recomputing or bool(eqn.params.get("differentiated", False))
            scope = Scope(eqn, Recovery(self.session, self._path, again), source=self._source(eqn))
            outputs = self._scan(scope, inputs) if scope.is_scan else self._checkpoint(scope, inputs)
        if not given and len(self.session.layer_wires) == found:
            return None
        scope.given, scope.returned = tuple(inputs), tuple(outputs)
        self.steps.append(scope)
        if eqn.effects:
            self.effects.append(scope)
        return outputs

    def _is_choice(self, wire: Wire) -> bool:
        """Whether an array may be the choice of a layer, made outside of the body that is given it."""
        if wire.value is None or not wire.value.is_plain:
            return False
        node = wire.value.factor.node
        return node in self.graph.bounds or is_made_by_choice(self.graph, self.session, node)

    def _scan(self, scope: Scope, inputs: Sequence[Wire]) -> list[Wire]:
        consts, carries = scan_counts(scope.eqn)
        entrance, inner = Entrance(scope, self.graph), scope.recovery
        inner.entrance = entrance
        starts = [inner.input(w.shape, w.dtype) for w in inputs[consts : consts + carries]]
        given = [entrance.whole(w) for w in inputs[:consts]] + starts
        given += [entrance.slice(w) for w in inputs[consts + carries :]]
        body = scope.eqn.params["jaxpr"]
        results = inner.walk(body.jaxpr, [inner.constant(c) for c in body.consts], given)
        scope.carries = list(zip(inputs[consts : consts + carries], starts, results[:carries], strict=True))
        scope.carried = [self._outer(scope, v) for v in scope.eqn.outvars[:carries]]
        exit_ = scope.exit = Exit(scope, self)
        stacked = [self._left(exit_, w, v) for w, v in zip(results[carries:], scope.eqn.outvars[carries:], strict=True)]
        return [*scope.carried, *stacked]

    def _checkpoint(self, scope: Scope, inputs: Sequence[Wire]) -> list[Wire]:
        entrance, inner = Entrance(scope, self.graph), scope.recovery
        results = inner.walk(scope.eqn.params["jaxpr"], [], [entrance.whole(w) for w in inputs])
        exit_ = Exit(scope, self)
        return [self._left(exit_, w, v) for w, v in zip(results, scope.eqn.outvars, strict=True)]

    def _cond(self, switch: Switch, inputs: Sequence[Wire]) -> list[Wire]:
        results = []
        for place, body in enumerate(switch.eqn.params["branches"]):
            inner = Recovery(self.session, (*self._path, place), self._recomputing)
            scope = Scope(switch.eqn, inner, source=switch.source, switch=switch)
            switch.branches.append(scope)
            entrance = inner.entrance = BranchEntrance(scope, self.graph, switch.taken, place)
            consts = [inner.constant(c) for c in body.consts]
            results.append(inner.walk(body.jaxpr, consts, [entrance.whole(w) for w in inputs[1:]]))
        exit_ = switch.exit = SwitchExit(switch, self)
        outputs = []
        for var, *wires in zip(switch.eqn.outvars, *results, strict=True):
            wire = self._outer(switch, var)
            self.adopt(wire, exit_.value(wires, wire), unites=False)
            wire.changed = wire.changed or (any(w.changed for w in wires) and not is_boring(wire.value))
            outputs.append(wire)
        return outputs

    def _outer(self, scope: Scope | Switch, var: Any) -> Wire:
        wire = self.input(*array_type(var.aval))
        wire.step = scope
        return wire

    def _left(self, exit_: Exit, inner: Wire, var: Any) -> Wire:
        """The outer wire of what a body returns."""
        wire = self._outer(exit_.scope, var)
        self.adopt(wire, exit_.value(inner, wire))
        wire.changed = wire.changed or (inner.changed and not is_boring(wire.value))
        exit_.scope.left.append((inner, wire))
        return wire

    def constant(self, const: Any) -> Wire:
        wire = Wire(tuple(np.shape(const)), const.dtype, number=self.session.number(("constant", id(const))))
        self._know(wire, const)
        wire.step = Step(const, ())
        return wire

    def closed_over(self, var: Any, const: Any) -> Wire:
        """An input of the program that is a constant of it."""
        wire = self.input(*array_type(var.aval))
        self._know(wire, const)
        return wire

    def _know(self, wire: Wire, const: Any) -> None:
        """Gives a constant its value: a number, where it holds one number everywhere, or 0, 1, …, as `arange` does."""
        number = _number_in(const)
        if number is not None:
            wire.value = of_literal(self.graph, number, wire.shape, wire.dtype)
        elif _counts_up(const):
            wire.value = of_node(self.graph.iota(wire.shape[0], wire.dtype))
        else:
            wire.value = of_node(self.graph.leaf(wire, wire.shape, wire.dtype))

    def _transfer(self, step: Step) -> None:
        """Gives a step's outputs their values."""
        self._folded, self._step = frozenset(), step
        tainted = frozenset().union(*(w.tainted for w in step.inputs)) if step.inputs else frozenset()
        values = self._rule_values(step)
        counted = self._spelled_count(step) or self._sorted_count(step, values)
        if self.session.weighted:
            tainted |= {self._path} & self.session.weighted.keys()
            self._note_placed(step)
        if counted is not None:
            values = [counted]
        if values is not None and not self._note_experts(step, values):
            values, step.refusal = None, "this layer is left as it is written"
        for k, wire in enumerate(step.outputs):
            wire.changed = bool(self._folded) or any(w.changed for w in step.inputs)
            wire.told = self._folded if is_boolean(wire.dtype) else frozenset()
            value = values[k] if values is not None else None
            if value is None:
                wire.tainted = tainted
                self._seal(wire, None)
                self._note_facts(step, wire)
                continue
            wire.tainted = self._sites_in(value)
            self._note_slots(wire, value)
            turned = self._turned(step)
            if turned is not None:
                self._seal(wire, turned)
                continue
            if is_sealed(value) or is_over_pairs(self.graph, value):
                self._seal(wire, value)
            else:
                wire.value = value
                self._note_origin(wire, value)
                if step.name in COMPARISONS and self.session.masks:
                    note_mask(self.graph, value)
        sites = frozenset().union(*(w.layers for w in (*step.inputs, *step.outputs)))
        if sites and step.name == "dot_general":
            self.session.contractions.append((sites, step))

    def _note_experts(self, step: Step, values: Sequence[Value]) -> bool:
        """Notes the work of chosen experts in the results of a step; False where it is to be left as it is written."""
        for wire, value in zip(step.outputs, values, strict=True):
            factors = [f for p in value.pieces for f in p.factors]
            indices = frozenset().union(*(matmul_indices(self.graph, f.node) for f in factors))
            sites = self._sites_choosing(indices) if indices else frozenset()
            if any(self.session.mode(s) == "off" for s in sites) or (indices and not sites):
                return False
            if sites and self._has_unknown_slots(value):
                return False
            if sites:
                self.session.unite(sites)
                given = [w for i in indices for w in self._matrices.pop(key_of(i), ())]
                for array in [*given, wire] if self._is_over_experts(value) else given:
                    self.session.layer_wires.append(array)
                    array.dense |= sites
            elif value.is_plain:
                self._note_matrices(wire, value.factor)
        return True

    def _has_unknown_slots(self, value: Value) -> bool:
        """Whether rows stand at different data-dependent places of which none is known to be a queue position."""
        for piece in value.pieces:
            places = {p for a in piece.axes for p in parts_of(a) if isinstance(p, Idx) and p.size > 1}
            if len(places) > 1 and not any(rank_sites(self.graph, p.node) for p in places):
                return True
        return False

    def _note_matrices(self, wire: Wire, factor: Factor) -> None:
        """Notes an array with a matrix of the chosen expert for each assignment."""
        if len([a for a in factor.args if isinstance(a, Var)]) > 1:
            for index in choices_in(self.graph, factor):
                self._matrices.setdefault(key_of(index), []).append(wire)

    def _is_over_experts(self, value: Value) -> bool:
        """Whether features of chosen experts stand in an array over all of them."""
        return any(
            any(isinstance(p, Idx) and not rank_sites(self.graph, p.node) for a in piece.axes for p in parts_of(a))
            and any(isinstance(p, Var) and p not in piece.points for a in piece.axes for p in parts_of(a))
            for piece in value.pieces
        )

    def _rule_values(self, step: Step) -> list[Value] | None:
        name = searches.NAME if is_search(step.eqn) else step.name
        boring = all(is_boring(w.value) or _is_permutation(w.value) for w in step.inputs)
        if boring and name in _MAXIMA:
            boring = _of_maxima(step) is None
        if boring and not self._is_worthwhile(step):
            return None
        rule = TABLE.get(name)
        if rule is None or any(math.prod(w.shape) == 0 for w in (*step.inputs, *step.outputs)):
            step.refusal = f"no rule for {name}"
            return None
        try:
            whole = _of_maxima(step) if name in _MAXIMA else None
            given = whole if whole is not None else (step.eqn, *[w.value for w in step.inputs])
            result = self._at_experts(step, rule) or rule(self.context, *given)
        except (NoRule, Contradiction, TooLarge) as error:
            step.refusal = str(error) or "contradiction"
            self._note_weighted(step, error)
            return None
        except Exception as error:  # a fault in a rule must never reach the user's step: the equation runs as written
            step.refusal = f"internal failure of the rule: {type(error).__name__}: {error}"
            logging.warning("moe_xla: %s; %s runs as written", step.refusal, name)
            return None
        values = result if isinstance(result, list) else [result]
        if any(v.background is not None and not v.background.is_plain for v in values):
            step.refusal = "what stands in cells that nothing hits is not known"
            return None
        for wire, value in zip(step.outputs, values, strict=True):
            assert value.shape == wire.shape and value.dtype == wire.dtype, (name, value.shape, wire.shape)
        return values

    def _at_experts(self, step: Step, rule: Rule) -> Value | None:
        """An equation in which an array that is zero outside of a threshold's mask meets the work of every expert."""
        if not self.graph.masks or step.name not in MEETINGS:
            return None
        for k, wire in enumerate(step.inputs):
            chosen = self._thresholds.at_experts(wire.value, self._source(step.eqn))
            if chosen is None:
                continue
            values = [chosen if i == k else w.value for i, w in enumerate(step.inputs)]
            try:
                result = rule(self.context, step.eqn, *values)
            except (NoRule, Contradiction):
                continue
            assert isinstance(result, Value)
            indices = (matmul_indices(self.graph, f.node) for p in result.pieces for f in p.factors)
            if self._thresholds.are_used(frozenset().union(*indices)):
                return result
        return None

    def _spelled_count(self, step: Step) -> Value | None:
        """A queue count that the program spells out with slices, pads and additions."""
        ranges = prefix.ranges_of(step, self._ranges)
        if ranges is None or ranges.base is None:
            return None
        self.ranges[step.outputs[0]] = ranges
        base = ranges.base
        if step.name == "cumsum" and ranges.inclusive and base is step.inputs[0]:
            return None
        if not (ranges.inclusive or ranges.exclusive) or base.value is None:
            return None
        wire = step.outputs[0]
        try:
            counts = queue_counts(self.context, base.value, ranges.axis, site=step.eqn)
            if ranges.exclusive:
                counts = apply(self.context, prims.sub_p, {}, [counts, base.value], wire.shape, wire.dtype)
        except NoRule as error:
            step.refusal = str(error)
            self._note_weighted(step, error)
            return None
        return counts

    def _note_weighted(self, step: Step, error: Exception) -> None:
        """Notes a count of weighted rows, which is no queue position to anybody."""
        if isinstance(error, WeightedRows):
            self.session.weighted[self._path] = Weighted(step, error.rows, error.index.size)

    def _note_placed(self, step: Step) -> None:
        """Notes counts of weighted rows that are used as places, by a comparison with all of them or as an index."""
        if step.name == "eq":
            indices = [w for w in step.inputs if not (w.value and w.value.is_plain and iota_axis(w.value) is not None)]
        elif step.name in ("gather", "scatter", "scatter-add"):
            indices = [step.inputs[1]]
        else:
            return
        if step.name != "eq" or len(indices) < len(step.inputs):
            self.session.placed |= {s for w in indices for s in w.tainted if s in self.session.weighted}

    def _sorted_count(self, step: Step, values: Sequence[Value] | None) -> Value | None:
        """A queue position that the program makes of a place in an order by expert, or the mask of such places."""
        if values is not None and step.name == "and":
            return sorted_mask(self.context, values[0])
        if step.name not in ("add", "sub") or values is None or not is_integer(values[0].dtype):
            return None
        try:
            position = sorted_position(self.context, step.eqn, values[0])
            if position is not None:
                self.session.sorted.add(self._path)
            return position
        except NoRule as error:
            step.refusal = str(error)
            return None

    def _ranges(self, wire: Wire, axis: int) -> prefix.Ranges | None:
        """What a wire sums of one mask along `axis` (-1: whether it is a zero)."""
        value = wire.value
        known = self.ranges.get(wire)
        if known is not None:
            return known if known.axis == axis else None
        if value is None:
            return None
        if value.is_plain:
            scalar = literal(value.factor)
            zero = scalar is not None and scalar == 0
            return prefix.zeros(wire.shape[axis] if axis >= 0 else 1, axis) if zero else None
        is_mask = value.background is None and not wire.slots and len(value.pieces) == 1
        return prefix.rows_of(wire, axis) if is_mask and axis >= 0 else None

    def _is_worthwhile(self, step: Step) -> bool:
        """Whether an operation on arrays is worth a definition: of indices, masks and literals."""
        if step.name in STRUCTURAL or _picks_choices(step) or _picks_experts(step):
            return True
        if step.name == "sharding_constraint":
            return is_integer(step.inputs[0].dtype)
        if step.name not in ELEMENTWISE and step.name not in _JOINING:
            return False
        if all(w.value is not None and literal(w.value.factor) is not None for w in step.inputs):
            return True
        if step.name in _JOINING:
            return False
        kinds = [w.dtype for w in (*step.inputs, *step.outputs)]
        return any(is_integer(d) or is_boolean(d) for d in kinds)

    def _sites_in(self, value: Value) -> frozenset[Any]:
        found: set[Any] = set()
        for piece in value.pieces:
            read = [*piece.factors, *piece.guards]
            terms = [a for f in read for a in f.args] + list(piece.axes)
            read += [p.factor for t in terms for p in parts_of(t) if isinstance(p, Idx)]
            found = found.union(*(tainting_sites(self.graph, f.node) for f in read))
        if value.background is not None:
            found |= self._sites_in(value.background)
        return frozenset(found)

    def _sites_of_term(self, term: Any) -> frozenset[Any]:
        indices = [p for p in parts_of(term) if isinstance(p, Idx)]
        return frozenset().union(*(rank_sites(self.graph, p.node) for p in indices)) if indices else frozenset()

    def _note_slots(self, wire: Wire, value: Value, unites: bool = True) -> None:
        sites: frozenset[Any] = frozenset()
        for piece in value.pieces:
            for term in piece.axes:
                for part in parts_of(term):
                    here = self._sites_of_term(part)
                    sites |= here
                    if isinstance(part, Idx):
                        self._note_bound(part)
        wire.slots = sites
        if sites:
            if unites:
                self.session.unite(sites)
            self.session.layer_wires.append(wire)
            wire.changed = wire.changed or any(self.session.is_dropless(s) for s in sites)

    def _turned(self, step: Step) -> Value | None:
        """A weight gradient that is transposed at once, made in the order in which it is wanted."""
        if step.name != "transpose" or self._uses[step.eqn.invars[0]] != 1:
            return None
        made = step.inputs[0].definition
        if made is None or not isinstance(made.factor.node, Ein) or made.factor.args != made.pieces[0].axes:
            return None
        node = made.factor.node
        if node.gathers or len(node.out) != len(step.inputs[0].shape):
            return None
        out = [node.out[i] for i in step.eqn.params["permutation"]]
        return of_node(
            self.graph.ein(
                out, node.factors, node.guards, node.equalities, node.coef, node.dtype, node.reducer, node.initial
            )
        )

    def _note_bound(self, slot: Idx) -> None:
        """An own position on an axis of length n is a test of the capacity too."""
        fact = rank_of(self.graph, slot.factor)
        if fact is not None and fact.is_own(self.graph):
            threshold = slot.size - 1 - fact.constant
            self.session.note_threshold(fact.rank.site, threshold, self._step)

    def _note_distinct(self, given: Wire, step: Step, node: Node) -> None:
        """The order that `argsort` finds, and the first columns of one."""
        value = given.value
        if value is None or not value.is_plain:
            return
        axes = value.pieces[0].axes
        if step.name == "sort" and iota_axis(value) == step.eqn.params["dimension"]:
            self.graph.distinct[node] = step.eqn.params["dimension"]
            self._note_order(step, node)
            return
        if step.name == "rev" and iota_axis(value) is not None:
            self.graph.distinct[node] = axes.index(value.factor.args[0])
            return
        fact = distinct_of(self.graph, value.factor)
        if fact is not None and fact.along in axes:
            axis = axes.index(fact.along)
            if step.name != "sort" or axis == step.eqn.params["dimension"]:
                self.graph.distinct[node] = axis

    def _note_order(self, step: Step, node: Node) -> None:
        """What an order sorts; the order that sorts a permutation is its inverse."""
        keys, axis = step.inputs[0].value, step.eqn.params["dimension"]
        if step.eqn.params["num_keys"] != 1 or keys is None or not keys.is_plain:
            return
        self.graph.orders[node] = keys, axis
        if keys.factor.args != keys.pieces[0].axes:
            return
        other = keys.factor.node
        if self.graph.distinct.get(other) == axis and self.graph.bounds.get(other) == other.shape[axis]:
            node.inverse, other.inverse = (other, axis), (node, axis)

    def _seal(self, wire: Wire, definition: Value | None) -> None:
        wire.definition = definition
        wire.value = of_node(self.graph.leaf(wire, wire.shape, wire.dtype))

    def _note_origin(self, wire: Wire, value: Value) -> None:
        if value.is_plain and not isinstance(value.factor.node, (Leaf, Lit)) and value.factor.node.origin is None:
            if value.factor.args == value.pieces[0].axes:
                value.factor.node.origin = wire

    def _note_facts(self, step: Step, wire: Wire) -> None:
        assert wire.value is not None
        node = wire.value.factor.node
        if step.name in _PERMUTING and is_integer(wire.dtype):
            self._note_distinct(step.inputs[wire.index if step.name == "sort" else 0], step, node)
        if step.name == "top_k" and wire.index == 1:
            shape = step.inputs[0].shape
            axis = step.eqn.params.get("axis", len(shape) - 1) % len(shape)
            self.graph.bounds[node] = shape[axis]
            self.graph.distinct[node] = axis
        elif step.name in _REARRANGING and is_integer(wire.dtype):
            given = step.inputs if step.name != "sort" else step.inputs[wire.index : wire.index + 1]
            bounds = [bound_of(self.graph, w.value.factor) if w.value and w.value.is_plain else None for w in given]
            if all(b is not None for b in bounds):
                self.graph.bounds[node] = max(b for b in bounds if b is not None)
        elif step.name in ("argmax", "argmin"):
            self.graph.bounds[node] = step.inputs[0].shape[step.eqn.params["axes"][0]]


_MAXIMA = frozenset({"reduce_max", "reduce_or"})


class _Reduction(NamedTuple):
    """What the rule of a reduction reads of an equation."""

    params: dict[str, Any]


def _of_maxima(step: Step) -> tuple[_Reduction, Value] | None:
    """A maximum of maxima that are not understood by themselves, as one maximum of what these are taken of."""
    axes: tuple[int, ...] = tuple(step.eqn.params["axes"])
    wire = step.inputs[0]
    while isinstance(wire.step, Step) and wire.step.name == step.name and wire.step.refusal is not None:
        inner = wire.step
        gone, wire = inner.eqn.params["axes"], inner.inputs[0]
        kept = [i for i in range(len(wire.shape)) if i not in gone]
        axes = (*gone, *(kept[i] for i in axes))
    if wire is step.inputs[0] or wire.value is None:
        return None
    return _Reduction({"axes": axes}), wire.value


def _always(name: str, bound: float, low: float) -> bool | None:
    """What a comparison of a position from `low` on with a number says of all of them, if it says one thing."""
    if (name in ("ge", "max") and bound <= low) or (name == "gt" and bound < low):
        return True
    return False if (name == "lt" and bound <= low) or (name == "le" and bound < low) else None


def _only_iteration(eqn: Any) -> jex.core.ClosedJaxpr:
    """What a scan of length 1 computes: no variable of index notation stands for its only iteration."""
    consts, carries = scan_counts(eqn)
    body = jex.core.jaxpr_as_fun(eqn.params["jaxpr"])

    def run(*arrays: Any) -> list[Any]:
        whole, slices = arrays[: consts + carries], arrays[consts + carries :]
        results = body(*whole, *(lax.squeeze(a, (0,)) for a in slices))
        return [*results[:carries], *(lax.expand_dims(r, (0,)) for r in results[carries:])]

    types = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types))


def _uses(jaxpr: Any) -> collections.Counter[Any]:
    """How often each variable is read by outputs and by equations that are not dead themselves."""
    uses = collections.Counter(v for v in jaxpr.outvars if not isinstance(v, jex.core.Literal))
    for eqn in reversed(jaxpr.eqns):
        if _is_live(eqn, uses):
            uses.update(v for v in eqn.invars if not isinstance(v, jex.core.Literal))
    return uses


def _body_of(eqn: Any) -> Any:
    """The body of a call or of a scan of length 1, or the program that jax has for an operation on integers.

    None for other equations, whose boundaries are kept.
    """
    name = eqn.primitive.name
    if name in SCANS and eqn.params["length"] == 1 and not eqn.effects:
        return eqn.params["jaxpr"]
    if name == COMPOSITE and all(is_integer(array_type(v.aval)[1]) for v in eqn.outvars):
        return expansion(eqn)
    return eqn.params[INLINED[name]] if name in INLINED and not is_search(eqn) else None


def _is_live(eqn: Any, uses: collections.Counter[Any]) -> bool:
    return bool(eqn.effects) or any(uses[v] for v in eqn.outvars)


def _picks_choices(step: Step) -> bool:
    """Whether an equation takes or joins single columns of integers: the first choices, the parts of an index."""
    if step.name not in ("slice", "unstack", "concatenate") or not is_integer(step.inputs[0].dtype):
        return False
    if step.name == "concatenate":
        return all(w.shape[-1:] == (1,) for w in step.inputs)
    widths = zip(step.inputs[0].shape, step.outputs[0].shape, strict=False)
    return step.name == "unstack" or all(new in (old, 1) for old, new in widths)


def _picks_experts(step: Step) -> bool:
    """Whether an equation takes matrices or the work of experts by index, or puts them back, or permutes choices."""
    if step.name not in ("gather", "scatter-add"):
        return False
    operand = step.inputs[0]
    return is_integer(operand.dtype) or (is_floating(operand.dtype) and len(operand.shape) > 2)


def _is_permutation(value: Value | None) -> bool:
    """Whether nothing but an order or its inverse stands in an array, in whatever dtype."""
    if value is None or not value.is_plain:
        return False
    node = unconverted(value.factor).node
    return isinstance(node, Leaf) and node.inverse is not None and not any(has_idx(a) for a in value.factor.args)


def _are_known_integers(const: Any, most: int) -> bool:
    """Whether a constant is an array of up to so many integers that can be looked into."""
    return not isinstance(const, jax.core.Tracer) and 0 < np.size(const) <= most and is_integer(const.dtype)


def _counts_up(const: Any) -> bool:
    """Whether a constant is 0, 1, …, n-1, with n above 1."""
    if np.ndim(const) != 1 or np.size(const) < 2 or not _are_known_integers(const, _LARGE):
        return False
    numbers = np.asarray(const)
    return bool(np.array_equal(numbers, np.arange(len(numbers), dtype=numbers.dtype)))


def _number_in(const: Any) -> Any:
    """The integer that a small constant holds everywhere, if it is known and there is one."""
    if not _are_known_integers(const, _SMALL):
        return None
    numbers = np.asarray(const).reshape(-1)
    return numbers[0] if np.all(numbers == numbers[0]) else None


def _is_structured(wire: Wire) -> bool:
    """Whether places that depend on data stand in an array, as in one-hots or the matrices of chosen experts."""
    value = wire.value
    if value is None or not value.is_plain:
        return value is not None
    return is_floating(value.dtype) and any(has_idx(a) for a in value.factor.args)


def is_sealed(value: Value) -> bool:
    """Whether a plain value is the result of expert work: from here on it is an array like any other."""
    return value.is_plain and is_floating(value.dtype) and _holds_product(value.factor.node)


def _holds_product(node: Node) -> bool:
    if isinstance(node, Ein):
        return bool(node.factors)
    return isinstance(node, Map) and any(_holds_product(op.node) for op in node.operands)


_CHOOSING = frozenset({"cumsum", "top_k", "argmax", "sort"})
_ROUTING = _CHOOSING | {"iota", "gather", "scatter", "scatter-add", "scan", "checkpoint", "remat", "remat2"}


def _holds(jaxpr: Any, names: frozenset[str]) -> bool:
    """Whether a primitive of these names stands in a body, or in one inside it."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        e.primitive.name in names or any(_holds(j, names) for j in jex.core.jaxprs_in_params(e.params))
        for e in inner.eqns
    )


def _may_route(jaxpr: Any) -> bool:
    return _holds(jaxpr, _ROUTING)


def _chooses(jaxpr: Any) -> bool:
    """Whether a body may choose experts."""
    return _holds(jaxpr, _CHOOSING) or (_holds(jaxpr, frozenset({"reduce_max"})) and _compares_scores(jaxpr))


def _compares_scores(jaxpr: Any) -> bool:
    """Whether arrays of numbers are compared with each other in a body, or in one inside it."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        (e.primitive.name in COMPARISONS and all(_are_numbers(v) for v in e.invars))
        or any(map(_compares_scores, jex.core.jaxprs_in_params(e.params)))
        for e in inner.eqns
    )


def _are_numbers(atom: Any) -> bool:
    shape, dtype = array_type(atom.aval)
    return math.prod(shape) > 1 and not isinstance(atom, jex.core.Literal) and is_floating(dtype)


def _counts(jaxpr: Any) -> bool:
    """Whether a body that is run as written may count queue positions."""
    return _holds(jaxpr, frozenset({"cumsum"}))


def describe(eqn: Any) -> str | None:
    """`file:line (function)` of an equation in the user's code."""
    return source_of(eqn)
