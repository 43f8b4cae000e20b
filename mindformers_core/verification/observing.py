"""The observer of one simulated rank: every tensor of its programs is compared with the value on one card."""

from collections import defaultdict
from contextlib import contextmanager

from mindspore import Tensor, nn

from mindformers_core.dtensor.move import dtype_name
from mindformers_core.operators.signature import is_float
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.observer import Observer
from mindformers_core.sharding.parameter_storage import as_dtype
from mindformers_core.sharding.sharded_cells import tree_and_path, tree_of
from mindformers_core.verification.comparison import gradient_layout
from mindformers_core.verification.drawing import begin_draws
from mindformers_core.verification.truth import is_known, widened_text
from mindformers_core.zero.sharded_parameter import parameter_like

__all__ = ["RankObserver"]


class RankObserver(Observer):
    """Compares the tensors of one rank.

    Args:
        rank: the global rank.
        check: the `Check` of all ranks.
        dtype: name of the dtype of all floating tensors.

    Attributes:
        replica: number of the data-parallel replica of this rank; 0 where the program has all of the batch.
    """

    def __init__(self, rank, check):
        self.rank, self.check, self._dtype = rank, check, check.precision.dtype
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

    def placed(self, cell, parameters):
        """See `Observer`: floating tensors of a Cell in one dtype."""
        for _, child in cell.cells_and_names():
            for name, value in vars(child).items():
                if type(value) is Tensor:
                    vars(child)[name] = as_dtype(value, dtype_name(value.dtype))
        return {number: self._widened(parameter) for number, parameter in parameters.items()}

    @staticmethod
    def _widened(parameter):
        """A new Parameter: MindSpore's autograd stores a Parameter's dtype at its creation."""
        name = dtype_name(parameter.dtype)
        made = parameter_like(parameter, parameter.shape, name, parameter) if is_float(name) else parameter
        made.model_dtype = name
        return made

    def dtype(self, name):
        """See `Observer`."""
        return self._dtype if is_float(name) else name

    def planned(self, tree, path, plan):
        """See `Observer`: ranks of one mesh share a plan, which was made in the dtypes of the model."""
        assert path == "", path
        return self.check.plans[self.stages[id(tree)], tree.mesh]

    def text(self, text):
        """See `Observer`."""
        return widened_text(text, self._dtype)

    def loaded(self, module, source):
        """See `Observer`."""
        for name in source.constants:
            tensor = getattr(module, name)
            setattr(module, name, as_dtype(tensor, dtype_name(tensor.dtype)))

        def observed(cell, number, tensor):
            if self._pass is not None and source.observed[number].entry is not None:
                self._observe(source, module.__file__, cell, number, tensor)

        module.observed = observed

    @contextmanager
    def in_pass(self, label, direction):
        """See `Observer`."""
        before = self._pass, self._direction
        self._pass, self._direction = (*label, self.replica), direction
        if direction == "forward":
            begin_draws(self._pass)
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
        rounding = self.check.precision.rounding * self.check.truth.largest("gradient", self._pass)
        if value is not None:  # a trained one that the program uses
            self.check.hold(order, self.rank, "weight gradient", at, layout, gradient, value, rounding=rounding)

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
        is_flowing = self._direction == "forward" and tensor._requires_grad and not is_known(tensor)
        if is_flowing and is_produced and layout is not None:
            tensor.register_hook(lambda gradient: self._gradient(at, layout, gradient))

    def _gradient(self, at, layout, gradient):
        """Compare the gradient of a tensor, None where none came."""
        if gradient is not None:
            self.check.compare(self.rank, "gradient", at, layout, gradient)

    def _calls_of(self, tree, source):
        """(path, CellPlan) -> numbers of its calls, of the program with this source."""
        key = id(source)
        if key not in self._calls:
            (program,) = [each for each in tree.programs.values() if each.source is source]
            calls = self._calls[key] = {}
            self.check.roots[self.stages[id(tree)], tree.mesh] = program.frame
            for path, frame, graph in program.calls():
                calls.setdefault((path, frame), []).append(graph.call)
        return self._calls[key]
