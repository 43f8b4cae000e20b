"""Level 3: the Cells whose weights are gathered together, and the gathers around their calls.

The order of fully sharded data parallelism (Rajbhandari et al. 2020; Zhao et al. 2023, PyTorch FSDP): weights are
gathered before the forward pass, freed after it, gathered again when the gradient of the output arrives, and freed when
the weights' gradients are complete. The next units' weights are prefetched. All ranks issue collectives in that order;
devices with asynchronous launches overlap them with computation, CPU doesn't.
"""

from functools import cache

from mindspore import Tensor

from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.mindspore_private import needs_gradient, no_grad, pynative_executor
from mindformers_core.program.structure import tree_map
from mindformers_core.sharding.parameter_storage import unit_of
from mindformers_core.sharding.sharded_cells import CONTAINERS, tree_of


def find_units(cell):
    """The default units of `hsdp()`: the entries of Cell containers, and the Cells beside these; a tuple of paths.

    A Cell with a container somewhere below is no unit; its children are visited.
    """
    units = []

    def visit(path, child):
        for name, inner in child.name_cells().items():
            inner_path = f"{path}.{name}" if path else name
            has_container = any(isinstance(below, CONTAINERS) for _, below in inner.cells_and_names())
            if has_container and not isinstance(child, CONTAINERS):
                visit(inner_path, inner)
            else:
                units.append(inner_path)

    visit("", cell)
    return tuple(units)


class UnitSchedule:
    """Gathers and frees the weights of buckets: those of units around the calls of their Cells.

    Args:
        storage: the `HsdpStorage`, with `units`, `gathers` and `parameters`.

    Attributes:
        called: the units whose Cells are being called.
    """

    def __init__(self, storage):
        self.storage, self.called = storage, []
        self._unit_of = cache(lambda path: unit_of(path, storage.units))
        self._order, self._met = [], []  # units in the order of the last pass's calls; of this one's, so far
        self._held, self._missing, self._finished = set(), {}, []  # _missing: unit -> gradients to come

    def _buckets(self, unit):
        return [bucket for bucket in self.storage.gathers if bucket.unit == unit]

    def gather_bucket(self, bucket):
        """Gather the weights of a bucket; nothing in a dry run."""
        if self.storage.collectives is not None:
            with no_grad():
                self.storage.collectives.gather([self.storage.parameters[number] for number in bucket.members])

    def call_cell(self, path, call, args, kwargs):
        """`call(*args, **kwargs)`, a call of the Cell at `path`, with the weights of its unit in place."""
        unit = self._unit_of(path)
        if not unit or unit in self.called:
            return call(*args, **kwargs)
        self.called.append(unit)
        try:
            if unit not in self._met:
                self._met.append(unit)
            self._hold(unit, +1)
            result = call(*args, **kwargs)
            if pynative_executor.grad_flag():
                tree_map(_OutputHook(self, unit).register, result)
            return result
        finally:
            self.called.pop()
            tree = tree_of(self.storage.cells[0])
            if not (pynative_executor.grad_flag() and tree.activations.keeps_weights(unit)):
                self._free(unit)

    def before_backward(self, unit):
        """The gradient of a unit's output has come: gather the weights."""
        if self._met:
            self._order, self._met = self._met, []
        while self._finished:
            self._free(self._finished.pop())
        if unit not in self._missing:
            trainable = [stored.plan.trainable for stored in self.storage.parameters if stored.plan.unit == unit]
            self._missing[unit] = len(trainable) if all(trainable) else float("inf")
        self._hold(unit, -1)

    def gradient_came(self, number, gradient):
        """The gradient of parameter `number` is complete; after the last one of a unit its weights are freed soon.

        Gradients of activations may still need weights that are used without a gradient, too: so the weights are freed
        at the next unit's turn. A unit with frozen weights is freed at the end of the pass.

        Returns:
            The gradient's replacement, or None.
        """
        unit, reducer = self.storage.parameters[number].plan.unit, self.storage.reducer
        replaced = None if reducer is None else reducer.came(number, gradient)
        if unit in self._missing:
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                del self._missing[unit]
                self._finished.append(unit)
        return replaced

    def end(self):
        """Free all units, after a pass, also one that failed."""
        self._order, self._met = self._met or self._order, []
        self._missing, self._finished = {}, []
        for unit in list(self._held):
            self._free(unit)

    def _hold(self, unit, direction):
        """Gather a unit and the next ones in the last pass's order, each that isn't in place."""
        following = self._order[::direction]
        place = following.index(unit) if unit in following else len(following)
        for other in (unit, *following[place + 1 : place + 1 + self.storage.settings.prefetch]):
            if other not in self._held:
                self._held.add(other)
                for bucket in self._buckets(other):
                    self.gather_bucket(bucket)

    def _free(self, unit):
        if unit in self._held:
            self._held.remove(unit)
            for number in (number for bucket in self._buckets(unit) for number in bucket.members):
                self.storage.parameters[number].release()


class _OutputHook:
    """A hook on the outputs of a unit's call. MindSpore's compiler accepts a bound method, and no closure."""

    def __init__(self, schedule, unit):
        self.schedule, self.unit = schedule, unit

    def register(self, leaf):
        tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, Tensor) and needs_gradient(tensor):
            tensor.register_hook(self._gradient_came)

    def _gradient_came(self, gradient):
        self.schedule.before_backward(self.unit)
