"""Activations that are computed again or kept on the host, chosen by the names of operators and Cells.

The public names load the module behind them when they are first used: settings and patterns need no MindSpore.
`from mindformers_core import recompute` gives this package, which can be called as its function `recompute`.
"""

import sys
from types import ModuleType

from mindformers_core.lazy_exports import lazy_exports

_EXPORTS = {
    "listing": "list_operators write_curve",
    "recomputing": "recompute swap",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)


class _CallablePackage(ModuleType):
    def __call__(self, *args, **kwargs):
        return self.recompute(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
