"""The classes of the Cells of a sharded tree: subclasses of the user's that run a program, or run eagerly."""

import logging

from mindspore import Parameter, ParameterTuple, Tensor, nn

from mindformers_core.capture.traced import failed_site
from mindformers_core.communication import process_state
from mindformers_core.dtensor.dtensor import DTensor, parameter_view, wrap
from mindformers_core.dtensor.interception import draws_by_position
from mindformers_core.hints import first_of, message_of
from mindformers_core.lowering.aliases import adoptions
from mindformers_core.mindspore_private import parameters_of
from mindformers_core.program.structure import tree_leaves
from mindformers_core.scopes import replaced
from mindformers_core.sharding.compiling import choose_program
from mindformers_core.sharding.parameter_storage import unit_of

CONTAINERS = (nn.CellList, nn.CellDict, nn.SequentialCell)  # they hold other Cells in a row
_LOG = logging.getLogger("mindformers_core")
_SHOWN = 5  # Cells of a list in an error
_LOCATED = (ValueError, TypeError, IndexError, RuntimeError, UnicodeDecodeError)


class ShardedCell:
    """Mixed into the class of every Cell of a sharded tree."""

    def construct(self, *args, program=None, **kwargs):
        if program is None:
            program = choose_program(self.sharded_cell_number, args, kwargs)
        return getattr(self, program)(*args, **kwargs)

    def eager(self):
        """From now on run this Cell, and those around it, operator by operator; the Cells in it keep their programs.

        For Cells whose Python code needs the values of tensors, and for debugging: operators then meet `DTensor`s in
        the user's own code.

        Returns:
            The Cell itself.
        """
        tree, path = self.__dict__["_sharding"]
        tree.mark_eager(path)
        return self

    def __setattr__(self, name, value):
        """As MindSpore's; with another Parameter, programs are made anew."""
        tree, path = self.__dict__["_sharding"]
        if isinstance(value, DTensor) and name in parameters_of(self):
            return _view(parameters_of(self)[name], tree).overwrite(value)
        if isinstance(value, nn.Cell) and not name.startswith("_"):
            tree.check_new(f"{path}.{name}".strip("."), value)
        super().__setattr__(name, value)
        if name == "training":
            tree.training = None
        elif isinstance(value, (Parameter, ParameterTuple)):
            tree.forget_programs()

    def __reduce_ex__(self, protocol):
        tree, path = self.__dict__["_sharding"]
        raise TypeError(
            f"{tree.label(path)} is sharded, and can't be copied or pickled: build and shard() a second one alike, and "
            "copy the values, mindspore.load_param_into_net(second, net.parameters_dict())"
        )

    def recompute(self, *args, **settings):
        """As MindSpore's; not where activations are chosen by name: `recompute()` and `swap()` leave it out, too."""
        tree, path = self.__dict__["_sharding"]
        if tree.activations.is_active:
            raise ValueError(
                f"recompute() or swap() was called with {tree.label('')} already: select {tree.label(path)} there, in "
                "a pattern, and leave its own recompute() out"
            )
        return super().recompute(*args, **settings)

    def parameters_and_names(self, name_prefix="", expand=True):
        """As MindSpore's, of the Parameters that optimizers and checkpoints are to see."""
        storage = self.__dict__["_sharding"][0].storage
        for name, parameter in super().parameters_and_names(name_prefix, expand):
            yield name, storage.stored(parameter)

    @property
    def parameter_layout_dict(self):
        """As MindSpore's, which its functions ask for that save a Cell: they write the parts that this rank has."""
        tree, path = self.__dict__["_sharding"]
        if any(any(parameter.layout.dims) for parameter in self.get_parameters()):
            _LOG.warning(
                "%s is sharded: what MindSpore saves of it are this rank's parts, which fit this mesh only; for whole "
                "tensors all ranks call mindformers_core.full_parameters(net), and one saves what it returns",
                tree.label(path),
            )
        return super().parameter_layout_dict

    def add_flags(self, **flags):
        """As MindSpore's, which `set_train` calls: programs depend on the flag."""
        self.__dict__["_sharding"][0].training = None
        return super().add_flags(**flags)


def tree_and_path(cell):
    """The `ShardedTree` that a Cell belongs to, and the Cell's path in it.

    Raises:
        TypeError: `cell` isn't sharded.
    """
    if not isinstance(cell, ShardedCell):
        raise TypeError(f"{type(cell).__name__} isn't sharded: call shard(cell, mesh, ...) first")
    return cell.__dict__["_sharding"]


def tree_of(cell):
    """The first of `tree_and_path`, which raises the same."""
    return tree_and_path(cell)[0]


def own_class(cell):
    """The class of a Cell before `shard()` changed it."""
    if not isinstance(cell, ShardedCell):
        return type(cell)
    tree, path = tree_and_path(cell)
    return tree.classes[path]


class GeneratedCell(ShardedCell):
    """A Cell that runs generated programs: its methods of such names as `parallel_gated_mlp`."""

    @property
    def mixed_precision_type(self):
        """None: the casts of `to_float` are in the programs."""

    @mixed_precision_type.setter
    def mixed_precision_type(self, kind):
        self.__dict__["mixed_precision_type"] = kind
        self.__dict__["_sharding"][0].forget_programs()

    def __call__(self, *args, program=None, **kwargs):
        tree, path = self.__dict__["_sharding"]
        call = super().__call__
        if program is not None:
            if tree.compiled_cells is not None:
                call = tree.compiled_cells.function_of(path, program) or call
            return tree.storage.call_cell(path, call, args, {**kwargs, "program": program})
        if not unit_of(path, tree.storage.units):
            return tree.enter(path, call, args, kwargs)  # MindSpore finds a gradient's forward pass by the arguments

        def call_in_unit(*args, **kwargs):
            return tree.storage.call_cell(path, call, args, {"program": tree.running, **kwargs})

        return tree.enter(path, call_in_unit, args, kwargs)

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return self.__dict__["_sharding"][0].storage.visible(value) if isinstance(value, Parameter) else value


class EagerCell(ShardedCell):
    """A Cell that runs operator by operator: tensors are `DTensor`s, moved at its boundary as declared."""

    def __call__(self, *args, **kwargs):
        tree, path = self.__dict__["_sharding"]
        return tree.storage.call_cell(path, super().__call__, args, kwargs)

    def run_eagerly(self, *args, **kwargs):
        """The user's `construct` on DTensors, between the declared moves."""
        tree, path = self.__dict__["_sharding"]
        boundary = tree.boundaries[path]
        if tree.views is None:
            if path == "":
                tree.follow_cells()
                shapes = tuple(tuple(tensor.shape) for tensor in tree_leaves((args, kwargs), Tensor))
                tree.compare_inputs(shapes, args, kwargs)
            state, weights = process_state(), tree.parameter_layouts.values()
            axes = frozenset(tree.mesh.axis_names).difference(*(layout.cut_axes for layout in weights))
            calls = state.memo((axes, tree.device_model))
            planned = replaced(state, batch_axes=axes, device_model=tree.device_model, calls=calls)
            with replaced(tree, views={}), tree.storage.call_scope(), draws_by_position(), adoptions(), planned:
                args, kwargs = tree.storage.cast_inputs(args, kwargs) if path == "" else (args, kwargs)
                result = self.run_eagerly(*args, **kwargs)
                return tree.storage.cast_outputs(result) if path == "" else result
        try:
            args, kwargs = boundary.enter(args, kwargs)
            return boundary.leave(super(ShardedCell, self).construct(*args, **kwargs))
        except _LOCATED as error:
            raise located(error, boundary.label) from error.__cause__

    def __getattr__(self, name):
        value = super().__getattr__(name)
        if isinstance(value, Parameter) and hasattr(value, "global_shape"):
            return _view(value, self.__dict__["_sharding"][0])
        if isinstance(value, ParameterTuple):
            return tuple(_view(parameter, self.__dict__["_sharding"][0]) for parameter in value)
        return value


def sharded_class(mixin, cls, programs=()):
    """`cls` with a mixin; `programs` are pairs (name, function) that become methods."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__, **dict(programs)})


def computing_parameters(cell):
    """The Parameters that a Cell and those below compute with, as a list."""
    return [parameter for _, parameter in nn.Cell.parameters_and_names(cell)]


def _view(parameter, tree):
    """The DTensor of a parameter, one for a whole forward pass, so that all its uses share marks and gathers."""
    if tree.views is None:
        return parameter_view(tree.storage.visible(parameter))
    tree.storage.on_read(parameter)
    view = tree.views.get(id(parameter))
    if view is None:
        view = tree.views[id(parameter)] = parameter_view(parameter, wrap)
    return view


def located(error, label):
    """The error with the innermost Cell's name in front, once. A user's own kind of error is left as it is."""
    if type(error) not in _LOCATED or getattr(error, "is_located", False):
        return error
    text, (source, _) = message_of(error), failed_site(error)
    kind = ValueError if isinstance(error, UnicodeDecodeError) else type(error)
    place = f"{label}, {source}" if source else label  # of a Cell of MindSpore there is no line of the user's
    found = kind(text if label in text else f"in {place}: {text}").with_traceback(error.__traceback__)
    found.is_located = True
    return found


def tree_of_root(cell, function, instead=""):
    """The `ShardedTree` of a root Cell all of whose Cells run generated programs.

    Args:
        cell: what a user gave.
        function: name of the function that it was given to, for errors.
        instead: what else to do with a Cell below the root, for errors.

    Raises:
        TypeError: it isn't sharded. ValueError: it is a Cell below a root, or one of its Cells runs eagerly.
    """
    if not isinstance(cell, ShardedCell):
        raise TypeError(
            f"{function}() takes a Cell that shard() was called with, not {type(cell).__name__}: on one card, "
            'shard(cell, init_device_mesh((1,), ("dp",))) first'
        )
    tree, path = cell.__dict__["_sharding"]
    if path:
        raise ValueError(
            f"{tree.label(path)} is part of a sharded tree, and {function}() takes the root: call it with "
            f"{tree.label('')}{instead}"
        )
    eager = [tree.label(inner) for inner, child in tree.cells.items() if isinstance(child, EagerCell)]
    if eager:
        raise ValueError(
            f"{first_of(eager, _SHOWN)}: runs operator by operator (eager), where {function}() can't change what runs: "
            'shard(cell, mesh, mode="generated"), and mark no Cell of it eager'
        )
    return tree
