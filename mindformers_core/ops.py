"""Functions under the names of MindSpore's `ops` that parallel code uses."""

from mindformers_core.lazy_exports import lazy_exports

_EXPORTS = {".tensor_parallel.functional": "shard"}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
