"""One Mixture-of-Experts layer, naive and rewritten, beside the best hand-written one and the limit.

A speed-up says little without knowing what is left, so every number stands next to the *limit*: one dense MLP over
A = T·K rows, which does the useful FLOPs of the layer and nothing else.  All variants compute value and gradients with
respect to the input and all parameters, and take turns in one run, so that a busy machine slows all of them.

In: flags.  Out: a table on stdout, and the same as JSON with `--json`.  Times are medians in seconds, memory is what
XLA reserves for temporaries in bytes; neither counts arguments and results.

    python -m moe_xla bench
    python -m moe_xla bench --tokens=1024 --experts=8,64 --form=gshard --json=bench.json
    python -m moe_xla bench --overhead

`--overhead` measures compiling instead of running: what rewriting adds to tracing a deep step, its layers unrolled and
under `lax.scan`, and how long XLA then needs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from moe_xla.bench.layers import FORM_CHOICES, FORMS, Problem
from moe_xla.bench.measure import VARIANTS, measurements
from moe_xla.bench.overhead import overheads
from moe_xla.bench.tables import layer_table, overhead_table

_TOKENS = flags.DEFINE_integer("tokens", Problem.tokens, "T, rows of the layer's input.", lower_bound=1)
_MODEL = flags.DEFINE_integer("model", Problem.model, "d, width of a row.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", Problem.hidden, "f, hidden width of an expert.", lower_bound=1)
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "E, one table for each.")
_CHOICES = flags.DEFINE_integer(
    "choices", None, "K, experts of a token; 2 by default, and what the form fixes otherwise.", lower_bound=1
)
_CAPACITY_FACTOR = flags.DEFINE_float(
    "capacity_factor", Problem.capacity_factor, "Slots of an expert over its mean load.", lower_bound=0.0
)
_FORM = flags.DEFINE_enum("form", Problem.form, list(FORMS), "How the naive layer is written.")
_DTYPE = flags.DEFINE_enum("dtype", Problem.dtype, ["float32", "bfloat16"], "Of the input and the parameters.")
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "What to measure; ratios need the limit.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Calls of each variant; the median counts.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of parameters and input.")
_OVERHEAD = flags.DEFINE_bool("overhead", False, "Measure compiling a deep step instead of running a layer.")
_LAYERS = flags.DEFINE_integer("layers", 12, "Layers of the step that --overhead compiles.", lower_bound=1)
_OVERHEAD_REPEATS = flags.DEFINE_integer("overhead_repeats", 3, "Compilations of that step.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "File to write the measurements to.")


flags.register_validator(
    "variants", lambda names: set(names) <= set(VARIANTS), f"each must be one of {', '.join(VARIANTS)}"
)
flags.register_validator(
    "experts",
    lambda counts: all(count.isdecimal() and int(count) > 0 for count in counts),
    "must be positive integers, separated by commas",
)
flags.register_multi_flags_validator(
    ["form", "choices"],
    lambda values: values["choices"] in (None, FORM_CHOICES.get(values["form"], values["choices"])),
    ", ".join(f"--form={form} goes with --choices={choices}" for form, choices in FORM_CHOICES.items()),
)


def problems() -> list[Problem]:
    """The problems that the flags ask for."""
    return [
        Problem(
            tokens=_TOKENS.value,
            model=_MODEL.value,
            hidden=_HIDDEN.value,
            experts=int(experts),
            choices=_CHOICES.value or FORM_CHOICES.get(_FORM.value, Problem.choices),
            capacity_factor=_CAPACITY_FACTOR.value,
            form=_FORM.value,
            dtype=_DTYPE.value,
        )
        for experts in _EXPERTS.value
    ]


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark that the flags ask for; `argv` holds the name of the program only."""
    if len(argv) > 1:
        raise app.UsageError(f"bench takes flags only, got {argv[1]!r}")
    logging.getLogger("jax").setLevel(logging.WARNING)  # else it tells of each kind of device that is not here
    results = []
    for problem in problems():
        if _OVERHEAD.value:
            found = overheads(problem, _LAYERS.value, _OVERHEAD_REPEATS.value)
            print(overhead_table(problem, found), end="\n\n", flush=True)
            measured: dict[str, Any] = {"overhead": list(map(dataclasses.asdict, found))}
        else:
            layer = measurements(problem, _VARIANTS.value, _REPEATS.value, _SEED.value)
            print(layer_table(problem, layer), end="\n\n", flush=True)
            measured = {"variants": {name: dataclasses.asdict(m) for name, m in layer.items()}}
        results.append({"problem": dataclasses.asdict(problem) | {"capacity": problem.capacity}, **measured})
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "results": results}, file, indent=2)


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the program."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
