"""A corpus of naive Mixture-of-Experts programs, written the ways people write them; see `form.Form`."""

from . import composed, layers, lists, loops, maps, orders, programs, queues, scatters, switches  # noqa: F401
from .form import FORMS, Form

__all__ = ["FORMS", "Form"]
