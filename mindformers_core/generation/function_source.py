"""From the plan of one Cell call to the source of one function: straight-line code on local tensors."""

import ast
import keyword
from inspect import Parameter
from itertools import repeat

from mindformers_core.capture.algorithm_graph import algorithm_graph, redistribution_steps
from mindformers_core.dtypes import wire_dtype
from mindformers_core.lowering.operator_source import NamedTensor, literal
from mindformers_core.operators import facts_of
from mindformers_core.program.deferral import NOTHING_DEFERRED, PRODUCTS
from mindformers_core.program.naming import Names, assigned_names
from mindformers_core.program.observer import Observed
from mindformers_core.program.passed_weights import WEIGHTS, passed_parameter, passed_to_call
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import DType, Value, call_signature, structure_text, tree_fill, tree_leaves
from mindformers_core.propagation.operators import TENSORS

_AFTER = {  # step kind -> the hint for the name of the tensor after it
    "slice": "slice",
    "all_gather": "whole",
    "all_to_all": "exchanged",
    "permute": "exchanged",
    "shift": "shifted",
    "all_reduce": "sum",
    "reduce_scatter": "scattered",
    "mark": "marked",
    "unmark": "unmarked",
    "to_partial": "term",
    "pad": "padded",
}


class FunctionSource:
    """The function of a `CellPlan` while it is written.

    Args:
        plan: the plan.
        parts: the `ModuleSource` that collects what the function needs at the top of its module.

    Attributes:
        variables: (number of a Value, Layout) -> the expression that holds it.
        detached: likewise -> the variable that holds it without its gradient.
        sites: lines of redistributions, as `(line from that of def, index of the instruction in the plan)`.
    """

    def __init__(self, plan, parts):
        self.plan, self.parts = plan, parts
        self.names = Names(parts.reserved)
        self.variables, self.detached = {}, {}
        self.body, self.sites, self.place = [], [], 0
        self.assigned = assigned_names(plan.graph)
        self.deferral = parts.deferrals.get(plan, NOTHING_DEFERRED)
        self.places = {id(node): place for place, node in enumerate(plan.graph.nodes)}
        self.keeper = None  # of the instruction that is written now

    def lines(self, name):
        """The lines of `def name(self, …)`."""
        is_root, added = self.plan is self.parts.plans[-1], [WEIGHTS] * self.plan.takes_weights
        if self.deferral.places and is_root:
            self.body.append(f"{PRODUCTS} = self.{PRODUCTS}_of_{name}")
        elif self.deferral.places:
            added = [PRODUCTS, *added]
        parameters = self._parameters()
        for use in self.plan.graph.parameters:
            self._enter_parameter(use)
        lifted = self.parts.lifted_names(self.plan)
        self.variables.update(zip(((value.id, layout) for value, layout in self.plan.lifted), lifted))
        for constant in self.plan.graph.constants:
            self._unpack(constant.value, self.parts.constant(self.plan, constant), self.plan.layouts)
        for use in self.plan.graph.parameters:
            self._observe(use, [(use.value, self.plan.layouts[use.value.id])])
        if is_root:
            self._observe(None, [(v, self.plan.layouts[v.id]) for v in tree_leaves(self.plan.graph.arguments)])
        for place, instruction in enumerate(self.plan.instructions):
            self.place, self.keeper = place, self.plan.keepers.get(instruction)
            if isinstance(instruction, Redistribution):
                self._move(instruction)
            elif isinstance(instruction, CallPlan):
                self._call(instruction)
            else:
                self._operator(instruction)
            self._observe(instruction, () if isinstance(instruction, CallPlan) else instruction.produced)
        for kept in self.plan.graph.kept:
            layouts = [self.plan.layouts[value.id] for value in tree_leaves(kept.value)]
            self.body.append(
                f"keep_attribute(self, {len(self.parts.kept)}, {self._structure(kept.value, iter(layouts))})"
            )
            self.parts.kept.append((self.plan, kept))
        self.body.append(f"return {self._structure(self.plan.graph.result, iter(self.plan.results))}")
        described = self._described()
        self.sites = [(1 + len(described) + line, place) for line, place in self.sites]
        rest = [parameter for parameter in parameters if parameter.startswith("**")]
        parameters = [parameter for parameter in parameters if parameter not in rest]
        head = f"def {name}({', '.join(['self', *parameters, *lifted, *added, *rest])}):"
        return [head, *described, *(f"    {line}" for line in self.body)]

    def _described(self):
        """Comments with the layouts of arguments and results."""
        arguments = [
            f"{name}: {', '.join(self._shown(value, self.plan.layouts[value.id]) for value in tree_leaves(structure))}"
            for name, structure in self.plan.graph.arguments.items()
            if tree_leaves(structure)
        ]
        arguments += [f"{value.hint}: {self._shown(value, layout)}" for value, layout in self.plan.lifted]
        results = (self._shown(value, layout) for value, layout in self.plan.returned)
        return [*(f"    # {line}" for line in arguments), f"    # returns {', '.join(results) or 'nothing'}"]

    @staticmethod
    def _shown(value, layout):
        return f"{value.dtype} {list(value.shape)} as {layout}"

    def _parameters(self):
        """The function's parameters, as `construct` has them, and the variables of the tensors in them."""
        written, star = [], {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
        kinds = call_signature(self.parts.cells[self.plan.graph.path].construct).parameters
        for name, structure in self.plan.graph.arguments.items():
            variable = self.names.keep(name)
            self.parts.variables.add(variable)
            written.append(star.get(kinds[name].kind, "") + variable)
            self._unpack(structure, variable, self.plan.layouts)
        return written

    def _unpack(self, structure, expression, layouts):
        """Enter every tensor in a structure that the expression holds."""
        if isinstance(structure, Value):
            self.variables[structure.id, layouts[structure.id]] = expression
        elif isinstance(structure, (tuple, list, dict)):
            for key, entry in structure.items() if isinstance(structure, dict) else enumerate(structure):
                self._unpack(entry, f"{expression}[{key!r}]", layouts)

    def _variable(self, hint):
        variable = self.names.variable(hint)
        self.parts.variables.add(variable)
        return variable

    def _enter_parameter(self, use):
        """A parameter; detached where its whole gradient is deferred."""
        takes = self.plan.takes_weights
        expression = passed_parameter(self.plan, use) if takes else self.parts.parameter(self.plan, use)
        if (use.value.id, self.plan.layouts[use.value.id]) in self.deferral.waiting:
            expression = self._assign(use.value.hint, self.parts.stop_gradient(expression))
        self._unpack(use.value, expression, self.plan.layouts)

    def _taken(self, value, layout, is_deferred=True):
        """The variable that an operator takes; for a deferred one detached if other operators take the gradient."""
        variable = value.id, layout
        if not is_deferred or variable not in self.deferral.needed:
            return self.variables[variable]
        if variable not in self.detached:
            expression = self.parts.stop_gradient(self.variables[variable])
            self.detached[variable] = self._assign(f"{value.hint}_cut", expression)
        return self.detached[variable]

    def _structure(self, structure, layouts):
        """The source of a structure of Values and plain leaves; `layouts` has the layouts of the Values."""

        def leaf_source(leaf):
            if isinstance(leaf, Value):
                return self.variables[leaf.id, next(layouts)]
            if isinstance(leaf, DType):
                self.parts.imports.add("import mindspore as ms")
            # a leaf without source is left out: the called function has it written in
            return literal(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str, DType)) else "None"

        return structure_text(structure, leaf_source)

    def _assign(self, hint, expression, communicates=False):
        variable = self._variable(hint)
        self.body.append(f"{variable} = {self._kept(expression, communicates)}")
        return variable

    def _observe(self, entry, produced):
        """Report tensors to the observer, if the module has one; `entry` produced them: an instruction, or a use."""
        for value, layout in produced if self.parts.observed is not None else ():
            variable = self.variables[value.id, layout]
            number = len(self.parts.observed)
            self.body.append(f"observed(self, {number}, {variable})")
            self.parts.observed.append(Observed(number, self.plan, entry, value, layout, variable))

    def _kept(self, expression, communicates=False):
        """An expression, called through the keeper of its instruction where that has one for it."""
        if self.keeper is None or (communicates and not self.keeper.takes_collectives):
            return expression
        used = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        inputs = [name for name in sorted(used) if name in self.names]  # none where it takes weights alone
        function = f"lambda{' ' * bool(inputs)}{', '.join(inputs)}: {expression}"
        return f"{self.parts.keeper(self.keeper)}({', '.join([function, *inputs])})"

    def _move(self, move):
        source = self._taken(move.value, move.source, (move.value.id, move.target) in self.deferral.waiting)
        comment = f"{move.source} -> {move.target}"
        self.variables[move.value.id, move.target] = self._redistributed(source, move.steps, move.value.dtype, comment)

    def _redistributed(self, source, steps, dtype, comment):
        """The variable that holds the result of some steps; sums of bools are made of integers."""
        if not steps:
            return source
        expression = source
        if wire_dtype(dtype) != dtype:
            self.parts.imports |= {"import mindspore as ms", "from mindspore import ops"}
            expression = f"ops.cast({source}, ms.{wire_dtype(dtype)})"
        for step in steps:
            expression = f"{self.parts.collective(step)}({expression})"
        if wire_dtype(dtype) != dtype:
            expression = f"ops.cast({expression}, ms.bool_)"
        *_, last = (step.kind for step in steps if step.kind != "view")  # a view is around other steps
        stem, after = source.rpartition(".")[2].partition("[")[0], _AFTER[last.removesuffix("_varying")]
        variable = self._assign(f"{stem}_{after}", expression, communicates=True)
        self.body[-1] += f"  # {comment}"
        self.sites.append((len(self.body) - 1, self.place))
        return variable

    def _hints(self, node, operator):
        """Names for the results of a node: those of the user's code, else the operator's."""
        names, *_ = self.assigned.get(self.places.get(id(node)), (None,))
        names = names or (None,) * len(tree_leaves(node.outputs))
        return [name if name and not keyword.iskeyword(name) else operator for name in names]

    def _receive(self, outputs, layouts, hints, expression):
        """Assign the results of a call to variables."""
        hints, pairs = iter(hints), iter(layouts)
        if isinstance(outputs, Value):
            self.variables[outputs.id, next(pairs)] = self._assign(next(hints), expression)
        elif isinstance(outputs, (tuple, list)) and outputs and all(isinstance(entry, Value) for entry in outputs):
            variables = [self._variable(next(hints)) for _ in outputs]
            self.body.append(f"{', '.join(variables)}{',' * (len(variables) == 1)} = {self._kept(expression)}")
            for value, variable in zip(outputs, variables):
                self.variables[value.id, next(pairs)] = variable
        elif not tree_leaves(outputs):
            self.body.append(expression)
        else:
            variable = self._assign("results", expression)
            self._unpack(outputs, variable, dict(zip([value.id for value in tree_leaves(outputs)], layouts)))

    def _call(self, call):
        node = call.node
        layouts = iter(call.inputs)
        args = [self._structure(argument, layouts) for argument in node.args]
        args += [f"{name}={self._structure(argument, layouts)}" for name, argument in node.kwargs.items()]
        if call.plan is not None:
            waiting = self.parts.deferrals.get(call.plan, NOTHING_DEFERRED).waiting
            names = self.parts.lifted_names(call.plan)
            for name, passed, (inner, layout) in zip(names, call.lifted, call.plan.lifted):
                args.append(f"{name}={self._taken(*passed, is_deferred=(inner.id, layout) in waiting)}")
            if call in self.deferral.places:
                args.append(f"{PRODUCTS}={PRODUCTS}[{self.deferral.places[call]}]")
            if self.plan.takes_weights:
                args.append(f"{WEIGHTS}={passed_to_call(self.plan, call)}")
            args.append(f'program="{self.parts.functions[call.plan]}"')
        expression = f"{self.parts.child(self.plan, call)}({', '.join(args)})"
        if call.is_part:
            hints = [self.parts.operator_name(value.hint) for value in node.outputs]
        else:
            hints = self._hints(node, self.parts.called_name(call))
        self._receive(node.outputs, call.outputs, hints, expression)

    def _deferred_operator(self, plan, hint):
        """A deferred operator: the object that stands for it takes the same tensors."""
        x, weight, *bias = plan.consumed
        args = [self._taken(*x, is_deferred=False), self._taken(*weight)]
        args += [self._taken(*entry, is_deferred=False) for entry in bias]
        expression = f"{PRODUCTS}[{self.deferral.places[plan]}]({', '.join(args)})"
        self._receive(plan.node.outputs, plan.outputs, self._hints(plan.node, hint), expression)

    def _operator(self, plan):
        node, hint = plan.node, self.parts.operator_name(plan.node.operator)
        if self.plan.takes_weights and facts_of(node.operator).writes:
            raise ValueError(
                f"{self.plan.graph.label}, {node.source}: a Parameter is written in a Cell that is compiled alone, "
                "which MindSpore can't do: compile the whole, or run in PyNative"
            )
        if plan in self.deferral.places:
            return self._deferred_operator(plan, hint)
        operands = self._operands(node, plan.inputs)
        if plan.algorithm is not None:
            return self._algorithm(plan, operands, hint)
        expression = self.parts.operator_call(node, *tree_fill(plan.local_call, operands, TENSORS))
        self._receive(node.outputs, plan.outputs, self._hints(node, hint), expression)

    def _operands(self, node, layouts):
        values = tree_leaves((node.args, node.kwargs))
        return [
            NamedTensor(self.variables[value.id, layout], value.shape, value.dtype, layout)
            for value, layout in zip(values, layouts)
        ]

    def _algorithm(self, plan, operands, hint):
        """The operators and collectives of a distributed algorithm, in the operator's place."""
        graph = algorithm_graph(plan)
        variables, keeper = self.variables, self.keeper
        self.variables = {
            (value.id, None): operand.name for value, operand in zip(tree_leaves(graph.arguments), operands)
        }  # of local tensors, which have no layouts
        for constant in graph.constants:
            self.variables[constant.value.id, None] = self.parts.constant(self.plan, constant)
        self.body.append(f"# {plan.node.operator} over {', '.join(plan.cut_axes) or 'all parts'}: {plan.algorithm}")
        for node in graph.nodes:
            steps = redistribution_steps(plan, node)
            if steps is not None:
                value, *ends = node.args
                variable = self.variables[value.id, None]
                moved = self._redistributed(variable, steps, value.dtype, " -> ".join(map(str, ends[:2])))
                self.variables[node.outputs.id, None] = moved
                continue
            operands = self._operands(node, repeat(None))
            args, kwargs = tree_fill((node.args, node.kwargs), operands, TENSORS)
            # without operands it draws random numbers, and would draw others when it runs again
            self.keeper = keeper if operands else None
            expression = self.parts.operator_call(node, args, kwargs)
            self._receive(node.outputs, repeat(None), repeat(hint), expression)
            self.keeper = keeper
        made = [self.variables[value.id, None] for value in tree_leaves(graph.result)]
        self.variables = variables
        for (value, layout), variable in zip(plan.produced, made, strict=True):
            self.variables[value.id, layout] = variable
