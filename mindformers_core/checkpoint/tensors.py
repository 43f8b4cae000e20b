"""The Parameters of a rank as parts of global tensors: weights, and the moments of an optimizer."""

import numpy as np
from mindspore import Parameter, Tensor

from mindformers_core.checkpoint.adapters import adapter_tensor
from mindformers_core.checkpoint.load import load
from mindformers_core.checkpoint.parts import Part, Ranks
from mindformers_core.checkpoint.regions import local_box, shape_of, whole
from mindformers_core.communication.messages import gather_values
from mindformers_core.communication.tensor_bytes import numpy_dtype
from mindformers_core.dtypes import dtype_name
from mindformers_core.padding import own_slices, padded_array, padded_shape


def ranks_of(mesh, rank):
    """The `Ranks` of a mesh, seen from a rank."""
    return Ranks(rank, lambda value: gather_values(mesh, value))


def model_parts(cells, rank, file_name=lambda path: path):
    """The `Part`s of the weights, trained or not, and of adapters, of Cells: a dict, `Part` -> Parameter.

    Args:
        cells: after `shard()`, `hsdp()`, or neither. Equal paths in several Cells are one tensor. A Parameter whose
            attribute `persistent` is False, such as a cache, is left out.
        rank: this rank's number.
        file_name: function of the path of a parameter that returns the name of the tensor in files.
    """
    parameters = {}
    for cell in cells:
        for path, parameter in cell.parameters_and_names():
            if getattr(parameter, "persistent", True):
                parameters.setdefault(path, parameter)
    found = {}
    for path, parameter in parameters.items():
        group = getattr(parameter, "group", "model")
        name = adapter_tensor(path, file_name) if group == "adapter" else file_name(path)
        found[_part(group, name, parameter, parameter, rank)] = parameter
    return found


def parts_of(checkpoint, parts):
    """Those of `Part`s, a dict as of `model_parts`, that a `Checkpoint` has: no adapters where it has none, and no
    weights beneath adapters where it has no base. Those that are saved for None: not what is frozen beneath adapters.
    """
    if checkpoint is not None and has_adapters(parts):
        groups = {group for group, _ in checkpoint.tensors}
        parts = {part: each for part, each in parts.items() if part.group in groups}
    if checkpoint is None or (checkpoint.adapters and checkpoint.base is None):
        parts = {
            part: each for part, each in parts.items() if each.requires_grad or not getattr(each, "is_base", False)
        }
    return parts


def has_adapters(parts):
    """Whether `Part`s, a dict as of `model_parts`, are of a model with adapters, perhaps of other stages."""
    return any(getattr(each, "is_base", False) for each in parts.values())


def optimizer_parts(optimizer, rank, file_name=lambda path: path):
    """The `Part`s of the state of an optimizer, a dict, `Part` -> Parameter; arguments as of `model_parts`.

    Raises:
        ValueError: two Parameters of one name; one of the shape of a parameter's part, but of another name, so that it
            isn't known where it lies.
    """
    found = {}
    for state, placed in states_of(optimizer):
        name = state.name
        if placed is not None:
            name = name.removesuffix(placed.name) + file_name(placed.name)
        part = _part("optimizer", name, state, state if placed is None else placed, rank)
        if part in found:
            raise ValueError(f"{type(optimizer).__name__} has two Parameters '{state.name}': give each its own name")
        found[part] = state
    return found


def states_alike(optimizer):
    """Name -> bytes of the Parameters of an optimizer's state that ranks have to have alike, as a number of steps."""
    return {state.name: state.asnumpy().tobytes() for state, placed in states_of(optimizer) if placed is None}


def states_of(optimizer):
    """Pairs (Parameter, the trained one that it lies with, or None) of an optimizer's state.

    That are the Parameters that it and Cells in it have besides `parameters`, in attributes, lists and dicts, but its
    learning rates, which belong to the code. One whose name ends with that of a parameter of its shape, as a moment's,
    lies with that.
    """
    trained = {parameter.name: parameter for parameter in optimizer.parameters}
    known = {id(parameter) for parameter in trained.values()}
    listed = (each for _, cell in optimizer.cells_and_names() for each in _parameters_in(vars(cell)))
    for state in [*optimizer.get_parameters(), *listed]:
        words = state.name.split(".")
        if id(state) in known or words[-1].startswith("learning_rate"):
            continue
        known.add(id(state))
        ends = (".".join(words[place:]) for place in range(1, len(words)))
        path = next((end for end in ends if end in trained and trained[end].shape == state.shape), None)
        parts = [each for each in trained.values() if each.shape != getattr(each, "global_shape", each.shape)]
        strange = next((each.name for each in parts if path is None and each.shape == state.shape), None)
        if strange is not None:
            raise ValueError(
                f"'{state.name}' of {type(optimizer).__name__} has the shape {tuple(state.shape)} of this rank's part "
                f"of '{strange}': call it '….{strange}', which says that it lies where that does"
            )
        yield state, trained.get(path)


def _parameters_in(value):
    """The Parameters in dicts, lists and tuples."""
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(entry)


def share_weights(cells):
    """Cells of a rank that have a parameter of one path, such as a tied embedding, get the values of the first."""
    weights = {}
    for cell in cells:
        for path, parameter in cell.parameters_and_names():
            if weights.setdefault(path, parameter) is not parameter:
                parameter.set_data(weights[path])


def _part(group, name, tensor, placed, rank):
    """The `Part` of a tensor that lies where the Parameter `placed` does."""
    layout, shape = getattr(placed, "layout", None), tuple(getattr(placed, "global_shape", placed.shape))
    sizes = getattr(placed, "part_sizes", ())
    box = whole(shape) if layout is None else local_box(layout, padded_shape(shape, sizes), rank)
    assert shape_of(box) == tuple(tensor.shape), (name, box, tensor.shape)
    box = tuple((each.start, each.stop) for each in own_slices([slice(*ends) for ends in box], sizes))
    return Part(group, name, dtype_name(tensor.dtype), shape, box)


def fill_parameter(parameter, array):
    """Give a Parameter the values of an array, of any dtype of as many bits, whose memory it keeps on CPU."""
    values = np.ascontiguousarray(padded_array(array, parameter.shape)).view(numpy_dtype(parameter.dtype))
    parameter.set_data(Tensor.from_numpy(values.reshape(parameter.shape)))


def load_parameters(checkpoint, parts, ranks, converts=False, ignored=()):
    """`load` into Parameters: `parts` is a dict, `Part` -> Parameter; results, errors and others as of `load`."""
    return load(
        checkpoint, list(parts), lambda part, array: fill_parameter(parts[part], array), ranks, converts, ignored
    )
