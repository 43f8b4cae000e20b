"""Where the values of a sharded tree's parameters are between computations: by default, in the parameters themselves.

`zero.hsdp()` gives a tree another storage: weights are unsharded while they compute, and sharded otherwise.
"""

from contextlib import nullcontext

from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.communication.world import process_state
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.dtypes import dtype_name
from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import tree_map


class ParameterStorage:
    """The hooks that a sharded tree's Cells and a pipeline's stage call. This storage leaves parameters as they are.

    Attributes:
        copied: ids of the Parameters that Cells compute with and that optimizers and users see another Parameter for;
            their memory is freed between computations.
        units: paths of the Cells whose weights are gathered for each call of them.
        takes_gradients: whether gradients are taken by a function that differentiates no inputs.
        is_open: whether all values that computing needs are in place, or are gathered by the calls of units.
        settings: the `HsdpSettings`, or None.
        replica: this rank's place among those that compute batches of their own, and their number.
        input_dtype, output_dtype: names of the dtypes that floating inputs and results of the root Cell are cast to;
            None leaves them as they are.
        uncast: places of the root Cell's positional arguments that stay as they are, which its class may say.
    """

    copied = frozenset()
    units = uncast = ()
    takes_gradients = False
    is_open = True
    replica = 0, 1
    settings = input_dtype = output_dtype = None

    def call_scope(self):
        """A context manager around a call of a Cell from outside, in PyNative."""
        return nullcontext()

    def backward_scope(self):
        """A context manager around a forward or backward pass whose gradients reach `gradient_sums`."""
        return nullcontext()

    def call_cell(self, path, call, args, kwargs):
        """`call(*args, **kwargs)`, a call of the Cell at `path`, with its weights in place."""
        return call(*args, **kwargs)

    def visible(self, parameter):
        """The Parameter that a reader of a Cell's attribute gets for one that the Cell computes with."""
        return parameter

    def stored(self, parameter):
        """The Parameter that optimizers and checkpoints get for one that a Cell computes with, with its values."""
        return parameter

    def on_read(self, parameter, reader=None):
        """A new program of the Cell at path `reader` reads a parameter; None: the parameter is read now."""

    def cast_inputs(self, args, kwargs):
        """The root Cell's arguments, with floating tensors in `input_dtype`, but those of `uncast`."""
        dtypes = (None if place in self.uncast else self.input_dtype for place in range(len(args)))
        return tuple(map(_cast, args, dtypes)), _cast(kwargs, self.input_dtype)

    def cast_outputs(self, result):
        """The root Cell's result, with floating tensors in `output_dtype`."""
        return _cast(result, self.output_dtype)

    def explained(self):
        """`(lines of text for explain(), micro-steps of a step, traffic of parameters)`, see `traffic.total`."""
        return [], 1, {}

    # What a pipeline's stage calls: forward and backward passes of several micro-batches alternate.

    def prepare_pipeline(self, stage_num):
        """Before a run: check which weights are frozen; of several stages keep them gathered, unless
        `reshard_after_forward=True`."""

    def free_units(self):
        """After a forward or backward pass: free the gathered weights of units."""

    def open(self, training=False):
        """Put all values in place that computing needs; `training`: whether gradients will be taken."""

    def close(self):
        """Allow values that computing needs to be freed."""

    def gradient_sums(self):
        """A new `GradientSums`."""
        return GradientSums()


class GradientSums:
    """Sums over micro-batches of the gradients of trained Parameters. These sums are of whole gradients, of one rank.

    Attributes:
        sums: number of a parameter -> the sum, in the dtype of sums, which may be this rank's shard.
    """

    def __init__(self):
        self.sums = {}

    def number(self, place):
        """The number of the trained Parameter at a place among all that are trained."""
        return place

    def begin(self, is_last, scale, comes, at_once):
        """Before the gradients of a micro-batch.

        Args:
            is_last: whether they are the last ones of a step, and can be reduced.
            scale: factor of reduced sums over all ranks. Default: that of `hsdp()`, or 1.
            comes, at_once: see `StepGradients.begin_adding`.
        """

    def take(self, gradients):
        """Add the gradients of all trained Parameters, a list in their order, which is emptied."""
        for place, gradient in enumerate(gradients):
            self.add(place, gradient)

    def add(self, number, gradient):
        """Add a gradient, as it is summed."""
        self.sums[number] = self.sums.pop(number) + gradient if number in self.sums else gradient

    def added_to(self, earlier):
        """The sum of `earlier` ones, or None, and these, which are emptied if there were earlier ones."""
        for number in [*self.sums] if earlier else ():
            earlier.add(number, self.sums.pop(number))
        return earlier or self

    def finish(self, scale):
        """The gradients of the Parameters that users see, in order; `scale` as of `begin`."""
        gradients = [self.sums.pop(place) for place in range(len(self.sums))]
        return gradients if scale is None else [gradient * scale for gradient in gradients]


def unit_of(path, units):
    """The unit of the parameter or Cell at `path`; "" for none."""
    return next((unit for unit in units if f"{path}.".startswith(f"{unit}.")), "")


def computing_dtype(name):
    """The name of the dtype to compute with in the place of one of the model, as `Instrumentation` may change it."""
    return process_state().instrumentation.dtype(name)


def as_dtype(tensor, name):
    """A tensor in the dtype of this name, or in its place; the tensor itself where it has that dtype."""
    name = computing_dtype(name)
    return tensor if dtype_name(tensor.dtype) == name else ops.cast(tensor, getattr(mstype, name))


def as_computed(tensor):
    """A tensor in the dtype to compute with."""
    return as_dtype(tensor, dtype_name(tensor.dtype))


def _cast(structure, dtype):
    """A pytree with floating tensors in the dtype of this name; as it is for None."""

    def cast(leaf):
        floats = isinstance(leaf, (Tensor, DTensor)) and is_float(dtype_name(leaf.dtype))
        return as_dtype(leaf, dtype) if floats else leaf

    return structure if dtype is None else tree_map(cast, structure)


def parameter_storage(cell):
    """The `ParameterStorage` of a Cell: that of its sharded tree, or one that keeps the parameters as they are.

    Raises:
        ValueError: a Cell with another storage than a tree that it is a part of, or that is a part of it.
    """
    storages = [
        (path, *child.__dict__["_sharding"]) for path, child in cell.cells_and_names() if "_sharding" in child.__dict__
    ]
    for path, tree, place in storages:
        if path != place and type(tree.storage) is not ParameterStorage:
            raise ValueError(
                f"hsdp() was called with {tree.label('')}, but this is "
                + (tree.label(place) + " of it" if path == "" else f"a {type(cell).__name__} around it")
                + ": pass on the Cell that hsdp() was called with"
            )
    return storages[0][1].storage if storages and storages[0][0] == "" else ParameterStorage()
