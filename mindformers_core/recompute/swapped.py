"""From swap settings to the instructions of a program whose results wait on the host. Pure Python."""

from mindformers_core.analysis.views import is_cast_to_its_dtype
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.program.places import operators_in_order
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.recompute.choosing import Program, cell_lies_in, full_layers, lies_in_call
from mindformers_core.recompute.prediction import cell_keys
from mindformers_core.recompute.wording import ranges_shown

__all__ = ["check_apart", "check_narrowed", "swapped_keys"]


def swapped_keys(settings, frame, layers, algorithm=None, path="", is_part=False):
    """Which results of a program go to the host: key -> how many saved tensors ahead of its use one comes back.

    What the program returns stays, whatever is selected: who called may change what it got, and the host wouldn't know.

    Args:
        settings: the `SwapSettings`.
        frame: the `FramePlan` of the program.
        layers: what `layers_of` gives.
        algorithm: what tells of distributed algorithms, see `saved_activations`.
        path: of the Cell whose call it is.
        is_part: whether layers and patterns may be for what isn't in this program.

    Raises:
        ValueError: a layer that there isn't, or a pattern that matches nothing, or nothing in the layers that it is
            for, though the program is not a part.
    """
    if not settings.is_on:
        return {}
    found = {}
    for _, entry, keys in _asked(settings, Program(frame, path), layers, bool(is_part or path)):
        found |= dict.fromkeys(keys, entry.backward_prefetch)
    inner = cell_keys(frame, (), algorithm) - {place.key for place in operators_in_order(frame) if _is_no_result(place)}
    return {key: prefetch for key, prefetch in found.items() if key in inner}


def _is_no_result(place):
    """Whether an instruction gives what it takes, perhaps a weight: that goes with who made it, or stays."""
    return isinstance(place.entry, OperatorPlan) and is_cast_to_its_dtype(place.entry.node)


def _asked(settings, program, layers, is_part):
    """`(path of the key, LayerSwap or OperatorSwap, keys of instructions)` of all that is asked for."""
    keys = [place.key for place in program.places if place.key not in program.closed]

    def inside(roots):
        return [key for key in keys if any(lies_in_call(key, root) for root in roots)]

    def in_layers(entry, where):
        paths = full_layers(entry.layers, layers, is_part, f"{where}.layers")
        return inside([key for key, cell in program.cells if cell in paths])

    for place, entry in enumerate(settings.layer_swap):
        where = f"swap.layer_swap[{place}]"
        yield where, entry, in_layers(entry, where)
    for entry in settings.op_swap:
        where = settings.where(entry)
        selected = program.selected((entry.op_name,), where, is_part)
        chosen = inside((*selected.cells, *selected.operators))
        if entry.layers is not True:
            allowed = {*in_layers(entry, where)}
            if not is_part:
                check_narrowed(entry, where, selected, program.names, program.cells, layers)
            chosen = [key for key in chosen if key in allowed]
        yield where, entry, chosen


def check_apart(settings, swapping, frame, layers, again, on_host, label, path="", full=()):
    """Raise `ValueError` for an instruction that is computed again and waits on the host, with who asks for it.

    Args:
        settings, swapping: the `RecomputeSettings`, and the `SwapSettings`.
        frame, layers, path: as in `swapped_keys`.
        again, on_host: keys of instructions.
        label: whose program it is.
        full: paths of the Cells that are recomputed wholly.
    """
    both = [key for key in on_host if key in again]
    if not both:
        return
    texts = operator_texts(frame, path)
    key, program = next((key for key in both if key in texts), both[0]), Program(frame, path)
    roots = [root for root, cell in program.cells if cell in full]
    patterns = program.selected(settings.select, "recompute.select", True).by_pattern
    asked = [("recompute.full", roots), *((f"recompute.select {text!r}", sum(patterns[text], ())) for text in patterns)]
    recomputed = [where for where, keys in asked if any(lies_in_call(key, root) for root in keys)]
    swapped = [where for where, _, keys in _asked(swapping, program, layers, True) if key in keys]
    *_, cell = (cell for root, cell in program.cells if lies_in_call(key, root))
    redistribution = f"a redistribution in '{cell}'" if cell else "a redistribution"
    name = texts.get(key, redistribution)
    who = f"recomputed ({', '.join(recomputed)}) and swapped ({', '.join(swapped)})"
    raise ValueError(
        f"{name} of {label} is {who}: what is computed again isn't kept, neither here nor on the host: choose one of "
        "the two (exclude takes it out of what is recomputed)"
    )


def check_narrowed(entry, where, selected, names, cells, layers):
    """Raise `ValueError` where nothing that the pattern of an `OperatorSwap` selects is in the layers that it is for.

    Args:
        entry: the `OperatorSwap`, with layers.
        where: what it is, for errors: `"swap.op_swap['*.mlp']"`.
        selected: the `Selection` of its pattern.
        names, cells: see `select`.
        layers: what `layers_of` gives.
    """
    chosen = [path for key, path in cells if key in selected.cells]
    single = [name.path for name in names if name.place.key in selected.operators]

    def is_in(layer):
        around = any(cell_lies_in(layer, path) for path in chosen)
        return around or any(cell_lies_in(path, layer) for path in (*chosen, *single))

    def shown(numbers):
        return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(ranges_shown(numbers))}"

    found = [number for number in layers if any(map(is_in, layers[number]))]
    if not set(entry.layers) & set(found):
        lies = f"in {shown(found)}" if found else "in no layer"
        raise ValueError(
            f"{where}.layers: nothing that {entry.op_name!r} selects is in {shown(entry.layers)}: it is {lies}"
        )
