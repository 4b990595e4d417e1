"""Scans over experts become operations with an expert axis.

A scan is one over experts if its body compares an array of integers with the number of the iteration, reads entries of
an array made of such comparisons, or reads what a scan over experts has stacked.  It is rolled if each of its carries
is one of the kinds of `Carry`: then no iteration depends on another.

A scan whose iterations run a branch, or contract a matrix, that a number of their own picks is one over tokens.

In: a jaxpr.  Out: `unscanned(jaxpr)`: a function as in `unrolled`, or None if there is no such scan.  `unmapped` is the
same for scans over tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend as jex
import numpy as np
from jax import lax

from moe_xla.passes._jax import at_source, bind_equation, scan_counts
from moe_xla.passes.recover.nodes import is_integer
from moe_xla.passes.roll.again import traced
from moe_xla.passes.roll.closures import chosen_sum, is_summable, move_axis
from moe_xla.passes.roll.graph import KEEPING, VIEWS, Graph, Op, Value, holds, is_random, read
from moe_xla.passes.roll.guards import ADDS
from moe_xla.passes.roll.marks import Marks, is_small, known_result
from moe_xla.passes.roll.numbers import array_of, numbers_along
from moe_xla.passes.roll.picks import batched_pick, may_pick
from moe_xla.passes.roll.scattered import adds_rows, scatter_all
from moe_xla.passes.roll.unrolled import batched_bind

IsLayer = Callable[[jex.core.ClosedJaxpr], bool]
_Bind = Callable[[Any, Sequence[Any], Sequence[bool]], list[Any]]

_MOST_CHOICES = 16  # of one token


class _NotRolled(Exception):
    """A scan whose iterations depend on each other, or which is not understood."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Row first + e of an axis, in iteration e; the axis is kept, with size 1, or dropped."""

    axis: int
    first: int
    keeps: bool
    written: Value | None = None


@dataclasses.dataclass(eq=False)
class Carry:
    """How a carry changes.

    `kind` is "same"; "counter"; "sum" (the sum of `terms` is added); "scattered" (the rows `terms[1]` are added at the
    places `terms[0]`); "chosen" (`terms[0]` where `mask`); "masked"
    (zero where `mask`, and read only where it holds); "rows" (`row` is written, and no other row is read).
    Masks exclude each other.
    """

    kind: str
    terms: tuple[Value, ...] = ()
    mask: Value | None = None
    row: Row | None = None


def unscanned(jaxpr: Any) -> Callable[[Sequence[Any]], list[Any]] | None:
    """The jaxpr with its scans over experts rolled, as a function of the arrays for its constants and inputs."""
    return _without(jaxpr, lambda plan: plan.is_over_experts() or plan.cuts())


def unmapped(jaxpr: Any, is_layer: IsLayer) -> Callable[[Sequence[Any]], list[Any]] | None:
    """As `unscanned`, for scans over tokens, where `is_layer` holds of the operations on all tokens."""
    return _without(jaxpr, lambda plan: plan.picks_experts() and is_layer(plan.as_program()), batched_pick)


def uncut(jaxpr: Any) -> Callable[[Sequence[Any]], list[Any]] | None:
    """As `unscanned`, for scans that count and cut arrays into rows, as jax takes them out of a loop in a scan."""
    return _without(jaxpr, lambda plan: plan.cuts())


def _without(
    jaxpr: Any, wanted: Callable[[_Plan], bool], bind: _Bind = batched_bind
) -> Callable[[Sequence[Any]], list[Any]] | None:
    graph = Graph(jaxpr)
    if not any(op.name == "scan" for op in graph.ops):
        return None
    level = _Level(graph, wanted, bind)
    return level.run if level.plans else None


class _Level:
    """The scans of one level that are `wanted`, planned in the order of the program; `bind` runs all iterations."""

    def __init__(self, graph: Graph, wanted: Callable[[_Plan], bool], bind: _Bind):
        self.graph = graph
        self.bind = bind
        self.marks = Marks(graph)
        self.stacked: set[Value] = set()  # by scans that are rolled
        self.exclusive: set[Value] = set()  # masks along a first axis that exclude each other
        self.plans: dict[Op, _Plan] = {}
        for op in graph.ops:
            if op.name == "scan" and op.key is not None and op.params["length"] >= 2:
                try:
                    plan = _Plan(op, self)
                except _NotRolled:
                    continue
                if wanted(plan):
                    self.plans[op] = plan
                    plan.note_results()

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs for arrays of the inputs."""
        env: dict[Value, Any] = dict(zip(self.graph.inputs, arrays, strict=True))
        for op in self.graph.ops:
            inputs = [read(env, v) for v in op.inputs]
            with at_source(op.source):
                plan = self.plans.get(op)
                results = bind_equation(op.eqn, inputs) if plan is None else plan.emit(inputs)
            env.update(zip(op.outputs, results, strict=True))
        return [read(env, v) for v in self.graph.outputs]


class _Plan:
    """A scan that can be rolled: what is known of its body, and its carries."""

    def __init__(self, op: Op, level: _Level):
        self.op = op
        self.level = level
        self.length: int = op.params["length"]
        closed = op.params["jaxpr"]
        self.body = Graph(closed.jaxpr)
        self.consts = closed.consts
        held = len(self.consts)
        consts, carries = scan_counts(op.eqn)
        inputs = self.body.inputs[held:]
        self.outer = dict(zip(inputs, op.inputs, strict=True))
        self.fixed = [*self.body.inputs[:held], *inputs[:consts]]
        self.carried = inputs[consts : consts + carries]
        self.slices = inputs[consts + carries :]
        self.known: dict[Value, np.ndarray] = {}  # integers, along a first axis of iterations
        self.varying: set[Value] = set()
        given = {v for v, o in self.outer.items() if o in level.marks.zeros and v not in self.carried}
        self.zeros = Marks(self.body).zeros | given
        if any(o.key is None or holds(o.eqn, is_random) for o in self.body.ops):
            raise _NotRolled
        self._know_inputs()
        self._walk()
        self.carries = [self._carry(i) for i in range(carries)]
        self._check()

    # --- what varies

    def _know_inputs(self) -> None:
        marks = self.level.marks
        for value in self.fixed:
            number = marks.number(self.outer[value]) if value in self.outer else None
            if number is not None:
                self.known[value] = self._repeated(number)
        for value in self.slices:
            number = marks.number(self.outer[value])
            self.varying.add(value)
            if number is not None:
                self.known[value] = number
        for i, value in enumerate(self.carried):
            step = self._step(value, self.body.outputs[i])
            start = marks.number(self.outer[value])
            if step is not None and start is not None:
                times = np.arange(self.length)
                self.known[value] = start + step * (times[::-1] if self.op.params["reverse"] else times)
                self.varying.add(value)

    def _repeated(self, number: np.ndarray) -> np.ndarray:
        return np.broadcast_to(number, (self.length, *number.shape))

    def _step(self, carried: Value, result: Value) -> int | None:
        """What is added to a counter in each iteration."""
        op = result.op
        if op is None or op.name not in ("add", "sub") or not is_integer(carried.aval.dtype) or carried.aval.shape:
            return None
        first, second = op.inputs
        if op.name == "add" and second is carried:
            first, second = second, first
        if first is not carried or second.literal is None:
            return None
        return int(second.literal) if op.name == "add" else -int(second.literal)

    def _walk(self) -> None:
        for op in self.body.ops:
            numbers = [self._number(v) for v in op.inputs]
            varies = any(v in self.varying for v in op.inputs)
            if len(op.outputs) == 1 and is_small(op.outputs[0]) and all(n is not None for n in numbers):
                rows = [known_result(op, [n[e] for n in numbers if n is not None]) for e in range(self.length)]
                if all(r is not None for r in rows):
                    self.known[op.outputs[0]] = np.stack(rows)  # type: ignore[arg-type]
            if varies:
                self.varying.update(op.outputs)

    def _number(self, value: Value) -> np.ndarray | None:
        if value in self.known:
            return self.known[value]
        if value.literal is not None and is_integer(value.aval.dtype):
            return self._repeated(np.asarray(value.literal, value.aval.dtype))
        return None

    # --- carries

    def _carry(self, index: int) -> Carry:
        carried, result = self.carried[index], self.body.outputs[index]
        if result is carried:
            return Carry("same")
        if carried in self.known:
            return Carry("counter")
        if sum(v is result for v in self.body.outputs) > 1 or result.users or result.op is None:
            raise _NotRolled
        if result.op.name in ADDS:
            carry = self._sum(carried, result)
        else:
            carry = self._scattered(carried, result.op) or self._replaced(carried, result.op)
        self.varying.add(result)
        return carry

    def _sum(self, carried: Value, result: Value) -> Carry:
        terms: list[Value] = []
        value = result
        while value is not carried:
            op = value.op
            if op is None or op.name not in ADDS or (value is not result and (len(value.users) > 1 or value.is_output)):
                raise _NotRolled
            value, term = self._towards(carried, op)
            if term.aval.shape != carried.aval.shape:
                raise _NotRolled
            terms.append(term)
        if len(carried.users) != 1 or carried.is_output:
            raise _NotRolled
        return Carry("sum", tuple(terms))

    def _scattered(self, carried: Value, op: Op) -> Carry | None:
        """Rows that are added into the carry, at places that are not one row after the other."""
        if not adds_rows(op) or op.inputs[0] is not carried or len(carried.users) != 1 or carried.is_output:
            return None
        return Carry("scattered", op.inputs[1:])

    def _towards(self, carried: Value, op: Op) -> tuple[Value, Value]:
        """The operand of an addition that holds the carry, and the other one."""
        one, other = op.inputs
        if self._holds_carry(one, carried):
            return one, other
        if self._holds_carry(other, carried):
            return other, one
        raise _NotRolled

    def _holds_carry(self, value: Value, carried: Value) -> bool:
        while value is not carried:
            if value.op is None or value.op.name not in ADDS:
                return False
            one, other = value.op.inputs
            if one is carried or other is carried:
                return True
            follow = [v for v in (one, other) if v.op is not None and v.op.name in ADDS]
            if len(follow) != 1:
                return any(self._holds_carry(v, carried) for v in follow)
            (value,) = follow
        return True

    def _replaced(self, carried: Value, op: Op) -> Carry:
        if op.name == "select_n" and len(op.inputs) == 3 and op.inputs[1] is carried:
            mask, _, chosen = op.inputs
            shapes = {v.aval.shape for v in op.inputs}
            if not self._excludes(mask) or len(shapes) > 1 or carried.is_output:
                raise _NotRolled
            others = [u for u, _ in carried.users if u is not op]
            if not others and chosen is not carried and is_summable(carried):
                return Carry("chosen", (chosen,), mask)
            if chosen in self.zeros and all(u.name == "select_n" and self._reads_on(u, mask, carried) for u in others):
                return Carry("masked", (), mask)
        row = self._written_row(op) if op.inputs[0] is carried and op.name != "scatter-add" else None
        if row is not None and row.written is not carried and not carried.is_output:
            if all(u is op or _same_row(self._read_row(u), row) for u, _ in carried.users):
                return Carry("rows", row=row)
        raise _NotRolled

    @staticmethod
    def _reads_on(op: Op, mask: Value, carried: Value) -> bool:
        return len(op.inputs) == 3 and op.inputs[0] is mask and op.inputs[2] is carried and op.inputs[1] is not carried

    def _excludes(self, mask: Value) -> bool:
        """Whether the masks of two iterations are never true in the same element."""
        if mask in self.outer:
            return mask in self.slices and self.outer[mask] in self.level.exclusive
        op = mask.op
        if op is None:
            return False
        if op.name in VIEWS and len(op.inputs) == 1:
            return self._excludes(op.inputs[0])
        return op.name == "eq" and self._compared(op) is not None

    def _compared(self, op: Op) -> Value | None:
        """The array of integers, the same in all iterations, that `eq` compares with a number that is not."""
        for value, other in (op.inputs, op.inputs[::-1]):
            number = self.known.get(other)
            if number is None or value in self.varying or not is_integer(value.aval.dtype):
                continue
            if number.size == self.length == len(np.unique(number)):
                return value
        return None

    # --- rows

    def _along(self, sizes: Sequence[int], shape: Sequence[int], starts: Sequence[Value]) -> tuple[int, int] | None:
        """(axis, first) if iteration e starts at row first + e of one axis, and takes all of the others."""
        found = []
        for axis, (size, whole, start) in enumerate(zip(sizes, shape, starts, strict=True)):
            if size != whole:
                first = self._consecutive(start, whole) if size == 1 else None
                found.append(None if first is None else (axis, first))
        return found[0] if len(found) == 1 else None

    def _consecutive(self, value: Value, whole: int) -> int | None:
        """The first of known numbers first + e that number rows of an axis."""
        number = self._number(value)
        if number is None or number.size != self.length:
            return None
        numbers = number.reshape(-1)
        first = int(numbers[0])
        in_a_row = np.array_equal(numbers, first + np.arange(self.length))
        return first if in_a_row and 0 <= first <= whole - self.length else None

    def _read_row(self, op: Op) -> Row | None:
        """The row of an array, the same in all iterations, that an operation reads."""
        if op.name not in ("dynamic_slice", "gather") or op.inputs[0] in self.varying:
            return None
        array, *starts = op.inputs
        shape = array.aval.shape
        if op.name == "dynamic_slice":
            along = self._along(op.params["slice_sizes"], shape, starts)
            return Row(*along, keeps=True) if along else None
        numbers = op.params["dimension_numbers"]
        sizes = tuple(op.params["slice_sizes"])
        plain = not numbers.operand_batching_dims and numbers.offset_dims == tuple(range(len(shape) - 1))
        return self._indexed(numbers.collapsed_slice_dims, numbers.start_index_map, starts[0], shape, sizes, plain)

    def _written_row(self, op: Op) -> Row | None:
        """The row that an operation writes or adds to its first operand."""
        array, second, *_ = op.inputs
        shape = array.aval.shape
        if op.name == "dynamic_update_slice":
            along = self._along(second.aval.shape, shape, op.inputs[2:])
            return Row(*along, keeps=True, written=second) if along else None
        if op.name not in ("scatter", "scatter-add"):
            return None
        numbers, written = op.params["dimension_numbers"], op.inputs[2]
        plain = not numbers.operand_batching_dims and numbers.update_window_dims == tuple(range(len(shape) - 1))
        inserted, mapped = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
        sizes = tuple(1 if i in inserted else n for i, n in enumerate(shape))
        plain = plain and written.aval.shape == tuple(n for i, n in enumerate(shape) if i not in inserted)
        row = self._indexed(inserted, mapped, second, shape, sizes, plain)
        return dataclasses.replace(row, written=written) if row else None

    def _indexed(
        self, dropped: Sequence[int], mapped: Sequence[int], index: Value, shape: Sequence[int], sizes: Any, plain: bool
    ) -> Row | None:
        if not plain or len(mapped) != 1 or tuple(dropped) != tuple(mapped):
            return None
        (axis,) = mapped
        first = self._consecutive(index, shape[axis])
        whole = sizes == tuple(1 if i == axis else n for i, n in enumerate(shape))
        return Row(axis, first, keeps=False) if first is not None and whole else None

    def _placed_row(self, value: Value) -> Row | None:
        """The row of a term that is zero in all others."""
        op = value.op
        if op is None or not op.inputs or op.inputs[0] not in self.zeros or len(value.users) != 1 or value.is_output:
            return None
        return self._written_row(op)

    # --- whether it is one

    def _check(self) -> None:
        skipped = self._skipped()
        kinds = dict(zip(self.carried, (carry.kind for carry in self.carries), strict=True))
        unready = {c for c, kind in kinds.items() if kind not in ("same", "counter")}
        unreadable = {c for c in unready if kinds[c] not in ("masked", "rows")}
        for op in self.body.ops:
            if op not in skipped and any(v in unreadable for v in op.inputs):
                raise _NotRolled
        count = len(self.carries)
        if any(v in unready for v in self.body.outputs[count:]):
            raise _NotRolled

    def _skipped(self) -> set[Op]:
        """Operations that the carries stand for, and rows that are placed by them."""
        skipped: set[Op] = set()
        for carried, carry, result in zip(self.carried, self.carries, self.body.outputs, strict=False):
            if carry.kind in ("same", "counter"):
                continue
            value = result
            while value is not carried and value.op is not None:
                skipped.add(value.op)
                if carry.kind != "sum":
                    break
                value, _ = self._towards(carried, value.op)
            for term in carry.terms if carry.kind == "sum" else ():
                if self._placed_row(term) is not None:
                    assert term.op is not None
                    skipped.add(term.op)
        return skipped

    def cuts(self) -> bool:
        """Whether iterations do no more than count, and take rows of arrays as they are."""
        if any(carry.kind not in ("same", "counter") for carry in self.carries):
            return False
        rows = {v for v in self.body.inputs if v not in self.carried}
        for op in self.body.ops:
            known = all(v in self.known for v in op.outputs)
            if not known and self._read_row(op) is None and op.name not in KEEPING:
                return False
            if not known and op.inputs[0] not in rows:
                return False
            rows.update(op.outputs)
        return True

    def is_over_experts(self) -> bool:
        """Whether the numbers of the iterations, or axes along which they go, are of experts."""
        level, marks = self.level, self.level.marks
        for value in self.slices:
            if value.users and (self.outer[value] in level.stacked or marks.has(self.outer[value], 0)):
                return True
        if not self.carries and self.op in marks.joined:
            return True
        for op in self.body.ops:
            if op.name == "eq":
                compared = self._compared(op)
                if compared is not None and compared.aval.ndim:
                    return True
            row = self._read_row(op)
            if row is not None and op.inputs[0] in self.outer and marks.has(self.outer[op.inputs[0]], row.axis):
                return True
        return False

    def picks_experts(self) -> bool:
        """Whether iterations run what integers of their own pick, as few as the choices of one token."""
        return any(may_pick(op.eqn) and self._picks(op) for op in self.body.ops)

    def _picks(self, op: Op) -> bool:
        places = op.inputs[:1] if op.name == "cond" else op.inputs[1:]
        fixed = op.name == "cond" or op.inputs[0] not in self.varying
        own = [v for v in places if v in self.varying and v not in self.known and is_integer(v.aval.dtype)]
        return fixed and bool(own) and all(v.aval.size <= _MOST_CHOICES for v in own)

    def as_program(self) -> Any:
        """What the scan becomes, as a program of its inputs that gives what is read of it."""
        is_read = [bool(v.users) or v.is_output for v in self.op.outputs]
        return traced(
            lambda arrays: list(itertools.compress(self.emit(arrays), is_read)), [v.aval for v in self.op.inputs]
        )

    def note_results(self) -> None:
        """Tells the level what the results are."""
        count = len(self.carries)
        for value, outer in zip(self.body.outputs[count:], self.op.outputs[count:], strict=True):
            self.level.stacked.add(outer)
            if value in self.known:
                self.level.marks.known[outer] = self.known[value]
            if value.op is not None and self._excludes(value):
                self.level.exclusive.add(outer)

    # --- emission

    def emit(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the scan."""
        given = dict(zip(self.outer, inputs, strict=True))
        env: dict[Value, Any] = {**dict(zip(self.body.inputs, self.consts, strict=False)), **given}
        skipped = self._skipped()
        for op in self.body.ops:
            if op in skipped or all(v in self.known for v in op.outputs):
                continue
            with at_source(op.source):
                env.update(zip(op.outputs, self._operation(op, env), strict=True))
        count = len(self.carries)
        with at_source(self.op.source):
            carried = [self._final(i, env) for i in range(count)]
            return [*carried, *(self._stack(v, env) for v in self.body.outputs[count:])]

    def _operation(self, op: Op, env: dict[Value, Any]) -> list[Any]:
        row = self._read_row(op)
        if row is not None:
            return [self._rows(row, read(env, op.inputs[0]))]
        batched = [v in self.varying for v in op.inputs]
        rank = max((v.aval.ndim for v in op.inputs), default=0)
        like = next((v.aval.shape for v in op.inputs if v.aval.ndim == rank), ())
        inputs = [self._operand(v, like if op.name == "eq" else v.aval.shape, env) for v in op.inputs]
        return self.level.bind(op.eqn, inputs, batched) if any(batched) else bind_equation(op.eqn, inputs)

    def _operand(self, value: Value, shape: Sequence[int], env: dict[Value, Any]) -> Any:
        number = self.known.get(value)
        if number is None:
            return read(env, value)
        if value not in self.varying:
            return array_of(number[0])
        if value.aval.shape:
            return array_of(number)
        return numbers_along(number, shape)

    def _rows(self, row: Row, array: Any) -> Any:
        """The rows that all iterations read, along a first axis."""
        if self.length != array.shape[row.axis]:
            array = lax.slice_in_dim(array, row.first, row.first + self.length, axis=row.axis)
        rows = move_axis(array, row.axis, 0)
        return lax.expand_dims(rows, (row.axis + 1,)) if row.keeps else rows

    def _laid(self, row: Row, env: dict[Value, Any]) -> Any:
        """The rows that all iterations write, along the axis of the rows."""
        assert row.written is not None
        rows = self._stack(row.written, env)
        return move_axis(lax.squeeze(rows, (row.axis + 1,)) if row.keeps else rows, 0, row.axis)

    def _final(self, index: int, env: dict[Value, Any]) -> Any:
        """A carry after the last iteration."""
        carry, carried, result = self.carries[index], self.carried[index], self.body.outputs[index]
        start = env[carried]
        if carry.kind == "same":
            return start
        if carry.kind == "counter":
            number = self.known[result]
            return array_of(number[0 if self.op.params["reverse"] else -1])
        if carry.kind == "sum":
            total = None if self.outer[carried] in self.level.marks.zeros else start
            for term in carry.terms:
                summed = self._summed(term, env)
                total = summed if total is None else lax.add(total, summed)
            return total
        if carry.kind == "scattered":
            assert result.op is not None
            return scatter_all(result.op.eqn, start, *(self._stack(v, env) for v in carry.terms))
        if carry.row is not None:
            laid, row = self._laid(carry.row, env), carry.row
            whole = laid.shape == start.shape
            return laid if whole else lax.dynamic_update_slice_in_dim(start, laid, row.first, row.axis)
        assert carry.mask is not None
        masks = self._stack(carry.mask, env)
        anywhere = lax.reduce_or(masks, axes=(0,))
        if carry.kind == "masked":
            return lax.select(anywhere, lax.full_like(start, 0), start)
        chosen = chosen_sum(masks, self._stack(carry.terms[0], env))
        return chosen if self.outer[carried] in self.level.marks.zeros else lax.select(anywhere, chosen, start)

    def _summed(self, term: Value, env: dict[Value, Any]) -> Any:
        row = self._placed_row(term)
        if row is None:
            return lax.reduce_sum(self._stack(term, env), axes=(0,))
        laid = self._laid(row, env)
        left = term.aval.shape[row.axis] - row.first - self.length
        config = [(row.first, left, 0) if i == row.axis else (0, 0, 0) for i in range(laid.ndim)]
        return lax.pad(laid, np.zeros((), laid.dtype), config) if row.first or left else laid

    def _stack(self, value: Value, env: dict[Value, Any]) -> Any:
        """The array of a value for all iterations, along a first axis."""
        if value in self.known:
            number = self.known[value]
            return array_of(number)
        array = read(env, value)
        if value in self.varying:
            return array
        return lax.broadcast(lax.convert_element_type(array, value.aval.dtype), (self.length,))


def _same_row(one: Row | None, other: Row) -> bool:
    return one is not None and (one.axis, one.first) == (other.axis, other.first)
