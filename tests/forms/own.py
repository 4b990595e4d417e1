"""Whether a form is itself right, without the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .check import assert_close, quick_jit, slot_arrays, tolerance
from .form import Form


def _rows(form: Form, y) -> np.ndarray:
    return np.asarray(y, np.float64).reshape(form.rows or form.tokens, -1)


def own_errors(form: Form, dtype=jnp.float32) -> list[str]:
    """What is wrong with a form: an empty list where it is as its description says."""
    errors = []
    params, x = form.inputs(dtype)
    victim = (form.rows or form.tokens) // 3

    @quick_jit
    def run(params, x):
        moved = x.reshape(form.rows or form.tokens, -1).at[victim].add(0.7).reshape(x.shape)
        forward = form.at(form.loose)
        reference = None if form.dense is None else form.dense(params, x)
        return forward(params, x)[0], forward(params, moved)[0], form.layer(params, x, form.tight)[0], reference

    loose, moved, tight, reference = run(params, x)
    if not np.isfinite(_rows(form, loose)).all():
        errors.append("its output is not finite")
    # A row that changed lost at least one of its assignments.
    dropped = np.any(_rows(form, loose) != _rows(form, tight), axis=1).mean() / form.choices
    if dropped < 0.1:
        errors.append(f"only {dropped:.0%} of the assignments are known to drop")
    if reference is not None:
        try:
            assert_close(loose, reference, tolerance(form, dtype))
        except AssertionError as error:
            errors.append(f"differs from the dense reference: {error}")
    if not slot_arrays(form, jax.make_jaxpr(form.at(form.tight))(params, x).jaxpr, form.tight):
        errors.append("its slot arrays cannot be told by their shapes")
    if mistaken := slot_arrays(form, jax.make_jaxpr(form.step(form.loose))(params, x).jaxpr, form.tight):
        errors.append(f"these arrays look like slot arrays: {mistaken}")
    # Without drops the tokens do not see each other.
    changed = np.abs(_rows(form, moved) - _rows(form, loose)).max(1) > tolerance(form, dtype)
    if not form.mixes_tokens and np.flatnonzero(changed).tolist() != [victim]:
        errors.append(f"moving token {victim} changes rows {np.flatnonzero(changed).tolist()}")
    return errors
