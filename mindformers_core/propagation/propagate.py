"""Propagation: from the layouts of a few tensors to those of all, and to every redistribution in between. Pure Python.

Every operator's rule (`mindformers_core.operators`) says which layouts fit its inputs, and what its outputs are then.
Where several would do, the choice is made in this order:

1. What is declared stands: layouts at the boundary of a Cell, of an operator's inputs and outputs, of parameters. Where
   two of these meet, tensors are redistributed between them.
2. At every operator, in the order of execution, the choice whose redistributions cost least, forward and backward.
3. Among equals the one that cuts most: a cut before a partial sum, a partial sum before the whole on every rank.
4. Among these the one that an earlier input suggests.
5. Then it is looked ahead (see `lookahead.py`): from every redistribution that is left, outwards in both directions,
   for choices that cost more at one operator and less in all, until there are none.

Steps 1 to 4 are those of the eager engine, which goes operator by operator as well. But here each tensor's moves are
known before anything runs, so that they are shared across Cells (see `insertion.py`). Spreading from declared operators
at the least cost of redistribution is MindSpore's sharding propagation; that layouts are derived from factors, and
conflicts settled in a stated order, follows OpenXLA Shardy.
"""

from mindformers_core.layout import Layout
from mindformers_core.operators.resolve import repeated, resolve
from mindformers_core.operators.signature import is_float
from mindformers_core.program.aliases import outer_index, parameter_index
from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.decide import FLOWS, NOTHING, decide_frame
from mindformers_core.propagation.insertion import insert_redistributions
from mindformers_core.propagation.lookahead import improve
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.redistribution import CPU, plan_redistribution

__all__ = ["Propagation", "derive_parameters", "propagate"]


def propagate(graph, mesh, arguments, parameters, declarations=None, cost_model=CPU, final=True):
    """Layouts for every tensor of a captured Cell tree, and the redistributions between them.

    Identical calls (the same graph, layouts and declarations) share one `CellPlan` object, so that a model of eighty
    layers takes hardly longer than one of two.

    Args:
        graph: the `CellGraph` of the root.
        mesh: the `DeviceMesh` that all layouts are on.
        arguments: number of every argument's Value in `graph` -> the `Layout` in which it arrives.
        parameters: path of every parameter from the root -> the `Layout` in which it is stored.
        declarations: path of a Cell -> its `Declaration`. Default: none.
        cost_model: what redistributions cost. Default: CPU.
        final: whether partial and varying results of the root are reduced, as a loss should be. Default: True.

    Returns:
        The root's `CellPlan`.

    Raises:
        ValueError, TypeError: a declaration that doesn't fit, an operator without a rule, or one whose rule rejects
            its arguments; all name the Cell, and those of operators the line of the source.
    """
    return Propagation(mesh, parameters, declarations or {}, cost_model).plan(lambda_lift(graph), arguments, final)


def derive_parameters(graph, mesh, arguments, parameters, declarations=None, cost_model=CPU, free=()):
    """Layouts in which parameters are best stored, for those that nobody declares.

    The parameters of `free` are taken to be available in any layout, and each is then stored as its operators took it:
    where several took it differently, in the layout from which the others are reached at the least cost.

    Args:
        free: paths of the parameters whose layouts are to be found. Default: none.
        others: as `propagate`.

    Returns:
        A layout for every parameter: those of `parameters`, with the ones that were found in the place of free ones.
    """
    run, graph = Propagation(mesh, parameters, declarations or {}, cost_model, free), lambda_lift(graph)
    decision = run.decide_root(graph, arguments, True)
    found = {}
    for path, use in run.parameter_index.uses(graph).items():
        if path in run.free:
            found[path] = _best_stored(use.value, decision.forms[path], cost_model)
    return {**parameters, **found}


def _best_stored(value, forms, cost_model):
    """The layout from which all wanted ones are reached at the least cost, one of these without its marks."""
    wanted = list(forms.wanted)
    candidates = dict.fromkeys(layout.replace(partial=(), varying=()) for layout in wanted)

    def cost(stored):
        return sum(plan_redistribution(stored, layout, value.shape, value.dtype, cost_model).cost for layout in wanted)

    return min(candidates, key=cost, default=forms.first)


class Propagation:
    """One run of the pass: what holds for all frames, and what is remembered of them.

    Attributes:
        mesh, parameters, cost_model: see `propagate`.
        free: see `derive_parameters`.
        parameter_index, outer_index: a `UseIndex` each.
    """

    def __init__(self, mesh, parameters, declarations, cost_model, free=()):
        self.mesh = mesh
        self.parameters = parameters
        self.free = frozenset(free)
        self.cost_model = cost_model
        self.parameter_index, self.outer_index = parameter_index(), outer_index()
        self._declarations = declarations
        self._below = _by_ancestor(declarations)
        self._decisions, self._improved, self._plans = {}, {}, {}
        self._signatures, self._resolutions = {}, {}

    def declaration(self, path):
        """The `Declaration` of a Cell, or None."""
        return self._declarations.get(path)

    def replicated(self, value):
        """The layout of a tensor that every rank holds alike."""
        return Layout.on(self.mesh, ((),) * len(value.shape))

    def keys_of(self, decision, graph, keys):
        """Key of everything that a call takes, in its `Decision` -> key in the caller's frame.

        Args:
            decision: of an identical call.
            graph: of the call.
            keys: the same for arguments and tensors of callers, by keys in `graph`.
        """
        arguments = {inner: outer for inner, outer in keys.items() if isinstance(inner, int)}
        outer = self.outer_index.in_place_of(graph, decision.graph)
        parameters = self.parameter_index.in_place_of(graph, decision.graph)
        return arguments | {inner: keys[here] for inner, here in outer.items()} | parameters

    def plan(self, graph, layouts, final):
        """The `CellPlan` of the root; arguments as of `propagate`."""
        decision = self.decide_root(graph, layouts, final)
        return self.place(decision, {value.id: layouts[value.id] for value in tree_leaves(graph.arguments)}, ())

    def decide_root(self, graph, layouts, final):
        """The `Decision` for the root; its inputs may be asked for their gradients, but nothing trained is behind."""
        arguments = {}
        for value in tree_leaves(graph.arguments):
            arguments[value.id] = layouts[value.id], FLOWS if is_float(value.dtype) else NOTHING, False
        return self.improved(graph, arguments, final)

    def decide(self, graph, arguments, final=False, wanted=None):
        """The `Decision` for a call, one for all identical ones, every operator by itself; see `decide_frame`."""
        key = self._key(graph, arguments, final, wanted)
        known = self._decisions.get(key)
        if known is None:
            known = self._decisions[key] = decide_frame(self, graph, arguments, final, wanted)
        return known

    def improved(self, graph, arguments, final=False, wanted=None):
        """As `decide`, after looking ahead; see `improve`."""
        key = self._key(graph, arguments, final, wanted)
        known = self._improved.get(key)
        if known is None:
            known = self._improved[key] = improve(self, graph, arguments, final, wanted)
        return known

    def _key(self, graph, arguments, final, wanted):
        """What tells a call from others."""
        paths = self.parameter_index.uses(graph)
        stored = tuple((self.parameters[path], path in self.free) for path in paths)
        places = self.parameter_index.places(graph), self.outer_index.places(graph)
        given = tuple((key if isinstance(key, int) else None, entry) for key, entry in arguments.items())
        declared = self._below.get(graph.path, ())
        return graph.key, given, stored, places, declared, final, wanted

    def signature(self, node):
        """The `Signature` of an operator."""
        known = self._signatures.get(id(node))
        if known is None:
            known = self._signatures[id(node)] = operator_signature(node)
        return known

    def resolve(self, node, asked, choice):
        """The `Resolution` of an `OperatorCall`: `choice` repeated, or else the cheapest."""
        key = (id(node), asked.metas, asked.inputs, asked.outputs, asked.free)
        again = None if choice is None else repeated(asked, choice)
        if again is not None:
            return again
        known = self._resolutions.get(key)
        if known is None:
            given = asked.inputs, asked.outputs, asked.free
            known = resolve(asked.signature, asked.metas, self.mesh, self.cost_model, *given)
            self._resolutions[key] = known
        return known

    def place(self, decision, passed, lifted):
        """The `CellPlan` of a call, one for all identical ones; see `insert_redistributions`."""
        key = (decision, tuple(passed.items()), lifted)
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = insert_redistributions(self, decision, passed, lifted)
        return known


def _by_ancestor(declarations):
    """Path of a Cell -> what is declared for it and below it, by relative path, in a form that can be compared."""
    found = {}
    for path, declaration in declarations.items():
        segments = path.split(".") if path else []
        shown = repr(declaration)
        for length in range(len(segments) + 1):
            ancestor, relative = ".".join(segments[:length]), ".".join(segments[length:])
            found.setdefault(ancestor, []).append((relative, shown))
    return {path: tuple(sorted(entries)) for path, entries in found.items()}
