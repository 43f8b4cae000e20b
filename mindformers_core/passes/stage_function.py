"""A stage's Cell as a function of local tensors, in PyNative or compiled."""

from contextlib import nullcontext
from inspect import Parameter as Argument
from inspect import signature

from mindspore import Tensor

from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.passes.compiled_cells import CompiledCells, forbid_reuse
from mindformers_core.sharding.compiling import jit
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.sharding.parameter_storage import parameter_storage
from mindformers_core.sharding.sharded_cells import (
    GeneratedCell,
    ShardedCell,
    computing_parameters,
    tree_and_path,
    tree_of,
)

__all__ = ["StageFunction", "own_class"]

_TARGET = "target"


def own_class(cell):
    """The class that a Cell has as its user wrote it, sharded or not."""
    if not isinstance(cell, ShardedCell):
        return type(cell)
    tree, path = tree_and_path(cell)
    return tree.classes[path]


class StageFunction:
    """Calls a Cell, and the loss function if there is one; gives a tuple of local tensors.

    Args:
        cell, loss_fn, compiled: as of `PipelineStage`. Where the storage gathers weights unit by unit, or Cells are
            recomputed, several functions are compiled: see `CompiledCells`.

    Attributes:
        by_place, takes: names of the arguments that can be given by place, and of those that can be given by name.
        takes_any: whether any name can be given.
        layouts: those of what was returned last; None for a tensor that isn't distributed.

    Raises:
        ValueError: a loss function for a Cell that is sharded over several ranks.
    """

    def __init__(self, cell, loss_fn, compiled):
        if loss_fn is not None and isinstance(cell, ShardedCell) and tree_of(cell).mesh.size > 1:
            raise ValueError(
                f"{own_class(cell).__name__} is sharded over several ranks: a loss_fn would see this rank's part of "
                "its output only. Let the Cell itself compute the loss, from an argument of its own"
            )
        self.cell, self.storage = cell, parameter_storage(cell)
        self._is_compiled, self._cells_compiled = compiled, None
        self.loss_fn = None if loss_fn is None else _judging(loss_fn, compiled)
        arguments = list(signature(own_class(cell).construct).parameters.values())[1:]
        by_name = [a.name for a in arguments if a.kind in (Argument.POSITIONAL_OR_KEYWORD, Argument.KEYWORD_ONLY)]
        self.by_place = [
            a.name for a in arguments if a.kind in (Argument.POSITIONAL_ONLY, Argument.POSITIONAL_OR_KEYWORD)
        ]
        self.takes = by_name if loss_fn is None else [*by_name, _TARGET]
        self.takes_any = any(a.kind == Argument.VAR_KEYWORD for a in arguments)
        self.layouts = ()
        if compiled and isinstance(cell, ShardedCell):
            self._cells_compiled = CompiledCells(tree_of(cell))
        self._cells = [child for _, child in cell.cells_and_names()]
        self._weights = computing_parameters(cell)
        self._graphs = {}  # (names of what is passed by name, training flags) -> (places of the values, function)

    def _apart(self):
        """What is open while programs are asked for, or run whose functions are compiled each by itself."""
        return nullcontext() if self._cells_compiled is None else self._cells_compiled.calling()

    @property
    def compiled(self):
        """Whether the Cell is one compiled function."""
        if not self._is_compiled or self.storage.units:
            return False
        return self._cells_compiled is None or not self._cells_compiled.recomputes

    def __call__(self, inputs, kwargs):
        """The results; `kwargs` are the Cell's and, with a loss function, `target`."""
        target, named = self._parted(kwargs)
        if self.compiled:
            inputs, named = self.storage.cast_inputs(tuple(inputs), named)
            results = self._checked(self._compiled(tuple(named))(*inputs, *named.values()))
            results = self.storage.cast_outputs(results)
        else:
            with self._apart():
                results = self._checked(self.cell(*inputs, **named))
            self.layouts = tuple(getattr(result, "layout", None) for result in results)
            results = tuple(result.to_local() if isinstance(result, DTensor) else result for result in results)
        return results if self.loss_fn is None else self._checked(self.loss_fn(*target, *results))

    def _compiled(self, names):
        """The graph for what is passed by `names`; made anew where the Cell is another one to MindSpore's compiler.

        A graph keeps the training flags that it met, and the places in memory where values were: after `set_data` or
        `load_param_into_net` it would go on with the old ones. Optimizers update values where they are. A storage that
        gives memory back and takes other does so where graphs follow.
        """
        key = names, tuple(child.training for child in self._cells)
        places = [weight.data_ptr() for weight in self._weights if id(weight) not in self.storage.copied]
        known, graph = self._graphs.get(key, (None, None))
        if known != places:
            forbid_reuse(self.cell)
            graph = jit(self._graph(names))
            self._graphs[key] = places, graph
        return graph

    def own_kwargs(self, input_count, kwargs):
        """Those of the keyword arguments of a run that this function takes besides so many inputs."""
        names = set(kwargs) if self.takes_any else set(self.takes)
        names -= set(self.by_place[:input_count])
        return {name: value for name, value in kwargs.items() if name in names}

    def make_program(self, inputs, kwargs):
        """Make the program of a sharded Cell, if it lacks one for these, so that nothing is captured in a gradient."""
        if isinstance(self.cell, GeneratedCell):
            inputs, named = self.storage.cast_inputs(tuple(inputs), self._parted(kwargs)[1])
            with self._apart():
                program = prepare(self.cell, *inputs, **named)
            self.layouts = tuple(result.layout for result in program.results)

    def check_gradients(self):
        """Raise `ValueError` where gradients can't be taken of the program as recompute or swap ask for."""
        if isinstance(self.cell, GeneratedCell):
            tree_of(self.cell).activations.validate_for_backward()

    def _parted(self, kwargs):
        """The target in a tuple, and the other keyword arguments."""
        if self.loss_fn is None:
            return (), kwargs
        if _TARGET not in kwargs:
            raise TypeError(f"the loss_fn needs the keyword argument '{_TARGET}' of run()")
        return (kwargs[_TARGET],), {name: value for name, value in kwargs.items() if name != _TARGET}

    def _graph(self, names):
        """What is compiled: a function of positional arguments, the last of which the Cell takes by `names`."""
        cell = self.cell

        def call(*arguments):
            own = len(arguments) - len(names)
            named = {}
            for place, name in enumerate(names):
                named[name] = arguments[own + place]
            return cell(*arguments[:own], **named)

        return call

    def _checked(self, result):
        """What was returned, as a tuple of tensors."""
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for place, entry in enumerate(results):
            if not isinstance(entry, Tensor):
                raise TypeError(
                    f"output {place} of {own_class(self.cell).__name__} is {entry!r} of type {type(entry).__name__}: "
                    "it should return a tensor, or a tuple of tensors"
                )
        return results


def _judging(loss_fn, compiled):
    """A loss function of `(target, *results)`."""

    def judge(target, *results):
        return loss_fn(results[0] if len(results) == 1 else results, target)

    return jit(judge) if compiled else judge
