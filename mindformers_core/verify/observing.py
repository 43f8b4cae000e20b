"""The observer of one simulated rank: every tensor of its programs is compared with the value on one card."""

from collections import defaultdict
from contextlib import contextmanager

import mindspore as ms
from mindspore import Tensor, nn

from mindformers_core.dtensor.move import dtype_name
from mindformers_core.operators.signature import is_float
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.observer import Observer
from mindformers_core.sharding.sharded_cells import tree_and_path, tree_of
from mindformers_core.verify.comparison import gradient_layout
from mindformers_core.verify.truth import widened_text

__all__ = ["RankObserver"]


class RankObserver(Observer):
    """Compares the tensors of one rank.

    Args:
        rank: the global rank.
        check: the `Check` of all ranks.
        widen: whether floating tensors are float64.

    Attributes:
        replica: number of the data-parallel replica of this rank; 0 where the program has all of the batch.
    """

    def __init__(self, rank, check, widen):
        self.rank, self.check, self.widen = rank, check, widen
        self.replica = 0
        self.stages, self._paths = {}, {}  # id of a `ShardedTree` -> number of its stage; id of a Parameter -> its path
        self._pass = self._direction = None
        self._seen = defaultdict(int)  # (label, direction, id of tree, path, number) -> reports so far
        self._calls = {}  # (id of a source, path) -> CellPlan -> numbers of its calls

    def enter_cells(self, cells):
        """Register the finished Cells of this rank, a dict by stage; returns id of a Parameter -> path."""
        self.stages = {id(tree_of(net)): stage for stage, net in cells.items()}
        for net in cells.values():
            for walk in (net.parameters_and_names(), nn.Cell.parameters_and_names(net)):
                self._paths.update((id(parameter), path) for path, parameter in walk)
        return self._paths

    def placed(self, cell):
        """See `Observer`: floating tensors of a Cell in float64."""
        if not self.widen:
            return
        for _, parameter in cell.parameters_and_names():
            if is_float(dtype_name(parameter.dtype)):
                parameter.set_dtype(ms.float64)
        for _, child in cell.cells_and_names():
            for name, value in vars(child).items():
                if type(value) is Tensor and is_float(dtype_name(value.dtype)):
                    vars(child)[name] = value.astype(ms.float64)

    def planned(self, tree, path, plan):
        """See `Observer`: ranks of one mesh share a plan, which was made in the dtypes of the model."""
        assert path == "", path
        return self.check.plans[self.stages[id(tree)], tree.mesh]

    def text(self, text):
        """See `Observer`."""
        return widened_text(text) if self.widen else text

    def loaded(self, module, source):
        """See `Observer`."""
        for name in source.constants if self.widen else ():
            tensor = getattr(module, name)
            if is_float(dtype_name(tensor.dtype)):
                setattr(module, name, tensor.astype(ms.float64))

        def observed(cell, number, tensor):
            if self._pass is not None and source.observed[number].entry is not None:
                self._observe(source, module.__file__, cell, number, tensor)

        module.observed = observed

    @contextmanager
    def in_pass(self, label, direction):
        """See `Observer`."""
        before = self._pass, self._direction
        self._pass, self._direction = (*label, self.replica), direction
        try:
            yield
        finally:
            self._pass, self._direction = before

    def weight_gradient(self, parameter, gradient):
        """See `Observer`; placeholders of gradients that were taken as they came have other shapes."""
        path = self._paths.get(id(parameter))
        tied = self.check.truth.tied  # a stage has one term of such a gradient
        if self._pass is None or path is None or path in tied or gradient.shape != parameter.shape:
            return
        layout = gradient_layout(getattr(parameter, "computing_layout", None) or parameter.layout)
        value = self.check.truth.weight_gradients[self._pass].get(path)
        order = 1, self._pass, 1, self.check.compared
        at = None, self._pass, None, path, None
        self.check.hold(order, self.rank, "weight gradient", at, layout, gradient, value)

    def _observe(self, source, file, cell, number, tensor):
        """Compare a tensor, and later its gradient."""
        seen, (tree, path) = source.observed[number], tree_and_path(cell)
        place = self._pass, self._direction, id(tree), path, id(source), number
        ordinal = self._seen[place]
        self._seen[place] += 1
        calls = self._calls_of(tree, source)[path, seen.frame]
        if self._direction == "backward" and len(calls) > 1:
            return  # which of them is recomputed isn't known
        stage = self.stages[id(tree)]
        at = (stage, self._pass), calls[ordinal % len(calls)], seen, path, file
        self.check.compare(self.rank, "value", at, seen.layout, tensor)
        layout = gradient_layout(seen.layout)
        is_produced = seen.frame.layouts[seen.value.id] == seen.layout and not isinstance(seen.entry, ParameterUse)
        if self._direction == "forward" and is_produced and layout is not None and tensor._requires_grad:
            tensor.register_hook(lambda gradient: self.check.compare(self.rank, "gradient", at, layout, gradient))

    def _calls_of(self, tree, source):
        """(path, CellPlan) -> numbers of its calls, of the program with this source."""
        key = id(source)
        if key not in self._calls:
            (program,) = [each for each in tree.programs.values() if each.source is source]
            calls = self._calls[key] = {}
            for path, frame, graph in program.calls():
                calls.setdefault((path, frame), []).append(graph.call)
        return self._calls[key]
