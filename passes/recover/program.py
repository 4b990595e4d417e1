"""The program as the recover pass sees it: equations as steps, arrays as wires.

A jaxpr's inner calls are inlined, so one inner equation may stand for several steps; `Wire` gives each array its own
identity.  Every wire has the step that computes it as written, and, beside it, the `Value` the algebra found.

In: jaxpr equations.  Out: `Wire` and `Step` objects.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_xla.passes.recover.values import Value


@dataclasses.dataclass(eq=False)
class Wire:
    """One array of the program.

    `step` computes it as written: None for an input, a `Scope` where a scan or checkpoint body was entered.  `value` is
    what the algebra knows.  `changed` says that the rewritten program holds another array here than the program as
    written (dropless), so the step must not be run on the original inputs.  `slots` names the sites whose slot axis the
    array has, `dense` those of which it holds the work of every expert, or a matrix for every assignment: it must not
    be built.  `tainted` names the sites whose queue positions flow into it.  Two wires of the same `number` hold the
    same array, also across scopes.  `loads` are the indices whose assignments are counted in it, `is_count` is whether
    it is such a count as it is, `mean_of` is the number that would make it a mean, and of what (see `loads`).  `told`
    are, with how many choices a token has, the indices of whose assignments it tells something one by one: which are
    kept, where dropless keeps them all, or which go to an expert.
    """

    shape: tuple[int, ...]
    dtype: Any
    step: Any = None
    index: int = 0
    value: Value | None = None
    definition: Value | None = None
    changed: bool = False
    tainted: frozenset[Any] = frozenset()
    slots: frozenset[Any] = frozenset()
    dense: frozenset[Any] = frozenset()
    number: Any = None
    loads: frozenset[Any] = frozenset()
    is_count: bool = False
    mean_of: tuple[float, str] | None = None
    told: frozenset[tuple[Any, int]] = frozenset()

    @property
    def layers(self) -> frozenset[Any]:
        """The sites whose rewriting makes the array superfluous."""
        return self.slots | self.dense


@dataclasses.dataclass(eq=False)
class Step:
    """One equation of the program, with its inputs and outputs as wires.  `refusal` says why no rule applied,
    `source` is the equation that knows the line in the user's code."""

    eqn: Any
    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...] = ()
    refusal: str | None = None
    source: Any = None

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)
