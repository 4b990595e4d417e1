"""The only module that imports private parts of jax.

`bind_checkpoint` turns the constants of a traced body into inputs, as `jax.checkpoint` itself does; there is no public
way to.  `source_of` needs the user's frame of an equation; `jax.extend.source_info_util` is its public place where it
exists.  `is_tracing` tells a call that is traced from one that runs; nothing public says so without leaving an
equation in the trace.  `hide_frames` and `api_boundary` keep our frames out of the tracebacks of the user's errors, as
jax does with its own; only the half for source lines is public.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np
from jax._src import core, source_info_util, traceback_util
from jax._src.interpreters import partial_eval

# A decorator: jax leaves its own and hidden frames out of the traceback of an error that leaves the function.
api_boundary = traceback_util.api_boundary


def hide_frames(file: str) -> None:
    """Code in `file` is no user's code: jax leaves it out of source lines and of filtered tracebacks."""
    source_info_util.register_exclusion(file)
    traceback_util.register_exclusion(file)


def array_type(aval: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a value of type `aval`; one that is no array, as a token, counts as a single object."""
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(object))


def is_tracing() -> bool:
    """Whether some transformation is tracing, so that operations are staged or transformed and not run."""
    return not core.trace_state_clean()


def source_of(eqn: Any) -> str | None:
    """`file:line (function)` of an equation in the user's code, or None."""
    info = getattr(eqn, "source_info", None)
    return (source_info_util.summarize(info) or None) if info is not None else None


def at_source(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """Equations traced inside bear the source line and the named scopes of `eqn`."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=name_stack)


def derivative_rule(eqn: Any) -> Any:
    """The jaxpr of the rule of a `custom_jvp_call`, its constants, and which of its tangents are zeros."""
    count = len(eqn.invars)
    return eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * count)


@functools.cache
def parameters_of(operation: Any) -> dict[str, Any]:
    """The parameters with which an elementwise operation of `jax.lax` binds its primitive in this version of jax."""
    operand = jax.ShapeDtypeStruct((), np.float32)
    (eqn,) = jax.make_jaxpr(operation)(operand, operand).eqns
    return dict(eqn.params)


def bind_equation(eqn: Any, inputs: Any) -> list[Any]:
    """Runs an equation on arrays (of any shape its primitive takes); returns its results as a list."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*subfuns, *inputs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


# What jax 0.12 calls an operation that it has a program for.
COMPOSITE = "call_hi_primitive"


def expansion(eqn: Any) -> Any:
    """The closed jaxpr that a composite operation stands for."""
    operation = eqn.params["_prim"]

    def expanded(*flat: Any) -> list[Any]:
        return jax.tree.leaves(operation.expand(*jax.tree.unflatten(operation.in_tree, flat)))

    return jax.make_jaxpr(expanded)(*(v.aval for v in eqn.invars))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants of its body, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # from jax 0.12 on
    return len(consts), len(carry)


def bind_checkpoint(eqn: Any, body: Any, arrays: Any) -> list[Any]:
    """Runs `body` as the body of a checkpoint equation: with its policy, and rematerialised as it is."""
    avals = [jax.typeof(a) for a in arrays]
    closed = jax.make_jaxpr(body)(*avals)
    jaxpr = partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    return list(eqn.primitive.bind(*closed.consts, *arrays, **{**eqn.params, "jaxpr": jaxpr}))
