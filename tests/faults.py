"""Faults of the passes themselves, which are logged, and then leave the user's step as it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from absl import logging

INTERNAL_FAILURES = ("internal failure of the", "loops over experts stay as written:", "ragged dots run as written:")


@contextlib.contextmanager
def noted_faults() -> Iterator[list[str]]:
    """Collects the internal failures that are logged, whatever the verbosity."""
    faults: list[str] = []
    warning = logging.warning

    def noted(message: str, *args: Any) -> None:
        text = message % args
        if is_internal_failure(text):
            faults.append(text)
        warning(message, *args)

    with mock.patch.object(logging, "warning", noted):
        yield faults


def is_internal_failure(text: str) -> bool:
    """Whether a warning, or a reason in a report, tells of a fault of the passes themselves."""
    return any(failure in text for failure in INTERNAL_FAILURES)
