"""Modules of generated source for tests: programs of operator calls in real files, run in PyNative and under jit."""

import importlib
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore._c_expression import NoFallbackGuard

from mindformers_core.dtensor.indexing import index_tensor
from mindformers_core.generation.operator_source import operator_source

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


class Traced(Tensor):
    """A tensor whose operator calls go to a `Recorder`."""

    def __fallback__(self, func, args, kwargs=None):
        return self.recorder.called(func, args, kwargs or {})

    def __getitem__(self, index):
        return index_tensor(self, index)


class Recorder:
    """Makes a `Program` of the operators that a function calls."""

    def __init__(self, values):
        self.program = Program([value.asnumpy() for value in values], len(values))
        self.known = {}  # id of a tensor -> (its name, the tensor, which keeps the id its own)
        self.inputs = [self.traced(value, f"a{place}") for place, value in enumerate(values)]

    def traced(self, tensor, name):
        tensor = Tensor._make_subclass(Traced, tensor)
        tensor.recorder = self
        self.known[id(tensor)] = (name, tensor)
        return tensor

    def called(self, func, args, kwargs):
        with NoFallbackGuard():
            result = func(*args, **kwargs)
        if func.name == "typeof":  # asks for a tensor's type and computes nothing
            return result
        attributes = {}
        if len(args) == 3 and isinstance(args[1], str) and isinstance(args[2], tuple):
            attributes, args = dict(args[0].init_attrs), args[2]
        target = f"v{len(self.program.lines)}"
        self.program.call(target, func.name, args, kwargs, attributes, self.name_of)
        if isinstance(result, Tensor):
            return self.traced(result, target)
        return tuple(self.traced(part, f"{target}[{place}]") for place, part in enumerate(result))

    def name_of(self, tensor):
        """The variable that holds a tensor; one that no recorded call made becomes a further input."""
        if id(tensor) not in self.known:
            self.known[id(tensor)] = (f"a{len(self.program.values)}", tensor)
            self.program.values.append(tensor.asnumpy())
        return self.known[id(tensor)][0]


def record(function, values):
    """The `Program` of `function` of the tensors `values`."""
    recorder = Recorder(values)
    plain = vars(Tensor)["__fallback__"]  # itself, not what it gives when it is asked for
    Tensor.__fallback__ = Traced.__fallback__  # for a plain tensor before a traced one
    try:
        recorder.program.result = recorder.name_of(function(*recorder.inputs))
    finally:
        Tensor.__fallback__ = plain
    return recorder.program


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
