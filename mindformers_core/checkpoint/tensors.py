"""The Parameters of a rank as parts of global tensors: weights, and the moments of an optimizer."""

import numpy as np
from mindspore import Tensor

from mindformers_core.checkpoint.load import load
from mindformers_core.checkpoint.parts import Part, Ranks
from mindformers_core.checkpoint.regions import local_box, shape_of, whole
from mindformers_core.communication.messages import gather_values
from mindformers_core.communication.tensor_bytes import numpy_dtype
from mindformers_core.dtypes import dtype_name


def ranks_of(mesh, rank):
    """The `Ranks` of a mesh, seen from a rank."""
    return Ranks(rank, lambda value: gather_values(mesh, value))


def model_parts(cells, rank, file_name=lambda path: path):
    """The `Part`s of the weights, trained or not, of Cells: a dict, `Part` -> Parameter.

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
    return {_part("model", file_name(path), parameter, parameter, rank): parameter for path, parameter in
            parameters.items()}  # fmt: skip


def optimizer_parts(optimizer, rank, file_name=lambda path: path):
    """The `Part`s of the Parameters that an optimizer has besides its `parameters`, a dict, `Part` -> Parameter.

    One whose name ends with that of a parameter, and that has its shape, lies where that does, as moments do; others
    are alike on all ranks, as numbers of steps are. Arguments as of `model_parts`.
    """
    trained, found = {parameter.name: parameter for parameter in optimizer.parameters}, {}
    own = {id(parameter) for parameter in trained.values()}
    for state in (each for each in optimizer.get_parameters() if id(each) not in own):
        words = state.name.split(".")
        ends = (".".join(words[place:]) for place in range(1, len(words)))
        path = next((end for end in ends if end in trained and trained[end].shape == state.shape), None)
        name = state.name if path is None else state.name.removesuffix(path) + file_name(path)
        found[_part("optimizer", name, state, trained.get(path, state), rank)] = state
    return found


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
    box = whole(shape) if layout is None else local_box(layout, shape, rank)
    assert shape_of(box) == tuple(tensor.shape), (name, box, tensor.shape)
    return Part(group, name, dtype_name(tensor.dtype), shape, box)


def fill_parameter(parameter, array):
    """Give a Parameter the values of an array, of any dtype of as many bits, whose memory it keeps on CPU."""
    dtype = numpy_dtype(parameter.dtype)
    parameter.set_data(Tensor.from_numpy(np.ascontiguousarray(array).view(dtype).reshape(parameter.shape)))


def load_parameters(checkpoint, parts, ranks, converts=False, ignored=()):
    """`load` into Parameters: `parts` is a dict, `Part` -> Parameter; results, errors and others as of `load`."""
    return load(
        checkpoint, list(parts), lambda part, array: fill_parameter(parts[part], array), ranks, converts, ignored
    )
