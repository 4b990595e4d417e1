"""What a backend of the grouped matmuls promises, as data."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Contract:
    """Where a backend may be used, and what it does at the edges.

    Attributes:
      platforms: platforms it runs on, as jax names them when lowering.
      dtypes: names of the operand dtypes it accepts, in any mixture.
      group_alignment: every group size must be a multiple of this; sizes are on the device, so only 1 can be assumed.
      k_alignment, n_alignment: the contracted and the produced axis must be multiples of these.
      empty_groups: the weight gradient of a group without rows.
      tails: rows past the last group, in and out.
      non_finite_weights: how far a NaN or infinity in one expert's weights reaches.
      temporaries: arrays it needs beside operands and result.
      needs: what else the machine must have, in words.
      min_jax: the oldest jax version it is known to work with.
    """

    platforms: tuple[str, ...]
    dtypes: tuple[str, ...]
    group_alignment: int = 1
    k_alignment: int = 1
    n_alignment: int = 1
    empty_groups: str = "exactly zero"
    tails: str = "never read into a sum, exactly zero out"
    non_finite_weights: str = "only the rows of that expert, values as computed"
    temporaries: str = "none"
    needs: tuple[str, ...] = ()
    min_jax: tuple[int, ...] = (0, 10, 2)


@dataclasses.dataclass(frozen=True)
class Need:
    """What one grouped matmul asks of a backend.

    Attributes:
      platform: the platform it is lowered for.
      dtypes: operand dtypes.
      k, n: sizes of the contracted and the produced axis.
    """

    platform: str
    dtypes: tuple[np.dtype, ...]
    k: int
    n: int


def refusal(contract: Contract, need: Need) -> str | None:
    """Why `contract` does not cover `need`, or None if it does."""
    if jax.__version_info__ < contract.min_jax:
        return f"it needs jax {'.'.join(map(str, contract.min_jax))}, not {jax.__version__}"
    if need.platform not in contract.platforms:
        return f"it runs on {', '.join(contract.platforms)}, not on {need.platform}"
    foreign = sorted({np.dtype(d).name for d in need.dtypes} - set(contract.dtypes))
    if foreign:
        return f"it takes {', '.join(contract.dtypes)}, not {', '.join(foreign)}"
    if contract.group_alignment != 1:
        return f"it needs group sizes in multiples of {contract.group_alignment}, and they are known only on the device"
    for axis, size, step in (("k", need.k, contract.k_alignment), ("n", need.n, contract.n_alignment)):
        if size % step:
            return f"it needs {axis} in multiples of {step}, not {size}"
    return None
