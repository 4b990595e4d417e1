"""What became of each Mixture-of-Experts layer of a program, for people and for programs.

In: the `Site` values that the passes filled in.  Out: a `Report`, which prints as a table and serialises to JSON; the
warnings that keep a fallback from being silent; and the error that `strict=True` asks for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

from absl import logging

from moe_xla.errors import RewriteError
from moe_xla.passes.probe import Outcome
from moe_xla.passes.site import REWRITTEN, Site

_HEADERS = (
    "site", "status", "pattern", "semantics", "T", "E", "K", "C", "drops", "backend",
    "useful GFLOP", "naive GFLOP", "removed MB", "source",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """The Mixture-of-Experts layers found in one traced program.

    Attributes:
      function: name of the traced function.
      semantics: what was asked for, `"dropless"` or `"exact"`.
      sites: one `Site` for each layer, in the program's order.
    """

    function: str
    semantics: str
    sites: tuple[Site, ...]

    def __str__(self) -> str:
        if not self.sites:
            return f"{self.function}: no Mixture-of-Experts layer found; the program is unchanged"
        count = f"{len(self.sites)} Mixture-of-Experts layer{'s' if len(self.sites) > 1 else ''}"
        table = format_table(_HEADERS, [_row(number, site) for number, site in enumerate(self.sites, 1)])
        return "\n".join(
            [f"{self.function}: {count}, {self.semantics} asked for", table, *self.unmet(), *self.probed()]
        )

    def unmet(self) -> tuple[str, ...]:
        """One line for each site that is not what was asked for: what it is, why, and the line that stopped it."""
        numbered = enumerate(self.sites, 1)
        return tuple(_unmet_line(number, site) for number, site in numbered if not self._is_met(site))

    def probed(self) -> tuple[str, ...]:
        """One line for each rewritten site whose numbers were asked for: how they compare with the layer as written."""
        numbered = enumerate(self.sites, 1)
        return tuple(f"site {number} on probes: {site.probed}" for number, site in numbered if site.probed)

    def to_json(self) -> str:
        """The report as a JSON object with the keys `function`, `semantics` and `sites` (the fields of `Site`)."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def _is_met(self, site: Site) -> bool:
        return site.status == REWRITTEN and site.semantics == self.semantics


def log_unmet(report: Report) -> None:
    """Warns of each site that is not what was asked for."""
    for line in report.unmet():
        logging.warning("moe_xla: %s: %s", report.function, line)


def log_unjudged(function: str, outcomes: Iterable[Outcome | None]) -> None:
    """Warns of each site that was to be probed where nothing could be compared."""
    for number, outcome in enumerate(outcomes, 1):
        if outcome is not None and not outcome.is_judged:
            logging.warning("moe_xla: %s: probe of site %d: %s", function, number, outcome)


def require_all_rewritten(report: Report) -> None:
    """Raises `RewriteError`, with every reason, unless there are sites and each of them is rewritten."""
    if report.sites and all(site.status == REWRITTEN for site in report.sites):
        return
    why = "\n".join(report.unmet()) if report.sites else "no Mixture-of-Experts layer was found"
    raise RewriteError(f"{report.function} was not rewritten as strict=True demands: {why}")


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headers, *rows)
    )


def _row(number: int, site: Site) -> tuple[str, ...]:
    sizes = (site.tokens, site.experts, site.choices, site.capacity)
    return (
        str(number),
        site.status,
        site.pattern,
        _or_dash(site.semantics),
        *map(_or_dash, sizes),
        _or_dash(site.drop_rule),
        _or_dash(site.backend),
        f"{site.useful_flops / 1e9:.3f}",
        f"{site.naive_flops / 1e9:.3f}",
        f"{site.removed_bytes / 1e6:.3f}",
        _or_dash(site.source),
    )


def _or_dash(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _unmet_line(number: int, site: Site) -> str:
    became = f"{site.status} as {site.semantics}" if site.status == REWRITTEN else site.status
    culprit = " at ".join(_present([site.primitive, site.reason_source]))
    details = _present([site.reason or "no reason given", culprit and f"({culprit})"])
    place = f" from {site.source}" if site.source else ""
    advice = f"; instead, {site.advice}" if site.advice else ""
    return f"site {number}{place} was {became}: {' '.join(details)}{advice}"


def _present(parts: Iterable[str | None]) -> list[str]:
    return [part for part in parts if part]
