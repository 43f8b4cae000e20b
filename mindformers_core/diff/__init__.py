"""`diff`: where two runs part. Digests of global values, recorded on every rank, assembled and compared."""

from mindformers_core.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, {"recorder": "record_digests"})
