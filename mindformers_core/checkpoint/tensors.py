"""The Parameters of a rank as parts of global tensors: weights, and the moments of an optimizer."""

from collections import Counter

import numpy as np
from mindspore import Parameter, Tensor

from mindformers_core.checkpoint.adapters import adapter_tensor
from mindformers_core.checkpoint.load import load
from mindformers_core.checkpoint.parts import Part, Ranks
from mindformers_core.checkpoint.regions import local_box, shape_of, whole
from mindformers_core.checkpoint.tensor_map import boxes_in_files
from mindformers_core.communication.messages import gather_values
from mindformers_core.communication.tensor_bytes import numpy_dtype
from mindformers_core.dtypes import dtype_name
from mindformers_core.padding import own_slices, padded_array, padded_shape


def ranks_of(mesh, rank):
    """The `Ranks` of a mesh, seen from a rank."""
    return Ranks(rank, lambda value: gather_values(mesh, value))


def model_parts(cells, rank, tensor_map=()):
    """The `Part`s of the weights, trained or not, and of adapters, of Cells: a dict, `Part` -> Parameter, which several
    have where files have its boxes in several tensors.

    Args:
        cells: after `shard()`, `hsdp()`, or neither. Equal paths in several Cells are one tensor. A Parameter whose
            attribute `persistent` is False, such as a cache, is left out.
        rank: this rank's number.
        tensor_map: see `tensor_map.py`. Default: names of tensors are the paths of parameters.
    """
    parameters = {}
    for cell in cells:
        for path, parameter in cell.parameters_and_names():
            if getattr(parameter, "persistent", True):
                parameters.setdefault(path, parameter)
    found = {}
    for path, parameter in parameters.items():
        group, name, own = getattr(parameter, "group", "model"), path, tensor_map
        if group == "adapter":
            name, own = adapter_tensor(path), ()
        found |= dict.fromkeys(_parts(group, "", name, parameter, parameter, rank, own), parameter)
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


def optimizer_parts(optimizer, rank, tensor_map=()):
    """The `Part`s of the state of an optimizer, a dict, `Part` -> Parameter; arguments as of `model_parts`.

    Raises:
        ValueError: two Parameters of one name; one of the shape of a parameter's part, but of another name, so that it
            isn't known where it lies.
    """
    found = {}
    for state, placed in states_of(optimizer):
        own = (
            ("", state.name, state, state)
            if placed is None
            else (state.name.removesuffix(placed.name), placed.name, state, placed)
        )
        parts = _parts("optimizer", *own, rank, () if placed is None else tensor_map)
        if not found.keys().isdisjoint(parts):
            raise ValueError(f"{type(optimizer).__name__} has two Parameters '{state.name}': give each its own name")
        found |= dict.fromkeys(parts, state)
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


def _parts(group, start, path, tensor, placed, rank, tensor_map):
    """The `Part`s of a tensor that lies where the Parameter `placed` at `path` does; their names begin with `start`."""
    layout, shape = getattr(placed, "layout", None), tuple(getattr(placed, "global_shape", placed.shape))
    sizes = getattr(placed, "part_sizes", ())
    box = whole(shape) if layout is None else local_box(layout, padded_shape(shape, sizes), rank)
    assert shape_of(box) == tuple(tensor.shape), (path, box, tensor.shape)
    box = tuple((each.start, each.stop) for each in own_slices([slice(*ends) for ends in box], sizes))
    found, dtype = boxes_in_files(tensor_map, path, shape, box), dtype_name(tensor.dtype)
    return [Part(group, start + name, dtype, *described) for name, *described in found]


def fill_parameter(parameter, array):
    """Give a Parameter the values of an array, of any dtype of as many bits, whose memory it keeps on CPU."""
    values = np.ascontiguousarray(padded_array(array, parameter.shape)).view(numpy_dtype(parameter.dtype))
    parameter.set_data(Tensor.from_numpy(values.reshape(parameter.shape)))


def load_parameters(checkpoint, parts, ranks, converts=False, ignored=()):
    """`load` into Parameters: `parts` is a dict, `Part` -> Parameter; results, errors and others as of `load`.

    A Parameter of several parts is filled when the last one has come.
    """
    left, arrays = Counter(id(parameter) for parameter in parts.values()), {}

    def fill(part, values):
        parameter, array = parts[part], values
        if part.view is not None:
            array = arrays.setdefault(id(parameter), np.zeros(parameter.shape, values.dtype))
            part.of(array)[...] = values
        left[id(parameter)] -= 1
        if not left[id(parameter)]:
            fill_parameter(parameter, array)
            arrays.pop(id(parameter), None)

    return load(checkpoint, list(parts), fill, ranks, converts, ignored)
