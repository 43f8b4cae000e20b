"""Forward and backward passes of a function as separate calls, on PyNative's autograd: one tape for each forward pass.

Several forward passes may be outstanding, as those of the micro-batches of a pipeline.
"""

from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from mindspore import nn, ops

from mindformers_core.communication.world import process_state
from mindformers_core.dtypes import dtype_name
from mindformers_core.operators.signature import is_float
from mindformers_core.passes.thread_tape import ThreadTape
from mindformers_core.sharding.recordings import forget_recordings


def is_differentiable(tensor):
    """Whether gradients flow through a tensor: its dtype is a floating one."""
    return is_float(dtype_name(tensor.dtype))


class _Call(NamedTuple):
    """An outstanding forward pass: its tape (None where no gradient is needed), inputs, and differentiated outputs."""

    tape: "_Tape | None"
    inputs: tuple
    outputs: tuple


class ForwardBackward:
    """Runs forward passes of functions of tensors, and later the backward pass of each, in any order.

    Args:
        differentiated: selects from the tuple of outputs those that `backward` gets gradients for.
        around: returns a context manager, which is entered for every pass.
    """

    def __init__(self, differentiated, around=nullcontext):
        self._differentiated, self._around = differentiated, around
        self._begun = {}  # key -> number of its forward passes but one
        self.forget()

    def forget(self):
        """Drop all outstanding calls, and the tensors that they keep."""
        self._calls, self._free = {}, []

    def forward(self, key, function, inputs):
        """Run `function(*inputs)` and record it until `backward(key, …)`.

        Args:
            key: identifies the call among the outstanding ones.
            function: returns a tuple of tensors.
            inputs: the floating tensors whose gradients are needed; `function` binds its other arguments itself.

        Returns:
            The tuple of outputs.
        """
        assert key not in self._calls, key
        self._begun[key] = self._begun.get(key, -1) + 1
        # new objects: a tensor of another stage of this rank is on that stage's tape, and this tape has to end at it
        inputs = tuple(ops.stop_gradient(tensor) for tensor in inputs)
        kind = ThreadTape if process_state().is_simulated else _Tape  # the tapes of a process are those of one thread
        tape = self._free.pop() if self._free else kind()
        returned, flowing = [], []

        def recorded(*inputs):
            returned.extend(function(*inputs))
            flowing.extend(self._differentiated(tuple(returned)))
            return flowing[0] if len(flowing) == 1 else tuple(flowing)

        with _clean_after_errors(), self._around(), self.observed(key, "forward"):
            tape.record(recorded, inputs)
        self._calls[key] = _Call(tape, inputs, tuple(flowing))
        return tuple(returned)

    def remember(self, key, outputs):
        """As `forward`, for given outputs of which no gradient is needed; returns them."""
        self._calls[key] = _Call(None, (), tuple(self._differentiated(outputs)))
        return outputs

    def observed(self, key, direction):
        """The context in which the observer gets the values of a pass, "forward" or "backward"."""
        return process_state().observer.in_pass((key, self._begun[key]), direction)

    def outputs(self, key):
        """The differentiated outputs of an outstanding call."""
        return self._calls[key].outputs

    def backward(self, key, gradients, weights, is_split=False):
        """Run the backward pass of an outstanding call, and drop the call.

        Args:
            key: the key of `forward`.
            gradients: one for each of `outputs(key)`, of the same shape and dtype.
            weights: a `ParameterTuple`.
            is_split: whether their gradients lack terms that are computed later.

        Returns:
            The gradients of the call's inputs and of the weights, two tuples.
        """
        tape, inputs, outputs = self._calls.pop(key)
        if tape is None:
            return (), ()
        assert inputs or weights, key
        with _clean_after_errors(), self._around(), self.observed(key, "backward"):
            found = tape.gradients(inputs, outputs, tuple(gradients), weights)
            for weight, gradient in () if is_split else zip(weights, found[1], strict=True):
                process_state().observer.weight_gradient(weight, gradient)
        self._free.append(tape)
        return found


@contextmanager
def _clean_after_errors():
    """End MindSpore's recording after an error, as it doesn't itself; all outstanding tapes are lost."""
    try:
        yield
    except Exception:
        forget_recordings()
        raise


class _Tape(nn.Cell):
    """The tape of one call. MindSpore finds a tape by Cell and inputs, so every outstanding call needs its own Cell."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.function = None
        self.set_grad(True)

    def record(self, function, inputs):
        """Call `function(*inputs)`, a function that returns a tensor or a tuple of tensors."""
        self.function = function
        self(*inputs)
        self.function = None

    def gradients(self, inputs, outputs, sens, weights):
        """The gradients of the recorded call's inputs and of weights, two tuples, from those of its outputs."""
        gradient = ops.GradOperation(get_all=bool(inputs), get_by_list=bool(weights), sens_param=True)
        sens = sens[0] if len(sens) == 1 else sens
        found = gradient(self, *((weights,) if weights else ()))(*inputs, sens)
        of_inputs, of_weights = found if inputs and weights else (found, ()) if inputs else ((), found)
        return tuple(of_inputs), tuple(of_weights)

    def construct(self, *inputs):
        if self.function is None:
            raise RuntimeError(
                "MindSpore lost a forward pass that was to be differentiated: an error in another gradient, such as "
                "mindspore.value_and_grad's, had left it recording; it is cleared now, call again"
            )
        return self.function(*inputs)
