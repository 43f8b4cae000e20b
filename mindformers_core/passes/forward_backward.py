"""Forward and backward of a function apart, with several calls outstanding: PyNative's autograd, a tape for each."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from mindspore import nn, ops

from mindformers_core.dtensor.move import dtype_name
from mindformers_core.operators.signature import is_float
from mindformers_core.sharding.recordings import forget_recordings

__all__ = ["ForwardBackward", "is_differentiable"]


def is_differentiable(tensor):
    """Whether gradients flow through a tensor: it is of a floating dtype."""
    return is_float(dtype_name(tensor.dtype))


@dataclass(frozen=True)
class _Call:
    """A call whose backward pass is still to come: the tape, and the inputs that it was recorded with."""

    tape: "_Tape | None"  # None where nobody asks for gradients
    inputs: tuple
    outputs: tuple  # those that gradients come in for


class ForwardBackward:
    """A function of tensors that is called forward several times, and later backward for each, in any order.

    Args:
        differentiated: takes the tuple of outputs and gives those that gradients will come in for.
        around: gives a context manager that is open during every pass.
    """

    def __init__(self, differentiated, around=nullcontext):
        self._differentiated, self._around = differentiated, around
        self._calls, self._free = {}, []

    def forget(self):
        """Drop all calls whose backward pass has not come, and what they keep."""
        self._calls, self._free = {}, []

    def forward(self, key, function, inputs):
        """`function(*inputs)`, a tuple of tensors, remembered as `key` until `backward(key, …)`.

        Args:
            key: names the call; unlike those that are outstanding.
            function: gives a tuple of tensors.
            inputs: the floating tensors that gradients are wanted for; other arguments are the function's own affair.
        """
        assert key not in self._calls, key
        # a new object each: what was handed over on this rank has a tape of its own, which this one has to end at
        inputs = tuple(ops.stop_gradient(tensor) for tensor in inputs)
        tape = self._free.pop() if self._free else _Tape()
        returned, flowing = [], []

        def recorded(*inputs):
            returned.extend(function(*inputs))
            flowing.extend(self._differentiated(tuple(returned)))
            return flowing[0] if len(flowing) == 1 else tuple(flowing)

        tape.function = recorded
        with _clean_after_errors(), self._around():
            tape(*inputs)
        tape.function = None
        self._calls[key] = _Call(tape, inputs, tuple(flowing))
        return tuple(returned)

    def remember(self, key, outputs):
        """As `forward`, for outputs of which no gradient will be asked; returns them."""
        self._calls[key] = _Call(None, (), tuple(self._differentiated(outputs)))
        return outputs

    def outputs(self, key):
        """The outputs of an outstanding call that gradients come in for."""
        return self._calls[key].outputs

    def backward(self, key, gradients, weights):
        """The gradients of a call's inputs and of the weights, two tuples; then the call is forgotten.

        Args:
            key: as `forward` got it.
            gradients: one for each of `outputs(key)`, of the same shape and dtype.
            weights: a `ParameterTuple`.
        """
        call = self._calls.pop(key)
        if call.tape is None:
            return (), ()
        flowing = bool(call.inputs), bool(weights)
        assert any(flowing), key
        take = ops.GradOperation(get_all=flowing[0], get_by_list=flowing[1], sens_param=True)
        sens = gradients[0] if len(gradients) == 1 else tuple(gradients)
        by = (weights,) if weights else ()
        with _clean_after_errors(), self._around():
            found = take(call.tape, *by)(*call.inputs, sens)
        self._free.append(call.tape)
        if all(flowing):
            return tuple(found[0]), tuple(found[1])
        return (tuple(found), ()) if flowing[0] else ((), tuple(found))


@contextmanager
def _clean_after_errors():
    """After an error MindSpore would go on recording; then all tapes are lost, and the next one is as good as new."""
    try:
        yield
    except Exception:
        forget_recordings()
        raise


class _Tape(nn.Cell):
    """One call on the tape. MindSpore finds a tape by the Cell and its inputs, so calls in flight need a Cell each."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.function = None
        self.set_grad(True)

    def construct(self, *inputs):
        if self.function is None:
            raise RuntimeError(
                "MindSpore lost a forward pass that was to be differentiated: an error in another gradient, such as "
                "mindspore.value_and_grad's, had left it recording; it is cleared now, call again"
            )
        return self.function(*inputs)
