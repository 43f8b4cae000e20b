"""Propagation: layouts of all tensors, and all redistributions, from the layouts of a few tensors. Pure Python.

Every operator's rule (`mindformers_core.operators`) gives the valid layouts of its inputs, and its outputs for them.
Among several valid layouts the choice is made in this order:

1. Declarations hold: layouts at the boundary of a Cell, of an operator's inputs and outputs, of parameters. Tensors are
   redistributed between two different declarations.
2. At every operator, in the order of execution: the least cost of redistribution, forward and backward.
3. Among equals the most sharded choice: shards before partial sums, partial sums before whole tensors on every rank.
4. Among these the choice that follows the earliest input.
5. Lookahead (see `lookahead.py`): from every remaining redistribution, backward and forward, choices with a higher cost
   at one operator and a lower total cost, until there are none.

Steps 1 to 4 are those of the eager engine, which decides operator by operator, too. But here all redistributions of a
tensor are known before execution, so that Cells share them (see `insertion.py`). Propagation from declared operators at
the least cost of redistribution is MindSpore's sharding propagation; layouts that are derived from factors, and a
stated order of priorities, follow OpenXLA Shardy.
"""

from mindformers_core.grouping import grouped
from mindformers_core.layout import Layout
from mindformers_core.operators import facts_of
from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.graph import CallNode
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.algorithms import algorithm_steps, own_gradient_steps
from mindformers_core.propagation.boundaries import Declaration, activation_axes
from mindformers_core.propagation.decide import decide_plan, gradient_flow
from mindformers_core.propagation.insertion import insert_redistributions
from mindformers_core.propagation.lookahead import improve
from mindformers_core.propagation.operators import operator_plan, operator_signature
from mindformers_core.redistribution import CPU, FREE, redistribution_price, steps_price

_NOTHING = Declaration()


def propagate(graph, mesh, arguments, parameters, declarations=None, device_model=CPU, final=True, algorithm=None):
    """Layouts for every tensor of a captured Cell tree, and the redistributions between them.

    Identical calls (the same graph, layouts and declarations) share one `CellPlan` object, so that a model of eighty
    layers takes hardly longer than one of two.

    Args:
        graph: the `CellGraph` of the root.
        mesh: the `DeviceMesh` that all layouts are on.
        arguments: number of every argument's Value in `graph` -> the `Layout` in which it arrives.
        parameters: path of every parameter from the root -> the `Layout` in which it is stored.
        declarations: path of a Cell -> its `Declaration`. Default: none.
        device_model: the device model of redistributions. Default: CPU.
        final: whether partial and varying results of the root are reduced, as a loss should be. Default: True.
        algorithm: as of `through_algorithm`, by which the steps of distributed algorithms are priced. Default: they
            cost nothing.

    Returns:
        The root's `CellPlan`.

    Raises:
        ValueError, TypeError: a declaration that doesn't fit, an operator without a rule, or one whose rule rejects
            its arguments; names the Cell and, for operators, the source line.
    """
    run = Propagation(mesh, parameters, declarations or {}, device_model, algorithm=algorithm)
    return run.plan(lambda_lift(graph), arguments, final)


def derive_parameters(graph, mesh, arguments, parameters, declarations=None, device_model=CPU, free=(), algorithm=None):
    """Storage layouts for parameters without a declared one.

    Propagation assumes that the parameters of `free` are available in any layout. Each is then stored in the layout in
    which its operators consume it; of several layouts in the one from which redistribution to the others costs least.

    Args:
        free: paths of the parameters without a declared layout. Default: none.
        others: as of `propagate`.

    Returns:
        A layout for every parameter: those of `parameters`, with derived ones for `free`.
    """
    run, graph = Propagation(mesh, parameters, declarations or {}, device_model, free, algorithm), lambda_lift(graph)
    decision = run.decide_root(graph, arguments, True)
    uses = graph.uses.parameters.items()
    found = {path: _best_stored(run, use, decision.required[path]) for path, use in uses if path in run.free}
    return {**parameters, **found}


def _best_stored(run, use, required):
    """The required layout, without partial and varying axes, with the least price of redistribution to all others."""
    wanted = list(required.wanted)
    candidates = dict.fromkeys(layout.contiguous.replace(partial=(), varying=()) for layout in wanted)

    def seconds(stored):
        prices = [run.redistribution_price(use.value, use.trainable, stored, layout) for layout in wanted]
        return sum(prices, FREE).seconds

    return min(candidates, key=seconds, default=required.first)


class Propagation:
    """One run of the pass: its settings, and caches for identical calls.

    Attributes:
        mesh, parameters, device_model, algorithm: see `propagate`.
        free: see `derive_parameters`.
        batch_axes: the mesh axes that cut no parameter with a declared layout, or an argument of the root and only
            parameters that are cut with it, see `Signature.joint`.
        weight_axes: those that cut one, and no argument of the root.
        activation_axes: those that cut an argument of the root, but no parameter that an operator writes, or a declared
            input or output of a Cell below; all, where strategies of operators are declared.
    """

    def __init__(self, mesh, parameters, declarations, device_model, free=(), algorithm=None):
        self.mesh = mesh
        self.parameters = parameters
        self.free = frozenset(free)
        self.device_model, self.algorithm = device_model, algorithm
        weights = {axis for path in parameters.keys() - self.free for axis in parameters[path].cut_axes}
        self.batch_axes, self.weight_axes = frozenset(mesh.axis_names) - weights, frozenset(weights)
        self.activation_axes = frozenset()  # until there is a root
        self._declarations = declarations
        self._below = _by_ancestor(declarations)
        self._decisions, self._improved, self._plans = {}, {}, {}
        self._signatures, self._operators, self._algorithms = {}, {}, {}

    def declaration(self, path):
        """The `Declaration` of a Cell; an empty one where nothing is declared."""
        return self._declarations.get(path, _NOTHING)

    def replicated(self, value):
        """The layout of a tensor that is replicated on all ranks."""
        return Layout.on(self.mesh, ((),) * len(value.shape))

    def keys_of(self, decision, graph, keys):
        """Key of every tensor that a call takes, in its `Decision` -> key in the caller.

        Args:
            decision: of an identical call.
            graph: of the call.
            keys: the same for arguments and free variables, by keys in `graph`.
        """
        arguments = {inner: outer for inner, outer in keys.items() if isinstance(inner, int)}
        uses = graph.uses.in_place_of(decision.graph.uses)
        return arguments | {inner: keys.get(here, here) for inner, here in uses.items()}

    def plan(self, graph, layouts, final):
        """The `CellPlan` of the root; arguments as of `propagate`."""
        decision = self.decide_root(graph, layouts, final)
        return self.place(decision, {value.id: layouts[value.id] for value in tree_leaves(graph.arguments)}, ())

    def decide_root(self, graph, layouts, final):
        """The `Decision` for the root, whose inputs may require gradients, but depend on no trained parameter."""
        values = tree_leaves(graph.arguments)
        arguments = {value.id: (layouts[value.id], gradient_flow(value), False) for value in values}
        cut = {axis for layout, _, _ in arguments.values() for axis in layout.cut_axes}
        if cut & self.weight_axes:
            alone = self.parameters.keys() - self.free - {*self._taken_jointly(graph)}
            self.batch_axes |= cut.difference(*(self.parameters[path].cut_axes for path in alone))
        self.weight_axes -= cut
        assert not self._operators, "decisions depend on these axes"
        states = {axis for path in self._written(graph) for axis in self.parameters[path].cut_axes}
        self.activation_axes = activation_axes(graph, self.declaration, self.mesh, states) | cut - states
        return self.improved(graph, arguments, final)

    def _taken_jointly(self, graph):
        """Paths of parameters that an axis may cut together with activations, as those of experts."""

        def taken(node):
            joint = facts_of(node.operator).algorithms and self.signature(node).joint
            return node.taken if joint else ()

        return _parameters_of(graph, taken)

    def _written(self, graph):
        """Paths of parameters that operators write."""
        return _parameters_of(graph, lambda node: node.taken[: facts_of(node.operator).writes])

    def redistribution_price(self, value, gradient, source, target):
        """The `Price` of a redistribution of a Value; `gradient` says whether a gradient flows back through it."""
        return redistribution_price(source, target, value.shape, value.dtype, gradient, self.device_model)

    def decide(self, graph, arguments, final=False, wanted=None):
        """The `Decision` for a call without lookahead, shared by identical calls; see `decide_plan`."""
        key = self._key(graph, arguments, final, wanted)
        return _once(self._decisions, key, lambda: decide_plan(self, graph, arguments, final, wanted))

    def improved(self, graph, arguments, final=False, wanted=None):
        """As `decide`, with lookahead; see `improve`."""
        key = self._key(graph, arguments, final, wanted)
        return _once(self._improved, key, lambda: improve(self, graph, arguments, final, wanted))

    def _key(self, graph, arguments, final, wanted):
        """A key that identical calls share."""
        stored = tuple((self.parameters[path], path in self.free) for path in graph.uses.parameters)
        given = tuple((key if isinstance(key, int) else None, entry) for key, entry in arguments.items())
        declared = self._below.get(graph.path, ())
        return graph.key, given, stored, graph.uses.places, declared, final, wanted

    def signature(self, node):
        """The `Signature` of an operator."""
        return _once(self._signatures, id(node), lambda: operator_signature(node))

    def operator(self, call, make):
        """What `make()` gives for an operator's call with a choice, shared by equal ones."""
        return _once(self._operators, call, make)

    def algorithm_price(self, node, call, found):
        """The `Price` of the steps of the distributed algorithm of a `Resolution` of an operator."""
        if self.algorithm is None:
            return FREE
        plan = operator_plan(node, call, found)
        steps, own = _once(
            self._algorithms,
            (id(node), found.choice, found.inputs),
            lambda: tuple(steps_of(plan, self.algorithm) for steps_of in (algorithm_steps, own_gradient_steps)),
        )
        trained = bool(call.trained)
        ways = [(step, gradient and trained) for step, gradient in steps] + [(step, False) for step in own * trained]
        return steps_price(ways, self.device_model)

    def place(self, decision, passed, lifted):
        """The `CellPlan` of a call, shared by identical calls; see `insert_redistributions`."""
        key = (decision, tuple(passed.items()), lifted)
        return _once(self._plans, key, lambda: insert_redistributions(self, decision, passed, lifted))


def _parameters_of(graph, taken):
    """Paths of the parameters among the tensors `taken(node)` of all operators, here and below."""
    for called in graph.calls():
        nodes = [node for node in called.nodes if not isinstance(node, CallNode)]
        ids = {value.id for node in nodes for value in taken(node)}
        yield from (use.path for use in called.parameters if use.value.id in ids)


def _once(known, key, make):
    """The value of a key, made on first use."""
    if key not in known:
        known[key] = make()
    return known[key]


def _by_ancestor(declarations):
    """Path of a Cell -> the declarations of the Cell and those below, by relative path, in a comparable form."""
    pairs = []
    for path, declaration in declarations.items():
        segments, shown = path.split(".") if path else [], repr(declaration)
        ways = ((".".join(segments[:end]), ".".join(segments[end:])) for end in range(len(segments) + 1))
        pairs += [(ancestor, (relative, shown)) for ancestor, relative in ways]
    return {path: tuple(sorted(entries)) for path, entries in grouped(pairs).items()}
