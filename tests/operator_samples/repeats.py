"""Whether a kernel gives the same bits at every call, and its gradient does."""

import time

import mindspore as ms
from mindspore import Tensor

from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import tree_leaves
from operator_samples.calls import Sample, build
from operator_samples.inputs import names_for_samples
from operator_samples.measure import one_line

__all__ = ["repeated"]

_LONGER = 128  # times the last dim, so that kernels are cut into tasks for their pool of threads
_SECONDS = 120  # of the calls of a function, and of its gradient: convolutions of long images take hours
_MOST_RESULTS = 64  # of a call: pieces of 4 of a long tensor would take hours


def repeated(target, text, calls):
    """A dict: `calls`; `forward` and `gradient`, each the number of calls that differ from the first one, or an error;
    and `long`, whether last dims are 128 times as long as in the sample.

    Args:
        target, text: of a `Sample`.
        calls: how many of each, unless they take more than two minutes.
    """
    for stretch in (_LONGER, 1):
        cell, inputs = build(Sample(target, text), names=names_for_samples(stretch=stretch))
        bits = _Bits(cell, inputs)
        if stretch > 1 and not _is_possible(bits):
            continue
        made, found = _differing(bits, calls)
        slopes_made, slopes = _differing(_Bits(_gradient(cell, inputs), inputs), calls)
        counted = [number for number in (made, slopes_made) if number]
        return {"calls": min(counted, default=0), "forward": found, "gradient": slopes, "long": stretch > 1}


class _Bits:
    """A function of inputs, which stay as they are, that gives the bytes of all results."""

    def __init__(self, function, inputs):
        self.function, self.arrays = function, [x.asnumpy().copy() for x in inputs if x.dtype != ms.bfloat16]
        self.inputs = inputs if len(self.arrays) < len(inputs) else None

    def __call__(self):
        inputs = self.inputs or list(map(Tensor, self.arrays))  # some kernels write into their inputs
        found = tree_leaves(self.function(*inputs), Tensor)
        return [(x.float() if x.dtype == ms.bfloat16 else x).asnumpy().tobytes() for x in found]


def _gradient(cell, inputs):
    places = tuple(place for place, x in enumerate(inputs) if is_float(str(x.dtype).lower()))
    if not places:
        return None

    def summed(*given):
        results = [x for x in tree_leaves(cell(*given), Tensor) if is_float(str(x.dtype).lower())]
        return sum((x * x).sum() for x in results)

    return ms.grad(summed, places)


def _is_possible(bits):
    """Whether a function takes its inputs, and gives few results."""
    try:
        return len(bits()) <= _MOST_RESULTS
    except Exception:
        return False


def _differing(bits, calls):
    """The number of calls that were made, and of those that differ from the first one; or 0 and an error."""
    if bits.function is None:
        return 0, "nothing to differentiate"
    end, made, different = time.monotonic() + _SECONDS, 1, 0
    try:
        first = bits()
        while made < calls and time.monotonic() < end:
            made, different = made + 1, different + (bits() != first)
    except Exception as error:
        return 0, one_line(error)
    return made, different
