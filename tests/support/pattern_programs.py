"""Names and Cells of a made-up program with layers, and what patterns select in one."""

import re
from types import SimpleNamespace

from mindformers_core.program.operator_names import Label, OperatorName
from mindformers_core.program.plan import Instruction
from mindformers_core.recompute.patterns import check_found, match, parse_pattern


def name_of(key, path, operator, *variables, number=0, count=1):
    """An `OperatorName` whose labels all have the same number."""
    friendly = re.sub("(ExtView|Ext|View)$", "", operator)
    labels = [Label(name, False, number, count) for name in dict.fromkeys((friendly, operator))]
    labels += [Label(name, True, number, count) for name in variables]
    return OperatorName(Instruction(key, path, None, None), path, operator, tuple(labels))


LAYERS = range(8)
CELLS = [
    ((), ""),
    ((0,), "model"),
    *(
        (key, f"model.layers.{layer}{inner}")
        for layer in LAYERS
        for key, inner in (
            ((0, layer), ""),
            ((0, layer, 0), ".input_layernorm"),
            ((0, layer, 1), ".self_attn"),
            ((0, layer, 1, 0), ".self_attn.q_proj"),
            ((0, layer, 2), ".mlp"),
            ((0, layer, 2, 0), ".mlp.gate_proj"),
        )
    ),
]
NAMES = [
    *(
        name
        for layer in LAYERS
        for name in (
            name_of((0, layer, 0, 0), f"model.layers.{layer}.input_layernorm", "Cast", "normed"),
            name_of((0, layer, 1, 0, 0), f"model.layers.{layer}.self_attn.q_proj", "Dense", "y"),
            name_of((0, layer, 1, 1), f"model.layers.{layer}.self_attn", "MatMulExt", count=2),
            name_of((0, layer, 1, 2), f"model.layers.{layer}.self_attn", "Softmax", "weights"),
            name_of((0, layer, 1, 3), f"model.layers.{layer}.self_attn", "MatMulExt", number=1, count=2),
            name_of((0, layer, 2, 0, 0), f"model.layers.{layer}.mlp.gate_proj", "MatMulExt"),
            name_of((0, layer, 2, 1), f"model.layers.{layer}.mlp", "all_gather"),
        )
    ),
    name_of((1,), "", "Cast"),
]


def select(patterns, names, cells, where="select", required=True):
    """The keys that patterns select, of Cells and of operators, in order, together and by pattern."""
    found = []
    for number, text in enumerate(patterns):
        place = f"{where}[{number}]" if len(patterns) > 1 else where
        pattern = parse_pattern(text, place)
        found.append(match(pattern, names, cells))
        if required:
            check_found(place, pattern, [found[-1].found])
    chosen = {key for each in found for key in (*each.cells, *each.operators)}
    together = [key for key, _ in cells if key in chosen], [n.place.key for n in names if n.place.key in chosen]
    by_pattern = {text: (each.cells, each.operators) for text, each in zip(patterns, found, strict=True)}
    return SimpleNamespace(cells=tuple(together[0]), operators=tuple(together[1]), by_pattern=by_pattern)
