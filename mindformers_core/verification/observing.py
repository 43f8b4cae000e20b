"""The programs of one simulated rank: in one dtype, and every tensor compared with the value on one card."""

from contextlib import nullcontext
from traceback import walk_tb

from mindspore import Tensor

from mindformers_core.capture.python_state import PythonState
from mindformers_core.dtypes import dtype_name
from mindformers_core.mindspore_private import leave_dtypes, needs_gradient
from mindformers_core.operators.signature import is_float
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.observer import Instrumentation
from mindformers_core.sharding.observing import ProgramObserver, parameter_paths
from mindformers_core.sharding.parameter_storage import as_computed
from mindformers_core.sharding.sharded_cells import tree_and_path, tree_of
from mindformers_core.verification.comparison import gradient_layout
from mindformers_core.verification.report import instruction_at
from mindformers_core.verification.truth import is_known, widened, widened_text
from mindformers_core.zero.sharded_parameter import parameter_like


class RankInstrumentation(Instrumentation):
    """Programs of one rank in the dtype of a verification, with plans and sources that ranks share.

    Args:
        observer: the `RankObserver` of the rank.
    """

    def __init__(self, observer):
        self._observer, self._check, self._dtype = observer, observer.check, observer.check.precision.dtype

    def placed(self, cell, parameters):
        """See `Instrumentation`: floating tensors of a Cell in one dtype, without MindSpore's mixed precision."""
        if self._dtype is None:
            return parameters
        for _, child in cell.cells_and_names():
            child.mixed_precision_type = None
            leave_dtypes(child)
            for name, value in vars(child).items():
                if type(value) is Tensor:
                    vars(child)[name] = as_computed(value)
        return {number: self._widened(parameter) for number, parameter in parameters.items()}

    def _widened(self, parameter):
        """A new Parameter: MindSpore's autograd stores a Parameter's dtype at its creation."""
        name, made = dtype_name(parameter.dtype), parameter
        if is_float(name):
            values = Tensor(parameter.asnumpy().astype(self._dtype))  # MindSpore's cast takes 30 times as long
            made = parameter_like(parameter, parameter.shape, name, values)
        made.model_dtype = name
        return made

    def dtype(self, name):
        return widened(name, self._dtype) if is_float(name) and self._dtype else name

    def planned(self, tree, path, plan):
        """See `Instrumentation`: ranks of one mesh share a plan, which was made in the dtypes of the model."""
        assert path == "", path
        return *self._check.plans[self._observer.stages[id(tree)], tree.mesh], PythonState()

    def generated(self, key, generate):
        """See `Instrumentation`: ranks of one mesh share their source, too, but for constants of algorithms."""
        entries = (entry for _, plan in key[0].walk() for entry in plan.instructions)
        key += (self._observer.rank,) if any(getattr(entry, "algorithm", None) for entry in entries) else ()
        if key not in self._check.sources:
            self._check.sources[key] = generate()
        return self._check.sources[key]

    def text(self, text):
        return widened_text(text, self._dtype) if self._dtype else text

    def loaded(self, module, source):
        for name in source.constants:
            setattr(module, name, as_computed(getattr(module, name)))


class RankObserver(ProgramObserver):
    """Compares the tensors of one rank.

    Args:
        rank: the global rank.
        check: the `Check` of all ranks.

    Attributes:
        replica: number of the data-parallel replica of this rank; 0 where the program has all of the batch.
        stages: id of a `ShardedTree` -> number of the stage.
        paths: see `parameter_paths`.
        is_watching: whether tensors are compared while passes run.
    """

    def __init__(self, rank, check):
        super().__init__()
        self.rank, self.check = rank, check
        self.replica, self.stages, self.paths, self.is_watching = 0, {}, {}, check.precision.dtype is not None

    def enter_cells(self, cells, replica):
        """Register the finished Cells of this rank, a dict by stage."""
        self.stages = {id(tree_of(net)): stage for stage, net in cells.items()}
        self.paths, self.replica = parameter_paths(cells.values()), replica

    def in_pass(self, label, direction):
        label = *label, self.replica
        return super().in_pass(label, direction) if self.is_watching else nullcontext()

    def weight_gradient(self, parameter, gradient):
        """See `Observer`; placeholders of gradients that were taken as they came have other shapes."""
        path = self.paths.get(id(parameter))
        tied = self.check.truth.tied  # a stage has one term of such a gradient
        if self._pass is None or path is None or path in tied or gradient.shape != parameter.shape:
            return
        layout = gradient_layout(getattr(parameter, "computing_layout", None) or parameter.layout)
        value = self.check.truth.weight_gradients[self._pass].get(path)
        order = 1, self._pass, 1, self.check.compared
        at = None, self._pass, None, path, None
        if value is not None:  # a trained one that the program uses
            scale = self.check.truth.largest("gradient", self._pass)
            self.check.hold(order, self.rank, "weight gradient", at, layout, gradient, value, scale)

    def observed(self, source, cell, number, tensor):
        if self._pass is not None and self.check.looks_inside(self._pass):
            super().observed(source, cell, number, tensor)

    def computed(self, tree, program, path, graph, turn, seen, tensor):
        """Compare a tensor, and later its gradient."""
        stage = self.stages[id(tree)]
        self.check.roots[stage, tree.mesh] = program.plan
        at = (stage, self._pass), graph.call, seen, path, program.file
        self.check.compare(self.rank, "value", at, seen.layout, tensor)
        layout = gradient_layout(seen.layout)
        is_given = isinstance(seen.entry, ParameterUse | None) or seen.plan.layouts[seen.value.id] != seen.layout
        is_flowing = self._direction == "forward" and needs_gradient(tensor) and not is_known(tensor)
        if is_flowing and not is_given and layout is not None:
            tensor.register_hook(lambda gradient: self.check.compare(self.rank, "gradient", at, layout, gradient))


def place_of(traceback):
    """The instruction of a generated program that has raised an error, as text; "" where none has."""
    for frame, number in reversed(list(walk_tb(traceback))):
        if "/parallel_" in (file := frame.f_code.co_filename) and frame.f_code.co_name.startswith("parallel_"):
            tree, path = tree_and_path(frame.f_locals["self"])
            program = next(each for each in tree.programs.values() if each.file == file)
            return instruction_at(program.source.observed, path, file, number)
    return ""
