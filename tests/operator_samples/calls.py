"""A sample as a Cell and its inputs."""

from dataclasses import dataclass

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from operator_samples.inputs import Constant, names_for_samples

__all__ = ["NAMESPACES", "Sample", "build", "parameter_shapes", "plain_call"]

NAMESPACES = {
    "mint": ms.mint,
    "mint.nn.functional": ms.mint.nn.functional,
    "mint.linalg": ms.mint.linalg,
    "mint.special": ms.mint.special,
    "mint.nn": ms.mint.nn,
    "ops": ms.ops,
    "nn": ms.nn,
    "Tensor": Tensor,
}


@dataclass(frozen=True)
class Sample:
    """A call.

    Attributes:
        target: `"mint.add"`, `"nn.Dense"`, `"Tensor.add"`, `"ops.ReduceSum"`; or an expression, `"p + q"`.
        text: the arguments as source; of a class those of its constructor, `;`, those of the call. Of an expression the
            values of its names, in the order in which they come.
    """

    target: str
    text: str


def _arguments(text, names):
    return eval(f"(lambda *args, **kwargs: (args, kwargs))({text})", names)


def _function(target, first, names):
    """The callable behind a target, constructed with `first` where it is a class."""
    space, _, name = target.rpartition(".")
    if space == "Tensor":
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    if space not in NAMESPACES:
        return eval(f"lambda {', '.join(_names_in(target))}: {target}", names)
    found = getattr(NAMESPACES[space], name)
    if not isinstance(found, type):
        return found
    args, kwargs = _arguments(first, names)
    return found(*args, **kwargs)


def build(sample, anchored=False, detached=False, names=None):
    """`(Cell, inputs)`: the Cell calls the function with its inputs in the place of the sample's tensors, and with
    Parameters of its own in the place of the sample's. If `anchored`, it has one floating input more, which it returns
    doubled after its result: what takes and makes no floating tensor can be verified then. If `detached`, no gradient
    is asked of the function. `names`: other ones than those of `names_for_samples()`."""
    names = names or names_for_samples()
    first, separator, text = sample.text.rpartition(";")
    if not separator:
        first = ""
    args, kwargs = _arguments(text, names)
    function = _function(sample.target, first, names)
    inputs, parameters = [], []

    def place(leaf):
        if isinstance(leaf, Parameter):
            parameters.append(leaf)
            return _Place("parameter", len(parameters) - 1)
        if isinstance(leaf, Constant):
            return leaf.tensor
        if isinstance(leaf, Tensor):
            inputs.append(leaf)
            return _Place("input", len(inputs) - 1)
        return leaf

    template = _mapped(place, (args, kwargs))
    if sample.target.endswith(("_", "inplace_sigmoid")):  # it changes its first tensor, which isn't the caller's
        function = _on_a_copy(function)
    inputs += [names["f"](2)] if anchored else []
    cell = _cell_class(len(inputs), anchored, detached)(function, template, parameters)
    return cell.set_train(), inputs


def _on_a_copy(function):
    return lambda x, *args, **kwargs: function(x * 1, *args, **kwargs)


@dataclass(frozen=True)
class _Place:
    kind: str
    index: int


def _names_in(expression):
    code = compile(expression, "expression", "eval")
    return [name for name in code.co_names if name == "t" or not hasattr(Tensor, name)]


def _mapped(change, structure):
    if isinstance(structure, (tuple, list)):
        entries = [_mapped(change, entry) for entry in structure]
        return entries if isinstance(structure, list) else tuple(entries)
    if isinstance(structure, dict):
        return {key: _mapped(change, entry) for key, entry in structure.items()}
    return change(structure)


class _Called(nn.Cell):
    """Calls a function; `construct` is added for each number of inputs."""

    def __init__(self, function, template, parameters):
        super().__init__()
        self.template = template
        if isinstance(function, nn.Cell):
            self.inner = function
        self.function = function
        for number, parameter in enumerate(parameters):
            setattr(self, f"p{number}", parameter)

    def run(self, *inputs):
        def fill(leaf):
            if not isinstance(leaf, _Place):
                return leaf
            return inputs[leaf.index] if leaf.kind == "input" else getattr(self, f"p{leaf.index}")

        args, kwargs = _mapped(fill, self.template)
        return self.function(*args, **kwargs)


def _cell_class(count, anchored, detached):
    space, names = {"stop": ms.ops.stop_gradient}, ", ".join(f"x{number}" for number in range(count))
    given = ", ".join(f"stop(x{number})" for number in range(count)) if detached else names
    result = f"self.run({given})" + (f", x{count - 1} * 2.0" if anchored else "")
    exec(compile(f"def construct(self, {names}):\n    return {result}\n", __file__, "exec"), space)
    return type(f"Sample{count}", (_Called,), {"construct": space["construct"], "__module__": __name__})


def plain_call(sample, device="CPU"):
    """The result of the call on plain tensors, on CPU or on the meta device."""
    cell, inputs = build(sample)
    if device == "CPU":
        return cell(*inputs)
    with ms.DeviceCtx("meta"):
        return cell(*(ms.mint.empty(x.shape, dtype=x.dtype) for x in inputs))


def parameter_shapes(cell):
    """Name -> shape of the Parameters of a sample, not those of the Cell that it calls."""
    return {name: tuple(parameter.shape) for name, parameter in cell._params.items() if parameter is not None}
