"""Bodies that keep a boundary: `lax.scan` and `jax.checkpoint`; `branches` adds those of `lax.cond`.

A body is recovered in a graph of its own.  What flows in as an array is an input of the body; what flows in structured
is rebuilt inside from its definition, and only the arrays that the definition reads cross (per iteration of a scan,
their slice).  Results leave in the same way, so that integer structure is computed again rather than stored, and a
backward scan sees the positions of its forward scan.

In: a scan or checkpoint equation and its input wires.  Out: a `Scope`, and the values of its outputs outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moe_xla.passes.recover.facts import depends_on_rank, is_count
from moe_xla.passes.recover.nodes import (
    Ein,
    Graph,
    Iota,
    Leaf,
    Lit,
    Map,
    Node,
    Rank,
    is_boolean,
    is_extended,
    is_integer,
    operands_at,
)
from moe_xla.passes.recover.program import Wire
from moe_xla.passes.recover.terms import (
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    fresh,
    substitute,
    substitute_factor,
    term_vars,
    vars_of,
    with_indices,
)
from moe_xla.passes.recover.thresholds import carry_mask, is_made_by_choice
from moe_xla.passes.recover.values import NoRule, Piece, Value, of_node

if TYPE_CHECKING:
    from moe_xla.passes.recover.branches import Switch

SCANS = frozenset({"scan"})
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})


@dataclasses.dataclass(eq=False)
class Feed:
    """An array that crosses into a body: `source` outside (a wire or a node), its slice along `axis` if not None."""

    source: Wire | Node
    axis: int | None
    inner: Wire


@dataclasses.dataclass(eq=False)
class Export:
    """An array that leaves a body: `source` inside (a wire or a node), stacked along a new first axis by a scan."""

    source: Wire | Node
    outer: Wire


@dataclasses.dataclass(eq=False)
class Scope:
    """A body with its own recovery.  `carries` are (initial wire outside, input inside, result inside).

    `given` and `returned` are all wires outside, in the order of the equation's; `entered` has the wires that stand
    inside for outer ones of a known value, `left` the wires (inside, outside) of what the body returns.
    """

    eqn: Any
    recovery: Any
    feeds: list[Feed] = dataclasses.field(default_factory=list)
    exports: list[Export] = dataclasses.field(default_factory=list)
    carries: list[tuple[Wire, Wire, Wire]] = dataclasses.field(default_factory=list)
    carried: list[Wire] = dataclasses.field(default_factory=list)
    given: tuple[Wire, ...] = ()
    returned: tuple[Wire, ...] = ()
    entered: list[Feed] = dataclasses.field(default_factory=list)
    left: list[tuple[Wire, Wire]] = dataclasses.field(default_factory=list)
    required: dict[Export, None] = dataclasses.field(default_factory=dict)
    source: Any = None
    refusal: str | None = None
    exit: Exit | None = None
    switch: Switch | None = None

    @property
    def whole(self) -> Scope | Switch:
        """What computes the exports: a branch runs as part of its cond."""
        return self.switch or self

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)

    @property
    def inputs(self) -> tuple[Wire, ...]:
        return tuple(initial for initial, _, _ in self.carries)

    @property
    def outputs(self) -> tuple[Wire, ...]:
        return (*self.carried, *(e.outer for e in self.exports))

    @property
    def is_scan(self) -> bool:
        return self.eqn.primitive.name in SCANS


OnLeaf = Callable[[Node, tuple[Term, ...]], Factor]


class Translator:
    """Rebuilds factors, terms and values of one graph in another; `on_leaf` stands for arrays that cross."""

    def __init__(self, session: Any, source: Graph, target: Graph, on_leaf: OnLeaf, loop: Var | None):
        self.session = session
        self.source = source
        self.target = target
        self.on_leaf = on_leaf
        self.loop = loop

    def value(self, value: Value, axes_of: Callable[[Piece], tuple[Term, ...]], shape: Sequence[int]) -> Value:
        background = None if value.background is None else self.value(value.background, axes_of, shape)
        pieces = []
        for piece in value.pieces:
            axes = tuple(self.term(a) for a in axes_of(piece))
            equalities = frozenset((self.term(a), self.term(b)) for a, b in piece.equalities)
            factors = tuple(self.factor(f) for f in piece.factors)
            pieces.append(Piece(axes, factors, piece.coef, equalities, tuple(self.factor(g) for g in piece.guards)))  # type: ignore[arg-type]
        return Value(tuple(shape), value.dtype, tuple(pieces), background)

    def term(self, term: Term) -> Term:
        return with_indices(term, self.factor)

    def factor(self, factor: Factor) -> Factor:
        node = factor.node
        if isinstance(node, Lit):
            return self.target.lit(node.value, node.dtype)
        if isinstance(node, Iota) and self.loop not in factor_vars([factor]):
            return Factor(self.target.iota(node.shape[0], node.dtype), tuple(self.term(a) for a in factor.args))
        if isinstance(node, Rank):
            return self._rank(factor, node)
        if isinstance(node, Map) and self._is_structure(node):
            return self._map(factor, node)
        if isinstance(node, Ein) and is_count(node):
            return self._count(factor, node)
        return self.on_leaf(node, tuple(self.term(a) for a in factor.args))

    def _is_structure(self, node: Map) -> bool:
        """Whether a map is computed again rather than carried across: indices, masks and positions are."""
        whole = is_integer(node.dtype) or is_boolean(node.dtype)
        if depends_on_rank(self.source, node) or (whole and _reads_integers(node)):
            return True
        if node.name == "convert_element_type" and is_boolean(node.operands[0].node.dtype):
            return True  # a truth value as a number is known to be 0 or 1
        return is_made_by_choice(self.source, self.session, node)

    def _map(self, factor: Factor, node: Map) -> Factor:
        rebuilt = self.target.map(node.prim, node.params, [self.factor(op) for op in operands_at(factor)], node.dtype)
        carry_mask(self.session, self.source, factor, self.target, rebuilt, self.factor)
        return rebuilt

    def _rank(self, factor: Factor, node: Rank) -> Factor:
        """The rank over the variables it is read at; its order and batch must be variables there."""
        places = dict(zip(node.batch + node.order, factor.args[:-1], strict=True))
        names: dict[Var, Term] = {v: (t if isinstance(t, Var) else fresh(v.size)) for v, t in places.items()}
        names.update({v: fresh(v.size) for v in node.many})
        if self.loop is not None and any(names[v] == self.loop for v in node.order):
            raise NoRule("a queue that runs over the iterations of a scan")
        index = self.term(substitute(node.index, names))
        assert isinstance(index, Idx)
        guards = [self.factor(substitute_factor(g, names)) for g in node.guards]
        order = [names[v] for v in node.order]
        many = [names[v] for v in node.many]
        used = vars_of([index, *(a for g in guards for a in g.args)])
        batch = [v for v in used if v not in order and v not in many]
        counts = self.target.rank(index, batch, order, many, guards, node.dtype, node.site)  # type: ignore[arg-type]
        self.session.note_index(index, node.site)
        back = {names[v]: self.term(t) for v, t in places.items() if not isinstance(t, Var)}
        args = tuple(back.get(v, v) for v in counts.args)
        return Factor(counts.node, (*args, self.term(factor.args[-1])))

    def _count(self, factor: Factor, node: Ein) -> Factor:
        """A count per expert, over the variables it is read at."""
        names: dict[Var, Term] = {v: fresh(v.size) for v in node.binders}
        free: dict[Var, Term] = {}
        for term, arg in zip(node.out, factor.args, strict=True):
            if isinstance(term, Var):
                names[term] = arg if isinstance(arg, Var) else fresh(term.size)
                free[names[term]] = arg  # type: ignore[index]
        places = [(substitute(t, names), a) for t, a in zip(node.out, factor.args, strict=True)]
        places = [(t, a) for t, a in places if self.loop is None or t != self.loop]
        out = [self.term(t) for t, _ in places]
        guards = [self.factor(substitute_factor(g, names)) for g in node.guards]
        bound = {names[v] for v in node.binders}
        outer = [v for v in vars_of([*out, *(a for g in guards for a in g.args)]) if v not in bound and v not in out]
        count = self.target.ein((*outer, *out), (), guards, frozenset(), 1, node.dtype)
        return Factor(count, (*(self.term(free.get(v, v)) for v in outer), *(self.term(a) for _, a in places)))


def _reads_integers(node: Map) -> bool:
    """Whether every operand of a map is an integer, a truth value or a literal."""
    kinds = [op.node.dtype for op in node.operands if not isinstance(op.node, Lit)]
    return all(not is_extended(d) and (is_integer(d) or is_boolean(d)) for d in kinds)


def carry_facts(
    source: Graph,
    node: Node,
    target: Graph,
    inner: Node,
    crossed: Callable[[Node], Node | None],
    gone: int | None,
    new: int = 0,
) -> None:
    """Bounds and distinctness of an index survive the boundary; axis `gone` is dropped, `new` axes are put in front.

    So does what is inverse to it, where that has `crossed` too.
    """

    def moved(axis: int) -> int:
        return axis + new - (1 if gone is not None and axis > gone else 0)

    if node in source.bounds:
        target.bounds[inner] = source.bounds[node]
    axis = source.distinct.get(node)
    if axis is not None and axis != gone:
        target.distinct[inner] = moved(axis)
    if node.inverse is not None and node.inverse[1] != gone:
        other, place = crossed(node.inverse[0]), moved(node.inverse[1])
        if other is not None:
            inner.inverse, other.inverse = (other, place), (inner, place)


class Entrance:
    """Brings outer values into a scope."""

    def __init__(self, scope: Scope, outer: Graph):
        self.scope = scope
        self.outer = outer
        self.inner: Graph = scope.recovery.graph
        self._known: dict[tuple[Node, int | None], Leaf] = {}

    def source_of(self, inner: Node) -> tuple[Node, int | None] | None:
        """The outer node that an array came from, and the axis it was sliced along."""
        return next((key for key, leaf in self._known.items() if leaf is inner), None)

    @property
    def _session(self) -> Any:
        return self.scope.recovery.session

    def _number(self, number: int, axis: int | None) -> int:
        """The number of an array inside: what a scan stacked and another one slices again is the same array."""
        if axis is None:
            return number
        session = self._session
        stacked = session.unstacked.get(number)
        return stacked if stacked is not None and axis == 0 else session.number(("slice", number, axis))

    def whole(self, wire: Wire) -> Wire:
        """An outer wire as it is, inside."""
        return self._enter(wire, None)

    def slice(self, wire: Wire) -> Wire:
        """One iteration's slice of an outer wire along its first axis, inside."""
        return self._enter(wire, 0)

    def _enter(self, wire: Wire, axis: int | None) -> Wire:
        shape = wire.shape if axis is None else wire.shape[1:]
        assert wire.value is not None
        try:
            value = self._value(wire.value, axis, shape)
        except NoRule:
            return self._array(wire, axis, shape)
        inner = Wire(shape, wire.dtype, number=self._number(wire.number, axis))
        self.scope.recovery.adopt(inner, value)
        self.scope.entered.append(Feed(wire, axis, inner))
        return inner

    def _value(self, value: Value, axis: int | None, shape: Sequence[int]) -> Value:
        if axis is None:
            return self._translator(None).value(value, lambda p: p.axes, shape)
        pieces = [self._sliced(p, shape, value.dtype) for p in value.pieces]
        background = None if value.background is None else self._value(value.background, axis, shape)
        return Value(tuple(shape), value.dtype, tuple(pieces), background)

    def _sliced(self, piece: Piece, shape: Sequence[int], dtype: Any) -> Piece:
        loop = piece.axes[0]
        if not isinstance(loop, Var) or loop in vars_of([a for a in piece.axes[1:] if not isinstance(a, Idx)]):
            raise NoRule("a scan over an axis that has structure")
        lone = Value((loop.size, *shape), dtype, (piece,))
        return self._translator(loop).value(lone, lambda p: p.axes[1:], shape).pieces[0]

    def _translator(self, loop: Var | None) -> Translator:
        def on_leaf(node: Node, args: tuple[Term, ...]) -> Factor:
            places = [i for i, a in enumerate(args) if loop is not None and loop in term_vars(a)]
            if len(places) > 1 or any(args[i] != loop for i in places):
                raise NoRule("a scan over an axis that is part of a place")
            axis = places[0] if places else None
            leaf = self.leaf(node, axis)
            return Factor(leaf, tuple(a for i, a in enumerate(args) if i != axis))

        return Translator(self._session, self.outer, self.inner, on_leaf, loop)

    def leaf(self, node: Node, axis: int | None) -> Leaf:
        """An outer node as an array inside, sliced along an axis where there is one."""
        key = (node, axis)
        if key not in self._known:
            shape = tuple(n for i, n in enumerate(node.shape) if i != axis)
            source = node.wire.number if isinstance(node, Leaf) else self._session.number(("node", node.ordinal))
            inner = self.scope.recovery.input(shape, node.dtype, self._number(source, axis))
            if isinstance(node, Leaf):
                inner.tainted = node.wire.tainted
            self.scope.feeds.append(Feed(node, axis, inner))
            leaf = inner.value.factor.node
            carry_facts(self.outer, node, self.inner, leaf, lambda other: self._known.get((other, axis)), axis)
            self._known[key] = leaf
        return self._known[key]

    def _array(self, wire: Wire, axis: int | None, shape: Sequence[int]) -> Wire:
        inner = self.scope.recovery.input(shape, wire.dtype, self._number(wire.number, axis))
        inner.tainted = wire.tainted
        self.scope.feeds.append(Feed(wire, axis, inner))
        return inner


class Exit:
    """Takes inner values out of a scope."""

    def __init__(self, scope: Scope, outer: Any):
        self.scope = scope
        self.outer = outer
        self._known: dict[Node, Leaf] = {}
        self._fed = {f.inner: f for f in scope.feeds}

    def value(self, inner: Wire, wire: Wire) -> Value:
        """The value outside of what an inner wire holds (of all iterations, stacked); `wire` is its outer wire."""
        assert inner.value is not None
        loop = fresh(wire.shape[0]) if self.scope.is_scan else None
        try:
            return self._translated(inner.value, loop, wire.shape)
        except NoRule:
            export = Export(inner, wire)
            self.scope.exports.append(export)
            if loop is not None:
                self.scope.recovery.session.unstacked[wire.number] = inner.number
            return of_node(self.outer.graph.leaf(wire, wire.shape, wire.dtype))

    def defined(self, value: Value, shape: Sequence[int]) -> Value:
        """A value outside, in terms of the arrays that it is made of."""
        return self._translated(value, None, shape)

    def _translated(self, value: Value, loop: Var | None, shape: Sequence[int]) -> Value:
        front = () if loop is None else (loop,)

        def on_leaf(node: Node, args: tuple[Term, ...]) -> Factor:
            feed = self._fed.get(node.wire) if isinstance(node, Leaf) else None
            if feed is not None and isinstance(feed.source, Node):
                if feed.axis is None:
                    return Factor(feed.source, args)
                assert loop is not None
                return Factor(feed.source, (*args[: feed.axis], loop, *args[feed.axis :]))
            return Factor(self.leaf(node, loop), (*front, *args))

        recovery = self.scope.recovery
        translator = Translator(recovery.session, recovery.graph, self.outer.graph, on_leaf, None)
        return translator.value(value, lambda p: (*front, *p.axes), shape)

    def inside(self, outer: Node) -> Node | None:
        """The inner node that an outer array is of."""
        return next((node for node, leaf in self._known.items() if leaf is outer), None)

    def leaf(self, node: Node, loop: Var | None) -> Leaf:
        """An inner node as an array outside, stacked over the iterations of a loop."""
        if node not in self._known:
            shape = node.shape if loop is None else (loop.size, *node.shape)
            session = self.scope.recovery.session
            number = node.wire.number if isinstance(node, Leaf) else session.number(("node", node.ordinal))
            outer = self.outer.input(shape, node.dtype, number if loop is None else None)
            outer.step = self.scope.whole
            if isinstance(node, Leaf):
                outer.tainted = node.wire.tainted
            if loop is not None:
                session.unstacked[outer.number] = number
            self.scope.exports.append(Export(node, outer))
            leaf = outer.value.factor.node
            new = 0 if loop is None else 1
            carry_facts(self.scope.recovery.graph, node, self.outer.graph, leaf, self._known.get, None, new)
            self._known[node] = leaf
        return self._known[node]
