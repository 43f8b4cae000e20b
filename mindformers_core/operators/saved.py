"""The inputs and results that the gradient of an operator saves, in PyNative on CPU. Pure Python.

Measured with `mindspore.saved_tensors_hooks` (MindSpore 2.10); tests/test_saved_table.py holds every operator
to that.

An *operand* is one of an operator's captured arguments, positional ones first, tensor or not, by its index: in `2 / x`
the tensor `x` is operand 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from mindformers_core.operators.signature import is_float

ALL, FLOATS, INTEGERS, BOOLS = "all", "floats", "integers", "bools"


@dataclass(frozen=True)
class Operand:
    """One input or result of an operator, on one rank.

    Attributes:
        place: index among the arguments, or among the results.
        shape: local shape.
        dtype: name.
        item_size: bytes of one element.
        needs: whether a gradient flows back to it.
    """

    place: int
    shape: tuple
    dtype: str
    item_size: int
    needs: bool = False

    @property
    def nbytes(self):
        """Bytes of the tensor on one rank."""
        return prod(self.shape) * self.item_size


@dataclass(frozen=True)
class SavedByOperator:
    """The saved tensors of one operator.

    Attributes:
        inputs: places of operands that are always saved; or `"all"`, `"floats"`, `"integers"` (such as indices), or
            `"bools"` (masks).
        inputs_by_need: place of an operand -> places of operands that are saved where it needs a gradient.
        outputs: places of the results that are saved; or `"floats"`.
        outputs_by_need: place of an operand -> places of the results that are saved where it needs a gradient.
        internal: `(operands, results) -> sizes`, bytes of each internal tensor that the operator saves.
        as_they_are: whether an input that is a view is saved as a view, which holds the memory of its base. Else the
            operator saves a copy, even of a contiguous view.
    """

    inputs: tuple | str = ()
    inputs_by_need: dict = field(default_factory=dict)
    outputs: tuple | str = ()
    outputs_by_need: dict = field(default_factory=dict)
    internal: Callable | None = None
    as_they_are: bool = False

    def kept_inputs(self, operands):
        """The `Operand`s that are saved, in order."""
        if isinstance(self.inputs, str):
            return [operand for operand in operands if self.inputs in (ALL, _kind(operand.dtype))]
        places = _places(self.inputs, self.inputs_by_need, operands)
        return [operand for operand in operands if operand.place in places]

    def kept_outputs(self, operands, results):
        """The results, `Operand`s too, that are saved, in order."""
        if self.outputs == FLOATS:
            return [result for result in results if is_float(result.dtype)]
        places = _places(self.outputs, self.outputs_by_need, operands)
        return [result for result in results if result.place in places]

    def internal_sizes(self, operands, results):
        """Bytes of each saved tensor that is neither an input nor a result."""
        return list(self.internal(operands, results)) if self.internal else []


def _kind(dtype):
    return FLOATS if is_float(dtype) else BOOLS if dtype == "bool" else INTEGERS


def _places(always, by_need, operands):
    return set(always).union(*(by_need.get(operand.place, ()) for operand in operands if operand.needs))


NOTHING = SavedByOperator()
INPUTS = SavedByOperator(ALL)
INPUTS_AS_THEY_ARE = SavedByOperator(ALL, as_they_are=True)
INPUTS_AND_RESULT = SavedByOperator(ALL, outputs=(0,))
RESULT = SavedByOperator(outputs=(0,))
SECOND_RESULT = SavedByOperator(outputs=(1,))
BOTH_RESULTS = SavedByOperator(outputs=(0, 1))
OTHER_OPERAND = SavedByOperator(inputs_by_need={0: (1,), 1: (0,)})  # each is kept for the gradient of the other
MASKS = SavedByOperator(BOOLS)
INDICES = SavedByOperator(INTEGERS, as_they_are=True)
UNMEASURED = SavedByOperator(FLOATS, outputs=FLOATS)  # without a kernel on CPU, or a user's own: the most
