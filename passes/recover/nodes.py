"""Nodes: arrays *defined* in index notation, hash-consed so that equal definitions are one object.

A node of shape `[n0, n1, …]` is a function of the variables `Var(0, n0), Var(1, n1), …`; its definition is written
over exactly these, and every use of it is a `Factor`: the node read at terms.  Sampling a node at the assignments is
therefore substitution into its definition.

In: definitions (literal, program array, iota, map, einsum, rank, slice, pad).  Out: `Node` objects, and `Graph`, the
table that makes them and folds what can be folded while making them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend as jex
import jax.extend.core.primitives as prims
import numpy as np
from jax import numpy as jnp

from moe_xla.passes._jax import array_type
from moe_xla.passes.recover.attachments import ATTACHMENTS
from moe_xla.passes.recover.literals import evaluate
from moe_xla.passes.recover.terms import (
    Const,
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    parts_of,
    substitute,
    substitute_all,
    substitute_factor,
    vars_of,
)

_ordinals = itertools.count()


class Node:
    """An array defined in index notation.  Compared by identity: `Graph` makes equal definitions one object."""

    __slots__ = ("__weakref__", "dtype", "inverse", "is_queued", "ordinal", "origin", "queue", "shape", "wire_taint")

    kind = "node"

    def __init__(self, shape: Sequence[int], dtype: Any):
        self.ordinal = next(_ordinals)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.origin: Any = None
        # (node, axis) of the permutation along an axis that undoes this one
        self.inverse: tuple[Node, int] | None = None
        # of which queue this node tells who stands there, and whether there is one that tells it of this index
        self.queue: Queue | None = None
        self.is_queued = False

    def __repr__(self) -> str:
        return f"{self.kind}{self.ordinal}"

    @property
    def variables(self) -> tuple[Var, ...]:
        """The variables that the definition is written over."""
        return tuple(Var(i, n) for i, n in enumerate(self.shape))

    def bind(self, args: Sequence[Term]) -> dict[Var, Term]:
        """The substitution that reads the definition at `args`."""
        return {Var(i, n): a for i, (n, a) in enumerate(zip(self.shape, args, strict=True))}

    def split_of(self, low: Node) -> tuple[Factor, int] | None:
        """(index, divisor) when this node is the quotient and `low` the remainder of the same index."""
        return None


class Lit(Node):
    """A scalar literal."""

    __slots__ = ("value",)
    kind = "lit"

    def __init__(self, value: np.ndarray, dtype: Any):
        super().__init__((), dtype)
        self.value = value


class Leaf(Node):
    """An array of the program (`wire`), opaque to the algebra."""

    __slots__ = ("wire",)
    kind = "leaf"

    def __init__(self, wire: Any, shape: Sequence[int], dtype: Any):
        super().__init__(shape, dtype)
        self.wire = wire


class Iota(Node):
    """`0, 1, …, n-1`."""

    __slots__ = ()
    kind = "iota"


class Map(Node):
    """An elementwise operation: `out[v] = prim(op₁[…], op₂[…], …)`."""

    __slots__ = ("operands", "params", "prim")
    kind = "map"

    def __init__(
        self, prim: Any, params: dict[str, Any], operands: tuple[Factor, ...], shape: Sequence[int], dtype: Any
    ):
        super().__init__(shape, dtype)
        self.prim = prim
        self.params = params
        self.operands = operands

    @property
    def name(self) -> str:
        return str(self.prim.name)

    def split_of(self, low: Node) -> tuple[Factor, int] | None:
        if not isinstance(low, Map) or self.name != "div" or low.name != "rem" or self.operands != low.operands:
            return None
        divisor = literal(self.operands[1])
        return None if divisor is None else (self.operands[0], int(divisor))


class Ein(Node):
    """A sum of products: `out[…] = coef · Σ_binders Π factors · [guards] · Π [a = b]`, or a maximum instead of the sum.

    `out` are the terms on the axes.  Variables in `binders` are bound here; each other one is pinned by standing on
    an axis as it is.  An `Idx` on an axis scatters: cells that nothing hits hold zero (`initial` for a maximum).
    """

    __slots__ = ("binders", "coef", "domain", "equalities", "factors", "guards", "initial", "out", "reducer")
    kind = "ein"

    def __init__(
        self,
        out: tuple[Term, ...],
        factors: tuple[Factor, ...],
        guards: tuple[Factor, ...],
        equalities: frozenset[tuple[Idx, Idx]],
        coef: Any,
        binders: tuple[Var, ...],
        dtype: Any,
        reducer: str = "sum",
        initial: Any = 0,
    ):
        super().__init__(tuple(t.size for t in out), dtype)
        self.out = out
        self.factors = factors
        self.guards = guards
        self.equalities = equalities
        self.coef = coef
        self.binders = binders
        self.reducer = reducer
        self.initial = initial
        self.domain: frozenset[Factor] = frozenset()

    @property
    def gathers(self) -> bool:
        """Whether every axis is a plain variable, so that the definition can be read at any terms."""
        return all(isinstance(t, Var) for t in self.out) and self.reducer == "sum"

    def bind(self, args: Sequence[Term]) -> dict[Var, Term]:
        return {t: a for t, a in zip(self.out, args, strict=True) if isinstance(t, Var)}


class Rank(Node):
    """A queue count: how many assignments up to this one (inclusive) went to an expert.

    Axes are `batch + order + (expert,)`.  `index` is the expert index over `batch`, `order` and `many` (further
    variables counted at each step of the order, e.g. the choices of a multi-hot mask); only assignments under
    `guards` are counted.  `site` identifies the program equation the count came from.
    """

    __slots__ = ("batch", "guards", "index", "many", "order", "site")
    kind = "rank"

    def __init__(
        self,
        index: Idx,
        batch: tuple[Var, ...],
        order: tuple[Var, ...],
        many: tuple[Var, ...],
        guards: tuple[Factor, ...],
        dtype: Any,
        site: Any,
    ):
        super().__init__([v.size for v in batch + order] + [index.size], dtype)
        self.index = index
        self.batch = batch
        self.order = order
        self.many = many
        self.guards = guards
        self.site = site

    def bind(self, args: Sequence[Term]) -> dict[Var, Term]:
        return dict(zip(self.batch + self.order, args[:-1], strict=True))


class Occupant(Node):
    """Who stands at a position, counted from 0, of an expert's queue: the place of that assignment on one axis of the
    queue's order.

    Axes are the queue's batch + (expert, position); where nobody stands it is 0.
    """

    __slots__ = ("axis",)
    kind = "occupant"

    def __init__(self, queue: Queue, axis: int):
        rank = queue.rank
        super().__init__([*(v.size for v in rank.batch), rank.index.size, queue.length], np.dtype(np.int32))
        self.queue = queue
        self.axis = axis


class Queue:
    """The first `length` positions of the queues of a rank, and who stands there: a node for each axis of the order."""

    def __init__(self, rank: Rank, length: int):
        self.rank = rank
        self.length = length
        self.occupants = [Occupant(self, axis) for axis in range(len(rank.order))]

    def at(self, place: Sequence[Term]) -> dict[Var, Term]:
        """What the variables of the rank are for the assignment that stands at `place`: batch + (expert, position)."""
        names: dict[Var, Term] = dict(zip(self.rank.batch, place, strict=False))
        names.update({v: Idx(o, tuple(place), v.size) for v, o in zip(self.rank.order, self.occupants, strict=True)})
        return names


class Ends(Node):
    """Where each expert's assignments end when all are sorted by expert: the sums of `count` along `axis`."""

    __slots__ = ("axis", "count")
    kind = "ends"

    def __init__(self, count: Node, axis: int):
        super().__init__(count.shape, count.dtype)
        self.count = count
        self.axis = axis


class Slice(Node):
    """`base` restricted to `[start, stop)` along one axis."""

    __slots__ = ("axis", "base", "start", "stop")
    kind = "slice"

    def __init__(self, base: Node, axis: int, start: int, stop: int):
        super().__init__([stop - start if i == axis else n for i, n in enumerate(base.shape)], base.dtype)
        self.base, self.axis, self.start, self.stop = base, axis, start, stop


class Pad(Node):
    """`base` with zeros before and after along one axis."""

    __slots__ = ("axis", "base", "high", "low")
    kind = "pad"

    def __init__(self, base: Node, axis: int, low: int, high: int):
        super().__init__([n + low + high if i == axis else n for i, n in enumerate(base.shape)], base.dtype)
        self.base, self.axis, self.low, self.high = base, axis, low, high


class Mask(NamedTuple):
    """What a comparison is known to be: `scores` reach, or with `fails` do not reach, a `limit` that is one of them.

    `axis` of the scores is that of the experts; `levels` are the places among the best ones that the mask is for.  All
    is over the variables of the comparison.
    """

    scores: Factor
    limit: Factor
    axis: int
    levels: frozenset[int]
    fails: bool = False


def literal(factor: Factor) -> Any:
    """The value of a literal factor, as a numpy scalar, or None."""
    return factor.node.value if isinstance(factor.node, Lit) else None


def operands_at(factor: Factor) -> list[Factor]:
    """The operands of a map, read where `factor` reads the map."""
    node = factor.node
    assert isinstance(node, Map)
    mapping = node.bind(factor.args)
    return [substitute_factor(op, mapping) for op in node.operands]


def pinned(graph: Graph, factor: Factor) -> Factor:
    """A map read at fixed places as the map of what its operands are there: equal readings are one factor."""
    node = factor.node
    if not isinstance(node, Map) or not any(isinstance(a, Const) for a in factor.args):
        return factor
    return graph.map(node.prim, node.params, [pinned(graph, op) for op in operands_at(factor)], node.dtype)


def _is_positive(factor: Factor, or_zero: bool = False) -> bool:
    """Whether a number is proved to be above zero, or not below it, unless it is NaN."""
    value = literal(factor)
    if value is not None:
        return bool(value >= 0 if or_zero else value > 0)
    if isinstance(factor.node, Ein):
        summed = or_zero and factor.node.reducer == "sum" and factor.node.coef >= 0
        return summed and all(_is_positive(f, or_zero=True) for f in factor.node.factors)
    if isinstance(factor.node, Iota):
        return or_zero
    if not isinstance(factor.node, Map):
        return False
    name, ops = factor.node.name, operands_at(factor)
    if name == "convert_element_type":
        return or_zero and is_floating(ops[0].node.dtype) and _is_positive(ops[0], or_zero=True)
    if name in ("abs", "exp", "exp2", "square", "logistic") or (name == "integer_pow" and factor.node.params["y"] == 2):
        return or_zero
    if name == "sqrt" or name in ATTACHMENTS:
        return _is_positive(ops[0], or_zero)
    if name == "max":
        return any(_is_positive(op, or_zero) for op in ops)
    if name in ("add", "add_any"):
        others = (ops[0], ops[1]), (ops[1], ops[0])
        return any(_is_positive(a, or_zero) and _is_positive(b, or_zero=True) for a, b in others)
    return False


def _has_no_minus_zero(factor: Factor) -> bool:
    """Whether adding zero leaves every bit of a number as it is."""
    return is_integer(factor.node.dtype) or (
        is_map(factor, "convert_element_type") and is_integer(operands_at(factor)[0].node.dtype)
    )


def is_map(factor: Factor, *names: str) -> bool:
    return isinstance(factor.node, Map) and factor.node.name in names


@functools.cache
def is_inexact(dtype: Any) -> bool:
    """Whether an array of a dtype can have a derivative."""
    return not is_extended(dtype) and bool(jnp.issubdtype(dtype, np.inexact))


def is_extended(dtype: Any) -> bool:
    """Whether the dtype is one of jax's extended ones (PRNG keys), which numpy does not know."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


@functools.cache
def is_integer(dtype: Any) -> bool:
    return not is_extended(dtype) and np.dtype(dtype).kind in "iu"


@functools.cache
def is_boolean(dtype: Any) -> bool:
    return not is_extended(dtype) and np.dtype(dtype) == np.bool_


@functools.cache
def is_floating(dtype: Any) -> bool:
    return not is_extended(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))


def freeze(value: Any) -> Any:
    """A hashable stand-in for an equation parameter."""
    if isinstance(value, dict):
        return tuple(sorted((k, freeze(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    if isinstance(value, np.ndarray):
        return ("ndarray", value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, (jex.core.Jaxpr, jex.core.ClosedJaxpr)):
        return _structure(value)
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return value


def _structure(program: Any) -> Any:
    """What a jaxpr computes, apart from the names of its variables: equal for two traces of one function."""
    jaxpr = getattr(program, "jaxpr", program)
    places: dict[Any, int] = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def place(atom: Any) -> Any:
        return ("literal", freeze(atom.val)) if isinstance(atom, jex.core.Literal) else places[atom]

    equations = []
    for eqn in jaxpr.eqns:
        equations.append((eqn.primitive, freeze(eqn.params), tuple(place(a) for a in eqn.invars)))
        for var in eqn.outvars:
            places[var] = len(places)
    types = ((shape, str(dtype)) for shape, dtype in (array_type(v.aval) for v in jaxpr.invars))
    consts = tuple(id(c) for c in getattr(program, "consts", ()))
    return (tuple(types), consts, tuple(equations), tuple(place(a) for a in jaxpr.outvars))


def represents_exactly(dtype: object, count: int) -> bool:
    """Whether every integer up to `count` has its own value in the dtype."""
    if is_integer(dtype):
        return bool(count <= jnp.iinfo(dtype).max)
    return is_floating(dtype) and bool(count <= 2 ** (jnp.finfo(dtype).nmant + 1))


CONVERT = prims.convert_element_type_p


def pinned_vars(out: Sequence[Term]) -> set[Var]:
    """Variables that stand on an axis as they are."""
    return {part for t in out for part in parts_of(t) if isinstance(part, Var)}


_TESTS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_EXACT_LINEAR = {"add", "sub", "mul", "convert_element_type", "neg"}


class Reader(Protocol):
    """Who knows what arrays are made of that are ordinary ones to the algebra (see `dense`)."""

    def __call__(self, factor: Factor) -> Factor: ...

    def product(self, factor: Factor, index: Idx) -> tuple[Factor, ...] | None: ...


class TooLarge(Exception):
    """More maps were made than a program of this size may need: its definitions grow with each reading."""


class Graph:
    """The nodes of one scope.

    `compare_hook` may decide a comparison (dropless folds capacity tests there); `reader` may know better than to read
    an array at data-dependent places.
    """

    def __init__(
        self,
        compare_hook: Callable[[Graph, str, Factor, float], bool | None] | None = None,
        budget: float = math.inf,
    ):
        self.reader: Reader | None = None
        self._left = budget
        self._table: dict[Any, Node] = {}
        self.memo: dict[Any, Any] = {}
        self.bounds: dict[Node, int] = {}
        self.distinct: dict[Node, int] = {}
        # What an order sorts, along which axis.
        self.orders: dict[Node, tuple[Any, int]] = {}
        self.queues: list[Rank] = []
        # Comparisons that choose experts by a threshold; by scores and the axis of experts in them, the indices of the
        # assignments; which of these an index keeps, over its own variables, and how many of a token's that may be.
        self.masks: dict[Node, Mask] = {}
        self.choosing: dict[tuple[Node, int], list[Node]] = {}
        self.kept: dict[Node, Factor] = {}
        self.expected: dict[Node, int] = {}
        self._compare_hook = compare_hook

    def release(self) -> None:
        """Forgets all nodes."""
        for node in self._table.values():
            node.origin = None
            if isinstance(node, Leaf):
                node.wire = None
        for known in (self._table, self.memo, self.bounds, self.distinct, self.orders, self.masks):
            known.clear()
        for told in (self.choosing, self.kept, self.expected):
            told.clear()
        self.queues.clear()

    def _cons(self, key: Any, make: Callable[[], Node]) -> Node:
        node = self._table.get(key)
        if node is None:
            node = self._table[key] = make()
        return node

    def lit(self, value: Any, dtype: Any) -> Factor:
        array = np.asarray(value).astype(dtype)
        node = self._cons(("lit", array.tobytes(), str(array.dtype)), lambda: Lit(array, array.dtype))
        return Factor(node, ())

    def leaf(self, wire: Any, shape: Sequence[int], dtype: Any) -> Leaf:
        node = self._cons(
            ("leaf", wire.number if wire.number is not None else id(wire)), lambda: Leaf(wire, shape, dtype)
        )
        assert isinstance(node, Leaf)
        return node

    def iota(self, size: int, dtype: Any) -> Node:
        return self._cons(("iota", size, str(np.dtype(dtype))), lambda: Iota((size,), np.dtype(dtype)))

    def ends(self, count: Node, axis: int) -> Node:
        return self._cons(("ends", count, axis), lambda: Ends(count, axis))

    def slice(self, base: Node, axis: int, start: int, stop: int) -> Node:
        if (start, stop) == (0, base.shape[axis]):
            return base
        return self._cons(("slice", base, axis, start, stop), lambda: Slice(base, axis, start, stop))

    def block(self, factor: Factor) -> Factor:
        """A factor that is read at a fixed place of the slower part of an axis, as a slice."""
        for i, arg in enumerate(factor.args):
            block, *rest_parts = parts_of(arg) or (arg,)
            rest = rest_parts[0] if len(rest_parts) == 1 else arg
            if isinstance(block, Const) and isinstance(rest, Var):
                node = self.slice(factor.node, i, block.value * rest.size, (block.value + 1) * rest.size)
                return self.block(Factor(node, (*factor.args[:i], rest, *factor.args[i + 1 :])))
        return factor

    def pad(self, base: Node, axis: int, low: int, high: int) -> Node:
        return self._cons(("pad", base, axis, low, high), lambda: Pad(base, axis, low, high))

    # ---------------------------------------------------------------------------------------------- maps

    def map(self, prim: Any, params: dict[str, Any], operands: Sequence[Factor], dtype: Any) -> Factor:
        """`prim` applied elementwise to factors, folded where its value is known."""
        self._left -= 1
        if self._left < 0:
            raise TooLarge("its definitions grow too large to be followed")
        ops = tuple(operands) if is_inexact(dtype) else tuple(map(self._followed, operands))
        folded = self._fold(prim, params, ops, dtype)
        if folded is not None:
            return folded
        variables = factor_vars(ops)
        mapping: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(variables)}
        canonical = tuple(substitute_factor(op, mapping) for op in ops)
        shape = tuple(v.size for v in variables)
        key = ("map", prim, freeze(params), canonical, str(dtype), shape)
        return Factor(self._cons(key, lambda: Map(prim, params, canonical, shape, dtype)), variables)

    def convert(self, factor: Factor, dtype: Any) -> Factor:
        if factor.node.dtype == dtype:
            return factor
        return self.map(
            CONVERT, {"new_dtype": np.dtype(dtype), "weak_type": False, "sharding": None}, [factor], np.dtype(dtype)
        )

    def logical_and(self, factors: Sequence[Factor]) -> Factor:
        result = factors[0]
        for factor in factors[1:]:
            result = self.map(prims.and_p, {}, [result, factor], np.dtype(bool))
        return result

    def logical_not(self, factor: Factor) -> Factor:
        return self.map(prims.not_p, {}, [factor], np.dtype(bool))

    def compare(self, prim: Any, left: Factor, right: Any) -> Factor:
        right = self.lit(right, left.node.dtype) if not isinstance(right, Factor) else right
        return self.map(prim, {}, [left, right], np.dtype(bool))

    def select(self, condition: Factor, if_true: Factor, if_false: Factor) -> Factor:
        return self.map(prims.select_n_p, {}, [condition, if_false, if_true], if_true.node.dtype)

    def _fold(self, prim: Any, params: dict[str, Any], ops: tuple[Factor, ...], dtype: Any) -> Factor | None:
        name = prim.name
        if name == "copy" or (name == "convert_element_type" and ops[0].node.dtype == dtype):
            return ops[0]
        if name in ATTACHMENTS and not self._has_derivative(ops[0].node):
            return ops[0]
        if (
            name == "convert_element_type"
            and isinstance(ops[0].node, Iota)
            and represents_exactly(dtype, ops[0].node.shape[0])
        ):
            return Factor(self.iota(ops[0].node.shape[0], dtype), ops[0].args)
        values = [literal(op) for op in ops]
        if all(v is not None for v in values):
            return self.lit(evaluate(prim, params, values), dtype)
        return (
            self._fold_logic(name, ops, values, dtype)
            or self._fold_compare(name, ops, values)
            or self._fold_select(prim, params, ops, values, dtype)
        )

    def _has_derivative(self, node: Node) -> bool:
        """Whether the program, differentiated from outside, may ask for the derivative of an array."""
        if not is_inexact(node.dtype) or isinstance(node, Lit | Iota | Rank):
            return False
        if not isinstance(node, Map):
            return True
        key = ("has_derivative", node)
        if key not in self.memo:
            self.memo[key] = any(self._has_derivative(op.node) for op in node.operands)
        return bool(self.memo[key])

    def _followed(self, factor: Factor) -> Factor:
        """What is made into truth values or integers has no derivative: it is the same whatever the derivative of."""
        node = factor.node
        if not isinstance(node, Map) or not is_inexact(node.dtype):
            return factor
        key = ("followed", node)
        if key not in self.memo:
            if node.name in ATTACHMENTS:
                self.memo[key] = self._followed(node.operands[0])
            else:
                operands = tuple(map(self._followed, node.operands))
                same = operands == node.operands
                self.memo[key] = None if same else self.map(node.prim, node.params, operands, node.dtype)
        followed = self.memo[key]
        return factor if followed is None else substitute_factor(followed, node.bind(factor.args))

    def _fold_logic(self, name: str, ops: tuple[Factor, ...], values: list[Any], dtype: Any) -> Factor | None:
        if name == "not" and is_boolean(dtype) and is_map(ops[0], "not"):
            return operands_at(ops[0])[0]
        if name == "mul":
            for i in (0, 1):
                if values[i] is not None and values[i] == 1 and ops[1 - i].node.dtype == dtype:
                    return ops[1 - i]
        if name == "mul" and (masked := self._fold_mask(ops, dtype)) is not None:
            return masked
        if name == "div" and values[0] is not None and values[0] == 0 and _is_positive(ops[1]):
            return ops[0]
        adds_zero = name in ("add", "add_any", "sub") and values[1] is not None and values[1] == 0
        if adds_zero and _has_no_minus_zero(ops[0]):
            return ops[0]
        if name in ("div", "rem") and is_integer(dtype) and values[1] is not None and values[1] > 0:
            return self._fold_division(name, ops[0], int(values[1]), dtype)
        if name in ("eq", "ne") and (ops[0] == ops[1] and is_integer(ops[0].node.dtype)):
            return self.lit(name == "eq", bool)
        if name in ("eq", "ne") and values[1] is not None and values[1] == 0 and _is_positive(ops[0]):
            return self.lit(name == "ne", bool)
        if name not in ("and", "or") or not is_boolean(dtype):
            return None
        if ops[0] == ops[1]:
            return ops[0]
        for i in (0, 1):
            if values[i] is not None:
                absorbing = bool(values[i]) == (name == "or")
                return self.lit(name == "or", bool) if absorbing else ops[1 - i]
        return None

    def _fold_division(self, name: str, factor: Factor, divisor: int, dtype: Any) -> Factor | None:
        """Quotients and remainders by one, and of what is proved to be smaller than the divisor."""
        if divisor == 1:
            return factor if name == "div" else self.lit(0, dtype)
        bound = factor.node.shape[0] if isinstance(factor.node, Iota) else self.bounds.get(factor.node)
        if bound is None or bound > divisor:
            return None
        return factor if name == "rem" else self.lit(0, dtype)

    def _fold_mask(self, ops: tuple[Factor, ...], dtype: Any) -> Factor | None:
        """A position times a mask is a selection: both cases are then seen by whoever uses it as a place."""
        for mask, other in (ops, ops[::-1]):
            is_mask = is_map(mask, "convert_element_type") and is_boolean(operands_at(mask)[0].node.dtype)
            if is_mask and (is_integer(dtype) or self._has_rank(other.node)) and other.node.dtype == dtype:
                return self.select(operands_at(mask)[0], other, self.lit(0, dtype))
        return None

    def _has_rank(self, node: Node) -> bool:
        """Whether a value is a finite combination of queue counts."""
        key = ("has_rank", node)
        if key not in self.memo:
            linear = isinstance(node, Map) and node.name in (*_EXACT_LINEAR, "select_n")
            self.memo[key] = isinstance(node, Rank) or (linear and any(self._has_rank(o.node) for o in node.operands))  # type: ignore[attr-defined]
        return bool(self.memo[key])

    def _fold_select(
        self, prim: Any, params: dict[str, Any], ops: tuple[Factor, ...], values: list[Any], dtype: Any
    ) -> Factor | None:
        if prim.name == "select_n":
            if values[0] is not None:
                return ops[1 + int(values[0])]
            if all(op == ops[1] for op in ops[2:]):
                return ops[1]
            return self._fold_truth(ops, values, dtype)
        # Arithmetic with literals moves into a selection of a literal: `where(keep, p, 0) - 1` then shows both cases.
        compares = prim.name in _TESTS and is_boolean(dtype)
        if not compares and (prim.name not in _EXACT_LINEAR or not (is_integer(dtype) or is_floating(dtype))):
            return None
        chosen = [i for i, v in enumerate(values) if v is None]
        if len(chosen) != 1:
            return None if compares else self._fold_selections(prim, params, ops, dtype)
        if not compares and (negated := self._fold_not(prim, params, ops, dtype)) is not None:
            return negated
        if not is_map(ops[chosen[0]], "select_n") or len(operands_at(ops[chosen[0]])) != 3:
            return None
        condition, *cases = operands_at(ops[chosen[0]])
        if not is_boolean(condition.node.dtype) or all(literal(c) is None for c in cases):
            return None
        results = [
            self.map(prim, params, [c if i == chosen[0] else op for i, op in enumerate(ops)], dtype) for c in cases
        ]
        if compares:
            for result, other, held in (
                (results[0], results[1], condition),
                (results[1], results[0], self.logical_not(condition)),
            ):
                if literal(result) is not None and not literal(result):
                    return self.logical_and([held, other])
        return self.map(prims.select_n_p, {}, [condition, *results], dtype)

    def _selection(self, factor: Factor) -> tuple[Factor, list[Factor]] | None:
        """(condition, [if false, if true]) of a selection, also of what literals make of a truth value as a number."""
        if not isinstance(factor.node, Map):
            return None
        node, ops = factor.node, operands_at(factor)
        if node.name == "select_n" and len(ops) == 3:
            return (ops[0], ops[1:]) if is_boolean(ops[0].node.dtype) else None
        if node.name == "convert_element_type" and is_boolean(ops[0].node.dtype):
            return ops[0], [self.lit(truth, node.dtype) for truth in (False, True)]
        chosen = [i for i, op in enumerate(ops) if literal(op) is None]
        inner = self._selection(ops[chosen[0]]) if node.name in _EXACT_LINEAR and len(chosen) == 1 else None
        if inner is None or any(literal(c) is None for c in inner[1]):
            return None
        condition, cases = inner
        given = [[c if i == chosen[0] else op for i, op in enumerate(ops)] for c in cases]
        return condition, [self.map(node.prim, node.params, case, node.dtype) for case in given]

    def _fold_not(self, prim: Any, params: dict[str, Any], ops: tuple[Factor, ...], dtype: Any) -> Factor | None:
        """A truth value as a number, converted again or taken from one, is a truth value as a number."""
        if is_boolean(dtype) or not any(is_map(op, "convert_element_type") for op in ops):
            return None
        chosen = next(i for i, op in enumerate(ops) if is_map(op, "convert_element_type"))
        (condition,) = operands_at(ops[chosen])
        if not is_boolean(condition.node.dtype):
            return None
        truths = [self.lit(truth, ops[chosen].node.dtype) for truth in (False, True)]
        cases = [self.map(prim, params, [t if i == chosen else op for i, op in enumerate(ops)], dtype) for t in truths]
        values = [literal(case) for case in cases]
        return self._fold_truth((condition, *cases), [None, *values], dtype)

    def _fold_truth(self, ops: tuple[Factor, ...], values: list[Any], dtype: Any) -> Factor | None:
        """A selection of 0 or 1 is its condition, as a number."""
        if len(ops) != 3 or not is_boolean(ops[0].node.dtype) or any(v is None for v in values[1:]):
            return None
        if not (is_integer(dtype) or is_floating(dtype) or is_boolean(dtype)):
            return None
        truths = [np.asarray(truth).astype(dtype).tobytes() for truth in (False, True)]
        cases = [v.tobytes() for v in values[1:]]
        if cases == truths:
            return self.convert(ops[0], dtype)
        return self.convert(self.logical_not(ops[0]), dtype) if cases == truths[::-1] else None

    def _is_whole(self, node: Node) -> bool:
        """Whether an array holds whole numbers, perhaps as floats: indices and what arithmetic makes of them."""
        if not is_floating(node.dtype):
            return is_integer(node.dtype)
        if isinstance(node, Lit):
            return bool(np.isfinite(node.value) and node.value == np.floor(node.value))
        if not isinstance(node, Map):
            return False
        key = ("is_whole", node)
        if key not in self.memo:
            self.memo[key] = self._is_whole_map(node)
        return bool(self.memo[key])

    def _is_whole_map(self, node: Map) -> bool:
        read = [op.node for op in node.operands]
        if node.name == "convert_element_type":
            return is_integer(read[0].dtype) or is_boolean(read[0].dtype)
        if node.name == "select_n":
            return all(map(self._is_whole, read[1:]))
        return node.name in ("add", "sub", "mul", "neg") and all(map(self._is_whole, read))

    def _fold_selections(self, prim: Any, params: dict[str, Any], ops: tuple[Factor, ...], dtype: Any) -> Factor | None:
        """Whole numbers: arithmetic moves into a selection of literals, and into selections by one condition, so that
        an index which a mask makes negative shows both cases."""
        if prim.name not in ("add", "sub", "mul") or not all(self._is_whole(op.node) for op in ops):
            return None
        selections = [self._selection(op) for op in ops]
        known = [s for s in selections if s is not None]
        same = len(known) == 2 and known[0][0] == known[1][0]
        if not same and not (len(known) == 1 and all(literal(c) is not None for c in known[0][1])):
            return None
        cases = [[op, op] if s is None else s[1] for op, s in zip(ops, selections, strict=True)]
        results = [self.map(prim, params, list(pair), dtype) for pair in zip(*cases, strict=True)]
        return self.map(prims.select_n_p, {}, [known[0][0], *results], dtype)

    def _fold_compare(self, name: str, ops: tuple[Factor, ...], values: list[Any]) -> Factor | None:
        if self._compare_hook is None or name not in _COMPARISONS or len(ops) != 2:
            return None
        if values[1] is not None:
            return self._decide(name, ops[0], float(values[1]))
        if values[0] is not None:
            return self._decide(_MIRRORED[name], ops[1], float(values[0]))
        return None

    def _decide(self, name: str, factor: Factor, bound: float) -> Factor | None:
        assert self._compare_hook is not None
        decided = self._compare_hook(self, name, factor, bound)
        if decided is None:
            return None
        if name in ("max", "min"):
            return factor if decided else None
        return self.lit(decided, bool)

    # -------------------------------------------------------------------------------------------- einsums

    def ein(
        self,
        out: Sequence[Term],
        factors: Sequence[Factor],
        guards: Sequence[Factor],
        equalities: frozenset[tuple[Idx, Idx]],
        coef: Any,
        dtype: Any,
        reducer: str = "sum",
        initial: Any = 0,
        domain: Sequence[Factor] = (),
    ) -> Node:
        """An einsum node; every variable that no axis pins is bound in it.

        The caller accounts for variables that occur nowhere (they would multiply by their size), and promises that the
        node is read only where the conditions of `domain` hold.
        """
        factors = [self.block(f) for f in factors if literal(f) is None or literal(f) != 1]
        terms = list(out) + [a for f in (*factors, *guards) for a in f.args] + [t for pair in equalities for t in pair]
        mapping: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(vars_of(terms))}
        out_c = substitute_all(out, mapping)
        factors_c = tuple(substitute_factor(f, mapping) for f in factors)
        guards_c = tuple(substitute_factor(g, mapping) for g in guards)
        equal_c = frozenset((substitute(a, mapping), substitute(b, mapping)) for a, b in equalities)
        pinned = pinned_vars(out_c)
        binders = tuple(v for v in mapping.values() if v not in pinned)
        key = ("ein", out_c, factors_c, guards_c, equal_c, coef, str(dtype), reducer, initial)
        known = key in self._table
        node = self._cons(
            key,
            lambda: Ein(out_c, factors_c, guards_c, equal_c, coef, binders, dtype, reducer, initial),  # type: ignore[arg-type]
        )
        assert isinstance(node, Ein)
        inside = [g for g in domain if set(factor_vars([g])) <= pinned_vars(out)]
        here = frozenset(substitute_factor(g, mapping) for g in inside)
        node.domain = node.domain & here if known else here
        return node

    def rank(
        self,
        index: Idx,
        batch: Sequence[Var],
        order: Sequence[Var],
        many: Sequence[Var],
        guards: Sequence[Factor],
        dtype: Any,
        site: Any,
    ) -> Factor:
        """The inclusive queue count over `batch + order`; the caller adds the last argument, the expert."""
        variables = (*batch, *order, *many)
        mapping: dict[Var, Term] = {v: Var(i, v.size) for i, v in enumerate(variables)}
        index_c = substitute(index, mapping)
        guards_c = tuple(substitute_factor(g, mapping) for g in guards)
        b, o, m = (tuple(mapping[v] for v in vs) for vs in (batch, order, many))
        key = ("rank", index_c, b, o, m, guards_c, str(dtype))
        node = self._cons(key, lambda: self._queue(Rank(index_c, b, o, m, guards_c, dtype, site)))  # type: ignore[arg-type]
        return Factor(node, (*batch, *order))

    def queue(self, rank: Rank, length: int) -> Queue:
        """Who stands at the first positions of a queue to which each step of its order adds at most one assignment."""
        assert not rank.many
        key = ("queue", rank, length)
        if key not in self.memo:
            found = self.memo[key] = Queue(rank, length)
            self.bounds.update({o: rank.order[o.axis].size for o in found.occupants})
            rank.index.node.is_queued = True
        queue: Queue = self.memo[key]
        return queue

    def _queue(self, rank: Rank) -> Rank:
        self.queues.append(rank)
        return rank


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "max", "min"})
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "max": "max", "min": "min"}
