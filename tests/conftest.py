"""Settings and fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for one test."""
    with jax.enable_x64(True):
        yield
