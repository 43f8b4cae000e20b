"""Verification of plans: the programs of all ranks in one process, compared with one card, tensor by tensor."""

from mindformers_core.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(__name__, {"verifying": "verify"})
