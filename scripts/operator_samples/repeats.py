"""Whether a kernel gives the same bits at every call, and its gradient does."""

import mindspore as ms
from mindspore import Tensor

from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import tree_leaves
from operator_samples.calls import Sample, build
from operator_samples.inputs import names_for_samples
from operator_samples.measure import one_line

__all__ = ["repeated"]

_LONGER = 128  # times the last dim, so that kernels are cut into tasks for their pool of threads
_MOST_RESULTS = 64  # of a call: pieces of 4 of a long tensor would take hours


def repeated(target, text, calls):
    """A dict: `calls`; `forward` and `gradient`, each the number of calls that differ from the first one, or an error;
    and `long`, whether last dims are 128 times as long as in the sample.

    Args:
        target, text: of a `Sample`.
        calls: how many of each.
    """
    for stretch in (_LONGER, 1):
        cell, inputs = build(Sample(target, text), names=names_for_samples(stretch=stretch))
        found = _differing(_Bits(cell, inputs), 1)
        if stretch > 1 and found == 0 and len(_Bits(cell, inputs)()) > _MOST_RESULTS:
            continue
        found = _differing(_Bits(cell, inputs), calls) if found == 0 else found
        if isinstance(found, int) or stretch == 1:
            slopes = _differing(_Bits(_gradient(cell, inputs), inputs), calls)
            return {"calls": calls, "forward": found, "gradient": slopes, "long": stretch > 1}


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


def _differing(bits, calls):
    if bits.function is None:
        return "nothing to differentiate"
    try:
        first = bits()
        return sum(bits() != first for _ in range(calls - 1))
    except Exception as error:
        return one_line(error)
