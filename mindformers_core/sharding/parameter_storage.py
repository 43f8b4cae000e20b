"""Where the values of a sharded tree's parameters are while nothing is computed: by default, where they always are.

`zero.hsdp()` gives a tree another storage: weights are whole while they are needed, and in parts otherwise.
"""

from contextlib import nullcontext

__all__ = ["ParameterStorage", "parameter_storage"]


class ParameterStorage:
    """What the Cells of a sharded tree ask of the storage of their parameters. This one keeps them as they are.

    Attributes:
        parts: id of a Parameter that the Cells compute with -> the Parameter that optimizers and users see for it.
        units: the Cells, by path, whose weights come and go with their calls.
        takes_gradients: whether gradients are taken by a function that differentiates no inputs.
        is_open: whether all values that computing needs are there, or come by themselves.
        settings: the `HsdpSettings`, or None.
    """

    parts = {}
    units = {}
    takes_gradients = False
    is_open = True
    settings = None

    def call_scope(self):
        """A context manager around a call of a Cell from outside, in PyNative."""
        return nullcontext()

    def backward_scope(self):
        """A context manager around a forward or backward pass whose gradients are taken as they should be."""
        return nullcontext()

    def unit(self, path):
        """A function of `(call, args, kwargs)` that calls the Cell at `path` with weights in place; None: call it."""
        return None

    def give_parts(self):
        """Somebody from outside is going to look at the parts."""

    def cast_inputs(self, args, kwargs):
        """The arguments that the root Cell gets for those that it was called with."""
        return args, kwargs

    def cast_outputs(self, result):
        """What a call of the root Cell gives for its result."""
        return result

    def visible(self, parameter):
        """What reading a Cell's attribute gives that holds `parameter`."""
        return parameter

    def check_compiling(self):
        """Raise `ValueError` where a function that calls the Cells can't be compiled as things are."""

    def on_read(self, parameter, reader=None):
        """The Cell at path `reader` has a program, made just now, that reads a parameter; None: it is read now."""

    def explained(self):
        """`(lines of text for explain(), micro-steps of a step, what it sends of parameters)`, see `traffic.total`."""
        return [], 1, {}

    # What a pipeline's stage asks, whose forward and backward passes of several micro-batches lie between each other.

    def check_trained(self):
        """Raise `ValueError` where parameters were frozen or thawed that may not be."""

    def keep_units(self):
        """From now on no weights come and go by themselves in the midst of a pass, unless that was asked for."""

    def drop_units(self):
        """After a forward or backward pass: weights that come and go by themselves go."""

    def open(self, training=False):
        """Put all values in place that computing needs; where they are already, nothing happens.

        Args:
            training: whether gradients will be taken.
        """

    def close(self):
        """Values that computing needs may go."""

    def summed(self, gradients):
        """What is summed up for gradients of the trained Parameters that Cells compute with, a list that is used up.

        They themselves, in the dtypes to sum them in, or this rank's parts of them.
        """
        return gradients

    def reduced(self, gradients):
        """Of sums of what `summed` gave, a list that may be used up, the gradients of the Parameters that users see."""
        return gradients


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
