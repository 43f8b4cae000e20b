"""Selection of recomputed and swapped instructions of a program, from settings. Pure Python."""

from dataclasses import replace
from functools import cached_property

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.analysis.views import is_cast_to_its_dtype
from mindformers_core.hints import nearest
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.name_ranges import cells_together, quoted
from mindformers_core.program.operator_names import operator_names, operator_texts
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
from mindformers_core.recompute.patterns import match, parse_pattern

_SHOWN = 5


class NamedProgram:
    """A program with all names that patterns match, collected once.

    Args:
        frame: its `CellPlan`.
        path: path of the root Cell of the program.
        algorithm, arguments_need: see `Prediction`.

    Attributes:
        frame, path, algorithm: the arguments.
        places: its `Instruction`s in order.
        names: its `OperatorName`s.
        cells: `(key, path from the root)` of each call of a Cell.
        closed: keys of calls of Cells with a custom `bprop`.
        prediction: its `Prediction`.
    """

    def __init__(self, frame, path="", algorithm=None, arguments_need=True):
        self.frame, self.path, self.algorithm = frame, path, algorithm
        self.places, self.names = operators_in_order(frame), operator_names(frame, path)
        self.cells = [(key, joined_path(path, inner)) for key, inner in called_cells(frame)]
        self.closed = {place.key for place in self.places if isinstance(place.entry, CallPlan)}
        self.prediction = Prediction(frame, algorithm, arguments_need)

    def matches(self, patterns, where):
        """A `Match` for each pattern text; `where` is the key for errors: `"recompute.select"`.

        A match of operators includes redistributions of their results without local work, which have no names:
        gradients read the results of these, in the same memory.
        """
        places = [where] if len(patterns) == 1 else [f"{where}[{number}]" for number in range(len(patterns))]
        for text, place in zip(patterns, places):
            found = match(parse_pattern(text, place), self.names, self.cells)
            yield replace(found, operators=self._with_nameless(found.operators))

    def inside(self, roots):
        """Keys of the instructions inside the calls `roots`, and `roots` themselves."""
        roots, keys = set(roots), (place.key for place in self.places)
        return {key for key in keys if any(key[:end] in roots for end in range(len(key) + 1))}

    def calls(self, paths):
        """Keys of all calls of the Cells at `paths`."""
        return [key for key, path in self.cells if path in paths]

    def _with_nameless(self, operators):
        found = {*operators}
        for key, producers in self._nameless if found else ():
            found |= set() if found.isdisjoint(producers) else {key}
        return tuple(place.key for place in self.places if place.key in found)

    @cached_property
    def _nameless(self):
        """Redistributions without names, in order: `(key, keys of their producers)`."""
        named, producers = {name.place.key for name in self.names}, links_of(self.frame).producers
        moves = [place.key for place in self.places if isinstance(place.entry, Redistribution)]
        return [(key, producers[key]) for key in moves if key not in named]


def recomputed_keys(settings, program, full=(), boundaries=()):
    """Keys of the recomputed instructions of a program (a set): their results are not saved.

    Args:
        settings: the `RecomputeSettings`, without a budget.
        program: the `NamedProgram`.
        full: paths of the fully recomputed Cells.
        boundaries: paths of Cells whose results are always saved.

    Raises:
        ValueError: a pattern selects only Cells with a custom `bprop`.
    """
    return chosen_keys(settings, program, full) - kept_keys(settings, program, boundaries)


def chosen_keys(settings, program, full=()):
    """Keys of the instructions in `full` and `select`, including kept ones; arguments as `recomputed_keys`."""
    return set().union(*(keys for _, keys in _recompute_requests(settings, program, full)))


def _recompute_requests(settings, program, full):
    """`(setting, keys of instructions)` of each request to recompute."""
    yield "recompute.full", _keys_of_cells(program, program.calls(full))
    for each in program.matches(settings.select, "recompute.select"):
        if each.cells and program.closed.issuperset(each.cells):
            raise ValueError(
                f"{each.pattern.where}: {each.pattern.text!r} selects Cells with a bprop of their own, which keep what "
                "that needs: select others"
            )
        yield f"recompute.select {each.pattern.text!r}", {*each.operators, *_keys_of_cells(program, each.cells)}


def _keys_of_cells(program, calls):
    return set().union(*(program.prediction.cell_keys(key) for key in calls if key not in program.closed))


def excluded_keys(settings, program):
    """Keys of the instructions in `exclude`."""
    matches = program.matches(settings.exclude, "recompute.exclude")
    return program.inside(key for each in matches for key in (*each.cells, *each.operators))


def kept_keys(settings, program, boundaries=()):
    """Keys of the instructions whose results are always saved; arguments as `recomputed_keys`."""
    kept = excluded_keys(settings, program) | _state_keys(program)
    for place in program.places:
        sends = isinstance(place.entry, Redistribution) and bool(place.entry.steps)
        if not _can_run_again(place) or (sends and not settings.mp_comm_recompute):
            kept.add(place.key)
    for key, cell in program.cells:
        if key not in program.closed and (key == () or cell in boundaries):  # the caller may write to it in place
            kept |= program.inside([key]) - program.prediction.cell_keys(key)
    return kept


def written_by(place):
    """The paths of the Parameters that an instruction writes, from the program's Cell; a set."""
    node = getattr(place.entry, "node", None)
    writes = place.entry.frame is None and node is not None and facts_of(getattr(node, "operator", "")).writes
    return _parameters_among(place, node.args[:1]) if writes else set()


def _parameters_among(place, values):
    uses = [use for use in place.frame.graph.parameters if use.value in values]
    return {use.path if use.local is None else joined_path(place.path, use.local) for use in uses}


def _state_keys(program):
    """Keys of the instructions that write Parameters, or read them: there are other values later on."""
    written = set().union(*map(written_by, program.places))
    taken = {
        place.key: _parameters_among(place, [value for value, _ in place.entry.consumed])
        for place in (program.places if written else ())
    }
    return {key for key, paths in taken.items() if paths & written}


def _can_run_again(place):
    """Whether an instruction can be recomputed.

    Integers and bools have no gradient: autograd saves them unchanged. An instruction that returns its input produces
    no tensor.
    """
    if isinstance(place.entry, CallPlan):  # a Cell with a custom bprop saves its own tensors
        return False
    if isinstance(place.entry, Redistribution):
        return "float" in place.entry.value.dtype
    if not place.entry.inputs or is_cast_to_its_dtype(place.entry.node):
        return False
    return any("float" in value.dtype for value in tree_leaves(place.entry.node.outputs))


def swapped_keys(settings, program, layers):
    """Swapped results of a program: key of the instruction -> `backward_prefetch`.

    Results of the program itself are never swapped: the caller may write to them in place.

    Args:
        settings: the `SwapSettings`.
        program: the `NamedProgram`.
        layers: the result of `layers_of`.
    """
    found = {}
    for _, prefetch, keys in _swap_requests(settings, program, layers):
        found |= dict.fromkeys(keys, prefetch)
    inner = program.prediction.cell_keys(()) if found else ()
    places = [place for place in program.places if place.key in found and place.key in inner]
    same = [place for place in places if isinstance(place.entry, OperatorPlan)]  # return their input, perhaps a weight
    same = {place.key for place in same if is_cast_to_its_dtype(place.entry.node)}
    return {place.key: found[place.key] for place in places if place.key not in same}


def _swap_requests(settings, program, layers):
    """`(setting, backward_prefetch, keys of instructions)` of each request to swap."""
    for place, entry in enumerate(settings.layer_swap if settings.is_on else ()):
        yield f"swap.layer_swap[{place}]", entry.backward_prefetch, _in_layers(entry.layers, program, layers)
    for entry in settings.op_swap if settings.is_on else ():
        (found,) = program.matches((entry.op_name,), settings.where(entry))
        yield settings.where(entry), entry.backward_prefetch, operator_swap_keys(entry, found, program, layers)


def operator_swap_keys(entry, found, program, layers):
    """Keys of the instructions of an `OperatorSwap`, by the `Match` of its pattern."""
    keys = program.inside((*found.cells, *found.operators)) - program.closed
    return keys if entry.layers is True else keys & _in_layers(entry.layers, program, layers)


def _in_layers(asked, program, layers):
    return program.inside(program.calls(full_layers(asked, layers, is_part=True))) - program.closed


def check_apart(settings, swapping, program, layers, full, both, label):
    """Raise `ValueError` for an instruction that is both recomputed and swapped, with the settings that request it.

    Args:
        settings, swapping: the `RecomputeSettings`, and the `SwapSettings`.
        program, layers, full: as for `recomputed_keys` and `swapped_keys`.
        both: keys of such instructions.
        label: owner of the program.
    """
    if not both:
        return
    texts = operator_texts(program.frame, program.path)
    key = next((key for key in both if key in texts), both[0])
    asked = [(where, keys) for where, keys in _recompute_requests(settings, program, full)]
    asked += [(where, keys) for where, _, keys in _swap_requests(swapping, program, layers)]
    who = " and ".join(where for where, keys in asked if key in keys)
    raise ValueError(
        f"{texts.get(key, 'a redistribution')} of {label} is recomputed and swapped, by {who}: what is computed again "
        "isn't kept, neither here nor on the host: choose one of the two (exclude takes it out of what is recomputed)"
    )


def layers_of(containers):
    """Number of a layer -> paths of the Cells with this number.

    Args:
        containers: `(path, names)` of the outermost containers of consecutive layers; a numeric name is the layer's
            number, other names count in order.
    """
    layers = {}
    for path, names in containers:
        for place, name in enumerate(names):
            number = int(name) if name.isdigit() else place
            layers.setdefault(number, []).append(f"{path}.{name}" if path else name)
    return layers


def full_layers(asked, layers, is_part=False, where="recompute.full", paths=()):
    """Paths of the requested layers.

    Args:
        asked: True, or a tuple of numbers; None: none.
        layers: the result of `layers_of`.
        is_part: whether missing layers may be on other pipeline stages.
        where: the key, for errors.
        paths: paths of all Cells, for errors.

    Raises:
        ValueError: an unknown layer.
    """
    numbers = sorted(layers) if asked is True else asked or ()
    if asked and not layers and not is_part:
        there = [path for path in paths if path and "." not in path]
        instead = f"; its Cells are {_shown(there)}, which select can name in patterns" if there else ""
        raise ValueError(
            f"{where}: the model has no layers, Cells in a CellList or CellDict, or in a SequentialCell with more in "
            f"it than single Cells of MindSpore, such as Dense and GELU{instead}"
        )
    for number in () if is_part else numbers:
        if number not in layers:
            raise ValueError(
                f"{where}: there is no layer {number}: the layers are {min(layers)} to {max(layers)}, "
                f"{_shown([path for known in sorted(layers) for path in layers[known]])}"
                f"{nearest(str(number), list(map(str, layers)))}"
            )
    return [path for number in numbers for path in layers.get(number, ())]


def _shown(paths):
    """The first few Cells, with consecutive layers as one range."""
    together = cells_together(paths)
    return quoted(together[:_SHOWN]) + ", …" * (len(together) > _SHOWN)


def whole_cells(settings, full, paths):
    """Recomputed Cells of compiled functions; patterns that match no Cell are ignored.

    Args:
        settings: the `RecomputeSettings`.
        full: paths of the fully recomputed layers.
        paths: paths of all Cells.

    Returns:
        A list of paths; a list of `(path, path of an excluded Cell inside)`.
    """
    cells = [(path, path) for path in paths]

    def matched(patterns):
        return [path for text in patterns for path in match(parse_pattern(text, ""), [], cells).cells]

    excluded = matched(settings.exclude)
    chosen = {*full, *matched(settings.select)}
    chosen = sorted(path for path in chosen if not any(cell_lies_in(path, other) for other in excluded))
    return chosen, [(path, other) for path in chosen for other in excluded if cell_lies_in(other, path)]


def cell_lies_in(path, other):
    """Whether the Cell at `path` is the Cell at `other` or a descendant."""
    return not other or f"{path}.".startswith(f"{other}.")
