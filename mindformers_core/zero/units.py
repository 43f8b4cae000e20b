"""Level 3: which Cells' weights are gathered together, and when they come and go around their calls.

The order of fully sharded data parallelism (Rajbhandari et al. 2020; Zhao et al. 2023, PyTorch FSDP): gathered before
forward, dropped after it, gathered again when the gradient of the output arrives, dropped when the weights' gradients
are there. The next units' weights are gathered ahead. Collectives are issued in that order everywhere; devices with
asynchronous launches overlap them, CPU doesn't.
"""

from mindspore import Tensor
from mindspore.graph.api import _pynative_executor

from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.program.structure import tree_map
from mindformers_core.sharding.sharded_cells import CONTAINERS, tree_of

__all__ = ["UnitSchedule", "find_units", "unit_of"]


def find_units(cell):
    """Paths of the Cells that `hsdp()` takes as units: the entries of Cell containers, and what stands beside these.

    A Cell with a container somewhere in it is gone into; every other one with parameters is a unit.
    """
    units = []

    def visit(path, child):
        for name, inner in child.name_cells().items():
            inner_path = f"{path}.{name}" if path else name
            if isinstance(child, CONTAINERS) or not _has_container(inner):
                units.append(inner_path)
            else:
                visit(inner_path, inner)

    visit("", cell)
    return tuple(units)


def _has_container(cell):
    return any(isinstance(child, CONTAINERS) for _, child in cell.cells_and_names())


def unit_of(path, units):
    """The unit that the parameter or Cell at `path` lies in; "" for none."""
    return next((unit for unit in units if path.startswith(f"{unit}.")), "")


class UnitSchedule:
    """Gathers and drops the weights of units, one call after another.

    Args:
        storage: the `HsdpStorage`.
        prefetch: how many units ahead are gathered.

    Attributes:
        called: the units whose Cells are being called.
    """

    def __init__(self, storage, prefetch):
        self.storage, self.prefetch = storage, prefetch
        self.regroup()
        self._order, self._met = [], []  # units as the last pass called them; as this one has, so far
        self._held, self._missing, self._finished = set(), {}, []
        self.called = []

    def regroup(self):
        """Take over which buckets and parameters belong to which unit."""
        self._buckets = {}
        for bucket in self.storage.gathers:
            self._buckets.setdefault(bucket.unit, []).append(bucket)
        self._waiting = {}  # unit -> how many gradients its backward pass gives
        for stored in self.storage.parameters:
            self._waiting.setdefault(stored.plan.unit, []).append(stored.plan.trainable)

    def units(self):
        """Path of a Cell -> the function that calls it, for `ParameterStorage.units`."""
        return {unit: _Unit(self, unit) for unit in self._buckets if unit}

    def before_forward(self, unit):
        """The weights of a unit, and of those that come next, are in place."""
        if unit not in self._met:
            self._met.append(unit)
        self._hold(unit, +1)

    def after_forward(self, unit):
        """Drop what a unit's forward pass has needed."""
        self._drop(unit)

    def before_backward(self, unit):
        """The gradient of a unit's output has come."""
        if self._met:
            self._order, self._met = self._met, []
        self._drop_finished()
        self._missing.setdefault(unit, sum(self._waiting.get(unit, ())))
        self._hold(unit, -1)

    def gradient_came(self, unit):
        """One more gradient of a unit's weights is there; after the last one the weights are dropped soon.

        Gradients of activations may still need weights that are used without a gradient, too: so they go when the next
        unit's turn has come. Where a unit has weights that aren't trained, they stay until the pass ends.
        """
        if unit in self._missing:
            self._missing[unit] -= 1
            if self._missing[unit] == 0 and all(self._waiting[unit]):
                del self._missing[unit]
                self._finished.append(unit)

    def end(self):
        """After a pass, also one that failed: all units are in parts."""
        self._order, self._met = self._met or self._order, []
        self._missing, self._finished = {}, []
        for unit in list(self._held):
            self._drop(unit)

    def _drop_finished(self):
        while self._finished:
            self._drop(self._finished.pop())

    def _hold(self, unit, direction):
        """Gather a unit and the next ones in the last pass's order, each if it isn't there."""
        ahead = []
        if unit in self._order:
            place = self._order.index(unit)
            ahead = [place + direction * step for step in range(1, self.prefetch + 1)]
            ahead = [self._order[other] for other in ahead if 0 <= other < len(self._order)]
        for other in (unit, *ahead):
            if other not in self._held:
                self._held.add(other)
                for bucket in self._buckets.get(other, ()):
                    self.storage.fill(bucket)

    def _drop(self, unit):
        if unit in self._held:
            self._held.remove(unit)
            for bucket in self._buckets.get(unit, ()):
                self.storage.empty(bucket)


class _Unit:
    """Calls the Cell of a unit with its weights in place."""

    def __init__(self, schedule, unit):
        self.schedule, self.unit = schedule, unit

    def __call__(self, call, args, kwargs):
        schedule, unit = self.schedule, self.unit
        if unit in schedule.called:  # a Cell below the unit's own
            return call(*args, **kwargs)
        schedule.called.append(unit)
        try:
            schedule.before_forward(unit)
            result = call(*args, **kwargs)
            if _pynative_executor.grad_flag():
                tree_map(self._await_gradient, result)
            return result
        finally:
            schedule.called.pop()
            if not (_pynative_executor.grad_flag() and self._stays()):
                schedule.after_forward(unit)

    def _stays(self):
        tree = tree_of(self.schedule.storage.cells[0])
        return tree.activations.keeps_weights(self.unit)

    def _await_gradient(self, leaf):
        tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, Tensor) and tensor._requires_grad:
            tensor.register_hook(self._gradient_came)

    def _gradient_came(self, gradient):
        self.schedule.before_backward(self.unit)
