"""Real text that every machine with Python has: the source of the standard library.

In: sizes and a seed.  Out: batches of bytes, at random places of the text, the same for the same seed.
"""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np


def read_text() -> np.ndarray:
    """The modules at the top of the standard library, in order of their names, as one array of bytes [N] uint8."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise FileNotFoundError(f"no Python source in {sysconfig.get_path('stdlib')}")
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def batches(text: np.ndarray, steps: int, sequences: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """`steps` arrays [sequences, length] of consecutive bytes of `text`."""
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        starts = generator.integers(len(text) - length, size=sequences)
        yield np.stack([text[start : start + length] for start in starts])
