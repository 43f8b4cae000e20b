"""Modules of generated source for tests: programs of operator calls in real files, run in PyNative and under jit."""

import importlib
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Tensor
from operator_calls import local
from support.captured_models import Function

from mindformers_core.capture.capture import capture
from mindformers_core.lowering.operator_source import operator_source
from mindformers_core.program.structure import tree_leaves

GROUP = 40  # programs that are compiled together


@dataclass
class Program:
    """Straight-line source of one function. Its inputs are `values`, the first `count` of them the function's own."""

    values: list
    count: int
    lines: list = field(default_factory=list)
    imports: list = field(default_factory=list)
    constructors: dict = field(default_factory=dict)  # name in the module -> expression
    result: str = ""

    @property
    def names(self):
        """Names of the inputs."""
        return [f"a{place}" for place in range(len(self.values))]

    def call(self, target, name, args, kwargs, attributes, name_of):
        """Append one operator call, whose result gets the name `target`."""
        call = operator_source(name, args, kwargs, attributes)
        self.imports += call.imports
        function = None
        if call.instance is not None:
            hint, constructor = call.instance
            function = f"{hint}_{len(self.constructors)}"
            self.constructors[function] = constructor
        self.lines.append(f"{target} = {call.expression(name_of, function)}")


@dataclass
class Placeholder:
    """Stands for an input of a program among the arguments of a call."""

    place: int
    shape: tuple
    dtype: str


def program_of(call):
    """The `Program` of one operator call, with floats and indices of 32 bits, and each tensor's argument."""
    values, places = [], []

    def stand_in(argument, place):
        if isinstance(argument, (np.ndarray, np.generic)):
            values.append(local(argument))
            places.append(place)
            return Placeholder(len(values) - 1, values[-1].shape, str(values[-1].dtype))
        if isinstance(argument, (tuple, list)):
            return type(argument)(stand_in(entry, place) for entry in argument)
        return argument

    args = tuple(stand_in(argument, place) for place, argument in enumerate(call.args))
    kwargs = {name: stand_in(value, len(args) + place) for place, (name, value) in enumerate(call.named.items())}
    program = Program(values, len(values), result="v0")
    program.call("v0", call.name, args, kwargs, None, lambda placeholder: f"a{placeholder.place}")
    return program, places


def record(function, values):
    """The `Program` of `function` of the tensors `values`: of its operators as they are captured."""
    graph = capture(Function(function), *values)
    program = Program([value.asnumpy() for value in values], len(values))
    known = {value.id: f"a{place}" for place, value in enumerate(tree_leaves(graph.arguments))}
    for constant in graph.constants:
        known[constant.value.id] = f"a{len(program.values)}"
        program.values.append(constant.array)

    def name_of(value):
        return known[value.id]

    for node in graph.nodes:
        target, outputs = f"v{len(program.lines)}", node.outputs
        attributes = node.primitive and node.primitive.attributes
        program.call(target, node.operator, node.args, node.kwargs, attributes, name_of)
        several = isinstance(outputs, (tuple, list))
        made = {each.id: f"{target}[{n}]" for n, each in enumerate(outputs)} if several else {outputs.id: target}
        known.update(made)
    program.result = known[graph.result.id]
    return program


def write(folder, name, source):
    """Import `source` as module `name`, from a file in `folder`, which is on the path: jit reads it from there."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    importlib.invalidate_caches()
    return importlib.import_module(name)


def module_source(programs):
    """One function `call_<number>` a program, which gives a tuple."""
    parts = [sorted({"import mindspore as ms", "from mindspore import ops"}.union(*(p.imports for p in programs)))]
    for number, program in enumerate(programs):
        constructors = {name: f"{name}_of_{number}" for name in program.constructors}
        lines = [_renamed(line, constructors) for line in program.lines]
        parts.append([f"{constructors[name]} = {made}" for name, made in program.constructors.items()])
        parts.append(["", f"def call_{number}({', '.join(program.names)}):", *(f"    {line}" for line in lines)])
        parts.append(
            [f"    result = {program.result}", "    return result if isinstance(result, tuple) else (result,)", ""]
        )
    return "\n".join(line for part in parts for line in part) + "\n"


def _renamed(line, names):
    for old, new in names.items():
        line = line.replace(f"{old}(", f"{new}(")
    return line


def run_jitted(folder, name, programs, differentiable):
    """Run programs under `@ms.jit`, `GROUP` to a graph.

    Args:
        folder: as `write`.
        name: a module that `module_source(programs)` was written to.
        programs: the `Program`s.
        differentiable: for every program the places of its results that are summed up for its gradient.

    Returns:
        For every program its results, and the gradients of the sum of its float results and their squares.
    """
    results, gradients = [], []
    for start in range(0, len(programs), GROUP):
        numbers = range(start, min(start + GROUP, len(programs)))
        module = write(folder, f"{name}_from_{start}", _group_source(name, programs, numbers, differentiable))
        parts, slopes = module.step(*[Tensor(value) for number in numbers for value in programs[number].values])
        results += [[part.asnumpy() for part in results_of_one] for results_of_one in parts]
        slopes = iter(slopes)
        for number in numbers:
            places = float_places(programs[number], differentiable[number])
            gradients.append([next(slopes).asnumpy() for _ in places])
    return results, gradients


def float_places(program, differentiable):
    """The inputs of a program that have a gradient."""
    return [
        p
        for p, value in enumerate(program.values)
        if value.dtype == np.float32 and p < program.count and differentiable
    ]


def _group_source(name, programs, numbers, differentiable):
    inputs = {number: [f"{one}_{number}" for one in programs[number].names] for number in numbers}
    everything = [one for number in numbers for one in inputs[number]]
    places = tuple(
        everything.index(inputs[number][place])
        for number in numbers
        for place in float_places(programs[number], differentiable[number])
    )
    lines = []
    for number in numbers:
        lines.append(f"    r{number} = {name}.call_{number}({', '.join(inputs[number])})")
        if float_places(programs[number], differentiable[number]):
            lines += [f"    total = total + loss(r{number}[{place}])" for place in differentiable[number]]
    given = ", ".join(everything)
    return "\n".join(
        [
            f"import mindspore as ms\nimport {name}\n",
            "def loss(x):\n    x = ms.ops.cast(x, ms.float32)\n    return (x * x + x).sum()\n",
            f"def run({given}):\n    total = 0.0",
            *lines,
            f"    return total, ({', '.join(f'r{number}' for number in numbers)},)\n",
            f"@ms.jit\ndef step({given}):",
            f"    (_, results), slopes = ms.value_and_grad(run, {places}, has_aux=True)({given})",
            "    return results, slopes\n",
        ]
    )


def gradients_of(function, values, places, differentiable):
    """The same gradients of a function that gives a tuple, in PyNative."""
    if not places:
        return []

    def loss(*inputs):
        results = [
            ms.ops.cast(result, ms.float32) for place, result in enumerate(function(*inputs)) if place in differentiable
        ]
        return sum((result * result + result).sum() for result in results)

    slopes = ms.grad(loss, tuple(places))(*values)
    return [slope.asnumpy() for slope in ([slopes] if isinstance(slopes, Tensor) else slopes)]
