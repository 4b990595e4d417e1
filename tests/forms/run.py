"""Rewrites every form and prints one line for each: a development tool.

    python -m tests.forms.run [name-filter ...] [--mode exact|dropless] [--grad] [--x64] [--own] [--list] [--traceback]

Run from the root of the repository.  A filter is a substring of the form's name, or `=name` for exactly that form.
`--grad` takes value and gradients, otherwise the forward pass only.  `--own` judges the forms themselves, without
the compiler: that they drop when tight, agree with the dense reference when loose, and keep tokens apart.
A line ends in `ok`, or says the largest relative error, the slot arrays that are left, the report or the exception.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from absl import logging

from . import FORMS
from .check import max_errors, quick_jit, rewrite_and_run, site_errors, tolerance
from .own import own_errors


def judge(form, mode: str, grad: bool, dtype) -> str:
    build = form.step if grad else form.at
    inputs = form.inputs(dtype)
    outcome = rewrite_and_run(form, build(form.tight), mode, inputs)
    expected = quick_jit(build(form.tight if mode == "exact" else form.loose))(*inputs)
    errors = max_errors(outcome.outputs, expected)
    path, error = max(errors, key=lambda pair: float("inf") if math.isnan(pair[1]) else pair[1])
    bad = [] if error <= tolerance(form, dtype) else [f"ERROR {error:.1e} at {path}"]
    if outcome.slot_arrays:
        bad.append(f"SLOT ARRAYS {len(outcome.slot_arrays)}: {', '.join(dict.fromkeys(outcome.slot_arrays))}"[:300])
    if wrong := site_errors(form, outcome.sites, mode):
        bad.append("REPORT " + "; ".join(wrong))
    return " | ".join(bad) if bad else f"ok {error:.0e}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*")
    parser.add_argument("--mode", choices=("exact", "dropless"), default="exact")
    for flag in ("grad", "x64", "own", "list", "traceback"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.ERROR)  # the refusals are printed here
    jax.config.update("jax_enable_x64", options.x64)
    dtype = jnp.float64 if options.x64 else jnp.float32
    chosen = [
        form
        for name, form in FORMS.items()
        if not options.filters or any(f[1:] == name if f[:1] == "=" else f in name for f in options.filters)
    ]
    failures = 0
    for form in chosen:
        if options.list:
            print(f"{form.name:32s} {form.exercises}")
            continue
        start = time.perf_counter()
        try:
            if options.own:
                text = " | ".join(own_errors(form, dtype)) or "ok"
            else:
                text = judge(form, options.mode, options.grad, dtype)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:400]}"
            if options.traceback:
                traceback.print_exc()
        failures += not text.startswith("ok")
        print(f"{form.name:32s} {time.perf_counter() - start:5.1f}s  {text}", flush=True)
    if not options.list:
        print(f"{len(chosen) - failures} of {len(chosen)} ok")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
