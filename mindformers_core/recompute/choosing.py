"""From settings to the instructions of a program whose results are not kept. Pure Python."""

from mindformers_core.mesh import nearest
from mindformers_core.recompute.operator_names import operator_names
from mindformers_core.recompute.patterns import select
from mindformers_core.recompute.places import called_cells, operators_in_order
from mindformers_core.recompute.prediction import Prediction
from mindformers_core.tensor_parallel.capturing.structure import values_in
from mindformers_core.tensor_parallel.propagation.plan import CallPlan, Move

__all__ = [
    "check_whole_cells",
    "choose_keys",
    "full_layers",
    "kept_in_any_case",
    "layers_of",
    "swapped_keys",
    "whole_cells",
]


def layers_of(containers):
    """Number of a layer -> paths of the Cells that are it.

    Args:
        containers: paths of the outermost Cells that hold others in a row, with the names of those in them:
            `(path, names)`; names that are numbers count as they are, others in their order.
    """
    layers = {}
    for path, names in containers:
        for place, name in enumerate(names):
            number = int(name) if name.isdigit() else place
            layers.setdefault(number, []).append(f"{path}.{name}" if path else name)
    return layers


def full_layers(asked, layers, is_part=False, where="recompute.full"):
    """Paths of the layers that are asked for.

    Args:
        asked: True, or a tuple of numbers; None: none.
        layers: what `layers_of` gives.
        is_part: whether other layers may be elsewhere.
        where: the key, for errors.

    Raises:
        ValueError: a layer that there isn't.
    """
    if not asked:
        return []
    if is_part:
        return [path for number in sorted(layers) if asked is True or number in asked for path in layers[number]]
    if not layers:
        raise ValueError(f"{where}: the model has no layers, Cells in a CellList, CellDict or SequentialCell")
    numbers = sorted(layers) if asked is True else asked
    for number in numbers:
        if number not in layers:
            raise ValueError(
                f"{where}: there is no layer {number}: the layers are {min(layers)} to {max(layers)}"
                f"{nearest(str(number), list(map(str, layers)))}"
            )
    return [path for number in numbers for path in layers[number]]


def _can_run_again(place):
    """Whether the results of an instruction can be had again by running it once more.

    Integers and truth values have no gradient: autograd keeps those that it needs as they are.
    """
    if isinstance(place.entry, CallPlan):  # a Cell with a bprop keeps what that needs
        return False
    if isinstance(place.entry, Move):
        return "float" in place.entry.value.dtype
    return bool(place.entry.inputs) and any("float" in value.dtype for value in values_in(place.entry.node.outputs))


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
    chosen = sorted(path for path in chosen if not any(_is_below(path, other) for other in excluded))
    return chosen, [(path, other) for path in chosen for other in excluded if _is_below(other, path)]


def _is_below(path, other):
    """Whether a Cell is another one, or lies in it."""
    return not other or f"{path}.".startswith(f"{other}.")


def check_whole_cells(settings, frame, gaps, is_part=False):
    """Raise `ValueError` where a graph can't do what is asked for: it recomputes whole Cells, and everything in them.

    Args:
        settings: the `RecomputeSettings`.
        frame: the `FramePlan` of the program.
        gaps: excluded Cells in recomputed ones, as `whole_cells` gives them.
        is_part: as in `choose_keys`.
    """
    instead = "or run in PyNative (recipe: context.mode: 1)"
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
    program = _Program(frame, "")
    for where, patterns in (("select", settings.select), ("exclude", settings.exclude)):
        found = program.selected(patterns, f"recompute.{where}", is_part)
        for pattern, (_, operators) in found.by_pattern.items():
            if operators:
                raise ValueError(
                    f"recompute.{where}: '{pattern}' selects operators, but a graph recomputes whole Cells: name "
                    f"Cells, {instead}"
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
        ValueError: a pattern that matches nothing, though the program is not a part.
    """
    program, prediction = _Program(frame, path), Prediction(frame, algorithm)
    selected = program.selected(settings.select, "recompute.select", is_part)
    for pattern, (keys, operators) in selected.by_pattern.items():
        if keys and not operators and program.closed.issuperset(keys):
            raise ValueError(
                f"recompute.select: '{pattern}' selects Cells with a bprop of their own, which keep what that needs: "
                "select others"
            )
    chosen = set(selected.operators)
    for key in {*selected.cells, *(key for key, cell in program.cells if cell in full)} - program.closed:
        chosen |= prediction.cell_keys(key)
    return chosen - _kept_in_any_case(settings, program, prediction, boundaries, is_part)


def kept_in_any_case(settings, frame, algorithm, path="", boundaries=(), is_part=False):
    """Keys of the instructions whose results are kept, whatever is selected; arguments as of `choose_keys`."""
    return _kept_in_any_case(settings, _Program(frame, path), Prediction(frame, algorithm), boundaries, is_part)


def _kept_in_any_case(settings, program, prediction, boundaries, is_part):
    excluded = program.selected(settings.exclude, "recompute.exclude", is_part)
    kept = set(excluded.operators)
    for place in program.places:
        if not _may_go(place, settings.mp_comm_recompute) or any(_lies_in(place.key, cell) for cell in excluded.cells):
            kept.add(place.key)
    for key, cell in program.cells:
        if key not in program.closed and (key == () or cell in boundaries):  # who called may change what it got
            inside = {place.key for place in program.places if _lies_in(place.key, key)}
            kept |= inside - prediction.cell_keys(key)
    return kept


def swapped_keys(settings, frame, layers, path="", is_part=False):
    """Which results of a program go to the host: key -> how many saved tensors ahead of its use one comes back.

    Args:
        settings: the `SwapSettings`.
        frame: the `FramePlan` of the program.
        layers: what `layers_of` gives.
        path: of the Cell whose call it is.
        is_part: whether layers and patterns may be for what isn't in this program.

    Raises:
        ValueError: a layer that there isn't, or a pattern that matches nothing, though the program is not a part.
    """
    if not settings.is_on:
        return {}
    program, is_part = _Program(frame, path), bool(is_part or path)
    keys = [place.key for place in program.places if place.key not in program.closed]

    def inside(paths):
        roots = [key for key, cell in program.cells if cell in paths]
        return [key for key in keys if any(_lies_in(key, root) for root in roots)]

    found = {}
    for place, entry in enumerate(settings.layer_swap):
        paths = full_layers(entry.layers, layers, is_part, f"swap.layer_swap[{place}].layers")
        found |= dict.fromkeys(inside(paths), entry.backward_prefetch)
    for entry in settings.op_swap:
        where = f"swap.op_swap[{entry.op_name!r}]"
        selected = program.selected((entry.op_name,), where, is_part)
        chosen = [key for key in keys if any(_lies_in(key, root) for root in (*selected.cells, *selected.operators))]
        if entry.layers is not True:
            allowed = set(inside(full_layers(entry.layers, layers, is_part, f"{where}.layers")))
            chosen = [key for key in chosen if key in allowed]
        found |= dict.fromkeys(chosen, entry.backward_prefetch)
    return found


class _Program:
    """What patterns are matched with.

    Attributes:
        path: of the Cell whose call it is.
        places: a `Place` for every instruction.
        names: its `OperatorName`s.
        cells: `(key, path from the root)` of every call of a Cell.
        closed: keys of the calls of Cells with a `bprop` of their own.
    """

    def __init__(self, frame, path):
        self.path = path
        self.places, self.names = operators_in_order(frame), operator_names(frame, path)
        self.cells = [(key, f"{path}.{inner}".strip(".")) for key, inner in called_cells(frame)]
        self.closed = {place.key for place in self.places if isinstance(place.entry, CallPlan)}

    def selected(self, patterns, where, is_part):
        """The `Selection`; in a part, patterns may be for what is elsewhere."""
        return select(patterns, self.names, self.cells, where, required=not (is_part or self.path))


def _lies_in(key, cell):
    return key[: len(cell)] == cell


def _may_go(place, with_communication):
    moves = isinstance(place.entry, Move) and bool(place.entry.steps)
    return _can_run_again(place) and (with_communication or not moves)
