"""From a propagated plan to one readable Python module: a function for every distinct `CellPlan` in it."""

from dataclasses import dataclass
from itertools import chain, count
from keyword import iskeyword

from mindspore import nn

from mindformers_core.communication.communicator import collective_attributes
from mindformers_core.generation.function_source import function_source, operator_hint
from mindformers_core.layout import Layout
from mindformers_core.lowering.operator_source import node_source, source_of
from mindformers_core.program.deferral import PRODUCTS, deferrals
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.naming import snake_case
from mindformers_core.program.passed_weights import WEIGHTS

_RESERVED = ("ms", "ops", "self", "program", "mesh", "collectives", "communicator", "DeviceMesh", "Layout")
_RESERVED += ("observed", "keep_attribute")


@dataclass(frozen=True)
class ModuleOptions:
    """What a module depends on besides its plan and Cells.

    Attributes:
        header: lines of the module's docstring.
        taken: names that its functions must not have.
        defer_weights: whether matmuls split the gradients of their weights off: see `deferral.py`.
        separate_collectives: whether each call of a collective has an object of its own: where PyNative differentiates
            a graph that recomputes Cells, MindSpore mixes up the saved tensors of several calls of one object.
        is_observed: whether functions report their tensors, by calls of `observed(cell, number, tensor)`, a function
            that the loader puts into the module.
    """

    header: tuple
    taken: frozenset = frozenset()
    defer_weights: bool = False
    separate_collectives: bool = False
    is_observed: bool = False


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A generated module, not yet written to a file.

    Attributes:
        text: the source.
        functions: `CellPlan` -> name of its function; callees before their callers, the root last.
        constants: name in the module -> `Constant`: tensors that the loader puts there.
        borrowed: `CellPlan` -> (attribute, `"parameter"` or `"cell"`, index among the graph's parameters or the
            plan's calls): attributes that a Cell is given since they lie outside of it.
        deferrals: `CellPlan` -> its `Deferral`; empty without `defer_weights`.
        observed: the `Observed` tensors by number; None without `is_observed`.
        kept: `(CellPlan, KeptAttribute)` by number; `keep_attribute(cell, number, tensors)`, which functions call,
            comes from the owner of the module.
        sites: name of a function -> `(line of the module, index of the instruction)` of its redistributions, in order.
    """

    text: str
    functions: dict
    constants: dict
    borrowed: dict
    deferrals: dict
    observed: tuple | None
    kept: tuple
    sites: dict


def write_module(plan, cells, options):
    """The `ModuleSource` of a program.

    Args:
        plan: the root's `CellPlan`.
        cells: path of a Cell -> the class whose `construct` was captured.
        options: the `ModuleOptions`.

    Raises:
        ValueError: an argument of a Cell has a name that the module needs.
    """
    writer = ModuleWriter(plan, cells, options)
    written = {name: function_source(each, writer, name) for each, name in writer.functions.items()}
    writer.check_arguments()
    parts, sites = ["\n".join(writer.head(plan.mesh, options.header))], {}
    line = parts[0].count("\n") + 4  # of the first function, after two empty lines
    for name, (lines, places) in written.items():
        sites[name] = [(line + offset, place) for offset, place in places]
        parts.append("\n\n" + "\n".join(lines))
        line += len(lines) + 2
    observed = tuple(writer.observed) if options.is_observed else None
    found = writer.functions, writer.constants, writer.borrowed, writer.deferrals, observed, tuple(writer.kept), sites
    return ModuleSource("\n".join(parts) + "\n", *found)


class ModuleWriter:
    """What the functions of a module need at its top, collected while they are written.

    Args:
        plan, cells, options: see `write_module`.

    Attributes:
        functions, constants, borrowed, deferrals, observed, kept: see `ModuleSource`; lists for tuples.
        root: the root's `CellPlan`.
        imports: lines.
        reserved: names that no variable of a function may have; they grow.
        variables: names of variables of the functions, which nothing in the module may have.
    """

    def __init__(self, plan, cells, options):
        self.root, self.cells, self.is_observed = plan, cells, options.is_observed
        self.imports, self.variables = set(), set()
        self.observed, self.kept, self.constants, self.borrowed = [], [], {}, {}
        plans, names = distinct_plans(plan), set(options.taken)
        self.deferrals = deferrals(plans) if options.defer_weights else {}
        self._collectives, self._instances, self._separate = {}, {}, options.separate_collectives
        self._classes = {}  # lines of a class -> its name
        self.functions = {each: _unique(f"parallel_{snake_case(_class_name(each))}", names) for each in plans}
        passed = [WEIGHTS] if any(each.takes_weights for each in plans) else []
        passed += [PRODUCTS] if options.defer_weights else []
        self.reserved = {*_RESERVED, *passed, *self.functions.values(), *_imported_functions(plans)}

    def head(self, mesh, header):
        """The lines above the functions."""
        ranks = "" if tuple(mesh.rank_list) == tuple(range(mesh.size)) else f", {tuple(mesh.rank_list)}"
        used = ["communication import communicator", "layout import Layout", "mesh import DeviceMesh"]
        if "Layout.on(" not in str(self._collectives):
            del used[1]
        lines = ['"""' + header[0], *header[1:], '"""', "", *sorted(self.imports)]
        lines += [*(f"from mindformers_core.{each}" for each in used), ""]
        for body, name in self._classes.items():
            lines += ["", f"class {name}(nn.Cell):", *(f"    {line}".rstrip() for line in body), ""]
        lines += [f"mesh = DeviceMesh({mesh.shape}, {mesh.axis_names}{ranks})", "collectives = communicator(mesh)"]
        lines += [f"{name} = {text}" for text, name in (self._collectives | self._instances).items()]
        if self.constants:
            lines += ["", "# Tensors that the model makes itself; the loader puts them here."]
            values = {name: constant.value for name, constant in self.constants.items()}
            lines += [f"# {name}: {value.dtype} {list(value.shape)}" for name, value in values.items()]
        return lines

    def check_arguments(self):
        """Raise an error where an argument of a Cell has a name that its module needs."""
        needed = {line.rpartition(" ")[2] for line in self.imports} | self.reserved
        for plan in self.functions:
            for name in plan.graph.arguments:
                if name in needed:
                    raise ValueError(
                        f"Cell '{plan.graph.path}' ({_class_name(plan)}): an argument of construct is called "
                        f"'{name}', a name that generated modules need for something else: give it another one"
                    )

    def parameter(self, plan, use):
        """The expression for a parameter."""
        if use.local is not None:
            return self._path_expression(plan, use.local)
        return self._borrow(plan, "parameter", plan.graph.parameters.index(use))

    def stop_gradient(self, expression):
        """The expression for the same tensor without its gradient."""
        self.imports.add("from mindspore import ops")
        return f"ops.stop_gradient({expression})"

    def keeper(self, keeper):
        """Name of the object of a `Keeper`."""
        self.imports.add(keeper.imports)
        return self._object(self._instances, keeper.name, keeper.constructor)

    def child(self, plan, call):
        """The expression for the Cell that is called; for a part of a Cell that is the Cell itself."""
        if call.is_part:
            return "self"
        if call.node.child is not None:
            return self._path_expression(plan, call.node.child)
        return self._borrow(plan, "cell", plan.calls.index(call))

    def _borrow(self, plan, kind, index):
        entries = self.borrowed.setdefault(plan, [])
        entry = f"{kind}_{index}_of_{self.functions[plan]}", kind, index
        if entry not in entries:
            entries.append(entry)
        return f"self.{entry[0]}"

    def _path_expression(self, plan, path):
        """`layers.0.weight` as `self.layers[0].weight`, as seen from the Cell of a plan."""
        where, expression = plan.graph.path, "self"
        for part in path.split("."):
            if issubclass(self.cells.get(where, object), nn.CellDict):
                expression += f"[{part!r}]"
            elif part.isdigit():
                expression += f"[{part}]"
            elif part.isidentifier() and not iskeyword(part):
                expression += f".{part}"
            else:
                expression = f"getattr({expression}, {part!r})"
            where = f"{where}.{part}" if where else part
        return expression

    def constant(self, plan, constant):
        """The expression for a constant: a Cell's attribute is read where it is, everything else lies in the module."""
        if constant.local is not None and constant.path.rpartition(".")[0] in self.cells:
            return self._path_expression(plan, constant.local)
        for name, known in self.constants.items():
            same = known.digest == constant.digest and known.value.shape == constant.value.shape
            if same and known.value.dtype == constant.value.dtype:
                return name
        hint = constant.value.hint if constant.value.hint.isidentifier() else "constant"
        name = self._global(f"{hint}_{len(self.constants)}")
        self.constants[name] = constant
        return name

    def collective(self, step, number=0):
        """Name of the object that carries out a step; `number`: see `collective_source`."""
        text = collective_source(step, len(self._collectives) if self._separate else number)
        return self._object(self._collectives, collective_name(step), text)

    def own_gradient(self, algorithm, lines):
        """Name of the object of a Cell with these lines, for an algorithm with its own gradient."""
        if tuple(lines) not in self._classes:
            self._classes[tuple(lines)] = self._global("".join(map(str.capitalize, f"{algorithm}_gradient".split("_"))))
        number = str(len(self._instances)) if self._separate else ""
        return self._object(self._instances, f"{algorithm}_gradient", f"{self._classes[tuple(lines)]}({number})")

    def operator_call(self, node, args, kwargs):
        """An operator call as source; `NamedTensor`s stand for tensors."""
        call = node_source(node, args, kwargs, operator_hint(node.operator) + "_op")
        self.imports.update(call.imports)
        function = call.instance and self._object(self._instances, *call.instance)
        return call.expression(lambda operand: operand.name, function)

    def _object(self, known, hint, constructor):
        if constructor not in known:
            known[constructor] = self._global(hint)
        return known[constructor]

    def _global(self, hint):
        self.reserved.add(name := _unique(hint, self.reserved | self.variables))
        return name


def collective_source(step, number=0):
    """The expression for the Cell of a `Step`.

    Args:
        step: the `Step`. In the module `collectives` is the mesh's `Communicator`, and `mesh` the mesh.
        number: distinguishes several equal collectives.

    >>> all_gather = collective_source(step)
    'collectives.make("all_gather", axes=("tp",), dim=1)'
    """
    attributes = {"axes": step.axes} | collective_attributes(step) | ({"number": number} if number else {})
    return f'collectives.make("{step.kind}", {", ".join(f"{name}={_text(attributes[name])}" for name in attributes)})'


def collective_name(step):
    """The name of the Cell of a `Step`: `all_gather_tp_dim_1`, `reduce_scatter_dp_tp_dim_0_avg`, `shift_tp_by_minus_1`.

    Different permutes over the same axes have the same name, and so have views.
    """
    words = " ".join([step.kind, *step.axes, *step.words(collective_attributes(step))])
    return words.replace("-", "minus_").replace(" ", "_")


def _text(value):
    """Python source of an attribute's value."""
    text = f"Layout.on(mesh, {value.dims})" if isinstance(value, Layout) else repr(value)
    return text.replace("'", '"')


def distinct_plans(plan):
    """The distinct plans below and including this one, callees first."""
    below = [inner for call in plan.calls if call.plan is not None for inner in distinct_plans(call.plan)]
    return list(dict.fromkeys([*below, plan]))


def _unique(name, taken):
    """The name, or the first of `name_2`, `name_3`, … that isn't taken; takes it."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    free = next(each for each in names if each not in taken)
    taken.add(free)
    return free


def _imported_functions(plans):
    """The names of users' functions that the operators of plans call."""
    nodes = [node for plan in plans for node in plan.graph.nodes if isinstance(node, OperatorNode)]
    sources = {source_of(node.operator) for node in nodes}
    return {source.rpartition(".")[2] for source in sources if "(" not in source and source.find(".") > 0}


def _class_name(plan):
    return plan.graph.class_name.rpartition(".")[2]
