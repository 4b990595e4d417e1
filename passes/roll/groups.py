"""Groups: the parallel values of an unrolled loop.

A value is *placed* at e if it is entry e of an array, the comparison with the literal e, one of a list of arrays that
are used alike, or the result of an operation whose placed operands all stand at e and whose other operands are the same
for all e.  Values that differ only in e are the members of one `Group`.

In: a `Graph`.  Out: `Places`.  A group never depends on a member of its own, because all that a member reads beside
members of other groups is read by every member.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moe_xla.passes.recover.nodes import is_floating, is_integer
from moe_xla.passes.roll.graph import Graph, Op, Value, holds, is_random, tested_by
from moe_xla.passes.roll.guards import is_guard, spread_from

_ROUNDS = 12
_DEPTH = 3  # of the uses by which arrays of a list are told apart
_LARGEST = 4096  # no loop is unrolled that often
_MIXING = frozenset({"add", "add_any", "select_n", "concatenate", "stack", "pad"})


@dataclasses.dataclass(eq=False)
class Group:
    """Members e → the results of a seed or of an operation.  `operands` are values and (group, result) pairs.

    `kind` is "entries" (of `operands[0]` along `axis`), "list" (of values), or "op"; in an "op" the operand None is the
    literal e, or an array that holds e everywhere.
    """

    kind: str
    operands: tuple[Any, ...]
    axis: int = 0
    members: dict[int, Sequence[Value]] = dataclasses.field(default_factory=dict)
    tests: bool = False

    @property
    def first(self) -> int:
        """The least e."""
        return min(self.members)

    @property
    def is_range(self) -> bool:
        """Whether the members are two or more in a row."""
        return len(self.members) >= 2 and max(self.members) - self.first + 1 == len(self.members)

    @property
    def op(self) -> Op:
        """The operation of the first member."""
        op = self.members[self.first][0].op
        assert op is not None
        return op


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value stands: result `result` of member `entry` of a group."""

    group: Group
    result: int
    entry: int


class Places:
    """The places of the values of a graph.  `shared` values have none, whatever they are made of."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.shared: set[Value] = set()
        self.listed: dict[Value, tuple[Any, int]] = {}
        self._colours: dict[tuple[Value, int], Any] = {}
        for _ in range(_ROUNDS):
            self._place_all()
            if not (self._separate() | self._find_lists()) and not self._demote():
                break
        self._valid = self._whole()

    def __getitem__(self, value: Value) -> Place | None:
        return self._places.get(value)

    def member(self, value: Value) -> Place | None:
        """The place of a member of a group that can be rolled."""
        place = self._places.get(value)
        return place if place is not None and place.group in self._valid else None

    def _whole(self) -> dict[Group, None]:
        """The groups that are ranges, and read such groups alone."""
        valid: dict[Group, None] = {}
        for group in self._groups.values():  # in the order of the program, so operands come first
            if group.is_range and all(o[0] in valid for o in group.operands if isinstance(o, tuple)):
                valid[group] = None
        return valid

    @property
    def groups(self) -> Iterable[Group]:
        """The groups that can be rolled."""
        return self._valid

    # --- one walk

    def _place_all(self) -> None:
        self._places: dict[Value, Place] = {}
        self._groups: dict[Any, Group] = {}
        self._meetings: dict[Any, set[tuple[int, int]]] = collections.defaultdict(set)
        for value, (key, entry) in self.listed.items():
            self._add(("list", key), entry, (value,), "list", ())
        for op in self.graph.ops:
            if op.key is not None and not holds(op.eqn, is_random):
                self._place(op)

    def _add(
        self, key: Any, entry: int, values: Sequence[Value], kind: str, operands: tuple[Any, ...], **more: Any
    ) -> None:
        if self.shared.issuperset(values):
            return
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(kind, operands, **more)
        group.members.setdefault(entry, values)
        for i, value in enumerate(values):
            if value not in self.shared:
                self._places[value] = Place(group, i, entry)

    def _place(self, op: Op) -> None:
        places = [self._places.get(v) for v in op.inputs]
        found = [p for p in places if p is not None]
        if not found:
            self._seed(op)
            return
        self._note_meetings(op, found)
        if len({p.entry for p in found}) > 1:
            return
        entry = found[0].entry
        numbered = {v for v in op.inputs if op.name == "concatenate" and _repeated_number(v) == entry}
        pairs = list(zip(op.inputs, places, strict=True))
        if any(p is None and v not in numbered and _is_used_once(v) for v, p in pairs):
            return
        key = (op.key, *(None if v in numbered else _key(v, p) for v, p in pairs))
        operands = tuple(None if v in numbered else v if p is None else (p.group, p.result) for v, p in pairs)
        self._add(key, entry, op.outputs, "op", operands, tests=any(p.group.tests for p in found))

    def _seed(self, op: Op) -> None:
        source = op.inputs[0] if op.inputs else None
        if op.name == "eq":
            tested = tested_by(op)
            if tested and 0 <= tested[1] < _LARGEST:
                value, entry = tested
                operands = (value, None) if op.inputs[0] is value else (None, value)
                self._add((op.key, id(value), op.inputs[0] is value), entry, op.outputs, "op", operands, tests=True)
        elif source is None or source.held is not None:
            return
        elif op.name in ("split", "unstack"):
            sizes = {v.aval.shape for v in op.outputs}
            if len(sizes) == 1:
                key = (op.name, id(source), op.params["axis"], len(op.outputs))
                for entry, value in enumerate(op.outputs):
                    self._add(key, entry, (value,), "entries", (source,), axis=op.params["axis"])
        else:
            entry_of = entry_read(op)
            if entry_of is not None:
                axis, entry = entry_of
                self._add(("slice", id(source), axis), entry, op.outputs, "entries", (source,), axis=axis)

    def _note_meetings(self, op: Op, found: Sequence[Place]) -> None:
        """Which members of two groups meet in operations of one kind."""
        for i, one in enumerate(found):
            for other in found[i + 1 :]:
                if one.group is not other.group:
                    self._meetings[op.key, one.group, other.group].add((one.entry, other.entry))
        if op.name == "eq":
            tested = tested_by(op)
            if tested and len(found) == 1:
                self._meetings[op.key, found[0].group, None].add((found[0].entry, tested[1]))

    # --- what is found to be no member

    def _separate(self) -> bool:
        """A member that meets several members of another group, in operations of one kind, is the same for all of them.

        Where members of two groups meet each with each, they stand for different axes.  A comparison with literals
        stands for the axis of the experts, so its group stays; else the larger one does.  What is compared with several
        literals is settled first, because other meetings may come of it.
        """
        found = False
        for (_, one, other), pairs in self._meetings.items():
            if other is None:
                found |= self._share(v for e in _repeated(pairs) for v in one.members[e])
        if found:
            return True
        for (_, one, other), pairs in self._meetings.items():
            if other is None:
                continue
            ones, others = _repeated(pairs), _repeated((b, a) for a, b in pairs)
            if ones and others:
                keep_one = (one.tests, len(one.members)) > (other.tests, len(other.members))
                ones, others = (set(), others) if keep_one else (ones, set())
            found |= self._share(v for e in ones for v in one.members[e])
            found |= self._share(v for e in others for v in other.members[e])
        return found

    def _demote(self) -> bool:
        """Values that turned out to have no neighbours are the same for all e; what reads them is placed anew."""
        found = False
        for group in self._groups.values():
            if not group.is_range and all(o[0].is_range for o in group.operands if isinstance(o, tuple)):
                changed = self._share(v for member in group.members.values() for v in member)
                found |= changed and not (group.kind == "op" and group.op.name in _MIXING)
        return found

    def _share(self, values: Iterable[Value]) -> bool:
        values = set(values)
        found = not values <= self.shared
        self.shared |= values
        for value in values:
            self.listed.pop(value, None)
        return found

    # --- lists of arrays

    def _find_lists(self) -> bool:
        """Inputs of one type that are used alike: the arrays that a loop reads from a Python list.

        Two arrays of which a loop reads entry after entry are used alike too, but are no list.
        """
        origins: dict[Value, tuple[Value, Any]] = {}
        stacked = {g.operands[0] for g in self._groups.values() if _is_sliced(g)}
        for value, others in _by_type(self.graph.inputs).items():
            if len(others) > 1 and value not in self.listed and value not in self.shared and value not in stacked:
                origins[value] = (value, ())
        if not origins:
            return False
        buckets: dict[Any, dict[Value, int | None]] = collections.defaultdict(dict)
        met: set[Value] = set()
        for op in self.graph.ops:
            if op.key is not None:
                self._meet(op, origins, met, buckets)
        found = False
        for key, bucket in self._told_apart(buckets):
            entries = self._entries(bucket)
            if entries:
                found = True
                self.listed.update({v: (key, e) for v, e in entries.items()})
        return found

    def _meet(self, op: Op, origins: dict[Value, tuple[Value, Any]], met: set[Value], buckets: Any) -> None:
        """Notes the first operation in which an input meets something else, if that is known at all places."""
        own = {v: origins[v] for v in op.inputs if v in origins}
        if len({origin for origin, _ in own.values()}) > 1:
            own = {v: found for v, found in own.items() if not self._is_repeated(v, op)}
        if len({origin for origin, _ in own.values()}) != 1:
            return
        origin, chain = next(iter(own.values()))[0], tuple(chain for _, chain in own.values())
        key = (op.key, *(_key(v, self._places.get(v)) if v not in own else ("origin", own[v][1]) for v in op.inputs))
        others = [v for v in op.inputs if v not in own and v.held is None]
        if not others:
            origins.update({v: (origin, (chain, key, v.index)) for v in op.outputs})
            return
        entries = {p.entry for p in (self._places.get(v) for v in others) if p is not None}
        if origin in met or len(entries) > 1:
            return
        colour = None if entries else self._colour(origin, _DEPTH)
        met.add(origin)
        buckets[(_type(origin), chain, key, colour)][origin] = entries.pop() if entries else None

    def _told_apart(self, buckets: dict[Any, dict[Value, int | None]]) -> Iterator[tuple[Any, dict[Value, int | None]]]:
        """The buckets; one in which several arrays stand at the same place, as several by how these are used."""
        for key, bucket in buckets.items():
            known = [e for e in bucket.values() if e is not None]
            if len(set(known)) == len(known):
                yield key, bucket
                continue
            parts: dict[Any, dict[Value, int | None]] = collections.defaultdict(dict)
            for value, entry in bucket.items():
                parts[self._colour(value, _DEPTH)][value] = entry
            yield from (((key, colour), part) for colour, part in parts.items())

    @staticmethod
    def _is_repeated(value: Value, op: Op) -> bool:
        """Whether several operations of one kind read a value at the same place, as all experts read the tokens."""
        places = [i for i, v in enumerate(op.inputs) if v is value]
        return sum(user.key == op.key and place in places for user, place in value.users) > 1

    def _entries(self, bucket: dict[Value, int | None]) -> dict[Value, int] | None:
        """Places of the arrays of a list: those of what they meet, or the order in which they come in."""
        if len(bucket) < 2:
            return None
        known = {v: e for v, e in bucket.items() if e is not None}
        if not known:
            ordered = [v for v in self.graph.inputs if v in bucket]
            return {v: e for e, v in enumerate(ordered)}
        entries = sorted(known.values())
        in_a_row = entries == list(range(entries[0], entries[0] + len(entries)))
        return known if len(known) == len(bucket) and in_a_row else None

    def _colour(self, value: Value, depth: int) -> Any:
        """How a value is used, a few operations deep, apart from what else these read."""
        key = (value, depth)
        if key not in self._colours:
            uses = []
            for op, place in value.users:
                guards = is_guard(op)
                if (op.name in _MIXING and not _adds_bias(op) and not guards) or op.key is None or depth == 0:
                    uses.append(hash(op.name))
                else:
                    left = depth if guards else depth - 1
                    uses.append(hash((op.key, place, *(self._colour(v, left) for v in op.outputs))))
            self._colours[key] = hash(tuple(sorted(uses)))
        return self._colours[key]


def entry_read(op: Op) -> tuple[int, int] | None:
    """(axis, e) if an operation reads entry e of its operand along one axis and all of the others."""
    if op.name == "slice" and op.params["strides"] is None:
        starts, sizes = op.params["start_indices"], op.outputs[0].aval.shape
    elif op.name == "dynamic_slice" and all(v.literal is not None for v in op.inputs[1:]):
        starts, sizes = [v.literal for v in op.inputs[1:]], op.params["slice_sizes"]
    else:
        return None
    shape = op.inputs[0].aval.shape
    cut = [i for i, (size, n) in enumerate(zip(sizes, shape, strict=True)) if size != n]
    if len(cut) != 1 or sizes[cut[0]] != 1 or not 0 <= int(starts[cut[0]]) < shape[cut[0]]:
        return None
    return cut[0], int(starts[cut[0]])


def _is_sliced(group: Group) -> bool:
    """Whether a group is several entries of an array, each read by a slice of its own."""
    return group.kind == "entries" and group.is_range and len({v.op for (v,) in group.members.values()}) > 1


def _adds_bias(op: Op) -> bool:
    """Whether an operation adds an input that is smaller than its result, which an expert does within its own work."""
    return op.name == "add" and any(_is_smaller_input(v, op.outputs[0].aval.size) for v in op.inputs)


def _is_smaller_input(value: Value, size: int) -> bool:
    """Whether a value is an input of fewer elements than `size`, however it is laid out."""
    while value.op is not None and len(value.op.inputs) == 1:
        value = value.op.inputs[0]
    return value.op is None and value.held is None and value.aval.size < size


def _repeated_number(value: Value) -> int | None:
    """The integer literal that an array holds everywhere, as a column of an index array does."""
    source = spread_from(value)
    is_number = source.literal is not None and is_integer(source.aval.dtype) and not source.aval.shape
    return int(source.literal) if is_number else None


def _repeated(pairs: Iterable[tuple[int, int]]) -> set[int]:
    """The first entries that are paired with more than one second."""
    met: dict[int, set[int]] = collections.defaultdict(set)
    for one, other in pairs:
        met[one].add(other)
    return {one for one, others in met.items() if len(others) > 1}


def _is_used_once(value: Value) -> bool:
    """Whether one operation alone reads an array, so that no other expert does."""
    return value.held is None and len(value.users) == 1


def _key(value: Value, place: Place | None) -> Any:
    return ("shared", id(value)) if place is None else ("member", id(place.group), place.result)


def _type(value: Value) -> Any:
    return value.aval.shape, str(value.aval.dtype), bool(getattr(value.aval, "weak_type", False))


def _by_type(values: Sequence[Value]) -> dict[Value, list[Value]]:
    """Each floating-point value with all values of its type."""
    types: dict[Any, list[Value]] = collections.defaultdict(list)
    for value in values:
        if is_floating(value.aval.dtype):
            types[_type(value)].append(value)
    return {v: types[_type(v)] for vs in types.values() for v in vs}
