"""Selection of recomputed and swapped instructions of a program, from settings. Pure Python."""

from functools import cached_property

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.analysis.views import is_cast_to_its_dtype
from mindformers_core.grouping import grouped
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.operator_names import operator_names
from mindformers_core.program.plan import (
    CallPlan,
    OperatorPlan,
    Redistribution,
    called_cells,
    joined_path,
    operators_in_order,
)
from mindformers_core.program.producers import links_of
from mindformers_core.program.structure import tree_leaves
from mindformers_core.recompute.patterns import Match, match


class NamedProgram:
    """A program with all names that patterns match, collected once.

    Args:
        path: path of the root Cell of the program.
        layers: the result of `layers_of`.
        algorithm, arguments_need: see `Prediction`.

    Attributes:
        plan, path, layers, algorithm: the arguments.
        places: its `Instruction`s in order.
        texts: key of an instruction -> its name as text.
        cells: `(key, path from the root)` of each call of a Cell.
        closed: keys of calls of Cells with a custom `bprop`.
    """

    def __init__(self, plan, path="", layers=None, algorithm=None, arguments_need=True):
        self.plan, self.path, self.layers, self.algorithm = plan, path, layers or {}, algorithm
        self.places, self.names = operators_in_order(plan), operator_names(plan, path)
        self.texts = {name.place.key: name.text for name in self.names}
        self.cells = [(key, joined_path(path, inner)) for key, inner in called_cells(plan)]
        self.closed = {place.key for place in self.places if isinstance(place.entry, CallPlan)}
        self.prediction = Prediction(plan, algorithm, arguments_need)

    def match(self, request):
        """The `Match` of a `Request`; without a pattern, one of the calls of all its layers.

        A match of operators includes redistributions of their results without local work, which have no names:
        gradients read the results of these, in the same memory.
        """
        if request.pattern is None:
            return Match(self._calls(request.layers), ())
        found = match(request.pattern, self.names, self.cells)
        return found._replace(operators=self._with_nameless(found.operators))

    def keys(self, request):
        """Keys of the instructions that a `Request` selects.

        Raises:
            ValueError: it is to recompute only Cells with a custom `bprop`.
        """
        found = self.match(request)
        if request.kind != "recompute":
            keys = self.inside((*found.cells, *found.operators)) - (self.closed if request.kind == "swap" else set())
        elif request.pattern and found.cells and self.closed.issuperset(found.cells):
            raise ValueError(
                f"{request.where}: {request.pattern.text!r} selects Cells with a bprop of their own, which keep what "
                "that needs: select others"
            )
        else:
            open_cells = [self.prediction.cell_keys(key) for key in found.cells if key not in self.closed]
            keys = {*found.operators}.union(*open_cells)
        return keys if request.layers is True else keys & self.inside(self._calls(request.layers))

    def asked(self, kind, settings):
        """Keys of the instructions that all `Request`s of a kind select (a set)."""
        return set().union(*(self.keys(request) for request in settings.requests if request.kind == kind))

    def recomputed(self, settings, boundaries=()):
        """Keys of the recomputed instructions (a set): their results are not saved.

        Args:
            settings: the `RecomputeSettings`, without a budget.
            boundaries: paths of Cells whose results are always saved.

        Raises:
            ValueError: a pattern selects only Cells with a custom `bprop`.
        """
        return self.asked("recompute", settings) - self.kept(settings, boundaries)

    def kept(self, settings, boundaries=()):
        """Keys of the instructions whose results are always saved; arguments as of `recomputed`."""
        kept, written = self.asked("exclude", settings), set().union(*map(written_by, self.places))
        for place in self.places:
            sends = isinstance(place.entry, Redistribution) and bool(place.entry.steps)
            values = [value for value, _ in place.entry.consumed] if written else ()
            reads_state = not written.isdisjoint(_parameters_among(place, values))  # it has another value later on
            if reads_state or (sends and not settings.mp_comm_recompute) or not _can_run_again(place):
                kept.add(place.key)
        for key, cell in self.cells:
            if key not in self.closed and (key == () or cell in boundaries):  # the caller may write to it in place
                kept |= self.inside([key]) - self.prediction.cell_keys(key)
        return kept

    def swapped(self, settings):
        """Swapped results: key of the instruction -> `backward_prefetch`; `settings`: the `SwapSettings`.

        Results of the program itself are never swapped: the caller may write to them in place.
        """
        found = {}
        for request in settings.requests:
            found |= dict.fromkeys(self.keys(request), request.backward_prefetch)
        inner = self.prediction.cell_keys(()) if found else ()
        places = [place for place in self.places if place.key in found and place.key in inner]
        return {place.key: found[place.key] for place in places if not _returns_its_input(place.entry)}

    def check_apart(self, settings, swapping, both, label):
        """Raise `ValueError` for an instruction that is both recomputed and swapped, with the settings that request it.

        Args:
            settings, swapping: the `RecomputeSettings`, and the `SwapSettings`.
            both: keys of such instructions.
            label: owner of the program.
        """
        if not both:
            return
        key = next((key for key in both if key in self.texts), both[0])
        asked = [each for each in (*settings.requests, *swapping.requests) if each.kind != "exclude"]
        names = [
            f"recompute.select {each.pattern.text!r}" if each.kind == "recompute" and each.pattern else each.where
            for each in asked
            if key in self.keys(each)
        ]
        raise ValueError(
            f"{self.texts.get(key, 'a redistribution')} of {label} is recomputed and swapped, by "
            f"{' and '.join(names)}: what is computed again isn't kept, neither here nor on the host: choose one of "
            "the two (exclude takes it out of what is recomputed)"
        )

    def inside(self, roots):
        """Keys of the instructions inside the calls `roots`, and `roots` themselves."""
        roots, keys = set(roots), (place.key for place in self.places)
        return {key for key in keys if any(key[:end] in roots for end in range(len(key) + 1))}

    def _calls(self, layers):
        """Keys of all calls of the Cells of layers, which are numbers, or True."""
        paths = layer_paths(layers, self.layers)
        return tuple(key for key, path in self.cells if path in paths)

    def _with_nameless(self, operators):
        found = {*operators}
        for key, producers in self._nameless if found else ():
            found |= set() if found.isdisjoint(producers) else {key}
        return tuple(place.key for place in self.places if place.key in found)

    @cached_property
    def _nameless(self):
        """Redistributions without names, in order: `(key, keys of their producers)`."""
        named, producers = {name.place.key for name in self.names}, links_of(self.plan).producers
        moves = [place.key for place in self.places if isinstance(place.entry, Redistribution)]
        return [(key, producers[key]) for key in moves if key not in named]


def written_by(place):
    """The paths of the Parameters that an instruction writes, from the program's Cell; a set."""
    node = getattr(place.entry, "node", None)
    writes = place.entry.plan is None and node is not None and facts_of(getattr(node, "operator", "")).writes
    return _parameters_among(place, node.args[:1]) if writes else set()


def _parameters_among(place, values):
    uses = [use for use in place.plan.graph.parameters if use.value in values]
    return {use.path if use.local is None else joined_path(place.path, use.local) for use in uses}


def _returns_its_input(entry):
    """Whether the result of an instruction is its input, perhaps a weight."""
    return isinstance(entry, OperatorPlan) and is_cast_to_its_dtype(entry.node)


def _can_run_again(place):
    """Whether an instruction can be recomputed.

    Integers and bools have no gradient: autograd saves them unchanged. An instruction that returns its input produces
    no tensor.
    """
    if isinstance(place.entry, CallPlan):  # a Cell with a custom bprop saves its own tensors
        return False
    if isinstance(place.entry, Redistribution):
        return "float" in place.entry.value.dtype
    if not place.entry.inputs or _returns_its_input(place.entry):
        return False
    return any("float" in value.dtype for value in tree_leaves(place.entry.node.outputs))


def layers_of(containers):
    """Number of a layer -> paths of the Cells with this number.

    Args:
        containers: `(path, names)` of the outermost containers of consecutive layers; a numeric name is the layer's
            number, other names count in order.
    """
    found = ((path, place, name) for path, names in containers for place, name in enumerate(names))
    return grouped((int(name) if name.isdigit() else place, joined_path(path, name)) for path, place, name in found)


def layer_paths(asked, layers):
    """Paths of the Cells of layers, which are numbers, or True for all; unknown ones are ignored."""
    return [path for number in (sorted(layers) if asked is True else asked) for path in layers.get(number, ())]


def whole_cells(settings, layers, paths):
    """Recomputed Cells of compiled functions; patterns that match no Cell are ignored.

    Args:
        settings: the `RecomputeSettings`.
        layers: the result of `layers_of`.
        paths: paths of all Cells.

    Returns:
        A list of paths; a list of `(path, path of an excluded Cell inside)`.
    """
    cells, chosen = [(path, path) for path in paths], {"recompute": [], "exclude": []}
    for each in settings.requests:
        chosen[each.kind] += match(each.pattern, [], cells).cells if each.pattern else layer_paths(each.layers, layers)
    excluded = chosen["exclude"]
    whole = sorted(path for path in {*chosen["recompute"]} if not any(cell_lies_in(path, other) for other in excluded))
    return whole, [(path, other) for path in whole for other in excluded if cell_lies_in(other, path)]


def cell_lies_in(path, other):
    """Whether the Cell at `path` is the Cell at `other` or a descendant."""
    return not other or f"{path}.".startswith(f"{other}.")
