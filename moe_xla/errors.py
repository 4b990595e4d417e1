"""The exception that moe_xla itself raises about a program; everything else that surfaces is jax's or the user's."""

from __future__ import annotations


class RewriteError(Exception):
    """A program was not rewritten as `strict=True` demands, or checked mode found an equation that differs."""
