"""`memory_report()`: what `hsdp()` takes of a rank's memory, computed ahead and measured, side by side."""

from dataclasses import dataclass

from mindspore import nn

from mindformers_core.hints import bytes_shown
from mindformers_core.zero.explained import bucket_lines, step_plan, whole_lines
from mindformers_core.zero.formulas import MemoryEstimate, StepPlan, memory_of_step
from mindformers_core.zero.meter import MOMENTS
from mindformers_core.zero.sharded_parameter import bytes_of
from mindformers_core.zero.storage import storage_of

__all__ = ["MemoryReport", "memory_report"]

_ROWS = {
    "weights": "weights, whole",
    "parts": "parts to be updated",
    "gradients": "gradients",
    "state": "optimizer state",
    "buckets": "buckets",
    "total": "together",
}
_MOMENTS = dict(zip(MOMENTS, ("forward and backward", "optimizer's step")))


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, without activations. `str()` gives a table, and lists what stays whole, and the buckets.

    Attributes:
        computed: `{"pass": MemoryEstimate, "update": MemoryEstimate}`: at the fullest time of forward and backward
            pass, and in the optimizer's step after it, when whole weights are gone. `MemoryEstimate` has `weights`,
            `parts`, `gradients`, `state`, `buckets`, and `total`.
        measured: the same of the last step: tensors that were there, with the memory that MindSpore gave them; {}
            before the first step, and in a dry run. `state` is 0 where no optimizer was given.
        step: the `StepPlan`: `plans` says of every parameter its shape, dim that is cut and reason to stay whole,
            `gathers` and `reduces` are the buckets.
        states: computed bytes of what the ZeRO paper counts, at the most: no buckets, and nothing that comes and goes.
    """

    computed: dict
    measured: dict
    step: StepPlan
    states: int

    @property
    def whole(self):
        """`ParameterPlan`s of the parameters that stay whole; `path`, `shape`, `nbytes` and `reason` say which."""
        return tuple(plan for plan in self.step.plans if plan.dim is None)

    @property
    def buckets(self):
        """All `Bucket`s: of weights in forward order, then of gradients in backward order."""
        return (*self.step.gathers, *self.step.reduces)

    def __str__(self):
        rows = [["bytes on this rank"], [""]]
        for title in _MOMENTS.values():
            rows[0] += [title, ""]
            rows[1] += ["computed", "measured"]
        for kind, title in _ROWS.items():
            rows.append([title])
            for moment in _MOMENTS:
                measured = getattr(self.measured.get(moment), kind, None)
                rows[-1] += [_shown(getattr(self.computed[moment], kind)), _shown(measured)]
        lines = [f"{title:22}" + "".join(f"{cell:>22}" for cell in cells) for title, *cells in rows]
        passing = self.computed["pass"].passing
        if passing:
            lines.append(f"Of these, {bytes_shown(passing)} come and go: weights of units, gradients of one bucket.")
        lines.append(f"As the ZeRO paper counts, without buckets and what comes and goes: {bytes_shown(self.states)}.")
        return "\n".join([*(line.rstrip() for line in lines), *whole_lines(self.step), *bucket_lines(self.step)])


def memory_report(cell, optimizer=None, state_bytes=8, compiled=False):
    """What `hsdp()` takes of this rank's memory: a `MemoryReport`. Activations are not in it.

    Args:
        cell: what `hsdp()` returned. In a dry run (the fake backend) its parameters may be on the meta device.
        optimizer: a Cell; its Parameters that aren't weights are measured as the optimizer's state.
        state_bytes: bytes of optimizer state for an element of a trained parameter, for what is computed. Default: two
            float32 moments, as Adam's.
        compiled: whether steps are to be computed that `value_and_grad(…, compiled=True)` takes: a compiled function
            gives all its gradients at once.

    Raises:
        TypeError: `optimizer` isn't a Cell.
        ValueError: not a Cell that `hsdp()` was called with.
    """
    storage = storage_of(cell)
    if optimizer is not None and not isinstance(optimizer, nn.Cell):
        raise TypeError(f"memory_report(optimizer={optimizer!r}): should be an optimizer, a Cell with its state")
    step = step_plan(storage, compiled)
    measured = {}
    if len(storage.meter.peaks) == len(MOMENTS):
        state = None if optimizer is None else _state(storage, optimizer)
        measured = {moment: _figures(storage.meter.peaks[moment], state) for moment in MOMENTS}
    computed, states = memory_of_step(step, state_bytes)
    return MemoryReport(computed, measured, step, states)


def _figures(peak, state):
    return MemoryEstimate(peak["weights"], peak["parts"], peak["gradients"], state or 0, peak["buckets"])


def _state(storage, optimizer):
    """Bytes of an optimizer's own Parameters."""
    weights = {id(parameter) for stored in storage.parameters for parameter in (stored.unsharded, stored.shard)}
    return sum(bytes_of(parameter) for parameter in optimizer.get_parameters() if id(parameter) not in weights)


def _shown(count):
    return "-" if count is None else bytes_shown(count)
