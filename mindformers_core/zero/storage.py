"""`HsdpStorage`: the parameters of one sharded tree: sharded between steps, unsharded while they compute."""

from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

from mindspore import nn

from mindformers_core.algorithms.dropout import block_of, draws_of
from mindformers_core.mindspore_private import pynative_executor, recompute_cell_of
from mindformers_core.program.graph import cell_label
from mindformers_core.scopes import replaced
from mindformers_core.sharding.parameter_storage import ParameterStorage
from mindformers_core.sharding.recordings import forget_recordings
from mindformers_core.sharding.sharded_cells import ShardedCell, computing_parameters, tree_and_path
from mindformers_core.zero.explained import explained_lines, step_plan
from mindformers_core.zero.formulas import traffic_of_step
from mindformers_core.zero.gradient_reducer import GradientReducer
from mindformers_core.zero.units import UnitSchedule


class HsdpStorage(ParameterStorage):
    """The storage that `hsdp()` gives a tree; see `ParameterStorage` for the hooks.

    Between `open()` and `close()` unsharded weights are in place: all of them, or, where units are gathered one by one,
    those of no unit, while the calls of a unit's Cell gather and free the others.

    Args:
        tree: the `ShardedTree`.
        settings: the `HsdpSettings`.
        parameters: `ShardedParameter`s, in the order of the Cell's parameters.
        gathers, reduces: `Bucket`s of weights in the order of the Cells, and of gradients in that of a backward pass.
        meter: the `MemoryMeter` that counts the memory of the parameters.

    Attributes:
        settings, parameters, gathers, reduces, meter: as given.
        label, cells: the name of the root Cell in errors; all Cells of the tree.
        trained: numbers of the parameters that get gradients, in order.
        collectives: the `BucketCollectives`; None in a dry run.
        reducer: the `GradientReducer` that takes gradients while a backward pass runs, or None.
        schedule: the `UnitSchedule`.
        is_training: whether it was opened for gradients.
        has_checked: whether optimizers were checked, which is done at a gradient function's first gradients.
    """

    takes_gradients = True

    def __init__(self, tree, settings, parameters, gathers, reduces, meter):
        self.settings, self.parameters, self.gathers, self.reduces = settings, parameters, gathers, reduces
        self.meter, self.label, self.cells = meter, tree.label(""), tuple(tree.cells.values())
        self.input_dtype, self.output_dtype = settings.precision.compute, settings.precision.output
        self.uncast = getattr(tree.cells[""], "uncast", ())
        self.copied = {id(stored.unsharded) for stored in parameters if stored.is_copied}
        self.trained = [number for number, stored in enumerate(parameters) if stored.plan.trainable]
        self.collectives = self.reducer = None
        self.is_open = self.is_training = self._in_pass = self.has_checked = False
        self._numbers = {id(stored.unsharded): number for number, stored in enumerate(parameters)}
        if settings.reshard_after_forward is not False:
            self.units = tuple(dict.fromkeys(bucket.unit for bucket in gathers if bucket.unit))
        self.schedule = UnitSchedule(self)

    def check_trained(self):
        """Raise `ValueError` where parameters were frozen or thawed since `hsdp()`."""
        for stored in self.parameters:
            if stored.shard.requires_grad != stored.plan.trainable:
                raise ValueError(
                    f"requires_grad of '{stored.plan.path}' has changed to {stored.shard.requires_grad} since hsdp(), "
                    "which plans with it: freeze or thaw parameters before"
                )

    def check_closed(self):
        """Raise `ValueError` where unsharded weights are in place."""
        if self.is_open:
            raise ValueError(
                f"{self.label} is in the middle of a step or of gathered(): finish the step, with as many calls of its "
                f"value_and_grad function as accumulate_grad_step ({self.settings.accumulate_grad_step}), or leave the "
                "block before"
            )

    def prepare_pipeline(self, stage_num):
        self.check_trained()
        if stage_num > 1 and self.units and self.settings.reshard_after_forward is None:
            self.units = ()

    def open(self, training=False):
        """See `ParameterStorage`.

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
        if self.collectives is None:
            return
        try:
            for stored in self.parameters:
                if stored.is_copied and stored.plan.dim is None:  # the optimizer updates a copy in another dtype
                    stored.fill(stored.sent().reshape(stored.plan.shape))
            for bucket in self.gathers:
                if bucket.unit not in self.units:
                    self.schedule.gather_bucket(bucket)
        except BaseException:
            self.close()
            raise
        for stored in () if self.units else self.parameters:
            if stored.is_filled:
                stored.lend()

    def _check_in_place(self):
        """Raise `ValueError` where a Cell has another Parameter than at `hsdp()`, or differentiates by shards."""
        found = {id(parameter) for parameter in computing_parameters(self.cells[0])}
        for stored in self.parameters:
            if id(stored.unsharded) not in found:
                raise ValueError(
                    f"parameter '{stored.plan.path}' of {self.label} isn't the one that it had at hsdp(): don't put "
                    "another Parameter in its place, but assign values to the one that cell.parameters_and_names() "
                    f"gives, this rank's part, of shape {stored.shard_shape}"
                )
        shards = {id(stored.shard) for stored in self.parameters if stored.is_copied}
        for cell in self.cells:
            if any(id(parameter) in shards for parameter in getattr(recompute_cell_of(cell), "internal_params", ())):
                raise ValueError(
                    f"recompute() of a {type(cell).__name__} in {self.label} was called after hsdp(), and would give "
                    "gradients of parts: call it before"
                )

    def close(self):
        """See `ParameterStorage`: free unsharded weights."""
        self.schedule.end()
        for stored in self.parameters:
            if stored.is_filled:
                stored.release()
        if self.is_training:
            self.meter.begin("update")
        self.is_open = self.is_training = False
        self.reducer = None

    def free_units(self):
        self.schedule.end()

    def gradient_sums(self):
        return GradientReducer(self)

    @contextmanager
    def call_scope(self):
        """See `ParameterStorage`. Gradients are refused but where `value_and_grad` or a pipeline takes them."""
        if not self._in_pass:
            self._refuse_gradients()
        draws_nothing = self._in_pass or self.collectives is None  # in a dry run
        was_open = self.is_open
        with nullcontext() if draws_nothing else draws_of(block_of(self.replica)):
            self.open()
            with nullcontext() if was_open else closing(self):
                yield

    def backward_scope(self):
        return replaced(self, _in_pass=True)

    def call_cell(self, path, call, args, kwargs):
        return self.schedule.call_cell(path, call, args, kwargs) if self.units else call(*args, **kwargs)

    def visible(self, parameter):
        """See `ParameterStorage`: the shard, while the storage is closed."""
        number = self._numbers.get(id(parameter))
        return parameter if self.is_open or number is None else self.parameters[number].shard

    def stored(self, parameter):
        """See `ParameterStorage`: the shard; where its memory was lent, with its values until the next step.

        In a pass MindSpore asks, for identities only.
        """
        number = self._numbers.get(id(parameter))
        if number is None:
            return parameter
        if not self._in_pass:
            self.parameters[number].take_back()
        return self.parameters[number].shard

    def _refuse_gradients(self):
        """Raise `ValueError` where MindSpore records a call: with a flag of its own, or one of the Cell."""
        asking = [cell for cell in self.cells if cell.requires_grad]
        if not (asking or pynative_executor.grad_flag()):
            return
        for cell in asking:
            cell.set_grad(False)  # mindspore.grad leaves it set after an error
        forget_recordings()
        raise ValueError(
            f"{self.label} is under hsdp(), so a gradient that MindSpore takes of a call would be this rank's term "
            "only: take it with mindformers_core.zero.value_and_grad(cell), or a PipelineStage. To evaluate, call the "
            "Cell outside of gradients, and without set_grad()"
        )

    def on_read(self, parameter, reader=None):
        """See `ParameterStorage`: a weight that a Cell outside of its unit reads, too, is gathered for a whole pass.

        All ranks come here alike.
        """
        number = self._numbers.get(id(parameter))
        unit = "" if number is None else self.parameters[number].plan.unit
        if unit in self.units:
            inside = unit in self.schedule.called if reader is None else f"{reader}.".startswith(f"{unit}.")
            if not inside:
                self._take_out_of_unit(number)

    def _take_out_of_unit(self, number):
        """Gather a parameter in a bucket of its own, of no unit."""
        stored = self.parameters[number]
        stored.plan = replace(stored.plan, unit="")
        self.reduces = [replace(bucket, unit="") if number in bucket.members else bucket for bucket in self.reduces]
        gathers, self.gathers = self.gathers, []
        for bucket in gathers:
            if number in bucket.members:
                alone = replace(bucket, members=(number,), unit="", size=stored.plan.size)
                self.gathers.append(alone)
                if self.is_open:
                    self.schedule.gather_bucket(alone)
                rest = tuple(member for member in bucket.members if member != number)
                bucket = replace(bucket, members=rest, size=bucket.size - stored.plan.size)
            if bucket.members:
                self.gathers.append(bucket)

    def explained(self):
        step, axes = step_plan(self), (*self.settings.axes, "hsdp")
        traffic = {(axes, *key): sent for key, sent in traffic_of_step(step).items() if sent[1]}
        return explained_lines(step), self.settings.accumulate_grad_step, traffic


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
    """A context manager that keeps the unsharded weights of a Cell in place, so that evaluations gather them once.

    The shards must not change, and no step may be taken, inside of the block. The weights of units are gathered for
    every call all the same.

    Args:
        cell: the result of `hsdp()`. All ranks enter the block together.
    """
    storage = storage_of(cell)
    storage.check_closed()
    storage.open()
    with closing(storage):
        yield cell
