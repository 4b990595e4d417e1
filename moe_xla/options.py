"""Turns the keywords of `rewrite`, `moe_jit` and `verify` into one validated value.

In: what the user wrote.  Out: `Options`, or an error raised where the user wrote it, at decoration, that names the
argument, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from moe_xla.ops.backends import AUTO, BACKENDS
from moe_xla.passes import pipeline

CHECK_VARIABLE = "MOE_XLA_CHECK"
STATIC_KEYWORDS = ("static_argnums", "static_argnames")
# `backend` names the backend of moe_xla.ops here; jit's own keyword of that name is deprecated.
JIT_KEYWORDS = tuple(name for name in inspect.signature(jax.jit).parameters if name not in ("fun", "backend"))
OWN_KEYWORDS = ("semantics", "patterns", "backend", "strict", "probe")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a transformation was asked to do: see `moe_xla.rewrite`."""

    passes: pipeline.PassOptions
    strict: bool
    check: bool


def parse_options(
    api: str,
    semantics: str,
    patterns: Iterable[str] | None,
    backend: str,
    strict: bool = False,
    probe: bool = False,
) -> Options:
    """The validated `Options` of a call of `api`, the name that errors are raised under."""
    _require_member(api, "semantics", semantics, pipeline.SEMANTICS)
    _require_member(api, "backend", backend, (AUTO, *BACKENDS))
    for name, value in (("strict", strict), ("probe", probe)):
        if not isinstance(value, bool):
            raise TypeError(f"{api}: {name} must be True or False, got {value!r}")
    passes = pipeline.PassOptions(
        semantics=semantics, patterns=_pattern_set(api, patterns), backend=backend, probe=probe
    )
    return Options(passes, strict, check=_check_requested(api))


def require_callable(api: str, fn: Any) -> None:
    """Raises a TypeError that names `api` unless `fn` can be called."""
    if not callable(fn):
        raise TypeError(f"{api}: fn must be a callable, got {fn!r} of type {type(fn).__name__}")


def require_jit_keywords(api: str, keywords: Mapping[str, Any]) -> None:
    """Raises a TypeError that names the first keyword that neither moe_xla nor `jax.jit` has."""
    for name in keywords:
        if name not in JIT_KEYWORDS:
            allowed = ", ".join((*OWN_KEYWORDS, *JIT_KEYWORDS))
            raise TypeError(f"{api} got an unexpected keyword argument {name!r}; allowed are {allowed}")


def function_name(fn: Callable[..., Any]) -> str:
    """The name jax would show for `fn`: that of the innermost function of partials, or the class of a callable."""
    while not hasattr(fn, "__name__") and hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _require_member(api: str, argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{api}: {argument} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _pattern_set(api: str, patterns: Iterable[str] | None) -> frozenset[str]:
    if patterns is None:
        return pipeline.PassOptions().patterns
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise TypeError(f"{api}: patterns must be an iterable of names, e.g. {pipeline.PATTERNS}; got {patterns!r}")
    chosen = tuple(patterns)
    for name in chosen:
        _require_member(api, "each name in patterns", name, pipeline.PATTERNS)
    return frozenset(chosen)


def _check_requested(api: str) -> bool:
    value = os.environ.get(CHECK_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{api}: environment variable {CHECK_VARIABLE} must be '1', '0' or unset; got {value!r}")
    return value == "1"
