"""`memory_report()`: a rank's memory under `hsdp()`, computed from the plans and measured, side by side."""

from dataclasses import dataclass

from mindspore import nn

from mindformers_core.hints import bytes_shown
from mindformers_core.zero.explained import bucket_lines, step_plan, whole_lines
from mindformers_core.zero.formulas import MemoryEstimate, StepPlan, memory_of_step
from mindformers_core.zero.meter import MOMENTS
from mindformers_core.zero.sharded_parameter import bytes_of
from mindformers_core.zero.storage import storage_of

_ROWS = {
    "weights": "weights, whole",
    "parts": "parts to be updated",
    "gradients": "gradients",
    "state": "optimizer state",
    "buckets": "buckets",
    "total": "together",
}


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, without activations. `str()` gives a table, the replicated parameters and the buckets.

    Attributes:
        computed: `{"pass": MemoryEstimate, "update": MemoryEstimate}`: the peak of forward and backward pass, and the
            optimizer's step after it, without unsharded weights. `MemoryEstimate` has `weights`, `parts`, `gradients`,
            `state`, `buckets`, and `total`.
        measured: the same for the tensors of the last step, with the memory that MindSpore allocated; {} before the
            first step, and in a dry run. `state` is 0 without an optimizer.
        step: the `StepPlan`: `plans` has every parameter's shape, sharded dim and reason to be replicated, `gathers`
            and `reduces` are the buckets.
        states: computed peak of the ZeRO paper's model states: no buckets, and no temporary weights and gradients.
    """

    computed: dict
    measured: dict
    step: StepPlan
    states: int

    @property
    def whole(self):
        """`ParameterPlan`s of the replicated parameters, with `path`, `shape`, `nbytes` and `reason`."""
        return tuple(plan for plan in self.step.plans if plan.dim is None)

    @property
    def buckets(self):
        """All `Bucket`s: of weights in forward order, then of gradients in backward order."""
        return (*self.step.gathers, *self.step.reduces)

    def __str__(self):
        rows = [
            ("bytes on this rank", "forward and backward", "", "optimizer's step"),
            ("", *("computed", "measured") * len(MOMENTS)),
        ]
        for kind, title in _ROWS.items():
            estimates = [each.get(moment) for moment in MOMENTS for each in (self.computed, self.measured)]
            rows.append((title, *("-" if one is None else bytes_shown(getattr(one, kind)) for one in estimates)))
        lines = [f"{title:22}" + "".join(f"{cell:>22}" for cell in cells) for title, *cells in rows]
        passing = self.computed["pass"].passing
        if passing:
            lines.append(f"Of these, {bytes_shown(passing)} come and go: weights of units, gradients of one bucket.")
        lines.append(f"As the ZeRO paper counts, without buckets and what comes and goes: {bytes_shown(self.states)}.")
        return "\n".join([*lines, *whole_lines(self.step), *bucket_lines(self.step)])


def memory_report(cell, optimizer=None, state_bytes=8, compiled=False):
    """A rank's memory under `hsdp()`, without activations: a `MemoryReport`.

    Args:
        cell: the result of `hsdp()`. In a dry run (the fake backend) its parameters may be on the meta device.
        optimizer: a Cell; its Parameters other than weights are measured as the optimizer's state.
        state_bytes: bytes of computed optimizer state for an element of a trained parameter. Default: two float32
            moments, as Adam's.
        compiled: whether the computed steps are those of `value_and_grad(…, compiled=True)`: a compiled function
            returns all its gradients at once.

    Raises:
        TypeError: `optimizer` isn't a Cell.
        ValueError: a Cell without `hsdp()`.
    """
    storage = storage_of(cell)
    if optimizer is not None and not isinstance(optimizer, nn.Cell):
        raise TypeError(f"memory_report(optimizer={optimizer!r}): should be an optimizer, a Cell with its state")
    measured, state = {}, 0
    if len(storage.meter.peaks) == len(MOMENTS):
        weights = {id(parameter) for stored in storage.parameters for parameter in (stored.unsharded, stored.shard)}
        parameters = [] if optimizer is None else optimizer.get_parameters()
        state = sum(bytes_of(parameter) for parameter in parameters if id(parameter) not in weights)
        measured = {moment: MemoryEstimate(**storage.meter.peaks[moment], state=state) for moment in MOMENTS}
    step = step_plan(storage, compiled)
    computed, states = memory_of_step(step, state_bytes)
    return MemoryReport(computed, measured, step, states)
