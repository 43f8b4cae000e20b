"""From settings to the instructions of a program whose results are not kept. Pure Python."""

from dataclasses import replace
from functools import cached_property

from mindformers_core.analysis.views import is_cast_to_its_dtype
from mindformers_core.hints import nearest
from mindformers_core.program.links import links_of
from mindformers_core.program.operator_names import operator_names
from mindformers_core.program.places import operators_in_order
from mindformers_core.program.plan import CallPlan, Move, called_cells, joined_path
from mindformers_core.program.structure import values_in
from mindformers_core.recompute.contradictions import check_something_left
from mindformers_core.recompute.patterns import select
from mindformers_core.recompute.prediction import Prediction
from mindformers_core.recompute.wording import cells_together, quoted

__all__ = [
    "INSTEAD_OF_GRAPHS",
    "Program",
    "cell_lies_in",
    "check_for_graphs",
    "check_whole_cells",
    "choose_keys",
    "full_layers",
    "kept_in_any_case",
    "layers_of",
    "lies_in_call",
    "whole_cells",
]

_SHOWN = 5
INSTEAD_OF_GRAPHS = "or run in PyNative (recipe: context.mode: 1)"


def layers_of(containers):
    """Number of a layer -> paths of the Cells that are it.

    Args:
        containers: paths of the outermost Cells that hold layers in a row, with the names of those in them:
            `(path, names)`; names that are numbers count as they are, others in their order.
    """
    layers = {}
    for path, names in containers:
        for place, name in enumerate(names):
            number = int(name) if name.isdigit() else place
            layers.setdefault(number, []).append(f"{path}.{name}" if path else name)
    return layers


def full_layers(asked, layers, is_part=False, where="recompute.full", paths=()):
    """Paths of the layers that are asked for.

    Args:
        asked: True, or a tuple of numbers; None: none.
        layers: what `layers_of` gives.
        is_part: whether other layers may be elsewhere.
        where: the key, for errors.
        paths: of all Cells, for errors.

    Raises:
        ValueError: a layer that there isn't.
    """
    if not asked:
        return []
    if is_part:
        return [path for number in sorted(layers) if asked is True or number in asked for path in layers[number]]
    if not layers:
        there = [path for path in paths if path and "." not in path]
        instead = f"; its Cells are {_shown(there)}, which select can name in patterns" if there else ""
        raise ValueError(
            f"{where}: the model has no layers, Cells in a CellList or CellDict, or in a SequentialCell with more in "
            f"it than single Cells of MindSpore, such as Dense and GELU{instead}"
        )
    numbers = sorted(layers) if asked is True else asked
    for number in numbers:
        if number not in layers:
            raise ValueError(
                f"{where}: there is no layer {number}: the layers are {min(layers)} to {max(layers)}, "
                f"{_shown([path for known in sorted(layers) for path in layers[known]])}"
                f"{nearest(str(number), list(map(str, layers)))}"
            )
    return [path for number in numbers for path in layers[number]]


def _shown(paths):
    """The first of some Cells, those of layers in a row in one."""
    together = cells_together(paths)
    return quoted(together[:_SHOWN]) + ", …" * (len(together) > _SHOWN)


def _can_run_again(place):
    """Whether the results of an instruction can be had again by running it once more.

    Integers and truth values have no gradient: autograd keeps those that it needs as they are. What gives its input
    back makes nothing.
    """
    if isinstance(place.entry, CallPlan):  # a Cell with a bprop keeps what that needs
        return False
    if isinstance(place.entry, Move):
        return "float" in place.entry.value.dtype
    if not place.entry.inputs or is_cast_to_its_dtype(place.entry.node):
        return False
    return any("float" in value.dtype for value in values_in(place.entry.node.outputs))


def whole_cells(settings, full, paths):
    """Which Cells are recomputed, and which ones in them are excluded; patterns that are for no Cell are left out.

    Args:
        settings: the `RecomputeSettings`.
        full: paths of the layers that are recomputed wholly.
        paths: of all Cells.

    Returns:
        A list of paths; a list of `(path, path of the excluded Cell in it)`.
    """
    cells = [(path, path) for path in paths]
    chosen = {*full, *select(settings.select, [], cells, "recompute.select", required=False).cells}
    excluded = select(settings.exclude, [], cells, "recompute.exclude", required=False).cells
    chosen = sorted(path for path in chosen if not any(cell_lies_in(path, other) for other in excluded))
    return chosen, [(path, other) for path in chosen for other in excluded if cell_lies_in(other, path)]


def cell_lies_in(path, other):
    """Whether a Cell is another one, or lies in it, by their paths."""
    return not other or f"{path}.".startswith(f"{other}.")


def check_for_graphs(settings, swapping, gaps):
    """Raise `ValueError` where a graph can't do what is asked for, whatever the program: it recomputes whole Cells.

    Args:
        settings, swapping: the `RecomputeSettings` and the `SwapSettings`.
        gaps: excluded Cells in recomputed ones, as `whole_cells` gives them.
    """
    instead = INSTEAD_OF_GRAPHS
    if swapping.is_on:
        raise ValueError(f"swap: nothing can be swapped in a graph, a compiled function: leave it out, {instead}")
    if settings.budget is not None:
        raise ValueError(f"recompute.budget chooses operators, but a graph recomputes whole Cells: use full, {instead}")
    if not settings.mp_comm_recompute:
        raise ValueError(
            f"recompute.mp_comm_recompute: False keeps collectives' results, which a graph can't: use True, {instead}"
        )
    if gaps:
        raise ValueError(
            f"recompute.exclude: Cell '{gaps[0][1]}' lies in '{gaps[0][0]}', which is recomputed, but a graph "
            f"recomputes whole Cells: select the Cells beside it, {instead}"
        )


def check_whole_cells(settings, swapping, frame, gaps, is_part=False, full=()):
    """Raise `ValueError` where a graph can't do what is asked for of a program: patterns that select operators, too.

    Args:
        settings, swapping, gaps: as of `check_for_graphs`.
        frame: the `FramePlan` of the program.
        is_part, full: as in `choose_keys`.
    """
    check_for_graphs(settings, swapping, gaps)
    program = Program(frame, "")
    found = {
        key: program.selected(getattr(settings, key), f"recompute.{key}", is_part) for key in ("select", "exclude")
    }
    if not is_part:
        check_something_left(settings, full, program.names, program.cells, found["select"], found["exclude"])
    for where, selection in found.items():
        for pattern, (_, operators) in selection.by_pattern.items():
            if operators:
                raise ValueError(
                    f"recompute.{where}: '{pattern}' selects operators, but a graph recomputes whole Cells: name "
                    f"Cells, {INSTEAD_OF_GRAPHS}"
                )


def choose_keys(settings, frame, algorithm, path="", full=(), boundaries=(), is_part=False):
    """Which results of a program are not kept: a set of keys of instructions.

    Args:
        settings: the `RecomputeSettings`, without a budget.
        frame: the `FramePlan` of the program.
        algorithm: what tells of distributed algorithms, see `saved_activations`.
        path: of the Cell whose call it is.
        full: paths of the Cells that are recomputed wholly.
        boundaries: paths of Cells whose results are kept in any case.
        is_part: whether patterns may be for what isn't in this program.

    Raises:
        ValueError: a pattern that matches nothing, or `exclude` leaves nothing, though the program is not a part.
    """
    program, prediction = Program(frame, path), Prediction(frame, algorithm)
    selected = program.selected(settings.select, "recompute.select", is_part)
    for pattern, (keys, operators) in selected.by_pattern.items():
        if keys and not operators and program.closed.issuperset(keys):
            raise ValueError(
                f"recompute.select: '{pattern}' selects Cells with a bprop of their own, which keep what that needs: "
                "select others"
            )
    excluded = program.selected(settings.exclude, "recompute.exclude", is_part)
    if not (is_part or path):
        check_something_left(settings, full, program.names, program.cells, selected, excluded)
    chosen = set(selected.operators)
    for key in {*selected.cells, *(key for key, cell in program.cells if cell in full)} - program.closed:
        chosen |= prediction.cell_keys(key)
    return chosen - _kept_in_any_case(settings, program, prediction, boundaries, excluded)


def kept_in_any_case(settings, frame, algorithm, path="", boundaries=(), is_part=False):
    """Keys of the instructions whose results are kept, whatever is selected; arguments as of `choose_keys`."""
    program = Program(frame, path)
    excluded = program.selected(settings.exclude, "recompute.exclude", is_part)
    return _kept_in_any_case(settings, program, Prediction(frame, algorithm), boundaries, excluded)


def _kept_in_any_case(settings, program, prediction, boundaries, excluded):
    kept = set(excluded.operators)
    for place in program.places:
        is_excluded = any(lies_in_call(place.key, cell) for cell in excluded.cells)
        if is_excluded or not _may_go(place, settings.mp_comm_recompute):
            kept.add(place.key)
    for key, cell in program.cells:
        if key not in program.closed and (key == () or cell in boundaries):  # who called may change what it got
            inside = {place.key for place in program.places if lies_in_call(place.key, key)}
            kept |= inside - prediction.cell_keys(key)
    return kept


class Program:
    """What patterns are matched with.

    Args:
        frame: its `FramePlan`.
        path: of the Cell whose call it is.

    Attributes:
        frame, path: as given.
        places: a `Place` for every instruction.
        names: its `OperatorName`s.
        cells: `(key, path from the root)` of every call of a Cell.
        closed: keys of the calls of Cells with a `bprop` of their own.
    """

    def __init__(self, frame, path):
        self.frame, self.path = frame, path
        self.places, self.names = operators_in_order(frame), operator_names(frame, path)
        self.cells = [(key, joined_path(path, inner)) for key, inner in called_cells(frame)]
        self.closed = {place.key for place in self.places if isinstance(place.entry, CallPlan)}

    def selected(self, patterns, where, is_part):
        """The `Selection`; in a part, patterns may be for what is elsewhere.

        With operators go redistributions of their results that do nothing on a rank, and so have no names: gradients
        need what these give, in the same memory.
        """
        required = not (is_part or self.path)
        found = select(patterns, self.names, self.cells, where, required)
        return replace(found, operators=self._with_nameless(found.operators)) if found.operators else found

    def _with_nameless(self, operators):
        found = {*operators}
        for key, makers in self._nameless:
            found |= set() if found.isdisjoint(makers) else {key}
        return tuple(place.key for place in self.places if place.key in found)

    @cached_property
    def _nameless(self):
        """Redistributions without names, in order: `(key, keys of those that make what they take)`."""
        named, makers = {name.place.key for name in self.names}, links_of(self.frame).makers
        moves = [place.key for place in self.places if isinstance(place.entry, Move)]
        return [(key, makers[key]) for key in moves if key not in named]


def lies_in_call(key, cell):
    """Whether an instruction lies in the call of a Cell, or is it, by their keys."""
    return key[: len(cell)] == cell


def _may_go(place, with_communication):
    moves = isinstance(place.entry, Move) and bool(place.entry.steps)
    return _can_run_again(place) and (with_communication or not moves)
