"""Rewrites naive Mixture-of-Experts layers in a JAX training step to dropless grouped matmuls.

The face of the project: `moe_jit` in place of `jax.jit`, the pure transformation `rewrite`, `verify`, and the values
they report with; `ops` for writing Mixture-of-Experts by hand.
"""

from importlib.metadata import version

from moe_xla import ops
from moe_xla.api import MoeJit, moe_jit, rewrite
from moe_xla.errors import RewriteError
from moe_xla.passes.site import Site
from moe_xla.report import Report
from moe_xla.verify import Verification, verify

__version__ = version("moe_xla")

__all__ = [
    "MoeJit",
    "Report",
    "RewriteError",
    "Site",
    "Verification",
    "__version__",
    "moe_jit",
    "ops",
    "rewrite",
    "verify",
]
