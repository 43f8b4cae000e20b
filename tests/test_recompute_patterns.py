"""Patterns that select Cells and operators: examples, and all errors."""

import re
from types import SimpleNamespace

import pytest

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


def chosen(*patterns):
    found = select(patterns, NAMES, CELLS, "recompute.select")
    return found.cells, found.operators


def refused(pattern):
    with pytest.raises(ValueError) as error:
        chosen("model", pattern)
    return removed(str(error.value), f"recompute.select[1]: {pattern!r}")


def removed(message, beginning):
    assert message.startswith(beginning)
    return message.removeprefix(beginning)


CELL_EXAMPLES = {
    "layers.*.mlp": [(0, layer, 2) for layer in LAYERS],
    "layers.0-2.self_attn": [(0, layer, 1) for layer in range(3)],
    "layers.0,3,5-7.mlp": [(0, layer, 2) for layer in (0, 3, 5, 6, 7)],
    "model.layers.3": [(0, 3)],
    "layers.?": [(0, layer) for layer in LAYERS],
    "7": [(0, 7)],
    "0.self_attn.*_proj": [(0, 0, 1, 0)],
    "layers.1.**": [(0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0), (0, 1, 2), (0, 1, 2, 0)],
    "model.**.gate_proj": [(0, layer, 2, 0) for layer in LAYERS],
    "*.mlp": [(0, layer, 2) for layer in LAYERS],
    "*.model": [(0,)],
    ".model": [(0,)],
    "*": [key for key, path in CELLS if path],
    "**": [key for key, _ in CELLS],
}
OPERATOR_EXAMPLES = {
    "layers.*.self_attn.softmax": [(0, layer, 1, 2) for layer in LAYERS],
    "layers.*.self_attn.weights": [(0, layer, 1, 2) for layer in LAYERS],
    "layers.2.mlp.gate_proj.MatMul": [(0, 2, 2, 0, 0)],
    "layers.2.mlp.gate_proj.MatMulExt": [(0, 2, 2, 0, 0)],
    "layers.2.mlp.gate_proj.mat_mul": [(0, 2, 2, 0, 0)],
    "layers.2.mlp.**.matmul": [(0, 2, 2, 0, 0)],
    "2.self_attn.MatMul": [(0, 2, 1, 1), (0, 2, 1, 3)],
    "2.self_attn.MatMul[1]": [(0, 2, 1, 3)],
    "2.self_attn.MatMul[0-1]": [(0, 2, 1, 1), (0, 2, 1, 3)],
    "2.self_attn.MatMul[0,1]": [(0, 2, 1, 1), (0, 2, 1, 3)],
    "2.self_attn.*[1]": [(0, 2, 1, 3)],
    "*.cast": [*((0, layer, 0, 0) for layer in LAYERS), (1,)],
    "cast": [*((0, layer, 0, 0) for layer in LAYERS), (1,)],
    ".cast": [(1,)],
    "layers.*.mlp.all_gather": [(0, layer, 2, 1) for layer in LAYERS],
    "0.*.allgather": [(0, 0, 2, 1)],
}


@pytest.mark.parametrize("pattern", CELL_EXAMPLES)
def test_examples_of_cells(pattern):
    assert chosen(pattern) == (tuple(CELL_EXAMPLES[pattern]), ())


@pytest.mark.parametrize("pattern", OPERATOR_EXAMPLES)
def test_examples_of_operators(pattern):
    assert chosen(pattern) == ((), tuple(OPERATOR_EXAMPLES[pattern]))


def test_variables_are_called_exactly_as_in_the_code():
    assert "did you mean 'weights'?" in refused("self_attn.Weights")


def test_several_patterns_together():
    patterns = ["layers.1-2.mlp", "layers.0.*.MatMul[0]", "layers.0-1.mlp", "layers.0.self_attn.matmul"]
    found = select(patterns, NAMES, CELLS)
    assert found.cells == ((0, 0, 2), (0, 1, 2), (0, 2, 2))
    assert found.operators == ((0, 0, 1, 1), (0, 0, 1, 3))
    assert list(found.by_pattern) == patterns
    assert found.by_pattern["layers.0.*.MatMul[0]"] == ((), ((0, 0, 1, 1),))
    assert found.by_pattern["layers.0-1.mlp"] == (((0, 0, 2), (0, 1, 2)), ())


WRONG = {
    ".": "segment 1 is empty",
    "a..b": "segment 2 is empty",
    "a.b.": "segment 3 is empty",
    "layers.7-0": "the range '7-0' ends before it begins: write 0-7",
    "layers.0-": "'0-' is neither a number from 0 to 99999 nor a range",
    "layers.1,,2": "'' is neither a number from 0 to 99999 nor a range",
    "layers[0].mlp": "'layers[0]' has an index, which only an operator at the end has: a Cell in a list is layers.0",
    "mul[1]x": "the brackets in 'mul[1]x' are not a name with an index behind it",
    "layers.0-100000": "'0-100000' is neither a number from 0 to 99999 nor a range",
    "mul[x]": "'x' is neither a number from 0 to 99999 nor a range",
    "mul[2-1]": "the range '2-1' ends before it begins: write 1-2",
    "**[1]": "'**' in '**[1]' is not the name of an operator",
    "0-7[1]": "'0-7' in '0-7[1]' is not the name of an operator",
    "a.b**": "** in 'b**' is not a segment of its own: within a name, write one *",
    "layers/0/mlp": "'/' in 'layers/0/mlp' is not part of a name",
    "a,b": "',' in 'a,b' is not part of a name",
}


@pytest.mark.parametrize("pattern", WRONG)
def test_what_is_no_pattern(pattern):
    message = refused(pattern)
    assert message.startswith(f": {WRONG[pattern]}; a pattern is names with the wildcards * and ?, numbers (3 or 0-7")
    assert message.endswith("may have an index: MatMul[1]; it is no regular expression: docs/recompute.md")


@pytest.mark.parametrize("given", [3, None, ["a"], b"a"])
def test_what_is_no_text(given):
    with pytest.raises(TypeError, match=re.escape(f"recompute.select: {given!r} should be a pattern, a text as")):
        chosen(given)


NOTHING = {
    "layers.*.self": "below 'layers.*' are 'input_layernorm', 'self_attn', 'mlp' (did you mean 'self_attn'?)",
    "layers.*.self.softmax": "below 'layers.*' are 'input_layernorm', 'self_attn', 'mlp' (did you mean 'self_attn'?)",
    "layers.*.self_attn.Softmaxx": "below 'layers.*.self_attn' are 'q_proj', 'MatMul', 'Softmax', "
    "'weights' (did you mean 'Softmax'?)",
    "layers.8-9.mlp": "below 'layers' are '0-7'",
    "layers": "below 'layers' are '0-7'",
    "layer.0": "there are '0-7', 'model', 'layers', 'input_layernorm', 'self_attn', … (did you mean 'layers'?)",
    "qqq": "there are '0-7', 'model', 'layers', 'input_layernorm', 'self_attn', …",
    ".layers.0": "at the root are 'model', 'Cast'",
    ".mode": "at the root are 'model', 'Cast' (did you mean 'model'?)",
    "0.mlp.**.gate_projection": "below '0.mlp.**' are 'gate_proj', 'MatMul', 'all_gather' (did you mean 'gate_proj'?)",
    "self_attn.matmul[2]": "a call of a Cell has 2 of 'matmul' at most",
    "layers.*.mlp[0]": "below 'layers.*' are 'input_layernorm', 'self_attn', 'mlp' (did you mean 'mlp'?)",
}


@pytest.mark.parametrize("pattern", NOTHING)
def test_what_matches_nothing(pattern):
    assert refused(pattern) == f" matches no Cell or operator: {NOTHING[pattern]}"


def test_a_program_without_operators():
    with pytest.raises(ValueError, match="there are no names"):
        select(["a"], [], [((), "")])
