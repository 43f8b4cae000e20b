"""Loss scaling (Micikevicius et al., "Mixed Precision Training", 2018) in which all ranks skip a step together."""

import mindspore as ms
from mindspore import Tensor, amp, ops

from mindformers_core.algorithms.compiled import on_cpu
from mindformers_core.communication import communicator
from mindformers_core.sharding.whole_tensors import of_this_rank


def all_finite(mesh, tensors):
    """Whether no element of `tensors` on any rank of `mesh` is infinite or NaN: a bool, equal on all these ranks.

    All ranks of the mesh call the function, for one all-reduce of a float32 scalar. PyNative.

    Args:
        mesh: the `DeviceMesh`; None checks this rank alone.
        tensors: this rank's tensors; an empty tuple is finite.
    """
    tensors = tuple(map(_for_kernels, tensors))
    with of_this_rank():
        finite = not tensors or bool(amp.all_finite(tensors))  # MindSpore's fails for none
    if mesh is None:
        return finite
    sum_over_all = communicator(mesh).make("all_reduce", mesh.axis_names, op="sum")
    return sum_over_all(Tensor(0.0 if finite else 1.0, ms.float32)).item() == 0.0


def is_finite(tensor):
    """Whether no element of a tensor is infinite or NaN, on this rank alone. PyNative.

    `all_finite` compiles a graph for every new shape, which takes as long as hundreds of such calls.
    """
    return bool(ops.isfinite(_for_kernels(tensor)).all())


def _for_kernels(tensor):
    """In float32 on CPU, which has no kernel for bfloat16."""
    return ops.cast(tensor, ms.float32) if tensor.dtype == ms.bfloat16 and on_cpu() else tensor


class LossScale:
    """The factor of the loss that protects half-precision gradients from underflow, and the factor's adjustment.

    The loss is multiplied by `value` before the backward pass, the gradients are divided by `unscale`, and a step is
    skipped where that returns None. The objects of all ranks stay equal if their arguments are equal. PyNative.

    `unscale` keeps dtypes, so small float16 gradients underflow there: reduce to float32 (the default of
    `MixedPrecision`). Bfloat16 has float32's range and needs no loss scale.

    Args:
        scaler: `mindspore.amp.DynamicLossScaler`, `StaticLossScaler`, or another `LossScaler` that keeps its scale in
            `scale_value`. Default: `DynamicLossScaler(2**16, 2, 2000)`, which doubles after 2000 finite steps in a row
            and halves, to 1 at the least, at each other one.
        mesh: the mesh of all ranks that train this model. Default: this rank alone.

    Attributes:
        skipped: number of steps skipped so far.

    Raises:
        TypeError: another `scaler`, a `DynamicLossScaleManager` for instance.
    """

    def __init__(self, scaler=None, mesh=None):
        self.scaler = amp.DynamicLossScaler(2**16, 2, 2000) if scaler is None else scaler
        if not isinstance(self.scaler, amp.LossScaler) or not hasattr(self.scaler, "scale_value"):
            raise TypeError(
                f"LossScale({scaler!r}): give a mindspore.amp.DynamicLossScaler or StaticLossScaler, or a LossScaler "
                "of your own with the Parameter scale_value"
            )
        self.mesh = mesh
        self.skipped = 0

    @property
    def value(self):
        """The scale of the next step, a float."""
        return float(self.scaler.scale_value.item())

    def state(self):
        """All that changes from step to step, a dict that JSON can hold; for `restore`."""
        counter = getattr(self.scaler, "counter", None)
        return {
            "scale": self.value,
            "counter": None if counter is None else int(counter.item()),
            "skipped": self.skipped,
        }

    def restore(self, state):
        """Go on where another `LossScale` with an equal scaler gave this `state()`."""
        self.scaler.scale_value.set_data(Tensor(state["scale"], self.scaler.scale_value.dtype))
        if state["counter"] is not None:
            self.scaler.counter.set_data(Tensor(state["counter"], self.scaler.counter.dtype))
        self.skipped = state["skipped"]

    def unscale(self, gradients):
        """`gradients` (tensors of a scaled loss) divided by the scale, and the scale adjusted for the next step.

        Returns:
            A tuple in the gradients' dtypes; None where a gradient of any rank of the mesh is infinite or NaN.
        """
        gradients, factor = tuple(gradients), 1.0 / self.value
        finite = all_finite(self.mesh, gradients)
        self.scaler.adjust(Tensor(finite))
        if finite:
            return tuple(_times(gradient, factor) for gradient in gradients)
        self.skipped += 1
        return None


def _times(tensor, factor):
    """Multiplied in float32: a factor such as 2**-25 is zero in float16."""
    return ops.cast(ops.cast(tensor, ms.float32) * factor, tensor.dtype)
