"""What is known of a program's layers across all its scopes: sites, what is asked of each, and their capacity.

A *site* is named by the path of the equation that counts its queue, so that it keeps its name whatever is decided.

In: facts reported while a program is walked.  Out: the mode of each site, and which sites are one layer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from moe_xla.passes.recover.terms import Idx, IndexKey, key_of

Path = tuple[int, ...]


class Threshold(NamedTuple):
    """A test of an own queue position, counted from 0: those below `bound` pass; `step` made it, where one did."""

    bound: float
    step: Any


class Weighted(NamedTuple):
    """A count of one-hot rows times numbers, made by `step`: how many assignments, and of how many experts.

    Such a count is a queue position only if the numbers are 0 and 1.
    """

    step: Any
    assignments: int
    experts: int


@dataclasses.dataclass
class Session:
    """One walk over a program: `modes` says what is asked of a site, `default` of every other one;
    `enters` whether bodies of scans and checkpoints are walked too, `masks` whether those are looked for that choose
    experts, `budget` how many maps each of them may make.

    `choices` names the site of each array that chooses experts, `unwanted` those arrays whose queue is left as it is
    written; `sorted` are the sites whose positions come out of a sort by expert; `chosen` has the indices of a site
    without queues, `masked` those whose assignments masks keep, `contractions` the sites of contractions; `weighted`
    are counts that are not known to be queue positions, `placed` those of them that are used as such.
    """

    modes: dict[Path, str]
    default: str
    enters: bool = True
    masks: bool = True
    budget: float = math.inf
    sources: dict[Path, Any] = dataclasses.field(default_factory=dict)
    signatures: dict[Path, Any] = dataclasses.field(default_factory=dict)
    recomputed: set[Path] = dataclasses.field(default_factory=set)
    thresholds: dict[Path, list[Threshold]] = dataclasses.field(default_factory=dict)
    literal_uses: list[Any] = dataclasses.field(default_factory=list)
    layer_wires: list[Any] = dataclasses.field(default_factory=list)
    ranks: list[Any] = dataclasses.field(default_factory=list)
    sorted: set[Path] = dataclasses.field(default_factory=set)
    unwanted: set[int] = dataclasses.field(default_factory=set)
    contractions: list[Any] = dataclasses.field(default_factory=list)
    choices: dict[int, Path] = dataclasses.field(default_factory=dict)
    chosen: dict[Path, list[Any]] = dataclasses.field(default_factory=dict)
    masked: set[Any] = dataclasses.field(default_factory=set)
    indices: dict[Any, dict[IndexKey, Path]] = dataclasses.field(default_factory=dict)
    weighted: dict[Path, Weighted] = dataclasses.field(default_factory=dict)
    placed: set[Path] = dataclasses.field(default_factory=set)
    unentered: Any = None
    unstacked: dict[int, int] = dataclasses.field(default_factory=dict)
    _numbers: dict[Any, int] = dataclasses.field(default_factory=dict)
    _last: int = 0
    _parents: dict[Path, Path] = dataclasses.field(default_factory=dict)

    def mode(self, site: Path) -> str:
        return self.modes.get(site, self.default)

    def is_dropless(self, site: Path) -> bool:
        return self.mode(site) == "dropless" and site not in self.weighted

    def fresh_number(self) -> int:
        """A number for an array that equals no other."""
        self._last += 1
        return self._last

    def number(self, key: Any) -> int:
        """The number of the arrays that are computed as `key` says."""
        if key not in self._numbers:
            self._numbers[key] = self.fresh_number()
        return self._numbers[key]

    def note_threshold(self, site: Path, bound: float, step: Any) -> None:
        self.thresholds.setdefault(site, []).append(Threshold(bound, step))

    def dropless_thresholds(self) -> dict[Path, list[Threshold]]:
        """The tests of own queue positions in each layer that is asked to be dropless."""
        by_root: dict[Path, list[Threshold]] = {}
        for site, thresholds in self.thresholds.items():
            if self.is_dropless(site):
                by_root.setdefault(self.root(site), []).extend(thresholds)
        return by_root

    def note_index(self, index: Idx, site: Path) -> None:
        """The queue of `site` is counted by `index`."""
        key = key_of(index)
        self.indices.setdefault(key.node, {})[key] = site

    def sites_of(self, key: IndexKey) -> frozenset[Path]:
        """The sites whose queues are counted by an index, or by one that has assignments in common with it."""
        known = self.indices.get(key.node, {})
        if key in known:
            return frozenset({known[key]})
        return frozenset(site for other, site in known.items() if key.may_be(other))

    def sites_counting(self, key: IndexKey) -> frozenset[Path]:
        """The sites whose queues are counted by an index, or by what an array of the program is converted to."""
        sites = self.sites_of(key)
        number = getattr(getattr(key.node, "wire", None), "number", None)
        return sites | {self.choices[number]} if number in self.choices else sites

    def root(self, site: Path) -> Path:
        while site in self._parents:
            site = self._parents[site]
        return site

    def unite(self, sites: frozenset[Path]) -> None:
        """Queue counts that stand in one value belong to one layer."""
        first, *others = sorted({self.root(s) for s in sites})
        for other in others:
            self._parents[other] = first

    def unite_recomputed(self) -> None:
        """A layer that a rematerialised block computes again is the layer of the forward pass, in reverse order."""
        for signature in {self.signatures[s] for s in self.recomputed}:
            same = sorted(s for s, sig in self.signatures.items() if sig == signature)
            first = [s for s in same if s not in self.recomputed] or self._first_of(same)
            again = [s for s in same if s not in first]
            times = max(len(again) // len(first), 1) if first else 1
            for place, site in enumerate(again if first else ()):
                self.unite(frozenset({first[-1 - place // times % len(first)], site}))

    def _first_of(self, sites: list[Path]) -> list[Path]:
        """The forward passes of layers under two nested checkpoints, where jax marks all three passes as recomputed."""
        first = sites[: len(sites) // 3]
        self.recomputed -= set(first)
        return first

    def bound_together(self, sites: frozenset[Path]) -> set[Path]:
        """The sites whose mode must change with that of `sites`: their layers, and any they may be recomputed as."""
        roots = {self.root(s) for s in sites}
        signatures = {self.signatures[s] for s in self.sources if self.root(s) in roots}
        recomputed = {self.signatures[s] for s in self.recomputed}
        return {s for s in self.sources if self.root(s) in roots or self.signatures[s] in signatures & recomputed}
