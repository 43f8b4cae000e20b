"""The traced tensor of a capture: it has a shape and no values, and the recorder sees its operators."""

import sys
from functools import cache
from numbers import Number
from pathlib import Path
from traceback import walk_tb

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.ops import Primitive

from mindformers_core.lowering.aliases import note_write, unwritable
from mindformers_core.lowering.indexing import IndexedTensor, of_whole
from mindformers_core.mindspore_private import make_subclass

_MINDSPORE = str(Path(mindspore.__file__).parent), str(Path(np.__file__).parent)
_ENGINE = str(Path(__file__).parent.parent)
_MODEL_CODE = (str(Path(_ENGINE) / "models"), str(Path(_ENGINE) / "tensor_parallel"))  # ours, and yet no engine


class CaptureError(ValueError):
    """A Cell that can't be captured; names its path, its class, and the line of the user's code."""

    by_hand = None  # or the Cell in which there is parallel code written by hand


class Traced(IndexedTensor):
    """A tensor on the meta device, seen by a recorder.

    Attributes:
        recorder: the `Recorder` of the capture.
        meta: the plain meta tensor that operators are run with.
        entry: its source, for the recorder: `Made` (a `Value` of an `OpenCall`) or `Held` (a parameter or constant).
        original: the Parameter or plain tensor behind it, or None. The values of a plain tensor can be read.
        deferred: for the result of an operator on constants a function that computes `original`; else None.
    """

    @staticmethod
    def around(recorder, meta, entry, original=None, deferred=None):
        """A new one."""
        tensor = make_subclass(Traced, meta)
        vars(tensor).update(recorder=recorder, meta=meta, entry=entry, original=original, deferred=deferred)
        return tensor

    def __fallback__(self, func, args, kwargs=None):
        return self.recorder.operator(func, args, kwargs)

    def __getattr__(self, name):
        """Attributes of the Parameter behind it: `name`, `requires_grad`, …."""
        original = self.__dict__.get("original")
        if original is None or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(original, name)

    @property
    def has_init(self):
        """False: nothing is to be initialised while a tree is captured."""
        return False

    def value(self):
        """This tensor."""
        return self

    def _whole(self, what):
        """The plain tensor that holds the values, where they are known; `what` asks for them."""
        return self.recorder.values_of(self, what)

    asnumpy, numpy, tolist, item = map(of_whole, ("asnumpy()", "numpy()", "tolist()", "item()"))
    __bool__ = of_whole("bool(), which if, while, and, or and not ask for,", bool)
    __int__, __float__, __complex__ = (of_whole(f"{kind.__name__}()", kind) for kind in (int, float, complex))
    __index__ = of_whole("use as an index or a count", int)

    def __contains__(self, element):
        return isinstance(element, (Tensor, Number)) and element in self._whole("the operator 'in'")

    def __array__(self, dtype=None):
        return self._whole("conversion to NumPy").asnumpy().astype(dtype)

    def overwrite(self, value):
        """Give this tensor another value of its shape and dtype, as an operator in place does.

        Raises:
            CaptureError: what is outside of the program would change, too.
        """
        value, reason = self.recorder.stand_in(value), unwritable(self)
        if isinstance(self.original, Parameter):
            value = self.recorder.write(self, value)
        elif reason:
            raise self.recorder.error(reason)
        else:
            vars(self).update(original=value.original, deferred=value.deferred)
        self.entry, self.meta = value.entry, value.meta
        note_write(self, call_site()[0])

    def lasting(self):
        """What this tensor is, if it outlives the call; else ""."""
        if isinstance(self.original, Parameter):
            return f"Parameter '{self.original.name}'"
        if home := getattr(self.entry, "path", None):
            return f"the plain tensor '{home}' of a Cell"
        return f"an argument of the root Cell, {self!r}" if self.recorder.is_input(self.entry) else ""

    def redistribute(self, *_):
        """A `DTensor`'s: an error here."""
        raise self.by_hand("redistribute()")

    to_local = full_tensor = redistribute

    def by_hand(self, what):
        """The error for parallel code that is written by hand."""
        error = self.recorder.error(
            f"{what} is parallel code written by hand, on tensors of a mesh; a Cell is captured as single-card code. "
            "Mark the Cell, cell.eager() after shard(), or leave it to the layouts that are declared"
        )
        error.by_hand = self.recorder.open_calls[-1].cell
        return error

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        raise self.recorder.error("a tensor can't be pickled while its Cell is captured")

    def __repr__(self):
        return f"{str(self.dtype).lower()}{list(self.shape)}"

    __str__ = __repr__
    __hash__ = Tensor.__hash__


def call_site():
    """The current line of the user's code, and the primitive that is called there.

    Returns:
        `file:line` of the innermost frame outside of MindSpore and of this engine, or else of the innermost one in a
        MindSpore layer, or None; and the `Primitive` object that is being called, or None.
    """
    frame = sys._getframe(1)
    primitive, layer = None, None
    while frame is not None:
        name = frame.f_code.co_filename
        owner = owner_of(name)
        if owner == "user":
            return f"{name}:{frame.f_lineno}", primitive
        if owner == "mindspore":
            if primitive is None and layer is None and frame.f_code.co_name == "__call__":
                called = frame.f_locals.get("self")
                primitive = called if isinstance(called, Primitive) else None
            if layer is None and frame.f_code.co_name == "construct":
                layer = f"{name}:{frame.f_lineno}"
        elif frame.f_code.co_name == "capture":
            break
        frame = frame.f_back
    return layer, primitive


def failed_site(error):
    """`file:line` of the innermost frame of the user's code that a caught error passed; and whether it began there."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    users = [place for place, (name, _) in enumerate(frames) if owner_of(name) == "user"]
    return ":".join(map(str, frames[users[-1]])) if users else None, users[-1:] == [len(frames) - 1]


@cache
def owner_of(filename):
    """Whose code a file is: `"user"`, `"mindspore"` or `"engine"`."""
    if filename.startswith(_MINDSPORE):
        return "mindspore"
    if filename.startswith(_ENGINE) and not filename.startswith(_MODEL_CODE):
        return "engine"
    return "user" if not filename.startswith("<") else "engine"
