"""A Cell, and a loss function, as a function of local tensors, in PyNative or compiled."""

from contextlib import nullcontext
from inspect import Parameter as Argument

from mindspore import Tensor

from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.passes.compiled_cells import CompiledCells, forbid_reuse_below
from mindformers_core.program.structure import call_signature
from mindformers_core.scopes import replaced
from mindformers_core.sharding.compiling import jit
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.sharding.parameter_storage import parameter_storage
from mindformers_core.sharding.sharded_cells import GeneratedCell, ShardedCell, computing_parameters, own_class, tree_of

_TARGET = "target"


class StageFunction:
    """Calls a Cell, then the loss function if there is one; returns a tuple of local tensors.

    Args:
        cell, loss_fn, compiled: as of `PipelineStage`. Where the storage gathers weights unit by unit, or Cells are
            recomputed, several functions are compiled: see `CompiledCells`.

    Attributes:
        by_place, takes: names of the arguments that can be positional, and of those that can be keyword arguments.
        takes_any: whether every keyword argument is accepted.
        layouts: the layouts of the last outputs; None for an output that isn't distributed.

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
        self.loss_fn = None if loss_fn is None else _loss_of_outputs(loss_fn, compiled)
        arguments = list(call_signature(own_class(cell).construct).parameters.values())[1:]
        by_name, by_place = (
            [argument.name for argument in arguments if argument.kind in (Argument.POSITIONAL_OR_KEYWORD, kind)]
            for kind in (Argument.KEYWORD_ONLY, Argument.POSITIONAL_ONLY)
        )
        self.by_place, self.takes = by_place, by_name if loss_fn is None else [*by_name, _TARGET]
        self.takes_any = any(argument.kind == Argument.VAR_KEYWORD for argument in arguments)
        self.layouts, self._program = (), None  # the program that `make_program` has made or found, for the next call
        self._is_compiled = compiled
        self._cells_compiled = CompiledCells(tree_of(cell)) if compiled and isinstance(cell, ShardedCell) else None
        self._calling = nullcontext if self._cells_compiled is None else self._cells_compiled.calling
        self._cells = [child for _, child in cell.cells_and_names()]
        self._weights = computing_parameters(cell)
        self._graphs = {}  # (names of keyword arguments, training flags) -> (addresses of the values, function)

    @property
    def compiled(self):
        """Whether the Cell is one compiled function."""
        in_parts = self.storage.units or self._cells_compiled and tree_of(self.cell).activations.recomputed_cells
        return self._is_compiled and not in_parts

    def __call__(self, inputs, kwargs):
        """Call the Cell; `kwargs` are the Cell's and, with a loss function, `target`."""
        target, named = self._split_target(kwargs)
        if self.compiled:
            inputs, named = self.storage.cast_inputs(tuple(inputs), named)
            results = self._checked(self._compiled(tuple(named))(*inputs, *named.values()))
            results = self.storage.cast_outputs(results)
        else:
            prepared = nullcontext() if self._program is None else replaced(tree_of(self.cell), prepared=self._program)
            self._program = None
            with self._calling(), prepared:
                results = self._checked(self.cell(*inputs, **named))
            self.layouts = tuple(getattr(result, "layout", None) for result in results)
            results = tuple(result.to_local() if isinstance(result, DTensor) else result for result in results)
        return results if self.loss_fn is None else self._checked(self.loss_fn(*target, *results))

    def in_pynative(self):
        """A context manager: while it is open, nothing is compiled."""
        return replaced(self, _is_compiled=False, _calling=nullcontext)

    def _compiled(self, names):
        """The compiled Cell for keyword arguments `names`, as a function of positional arguments, those come last.

        A graph contains the training flags and the addresses of values at its compilation: after `set_data` or
        `load_param_into_net` the Cell is compiled again. Optimizers update values in place. The values of a storage
        that frees and allocates memory are excepted: graphs read their addresses at every call.
        """
        cell, key = self.cell, (names, tuple(child.training for child in self._cells))
        addresses = [weight.data_ptr() for weight in self._weights if id(weight) not in self.storage.copied]
        known, graph = self._graphs.get(key, (None, None))
        if known == addresses:
            return graph

        def call(*arguments):
            own = len(arguments) - len(names)
            named = {}
            for place, name in enumerate(names):
                named[name] = arguments[own + place]
            return cell(*arguments[:own], **named)

        forbid_reuse_below(cell)
        self._graphs[key] = addresses, jit(call)
        return self._graphs[key][1]

    def own_kwargs(self, input_count, kwargs):
        """The keyword arguments of a run that this function takes besides `input_count` positional ones."""
        names = set(kwargs if self.takes_any else self.takes) - set(self.by_place[:input_count])
        return {name: value for name, value in kwargs.items() if name in names}

    def make_program(self, inputs, kwargs):
        """Make the program of a sharded Cell for these arguments if it has none: gradients can't contain a capture.

        A call that follows is of these arguments.
        """
        if isinstance(self.cell, GeneratedCell):
            inputs, named = self.storage.cast_inputs(tuple(inputs), self._split_target(kwargs)[1])
            with self._calling():
                self._program = prepare(self.cell, *inputs, **named)
            self.layouts = tuple(result.layout for result in self._program.results)

    def check_gradients(self):
        """Raise `ValueError` where the program's backward pass can't follow the settings of recompute or swap."""
        if isinstance(self.cell, GeneratedCell):
            tree_of(self.cell).activations.validate_for_backward()

    def _split_target(self, kwargs):
        """`(target,)`, () without a loss function, and the other keyword arguments."""
        if self.loss_fn is None:
            return (), kwargs
        if _TARGET not in kwargs:
            raise TypeError(f"the loss_fn needs the keyword argument '{_TARGET}' of run()")
        return (kwargs[_TARGET],), {name: value for name, value in kwargs.items() if name != _TARGET}

    def _checked(self, result):
        """The returned value as a tuple; raise `TypeError` unless it contains tensors only."""
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for place, entry in enumerate(results):
            if not isinstance(entry, Tensor):
                raise TypeError(
                    f"output {place} of {own_class(self.cell).__name__} is {entry!r} of type {type(entry).__name__}: "
                    "it should return a tensor, or a tuple of tensors"
                )
        return results


def _loss_of_outputs(loss_fn, compiled):
    """`loss_fn` as a function of `(target, *outputs)`."""

    def loss_of(target, *outputs):
        return loss_fn(outputs[0] if len(outputs) == 1 else outputs, target)

    return jit(loss_of) if compiled else loss_of
