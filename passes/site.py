"""What the compiler says about each Mixture-of-Experts layer it found.

A `Site` is a plain value: the passes fill it in, `moe_xla.report` prints it.  Sizes are counts, FLOPs count a
multiply-add as two, bytes are bytes.
"""

from __future__ import annotations

import dataclasses

REWRITTEN = "rewritten"
PADDED = "padded"
KEPT = "kept"


@dataclasses.dataclass(frozen=True)
class Site:
    """One Mixture-of-Experts layer, its forward and backward together.

    Attributes:
      status: `"rewritten"`, `"padded"` (sparse dispatch, padded experts) or `"kept"` (refused, runs as written).
      pattern: name of the pattern that found the site, e.g. `"einsum_dispatch"`.
      semantics: `"dropless"` or `"exact"` for what the rewritten site computes, None when it was kept.
      source: `file:line (function)` of the equation that computes the slot positions, in the user's code.
      reason: why the site is not what was asked for (kept, padded, or exact although dropless was asked), else None.
      primitive: the first primitive that stopped the rewrite, else None.
      reason_source: `file:line (function)` of that primitive in the user's code, else None.
      advice: what to write instead, where something is known to help.
      tokens: T, rows of the layer's input (all groups together).
      experts: E.
      choices: K.
      capacity: C, slots per expert and group, or None when the program has no bound.
      drop_rule: in words, which assignments the naive program drops.
      backend: name of the ops backend that runs the grouped matmuls, or None.
      useful_flops: FLOPs of the expert matmuls on routed rows, forward and backward, per call of the step.
      naive_flops: FLOPs of the same matmuls and of dispatch and combine in the program as written.
      removed_bytes: bytes of the arrays over the slot axis that the rewritten program no longer builds.
      probed: what the numeric guard says of the rewritten site, None where it was not asked.
    """

    status: str
    pattern: str
    semantics: str | None = None
    source: str | None = None
    reason: str | None = None
    primitive: str | None = None
    reason_source: str | None = None
    advice: str | None = None
    tokens: int = 0
    experts: int = 0
    choices: int = 0
    capacity: int | None = None
    drop_rule: str | None = None
    backend: str | None = None
    useful_flops: int = 0
    naive_flops: int = 0
    removed_bytes: int = 0
    probed: str | None = None
