"""`diff`: where two runs part. Digests of global values, recorded on every rank, assembled and compared."""

from mindformers_core.lazy_exports import lazy_exports

_PUBLIC = {"record_digests": "recorder"}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
