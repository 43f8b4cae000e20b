"""`HsdpStorage`: the parameters of one sharded tree between steps in parts, and whole while they compute."""

from contextlib import contextmanager
from dataclasses import replace

from mindspore import nn
from mindspore.graph.api import _no_grad, _pynative_executor

from mindformers_core.program.graph import cell_label
from mindformers_core.sharding.parameter_storage import ParameterStorage
from mindformers_core.sharding.recordings import forget_recordings
from mindformers_core.sharding.sharded_cells import ShardedCell, computing_parameters, tree_and_path
from mindformers_core.zero.explained import explained
from mindformers_core.zero.formulas import StepPlan
from mindformers_core.zero.gradient_reducer import reduced, summed
from mindformers_core.zero.optimizers import check_optimizers

__all__ = ["HsdpStorage", "gathered", "storage_of"]


class HsdpStorage(ParameterStorage):
    """What `hsdp()` keeps for a tree.

    Between `open()` and `close()` whole weights are in place: all of them, or, where units are gathered one by one,
    those of no unit, while the others come and go with the calls of their Cells.

    Args:
        settings: the `HsdpSettings`.
        parameters: `ShardedParameter`s, in the order of the Cell's parameters.
        gathers, reduces: `Bucket`s of weights in the order of the Cells, and of gradients in that of a backward pass.
        meter: the `MemoryMeter` that the parameters know, too.
        label: how errors call the root Cell.
        cells: all Cells of the tree.

    Attributes:
        settings, parameters, gathers, reduces, meter, label, cells: as given.
        exchange: the `Exchange`; None in a dry run.
        collector: what takes gradients as they come while a last micro-step's backward pass runs, or None.
        schedule: the `UnitSchedule` of units that are gathered one by one, or None.
        is_training: whether it was opened for gradients.
    """

    def __init__(self, settings, parameters, gathers, reduces, meter, label, cells):
        self.settings, self.parameters, self.gathers, self.reduces = settings, parameters, gathers, reduces
        self.meter, self.label, self.cells = meter, label, tuple(cells)
        self.parts = {id(stored.whole): stored.part for stored in parameters if stored.is_copied}
        self.takes_gradients, self.units, self.schedule, self.exchange, self.collector = True, {}, None, None, None
        self.is_open = self.is_training = self._in_pass = self._has_checked = False
        self._callers = {}  # path of a Cell -> what `unit()` gives for it
        self._numbers = {id(stored.whole): number for number, stored in enumerate(parameters)}

    @property
    def trained(self):
        """Numbers of the parameters that get gradients, in order."""
        return [number for number, stored in enumerate(self.parameters) if stored.plan.trainable]

    def check_trained(self):
        """Raise `ValueError` where parameters were frozen or thawed since `hsdp()`."""
        for stored in self.parameters:
            if stored.part.requires_grad != stored.plan.trainable:
                raise ValueError(
                    f"requires_grad of '{stored.plan.path}' has changed to {stored.part.requires_grad} since hsdp(), "
                    "which plans with it: freeze or thaw parameters before"
                )

    def check_closed(self):
        """Raise `ValueError` where whole weights are in place already."""
        if self.is_open:
            raise ValueError(
                f"{self.label} is in the middle of a step or of gathered(): finish the step, with as many calls of its "
                f"value_and_grad function as accumulate_grad_step ({self.settings.accumulate_grad_step}), or leave the "
                "block before"
            )

    def open(self, training=False):
        """Put whole weights in place; where they are already, nothing happens.

        Raises:
            ValueError: for training inside of `gathered()`.
        """
        if self.is_open:
            if training and not self.is_training:
                self.check_closed()
            return
        self._check_in_place()
        self.is_open, self.is_training = True, training
        self.meter.begin("pass" if training else None)
        if self.exchange is None:
            return
        try:
            self._refresh_copies()
            for bucket in self.gathers:
                if bucket.unit not in self.units:
                    self.fill(bucket)
        except BaseException:
            self.close()
            raise
        if not self.units:
            for stored in self.parameters:
                if stored.is_filled:
                    stored.lend()

    def _check_in_place(self):
        """Raise `ValueError` where a Cell has another Parameter than `hsdp()` found, or differentiates by parts."""
        found = {id(parameter) for parameter in computing_parameters(self.cells[0])}
        for stored in self.parameters:
            if id(stored.whole) not in found:
                raise ValueError(
                    f"parameter '{stored.plan.path}' of {self.label} isn't the one that it had at hsdp(): don't put "
                    "another Parameter in its place, but assign values to the one that cell.parameters_and_names() "
                    f"gives, this rank's part, of shape {stored.part_shape}"
                )
        parts = {id(part) for part in self.parts.values()}
        for cell in self.cells:
            if any(id(parameter) in parts for parameter in getattr(cell._recompute_cell, "internal_params", ())):
                raise ValueError(
                    f"recompute() of a {type(cell).__name__} in {self.label} was called after hsdp(), and would give "
                    "gradients of parts: call it before"
                )

    def _refresh_copies(self):
        """Weights that are whole, but computed with in another dtype than they are updated in."""
        for stored in self.parameters:
            if stored.is_copied and not stored.is_cut:
                stored.fill(stored.sent().reshape(stored.plan.shape))

    def close(self):
        """Go back to parts."""
        if self.schedule is not None:
            self.schedule.end()
        for stored in self.parameters:
            if stored.is_filled:
                stored.release()
        if self.is_training:
            self.meter.begin("update")
        self.is_open = self.is_training = False

    def fill(self, bucket):
        """Gather the weights of a bucket."""
        if self.exchange is None:
            return
        members = [self.parameters[number] for number in bucket.members]
        with _no_grad():
            self.exchange.gather(members)

    def empty(self, bucket):
        """Give back the memory of the whole weights of a bucket."""
        for number in bucket.members:
            self.parameters[number].release()

    def keep_units(self):
        """See `ParameterStorage`: `reshard_after_forward=True` is the way to ask for units that come and go."""
        if self.settings.reshard_after_forward is None:
            self.units, self.schedule = {}, None

    def drop_units(self):
        """See `ParameterStorage`."""
        if self.schedule is not None:
            self.schedule.end()

    def find(self, path):
        """The `ShardedParameter` with this path, or None."""
        return next((stored for stored in self.parameters if stored.plan.path == path), None)

    def share(self, stored, other):
        """Have a parameter of this tree update the part of another tree's instead of its own; both are closed."""
        stored.share(other)
        self.parts[id(stored.whole)] = stored.part

    def summed(self, gradients):
        """See `ParameterStorage`: whole ones, or (`sums_shards`) this rank's parts of their sums over ranks."""
        return summed(self, gradients)

    def reduced(self, gradients):
        """Sums of what `summed` gave, reduced over the data-parallel ranks, which all call this; takes them out."""
        found = reduced(self, gradients)
        self.check_optimizers()
        return found

    def check_optimizers(self):
        """At the first gradients: raise `ValueError` where an optimizer can't work with parts."""
        if not self._has_checked:
            check_optimizers(self)
            self._has_checked = True

    @contextmanager
    def calling(self):
        """Around a call from outside: opens for it. Gradients are refused but where `value_and_grad` takes them."""
        if not self._in_pass:
            self._refuse_gradients()
        if self.is_open:
            yield
            return
        self.open()
        try:
            yield
        finally:
            self.close()

    @contextmanager
    def passing(self):
        """See `ParameterStorage`."""
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False

    def unit(self, path):
        """See `ParameterStorage`."""
        if not self.units:
            return None
        if path not in self._callers:
            inside = [call for unit, call in self.units.items() if f"{path}.".startswith(f"{unit}.")]
            self._callers[path] = inside[0] if inside else None
        return self._callers[path]

    def give_parts(self):
        """See `ParameterStorage`: parts that were lent are there again, until the next step.

        Not in a pass: there it is MindSpore that asks, for identities only.
        """
        for stored in () if self._in_pass else self.parameters:
            stored.take_back()

    def _refuse_gradients(self):
        """Raise `ValueError` where MindSpore records a call: with a flag of its own, or one of the Cell."""
        asking = [cell for cell in self.cells if cell.requires_grad]
        if not (asking or _pynative_executor.grad_flag()):
            return
        for cell in asking:
            cell.set_grad(False)  # mindspore.grad leaves it set after an error
        forget_recordings()
        raise ValueError(
            f"{self.label} is under hsdp(), so a gradient that MindSpore takes of a call would be this rank's term "
            "only: take it with mindformers_core.zero.value_and_grad(cell), or a PipelineStage. To evaluate, call the "
            "Cell outside of gradients, and without set_grad()"
        )

    def entering(self, args, kwargs):
        """Floating inputs in the dtype that computes."""
        return self.settings.cast_inputs(args), self.settings.cast_inputs(kwargs)

    def leaving(self, result):
        """Floating results in the output's dtype."""
        return self.settings.cast_outputs(result)

    def seen(self, parameter):
        """The part, for whoever looks from outside."""
        return parameter if self.is_open else self.parts.get(id(parameter), parameter)

    def check_compiling(self):
        """See `ParameterStorage`."""
        if not self.is_open:
            raise ValueError(
                f"{self.label} is under hsdp(), whose weights are gathered around calls, not in a graph: compile steps "
                "with mindformers_core.zero.value_and_grad(cell, compiled=True), and call the Cell itself to evaluate"
            )

    def reading(self, parameter, reader=None):
        """See `ParameterStorage`: a weight that a Cell outside of its unit reads, too, becomes one of no unit.

        All ranks come here alike.
        """
        number = self._numbers.get(id(parameter))
        unit = "" if number is None else self.parameters[number].plan.unit
        if unit in self.units:
            inside = unit in self.schedule.called if reader is None else f"{reader}.".startswith(f"{unit}.")
            if not inside:
                self._take_out_of_unit(number)

    def _take_out_of_unit(self, number):
        """A parameter is gathered by itself, and stays for a whole pass."""
        stored = self.parameters[number]
        stored.plan = replace(stored.plan, unit="")
        gathers = []
        for bucket in self.gathers:
            if number in bucket.members:
                rest = tuple(member for member in bucket.members if member != number)
                alone = replace(bucket, members=(number,), unit="", size=stored.plan.size)
                gathers.append(alone)
                if self.is_open:
                    self.fill(alone)
                if rest:
                    gathers.append(replace(bucket, members=rest, size=bucket.size - stored.plan.size))
            else:
                gathers.append(bucket)
        self.gathers = gathers
        self.reduces = [replace(bucket, unit="") if number in bucket.members else bucket for bucket in self.reduces]
        self.schedule.regroup()

    def gradient_came(self, number, gradient):
        """A gradient of a backward pass, as soon as it is whole; returns what is to take its place, or None."""
        replaced = None if self.collector is None else self.collector.came(number, gradient)
        if self.schedule is not None and self.is_open:
            self.schedule.gradient_came(self.parameters[number].plan.unit)
        return replaced

    def explained(self):
        """See `ParameterStorage`."""
        return explained(self.settings, self.step_plan())

    def step_plan(self, compiled=False):
        """The `StepPlan` of a step, of which passes are `compiled` or not."""
        settings = self.settings
        replicas = settings.mesh.axis_size(*settings.replicate_axes)
        at_once = not settings.reduces_as_they_come or (compiled and not self.units)
        return StepPlan(
            tuple(stored.plan for stored in self.parameters), settings.shard_size, replicas, settings.precision,
            tuple(self.gathers), tuple(self.reduces), settings.accumulate_grad_step, at_once,
            settings.sums_shards, tuple(self.units), settings.prefetch,
        )  # fmt: skip


def storage_of(cell):
    """The `HsdpStorage` of a Cell.

    Raises:
        TypeError, ValueError: not a Cell that `hsdp()` was called with.
    """
    if isinstance(cell, ShardedCell):
        tree, path = tree_and_path(cell)
        if isinstance(tree.storage, HsdpStorage):
            if path == "":
                return tree.storage
            raise ValueError(f"{tree.label(path)} isn't what hsdp() was called with: give {tree.label('')}")
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"{cell!r} isn't a Cell, an instance of a subclass of nn.Cell")
    raise ValueError(f"{cell_label('', cell)} isn't under hsdp(): call hsdp(cell) first")


@contextmanager
def gathered(cell):
    """Keep the whole weights of a Cell in place, so that several evaluations gather them once.

    Parts must not be changed, nor steps taken, while it is open. Where units are gathered one by one, these are
    gathered for every call all the same.

    Args:
        cell: the Cell that `hsdp()` was called with. All ranks open it together.
    """
    storage = storage_of(cell)
    storage.check_closed()
    storage.open()
    try:
        yield cell
    finally:
        storage.close()
