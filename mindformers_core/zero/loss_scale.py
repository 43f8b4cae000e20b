"""Loss scaling (Micikevicius et al., "Mixed Precision Training", 2018) in which all ranks skip a step together."""

import mindspore as ms
from mindspore import Tensor, amp, ops

from mindformers_core.communication import communicator

__all__ = ["LossScale", "all_finite"]


def all_finite(mesh, tensors):
    """Whether no element of `tensors` on any rank of `mesh` is infinite or NaN; the same answer on all these ranks.

    Costs one all-reduce of a float32 scalar over the whole mesh, which all its ranks have to make. PyNative.

    Args:
        mesh: the `DeviceMesh`; None asks this rank alone.
        tensors: this rank's tensors; none at all are finite.

    Returns:
        A bool.
    """
    tensors = tuple(map(_checkable, tensors))
    finite = not tensors or bool(amp.all_finite(tensors))  # MindSpore's fails for none
    if mesh is None:
        return finite
    sum_over_all = communicator(mesh).make("all_reduce", mesh.axis_names, op="sum")
    return sum_over_all(Tensor(0.0 if finite else 1.0, ms.float32)).item() == 0.0


class LossScale:
    """The factor of the loss that keeps small half-precision gradients from becoming zero, and its adjustment.

    Multiply the loss by `value` before the gradient is taken, `unscale` the gradients, and leave the optimizer alone
    where that gives None. Every rank has its own; they stay equal if they were built alike. PyNative.

    Float16 gradients stay float16, so what loss scaling has saved from underflow is lost again as they are unscaled:
    reduce to float32 (the default of `MixedPrecision`). Bfloat16 has float32's range and needs no loss scale.

    Args:
        scaler: `mindspore.amp.DynamicLossScaler`, `StaticLossScaler`, or another `LossScaler` that keeps its scale in
            `scale_value`. Default: `DynamicLossScaler(2**16, 2, 2000)`, which doubles after 2000 finite steps in a row
            and halves, to 1 at the least, at each other one.
        mesh: the ranks that have to agree: all that train this model. Default: this rank alone.

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

    def unscale(self, gradients):
        """`gradients` (tensors of a scaled loss) divided by the scale, and the scale adjusted for the next step.

        Returns:
            A tuple in the gradients' dtypes; None where a gradient of any rank of the mesh isn't finite: skip the step.
        """
        gradients, factor = tuple(gradients), 1.0 / self.value
        finite = all_finite(self.mesh, gradients)
        self.scaler.adjust(Tensor(finite))
        if finite:
            return tuple(_times(gradient, factor) for gradient in gradients)
        self.skipped += 1
        return None


def _checkable(tensor):
    """`tensor`, in float32 where MindSpore has no kernel that looks for infinities: bfloat16 on CPU."""
    if tensor.dtype == ms.bfloat16 and ms.get_context("device_target") == "CPU":
        return ops.cast(tensor, ms.float32)
    return tensor


def _times(tensor, factor):
    """Multiplied in float32: a factor such as 2**-25 is zero in float16."""
    return ops.cast(ops.cast(tensor, ms.float32) * factor, tensor.dtype)
