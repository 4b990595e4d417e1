"""Compares a function with its rewritten self on inputs the user trusts.

In: a function and concrete arguments.  Out: a `Verification`: for each output array how far the two runs differ, and
what became of each layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_xla.api import ORIGINAL, BoundMoeJit, MoeJit, checked_differences, compared_sites, moe_jit
from moe_xla.options import parse_options, require_callable
from moe_xla.passes import pipeline
from moe_xla.report import Report, format_table
from moe_xla.tracing import Capture, capture, is_array


@dataclasses.dataclass(frozen=True)
class OutputDifference:
    """How far one output array of the rewritten function is from that of the function as written.

    Attributes:
      path: where the array stands in the output, as `jax.tree_util.keystr` writes it.
      type: dtype and shape as jax writes them, or both types if they differ.
      max_abs: largest absolute difference; inf where only one of two values is finite, or the types differ.
      max_rel: `max_abs` over the largest finite magnitude in the array as written.
    """

    path: str
    type: str
    max_abs: float
    max_rel: float


@dataclasses.dataclass(frozen=True)
class SiteComparison:
    """How one layer compares with its replacement on the same inputs, whatever other layers do.

    Attributes:
      site: number of the site in the report, from 1.
      error: largest difference, relative to the layer as written, of the arrays that stand for its rows (root mean
        squares of an array).
      arrays: how many such arrays were compared.
      differs: whether they differ by more than rounding explains, or one token's rows move those of others.
      text: the same in words, or why nothing could be compared.
    """

    site: int
    error: float
    arrays: int
    differs: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
      outputs: one `OutputDifference` for each output array.
      report: what became of each layer; without a site both runs are the same program.
      different_equations: one line for each equation whose rewritten value differs, if `every_equation` was asked.
      sites: one `SiteComparison` for each rewritten layer.
    """

    outputs: tuple[OutputDifference, ...]
    report: Report
    different_equations: tuple[str, ...] = ()
    sites: tuple[SiteComparison, ...] = ()

    @property
    def max_abs(self) -> float:
        """Largest absolute difference of all outputs."""
        return max((output.max_abs for output in self.outputs), default=0.0)

    @property
    def max_rel(self) -> float:
        """Largest relative difference of all outputs."""
        return max((output.max_rel for output in self.outputs), default=0.0)

    def ok(self, rtol: float = 1e-5, atol: float = 0.0) -> bool:
        """Whether each output is within `atol` or within `rtol` of its array's magnitude, and nothing else differs.

        An equation, and a site by itself, is judged by what its own dtypes explain, not by `rtol`.
        """
        within = all(output.max_abs <= atol or output.max_rel <= rtol for output in self.outputs)
        return within and not self.different_equations and not any(site.differs for site in self.sites)

    def __str__(self) -> str:
        rows = [(out.path, out.type, f"{out.max_abs:.3g}", f"{out.max_rel:.3g}") for out in self.outputs]
        rows.append(("all", "", f"{self.max_abs:.3g}", f"{self.max_rel:.3g}"))
        table = format_table(("output", "type", "max abs error", "max rel error"), rows)
        sites = [f"site {site.site} on these inputs: {site.text}" for site in self.sites]
        return "\n".join([table, *self.different_equations, str(self.report), *sites])


def verify(
    fn: Callable[..., Any],
    /,
    *args: Any,
    semantics: str = "exact",
    patterns: Iterable[str] | None = None,
    backend: str = "auto",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    every_equation: bool = False,
    **kwargs: Any,
) -> Verification:
    """Runs `fn` as written and rewritten, each under `jax.jit`, on the same arguments, and compares the outputs.

    With `semantics="dropless"` the outputs differ wherever `fn` drops assignments, and rightly so.  Each rewritten
    layer is also compared by itself, in the exact semantics whichever is asked for: what it computes, forward and
    backward, from the very arrays that the layer as written is given, and what one token's rows move (see `probe` of
    `moe_xla.rewrite`).  Nothing is donated: both runs need the arguments.

    Args:
      fn: the function; for one made by `moe_jit` or `rewrite`, what it was made from (with its static arguments).
      *args, **kwargs: what to call it with; a keyword of `verify` itself is not handed on (use `functools.partial`).
      semantics, patterns, backend: as for `moe_xla.rewrite`.
      static_argnums, static_argnames: as for `jax.jit`.
      every_equation: also compare each rewritten value, equation by equation, in the exact semantics (slow).

    Raises:
      TypeError, ValueError: for a bad argument.
    """
    require_callable("verify", fn)
    options = parse_options("verify", semantics, patterns, backend)
    given = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    fn, args, static = _as_written(fn, args, {name: value for name, value in given.items() if value is not None})
    expected = jax.jit(fn, **static)(*args, **kwargs)
    rewritten = moe_jit(fn, semantics=semantics, patterns=patterns, backend=backend, **static)
    actual = rewritten(*args, **kwargs)
    report = rewritten.explain(*args, **kwargs)
    differences: tuple[str, ...] = ()
    sites: tuple[SiteComparison, ...] = ()
    if every_equation or report.sites:
        captured = capture(fn, args, kwargs, is_array)
        differences = checked_differences(captured, options.passes) if every_equation else ()
        sites = _site_comparisons(captured, options.passes) if report.sites else ()
    return Verification(_differences(expected, actual), report, differences, sites)


def _site_comparisons(captured: Capture, options: pipeline.PassOptions) -> tuple[SiteComparison, ...]:
    outcomes = enumerate(compared_sites(captured, options).outcomes, 1)
    return tuple(
        SiteComparison(number, outcome.error, outcome.arrays, outcome.difference is not None, str(outcome))
        for number, outcome in outcomes
        if outcome is not None
    )


def _as_written(
    fn: Callable[..., Any], args: tuple[Any, ...], static: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """The user's own function, arguments and static keywords behind what `moe_jit` or `rewrite` made of them."""
    if isinstance(fn, BoundMoeJit):
        args = (fn.instance, *args)
        fn = fn.step
    if isinstance(fn, MoeJit):
        return fn.__wrapped__, args, {**fn.static_keywords, **static}
    return getattr(fn, ORIGINAL, fn), args, static


def _differences(expected: Any, actual: Any) -> tuple[OutputDifference, ...]:
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(expected)
    return tuple(
        _difference(jax.tree_util.keystr(path) or "output", want, got)
        for (path, want), got in zip(paths_and_leaves, jax.tree.leaves(actual), strict=True)
    )


def _difference(path: str, expected: jax.Array, actual: jax.Array) -> OutputDifference:
    want_type, got_type = jax.typeof(expected), jax.typeof(actual)
    if want_type != got_type:
        return OutputDifference(path, f"{want_type} became {got_type}", np.inf, np.inf)
    want, got = _wide(expected), _wide(actual)
    # Equal infinities subtract to NaN, and a NaN that stays a NaN is no difference.
    same = (want == got) | (np.isnan(want) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(got - want))
    max_abs = float(np.max(np.nan_to_num(difference, nan=np.inf, posinf=np.inf), initial=0.0))
    magnitude = float(np.max(np.abs(want), where=np.isfinite(want), initial=0.0))
    max_rel = 0.0 if max_abs == 0.0 else float(np.divide(max_abs, magnitude)) if magnitude else np.inf
    return OutputDifference(path, str(want_type), max_abs, max_rel)


def _wide(array: jax.Array) -> np.ndarray[Any, Any]:
    """The values of any output as float64 or complex128."""
    if array.dtype == jax.dtypes.float0:
        return np.zeros(array.shape)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).astype(np.complex128 if jnp.iscomplexobj(array) else np.float64)
