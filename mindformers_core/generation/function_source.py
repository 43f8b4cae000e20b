"""From the plan of one Cell call to the source of one function: straight-line code on local tensors."""

import ast
import keyword
from functools import partial
from inspect import Parameter
from itertools import repeat

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.world import world
from mindformers_core.dtypes import wire_dtype
from mindformers_core.generation.own_gradient import own_gradient_lines
from mindformers_core.lowering.operator_source import NamedTensor, literal
from mindformers_core.operators import facts_of
from mindformers_core.operators.registry import algorithm_named
from mindformers_core.operators.signature import is_float
from mindformers_core.program.deferral import NOTHING_DEFERRED, PRODUCTS
from mindformers_core.program.environment import follow
from mindformers_core.program.naming import Names, assigned_names, snake_case
from mindformers_core.program.observer import Observed
from mindformers_core.program.passed_weights import WEIGHTS, passed_parameter, passed_to_call
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import DType, Value, call_signature, structure_text, tree_fill, tree_leaves
from mindformers_core.propagation.algorithms import through_algorithm
from mindformers_core.propagation.operators import TENSORS
from mindformers_core.redistribution.steps import STEP_KINDS


def function_source(plan, module, name):
    """The function of a `CellPlan`, a method of its Cell.

    Args:
        module: the `ModuleWriter` that collects what the function needs at the top of its module.
        name: of the function.

    Returns:
        (lines, sites): the lines of `def name(self, …)`, and of redistributions pairs (line from that of `def`, index
        of the instruction in the plan).
    """
    writer = _FunctionWriter(plan, module)
    lines = writer.lines(name)
    return lines, writer.sites


class _FunctionWriter:
    """A function while it is written.

    Attributes:
        variables: (number of a Value, Layout) -> the expression that holds it.
        detached: likewise -> the variable that holds it without its gradient.
    """

    def __init__(self, plan, module):
        self.plan, self.module = plan, module
        self.names = Names(module.reserved)
        self.variables, self.detached = {}, {}
        self.body, self.sites, self.place = [], [], 0
        self.assigned = assigned_names(plan.graph)
        self.deferral = module.deferrals.get(plan, NOTHING_DEFERRED)
        self.places = {id(node): place for place, node in enumerate(plan.graph.nodes)}
        self.keeper = None  # of the instruction that is written now
        self.number = 0  # of collectives: see `collective_source`

    def lines(self, name):
        """The lines of `def name(self, …)`."""
        plan, graph = self.plan, self.plan.graph
        is_root, added = plan is self.module.root, [WEIGHTS] * plan.takes_weights
        if self.deferral.places and is_root:
            self.body.append(f"{PRODUCTS} = self.{PRODUCTS}_of_{name}")
        elif self.deferral.places:
            added = [PRODUCTS, *added]
        parameters = self._parameters()
        for use in graph.parameters:
            self._enter_parameter(use)
        lifted = [self.names.keep(name) for name in _lifted_names(plan)]
        self.variables.update(zip(((value.id, layout) for value, layout in plan.lifted), lifted))
        for constant in graph.constants:
            self._enter(constant.value, self.module.constant(plan, constant))
        for use in graph.parameters:
            self._observe(use, [(use.value, plan.layouts[use.value.id])])
        if is_root:
            self._observe(None, [(value, plan.layouts[value.id]) for value in tree_leaves(graph.arguments)])
        results = follow(plan, self.variables, self._instruction)
        for kept in graph.kept:
            variables = [self.variables[value.id, plan.layouts[value.id]] for value in tree_leaves(kept.value)]
            structure = self._structure(kept.value, variables)
            self.body.append(f"keep_attribute(self, {len(self.module.kept)}, {structure})")
            self.module.kept.append((plan, kept))
        self.body.append(f"return {self._structure(graph.result, results)}")
        described = self._described()
        self.sites = [(1 + len(described) + line, place) for line, place in self.sites]
        ordered = sorted(["self", *parameters, *lifted, *added], key=lambda text: text.startswith("**"))
        head = f"def {name}({', '.join(ordered)}):"
        return [head, *described, *(f"    {line}" for line in self.body)]

    def _described(self):
        """Comments with the layouts of arguments and results."""
        arguments = [
            f"{name}: {', '.join(_shown(value, self.plan.layouts[value.id]) for value in values)}"
            for name, structure in self.plan.graph.arguments.items()
            if (values := tree_leaves(structure))
        ]
        arguments += [f"{value.hint}: {_shown(value, layout)}" for value, layout in self.plan.lifted]
        results = (_shown(value, layout) for value, layout in self.plan.returned)
        return [*(f"    # {line}" for line in arguments), f"    # returns {', '.join(results) or 'nothing'}"]

    def _parameters(self):
        """The function's parameters, as `construct` has them, and the variables of the tensors in them."""
        written, star = [], {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
        kinds = call_signature(self.module.cells[self.plan.graph.path].construct).parameters
        for name, structure in self.plan.graph.arguments.items():
            variable = self.names.keep(name)
            self.module.variables.add(variable)
            written.append(star.get(kinds[name].kind, "") + variable)
            self._enter(structure, variable)
        return written

    def _enter(self, structure, expression):
        """Enter every tensor in a structure that the expression holds, as it is first available."""
        for value, part in _parts(structure, expression):
            self.variables[value.id, self.plan.layouts[value.id]] = part

    def variable(self, hint):
        """A free name for a variable."""
        variable = self.names.variable(hint)
        self.module.variables.add(variable)
        return variable

    def _enter_parameter(self, use):
        """A parameter; detached where its whole gradient is deferred."""
        takes = self.plan.takes_weights
        expression = passed_parameter(self.plan, use) if takes else self.module.parameter(self.plan, use)
        if (use.value.id, self.plan.layouts[use.value.id]) in self.deferral.waiting:
            expression = self.assign(use.value.hint, self.module.stop_gradient(expression))
        self._enter(use.value, expression)

    def _taken(self, value, layout, is_deferred=True):
        """The variable that an operator takes; for a deferred one detached if other operators take the gradient."""
        variable = value.id, layout
        if not is_deferred or variable not in self.deferral.needed:
            return self.variables[variable]
        if variable not in self.detached:
            expression = self.module.stop_gradient(self.variables[variable])
            self.detached[variable] = self.assign(f"{value.hint}_cut", expression)
        return self.detached[variable]

    def _structure(self, structure, variables):
        """The source of a structure of Values and plain leaves; `variables` hold the Values, in order."""
        rest = iter(variables)

        def leaf_source(leaf):
            if isinstance(leaf, Value):
                return next(rest)
            if isinstance(leaf, DType):
                self.module.imports.add("import mindspore as ms")
            # a leaf without source is left out: the called function has it written in
            return literal(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str, DType)) else "None"

        return structure_text(structure, leaf_source)

    def assign(self, hint, expression, communicates=False):
        """The new variable that holds an expression."""
        variable = self.variable(hint)
        self.body.append(f"{variable} = {self._kept(expression, communicates)}")
        return variable

    def _observe(self, entry, produced):
        """Report tensors, pairs (Value, Layout), to the observer, if the module has one; `entry`: see `Observed`."""
        for value, layout in produced if self.module.is_observed else ():
            number, variable = len(self.module.observed), self.variables[value.id, layout]
            self.body.append(f"observed(self, {number}, {variable})")
            self.module.observed.append(Observed(number, self.plan, entry, value, layout, variable))

    def _kept(self, expression, communicates=False):
        """An expression, called through the keeper of its instruction where that has one for it."""
        if self.keeper is None or (communicates and not self.keeper.takes_collectives):
            return expression
        used = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        inputs = [name for name in sorted(used) if name in self.names]  # none where it takes weights alone
        function = f"lambda{' ' * bool(inputs)}{', '.join(inputs)}: {expression}"
        return f"{self.module.keeper(self.keeper)}({', '.join([function, *inputs])})"

    def _instruction(self, place, entry, taken):
        """Write an instruction; the expressions that hold what it produces."""
        self.place, self.keeper = place, self.plan.keepers.get(entry)
        if isinstance(entry, CallPlan):
            return self._call(entry)
        made = [self._move(entry)] if isinstance(entry, Redistribution) else self._operator(entry, taken)
        self.variables.update(((value.id, layout), each) for (value, layout), each in zip(entry.produced, made))
        self._observe(entry, entry.produced)
        return made

    def _move(self, move):
        source = self._taken(move.value, move.source, (move.value.id, move.target) in self.deferral.waiting)
        return self._redistributed(source, move.steps, move.value.dtype, f"{move.source} -> {move.target}")

    def _redistributed(self, source, steps, dtype, comment, others=()):
        """The variable that holds the result of some steps, which may take `others`; sums of bools are of integers."""
        if not steps:
            return source
        expression = source
        if wire_dtype(dtype) != dtype:
            self.module.imports |= {"import mindspore as ms", "from mindspore import ops"}
            expression = f"ops.cast({source}, ms.{wire_dtype(dtype)})"
        for step in steps:
            expression = f"{self.module.collective(step, self.number)}({', '.join((expression, *others))})"
        if wire_dtype(dtype) != dtype:
            expression = f"ops.cast({expression}, ms.bool_)"
        *_, after = (hint for step in steps if (hint := STEP_KINDS[step.kind].hint))  # a view is around other steps
        stem = source.rpartition(".")[2].partition("[")[0]
        variable = self.assign(f"{stem}_{after}", expression, communicates=True)
        self.body[-1] += f"  # {comment}"
        self.sites.append((len(self.body) - 1, self.place))
        return variable

    def _hints(self, node, operator):
        """Names for the results of a node: those of the user's code, else the operator's."""
        names, *_ = self.assigned.get(self.places.get(id(node)), (None,))
        names = names or (None,) * len(node.made)
        return [name if name and not keyword.iskeyword(name) else operator for name in names]

    def _received(self, outputs, hints, expression):
        """Assign the results of a call to variables; the expressions that hold them."""
        hints = iter(hints)
        if not tree_leaves(outputs):
            self.body.append(expression)
            return []
        if isinstance(outputs, (tuple, list)) and all(isinstance(entry, Value) for entry in outputs):
            variables = [self.variable(next(hints)) for _ in outputs]
            self.body.append(f"{', '.join(variables)}{',' * (len(variables) == 1)} = {self._kept(expression)}")
            return variables
        variable = self.assign(next(hints) if isinstance(outputs, Value) else "results", expression)
        return [part for _, part in _parts(outputs, variable)]

    def _call(self, call):
        node = call.node
        variables = iter([self.variables[value.id, layout] for value, layout in call.consumed])
        args = [self._structure(argument, variables) for argument in node.args]
        args += [f"{name}={self._structure(argument, variables)}" for name, argument in node.kwargs.items()]
        if call.plan is not None:
            waiting = self.module.deferrals.get(call.plan, NOTHING_DEFERRED).waiting
            for name, passed, (inner, layout) in zip(_lifted_names(call.plan), call.lifted, call.plan.lifted):
                args.append(f"{name}={self._taken(*passed, is_deferred=(inner.id, layout) in waiting)}")
            if call in self.deferral.places:
                args.append(f"{PRODUCTS}={PRODUCTS}[{self.deferral.places[call]}]")
            if self.plan.takes_weights:
                args.append(f"{WEIGHTS}={passed_to_call(self.plan, call)}")
            args.append(f'program="{self.module.functions[call.plan]}"')
        expression = f"{self.module.child(self.plan, call)}({', '.join(args)})"
        hints = [operator_hint(v.hint) for v in node.outputs] if call.is_part else self._hints(node, _called_hint(node))
        return self._received(node.outputs, hints, expression)

    def _operator(self, plan, taken):
        node, hint = plan.node, operator_hint(plan.node.operator)
        if self.plan.takes_weights and facts_of(node.operator).writes:
            raise ValueError(
                f"{self.plan.graph.label}, {node.source}: a Parameter is written in a Cell that is compiled alone, "
                "which MindSpore can't do: compile the whole, or run in PyNative"
            )
        if plan in self.deferral.places:  # the object that stands for it takes the same tensors
            x, weight, *bias = plan.consumed
            args = [self._taken(*each, is_deferred=each is weight) for each in (x, weight, *bias)]
            expression = f"{PRODUCTS}[{self.deferral.places[plan]}]({', '.join(args)})"
        elif plan.algorithm is not None:
            return self._algorithm(plan, taken, hint)
        else:
            expression = self._operator_call(node, plan.local_call, plan.inputs, taken)
        return self._received(node.outputs, self._hints(node, hint), expression)

    def _operator_call(self, node, call, layouts, taken):
        """The expression of an operator's call, `(args, kwargs)` with tensors in the variables of `taken`."""
        places = zip(taken, node.taken, layouts)
        operands = [NamedTensor(name, value.shape, value.dtype, layout) for name, value, layout in places]
        return self.module.operator_call(node, *tree_fill(call, operands, TENSORS))

    def _algorithm(self, plan, taken, hint):
        """The operators and collectives of a distributed algorithm, in the operator's place."""
        comment = f"{plan.node.operator} over {', '.join(plan.cut_axes) or 'all parts'}: {plan.algorithm}"
        self.body.append(f"# {comment}")
        if algorithm_named(plan.algorithm).gradient is None:
            return self.algorithm_parts(plan, taken, hint)
        self.module.imports |= {"import mindspore as ms", "from mindspore import nn, ops"}
        writer = _FunctionWriter(self.plan, self.module)
        cell = self.module.own_gradient(plan.algorithm, own_gradient_lines(plan, comment, writer))
        return self._with_own_gradient(plan, cell, taken, hint)

    def algorithm_parts(self, plan, taken, hint, **known):
        """The expressions that hold the results of an algorithm, or of its gradient (`of_gradient=True`)."""
        keeper = self.keeper

        def part(node, steps, taken):
            if steps is not None:
                source, *others = taken
                comment = " -> ".join(str(end) for end in node.args[1:3] if not isinstance(end, Value))
                return [self._redistributed(source, steps, node.args[0].dtype, comment, others)]
            # without operands it draws random numbers, and would draw others when it runs again
            self.keeper = keeper if taken and not facts_of(node.operator).on_host else None
            expression = self._operator_call(node, (node.args, node.kwargs), repeat(None), taken)
            made = self._received(node.outputs, repeat(hint), expression)
            self.keeper = keeper
            return made

        captured = partial(algorithm_of, rank=world().rank)
        constant = partial(self.module.constant, self.plan)
        return through_algorithm(plan, captured, taken, constant, part, **known)

    def _with_own_gradient(self, plan, cell, taken, hint):
        """The expressions that hold an algorithm's results, which have the gradient of a Cell: `own_gradient_lines`."""
        self.keeper = None
        floating = [is_float(value.dtype) for value, _ in plan.consumed]
        free = [
            self.assign(name.rpartition(".")[2], f"ops.stop_gradient({name})") if own else name
            for name, own in zip(taken, floating)
        ]
        results = self.algorithm_parts(plan, free, hint)
        passed = [name if own else f"ops.cast({name}, ms.float32)" for name, own in zip(taken, floating)]
        names = [self.variable(hint) for _ in results]
        self.body.append(f"{', '.join(names)}{',' * (len(names) == 1)} = {cell}({', '.join([*passed, *results])})")
        return [self.assign(hint, f"ops.reshape({name}, {shape})") for name, shape in zip(names, plan.local_shapes)]


def _parts(structure, expression):
    """Pairs (Value, expression) of every tensor in a structure that an expression holds."""
    if isinstance(structure, Value):
        yield structure, expression
    elif isinstance(structure, (tuple, list, dict)):
        for key, entry in structure.items() if isinstance(structure, dict) else enumerate(structure):
            yield from _parts(entry, f"{expression}[{key!r}]")


def _shown(value, layout):
    return f"{value.dtype} {list(value.shape)} as {layout}"


def _lifted_names(plan):
    """The keyword arguments that carry a plan's `lifted` tensors."""
    return [f"passed_{value.hint}_{place}" for place, (value, _) in enumerate(plan.lifted)]


def operator_hint(operator):
    """A variable's name for the result of an operator."""
    return snake_case(operator).removesuffix("_ext").removesuffix("_ext_view").removesuffix("_view")


def _called_hint(node):
    """A variable's name for the result of a call of a Cell."""
    name = (node.child or node.graph.path).rpartition(".")[2]
    return name if name.isidentifier() else snake_case(node.graph.class_name.rpartition(".")[2])
