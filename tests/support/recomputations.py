"""How often calls are made again in a backward pass."""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

from mindformers_core.recompute.keeping import Recomputation

__all__ = ["count_recomputations"]


@contextmanager
def count_recomputations():
    """Count calls that are made again while it is open: a `Counter` of the code objects of their functions."""
    counted, run = Counter(), Recomputation._run

    def counting(call):
        counted[call.function.__code__] += 1
        run(call)

    with patch.object(Recomputation, "_run", counting):
        yield counted
