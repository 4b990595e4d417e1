"""`rewrite` and `moe_jit`: the transformation, and `jax.jit` of it.

In: the user's function and keywords.  Out: a function that traces it, hands the jaxpr to the passes, and evaluates
what they return; `moe_jit` adds what `jax.jit` has, and `explain`.

    >>> import jax, moe_xla
    >>> step = moe_xla.moe_jit(lambda x: x + 1, donate_argnums=0)
    >>> print(step.explain(jax.ShapeDtypeStruct((4,), "float32")))
    <lambda>: no Mixture-of-Experts layer found; the program is unchanged
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, overload

import jax

from moe_xla.errors import RewriteError
from moe_xla.options import (
    STATIC_KEYWORDS,
    Options,
    function_name,
    parse_options,
    require_callable,
    require_jit_keywords,
)
from moe_xla.passes import pipeline
from moe_xla.passes._jax import api_boundary, hide_frames, is_tracing
from moe_xla.report import Report, log_unjudged, log_unmet, require_all_rewritten
from moe_xla.tracing import Capture, capture, is_array, is_jit_disabled, is_tracer, like, with_weak_types

F = TypeVar("F", bound=Callable[..., Any])

hide_frames(__file__)

# The attribute of a function made by `rewrite` that holds the function it was made from.
ORIGINAL = "__moe_xla_original__"


@overload
def rewrite(
    fn: F,
    /,
    *,
    semantics: str = ...,
    patterns: Iterable[str] | None = ...,
    backend: str = ...,
    strict: bool = ...,
    probe: bool = ...,
) -> F: ...
@overload
def rewrite(
    fn: None = None,
    /,
    *,
    semantics: str = ...,
    patterns: Iterable[str] | None = ...,
    backend: str = ...,
    strict: bool = ...,
    probe: bool = ...,
) -> Callable[[F], F]: ...
def rewrite(
    fn: Any = None,
    /,
    *,
    semantics: str = "dropless",
    patterns: Iterable[str] | None = None,
    backend: str = "auto",
    strict: bool = False,
    probe: bool = False,
) -> Any:
    """A function that computes what `fn` does, with its naive Mixture-of-Experts layers as grouped matmuls.

    A pure function transformation: it composes with `jax.jit`, `grad`, `vmap`, `scan` and the others, around and
    inside.  Every call traces `fn` once, over the arrays (of jax and numpy) among the leaves of its arguments; Python
    numbers and all other leaves reach `fn` as they are.  Use it under `jax.jit`, or use `moe_jit`, to trace once per
    signature.  Without Mixture-of-Experts layers the traced program is that of `fn`, equation by equation.  Under
    `jax.disable_jit()` `fn` runs as it is written.

    With the environment variable `MOE_XLA_CHECK=1` at decoration (checked mode, slow), a call with concrete arrays
    also runs the program equation by equation, in the exact semantics whichever is asked for, and raises if a
    rewritten value differs, naming its equation.

    Args:
      fn: the function; without it a decorator is returned.
      semantics: `"dropless"` (no assignment is dropped) or `"exact"` (exactly those that `fn` drops).
      patterns: names of the patterns to look for, all by default; `()` finds nothing.
      backend: name of the backend of `moe_xla.ops` that runs the grouped matmuls, or `"auto"`.
      strict: raise if a layer is refused or none is found; otherwise a refused layer runs as written, and a warning
        is logged with the reason and the source line.
      probe: also compare each layer with its replacement on random numbers, forward and backward, when `fn` is traced,
        and refuse it where they differ.  The arguments are not read, only their shapes and dtypes.  Compiles and runs
        one more program; a program too large to be run twice is not probed, which the report says of each site
        (`Site.probed`).

    Raises:
      TypeError, ValueError: at decoration, for a bad argument.
      RewriteError: at the call, for `strict` and in checked mode.
    """
    options = parse_options("rewrite", semantics, patterns, backend, strict, probe)
    if fn is None:
        return functools.partial(_rewrite, options=options)
    return _rewrite(fn, options)


def moe_jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    semantics: str = "dropless",
    patterns: Iterable[str] | None = None,
    backend: str = "auto",
    strict: bool = False,
    probe: bool = False,
    **jit_keywords: Any,
) -> Any:
    """`jax.jit` of `rewrite(fn)`: a `MoeJit`, or a decorator that makes one if `fn` is not given.

    Args:
      fn, semantics, patterns, backend, strict, probe: as for `rewrite`.  `backend` is a backend of `moe_xla.ops`; the
        deprecated keyword of `jax.jit` with this name is not available.
      **jit_keywords: every other keyword of `jax.jit`, with its meaning there.

    With `MOE_XLA_CHECK=1` every call with concrete arguments is checked as in `rewrite`, before it runs.

    Raises:
      TypeError, ValueError: at decoration, for a bad argument.
      RewriteError: from the call and from `lower`, `trace`, `eval_shape` and `explain`, for `strict`.
    """
    options = parse_options("moe_jit", semantics, patterns, backend, strict, probe)
    require_jit_keywords("moe_jit", jit_keywords)
    if fn is None:
        return functools.partial(MoeJit, options=options, jit_keywords=jit_keywords)
    return MoeJit(fn, options, jit_keywords)


class MoeJit:
    """A rewritten function under `jax.jit`; made by `moe_jit`.

    It is called, lowered and traced as a function under `jax.jit` is.  As a method of a class it binds the instance
    as the first argument, also of `lower`, `trace`, `eval_shape` and `explain`.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], options: Options, jit_keywords: dict[str, Any]) -> None:
        jax.jit(fn)  # what jit refuses is refused in its words
        # The function's own attributes are this object's too, as with `jax.jit`, except where they would hide a method.
        self.__dict__.update({k: v for k, v in getattr(fn, "__dict__", {}).items() if not hasattr(MoeJit, k)})
        functools.update_wrapper(self, fn, updated=())
        self.__name__ = function_name(fn)
        self._options = options
        self.static_keywords = {name: jit_keywords[name] for name in STATIC_KEYWORDS if name in jit_keywords}
        self._step = _step_of(fn, options)
        self._jitted: Any = jax.jit(self._step, **jit_keywords)
        self._signature: Any = jax.jit(_signature_of(fn), **self.static_keywords)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, compiling it on the first call with a signature."""
        if self._options.check:
            _check_call(self.__wrapped__, args, kwargs, self._options)
        return self._jitted(*args, **kwargs)

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for the arguments (arrays or `jax.ShapeDtypeStruct`): as of `jax.jit`."""
        lowered: jax.stages.Lowered = self._jitted.lower(*args, **kwargs)
        return lowered

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step for the arguments: as of `jax.jit`."""
        traced: jax.stages.Traced = self._jitted.trace(*args, **kwargs)
        return traced

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the step's outputs: as of `jax.jit`."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets the compiled programs and the reports of all signatures."""
        self._jitted.clear_cache()
        self._step.reports.clear()

    @api_boundary
    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """What became of each layer for these arguments (arrays or `jax.ShapeDtypeStruct`); runs and compiles nothing.

        Traces the step unless it has been traced for this signature; a later call uses that trace.
        """
        with jax.disable_jit(False):
            self._jitted.trace(*args, **kwargs)
            return self._step.reports[self._signature.eval_shape(*args, **kwargs)]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMoeJit(self, instance)

    def __repr__(self) -> str:
        return f"<moe_jit of {self.__wrapped__!r}>"


class BoundMoeJit:
    """A `MoeJit` read from an instance, which is the first argument of everything but `clear_cache`."""

    def __init__(self, step: MoeJit, instance: Any) -> None:
        # As the wrapped function a bound method is what gives `inspect.signature` the parameters without the instance.
        functools.update_wrapper(self, types.MethodType(step.__wrapped__, instance), updated=())
        self.step = step
        self.instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of `MoeJit`."""
        return self.step(self.instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As of `MoeJit`."""
        return self.step.lower(self.instance, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As of `MoeJit`."""
        return self.step.trace(self.instance, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `MoeJit`."""
        return self.step.eval_shape(self.instance, *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """As of `MoeJit`."""
        return self.step.explain(self.instance, *args, **kwargs)

    def clear_cache(self) -> None:
        """As of `MoeJit`."""
        self.step.clear_cache()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundMoeJit):
            return NotImplemented
        return self.step is other.step and self.instance is other.instance

    def __hash__(self) -> int:
        return hash((self.step, id(self.instance)))


def checked_differences(captured: Capture, options: pipeline.PassOptions) -> tuple[str, ...]:
    """What `moe_xla.passes.check` says of each equation whose rewritten value differs, on the capture's own inputs."""
    from moe_xla.passes import check

    return tuple(check.compare_every_equation(captured.closed, captured.inputs, options))


def compared_sites(captured: Capture, options: pipeline.PassOptions) -> pipeline.Rewritten:
    """The sites of a capture, each compared with the layer as written on the capture's own inputs."""
    return pipeline.compare_sites(captured.closed, captured.inputs, options)


def _rewrite(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    require_callable("rewrite", fn)

    @like(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        if is_jit_disabled():
            return fn(*args, **kwargs)
        captured = capture(fn, args, kwargs, is_array)
        if options.check and captured.is_concrete:
            _raise_differences(captured, options)
        outputs, _ = _evaluate(fn, captured, options)
        return outputs

    setattr(rewritten, ORIGINAL, fn)
    return rewritten


class _Step:
    """What `moe_jit` hands to `jax.jit`: there an argument is traced if and only if it is a tracer.

    jit keeps the traces and programs of a function as long as the function lives, whoever calls jit on it.  So one
    `_Step` stands for a function and is kept as long as that lives, and refers to it weakly: as long as something can
    call the step, a `MoeJit` holds the function.

    Under `jax_debug_nans` jit also calls it to run untraced, to find the operation that made a NaN: as `fn` is written.
    """

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(fn, name):
                setattr(self, name, getattr(fn, name))
        self.__name__ = function_name(fn)
        self.reports: dict[Hashable, Report] = {}
        self._options = options
        self._fn = _reference(fn)

    @property
    def __wrapped__(self) -> Callable[..., Any] | None:
        """The function, where jax finds its signature and source."""
        return self._fn()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self.__wrapped__
        assert fn is not None
        if is_jit_disabled() or not is_tracing():
            return fn(*args, **kwargs)
        outputs, report = _evaluate(fn, capture(fn, args, kwargs, is_tracer), self._options)
        self.reports[_signature(*args, **kwargs)] = report
        return outputs


_STEPS: weakref.WeakKeyDictionary[Callable[..., Any], dict[Options, _Step]] = weakref.WeakKeyDictionary()


def _step_of(fn: Callable[..., Any], options: Options) -> _Step:
    """The step of this function, the same one for every `moe_jit` of it with these options."""
    try:
        steps = _STEPS.setdefault(fn, {})
    except TypeError:  # it has no hash or no weak references: nothing can be kept for it
        return _Step(fn, options)
    step = steps.get(options)
    if step is None or step.__wrapped__ is not fn:  # another function may be equal to this one
        step = steps[options] = _Step(fn, options)
    return step


def _reference(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """A weak reference to `fn`, if it can have one."""
    try:
        return weakref.ref(fn)
    except TypeError:
        return lambda: fn


def _evaluate(fn: Callable[..., Any], captured: Capture, options: Options) -> tuple[Any, Report]:
    rewritten = pipeline.rewrite_jaxpr(captured.closed, options.passes)
    report = Report(function_name(fn), options.passes.semantics, rewritten.sites)
    log_unmet(report)
    log_unjudged(report.function, rewritten.outcomes)
    if options.strict:
        require_all_rewritten(report)
    outputs = with_weak_types(rewritten.evaluate(*captured.inputs), captured.closed)
    return captured.rebuild(outputs), report


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> None:
    captured = capture(fn, args, kwargs, is_array)
    if captured.is_concrete:
        _raise_differences(captured, options)


def _raise_differences(captured: Capture, options: Options) -> None:
    differences = checked_differences(captured, options.passes)
    if differences:
        raise RewriteError("checked mode found rewritten equations that differ:\n" + "\n".join(differences))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Signature:
    """What `jax.jit` keys a trace by: static arguments by value, the leaves of the others by type.

    As a pytree without leaves it can be the output of a traced function.
    """

    arguments: tuple[Hashable, ...]
    keywords: tuple[tuple[str, Hashable], ...]


def _signature_of(fn: Callable[..., Any]) -> Callable[..., _Signature]:
    """A function with the parameters of `fn` that returns the signature, under a jit with its static arguments."""

    @like(fn)
    def signature(*args: Any, **kwargs: Any) -> _Signature:
        return _signature(*args, **kwargs)

    return signature


def _signature(*args: Any, **kwargs: Any) -> _Signature:
    return _Signature(tuple(map(_key, args)), tuple((name, _key(kwargs[name])) for name in sorted(kwargs)))


def _key(argument: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(argument)
    if not all(map(is_tracer, leaves)):
        return type(argument), argument
    return tree, tuple(map(jax.typeof, leaves))
