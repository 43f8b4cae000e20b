"""Patterns that select Cells and operators: examples, and all errors."""

import re

import pytest

from mindformers_core.recompute.operator_names import Label, OperatorName
from mindformers_core.recompute.patterns import Pattern, parse_pattern, select
from mindformers_core.recompute.places import Place


def name_of(key, path, operator, *variables, number=0, count=1):
    """An `OperatorName` whose labels all have the same number."""
    friendly = re.sub("(ExtView|Ext|View)$", "", operator)
    labels = [Label(name, False, number, count) for name in dict.fromkeys((friendly, operator))]
    labels += [Label(name, True, number, count) for name in variables]
    return OperatorName(Place(key, path, None, None), path, operator, tuple(labels))


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
    assert "did you mean 'MatMul'?" in refused("_matmul")


def test_several_patterns_together():
    patterns = ["layers.1-2.mlp", "layers.0.*.MatMul[0]", "layers.0-1.mlp", "layers.0.self_attn.matmul"]
    found = select(patterns, NAMES, CELLS)
    assert found.cells == ((0, 0, 2), (0, 1, 2), (0, 2, 2))
    assert found.operators == ((0, 0, 1, 1), (0, 0, 1, 3))
    assert list(found.by_pattern) == patterns
    assert found.by_pattern["layers.0.*.MatMul[0]"] == ((), ((0, 0, 1, 1),))
    assert found.by_pattern["layers.0-1.mlp"] == (((0, 0, 2), (0, 1, 2)), ())
    assert select([parse_pattern(text, "x") for text in patterns], NAMES, CELLS) == found
    assert select([], NAMES, CELLS).by_pattern == {}


WRONG = {
    "": "an empty pattern",
    "  ": "an empty pattern",
    ".": "segment 1 is empty",
    "a..b": "segment 2 is empty",
    "..a": "segment 1 is empty",
    "a.b.": "segment 3 is empty",
    "layers.7-0": "the range '7-0' ends before it begins: write 0-7",
    "layers.1,7-0.a": "the range '7-0' ends before it begins: write 0-7",
    "layers.0-": "'0-' in '0-' is neither a number from 0 to 99999 nor a range",
    "layers.-3": "'-3' in '-3' is neither a number from 0 to 99999 nor a range",
    "layers.1,,2": "'' in '1,,2' is neither a number from 0 to 99999 nor a range",
    "layers.0-1-2": "'0-1-2' in '0-1-2' is neither a number from 0 to 99999 nor a range",
    "layers[0].mlp": "'layers[0]' has an index, which only an operator at the end has: a Cell in a list is layers.0",
    "mul[": "the brackets in 'mul[' are not a name with an index behind it",
    "mul]": "the brackets in 'mul]' are not a name with an index behind it",
    "mul[1": "the brackets in 'mul[1' are not a name with an index behind it",
    "mul[1]x": "the brackets in 'mul[1]x' are not a name with an index behind it",
    "mul[1][2]": "the brackets in 'mul[1][2]' are not a name with an index behind it",
    "mul][1]": "the brackets in 'mul][1]' are not a name with an index behind it",
    "layers.0-100000": "'0-100000' in '0-100000' is neither a number from 0 to 99999 nor a range",
    "mul[]": "'' in 'mul[]' is neither a number from 0 to 99999 nor a range",
    "mul[x]": "'x' in 'mul[x]' is neither a number from 0 to 99999 nor a range",
    "mul[*]": "'*' in 'mul[*]' is neither a number from 0 to 99999 nor a range",
    "mul[2-1]": "the range '2-1' ends before it begins: write 1-2",
    "**[1]": "'**' in '**[1]' is not the name of an operator",
    "0-7[1]": "'0-7' in '0-7[1]' is not the name of an operator",
    "a.b**": "** in 'b**' is not a segment of its own: within a name, write one *",
    "a***[0]": "** in 'a***' is not a segment of its own: within a name, write one *",
    "layers.[0-3].mlp": "the brackets in '[0-3]' are not a name with an index behind it",
    "layers/0/mlp": "'/' in 'layers/0/mlp' is not part of a name",
    "a,b": "',' in 'a,b' is not part of a name",
    "a.b c": "' ' in 'b c' is not part of a name",
    "layers.0 ": "' ' in '0 ' is not part of a name",
}


@pytest.mark.parametrize("pattern", WRONG)
def test_what_is_no_pattern(pattern):
    message = refused(pattern)
    assert message.startswith(f": {WRONG[pattern]}; a pattern is names with the wildcards * and ?, numbers (3 or 0-7")
    assert message.endswith("may have an index: MatMul[1]; it is no regular expression: docs/recompute.md")


@pytest.mark.parametrize("given", [3, None, ["a"], b"a"])
def test_what_is_no_text(given):
    with pytest.raises(TypeError, match=re.escape(f"recompute.select: {given!r} should be a text, as 'layers.*.m")):
        chosen(given)


@pytest.mark.parametrize("given", ["layers.*.mlp", 3, None])
def test_what_is_no_list_of_patterns(given):
    with pytest.raises(TypeError, match=re.escape(f"swap.select: {given!r} should be a list of patterns")):
        select(given, NAMES, CELLS, "swap.select")


NOTHING = {
    "layers.*.attention": "Cell or operator: 'layers.*' is there, below it are 'input_layernorm', 'self_attn', 'mlp' "
    "(did you mean 'self_attn'?)",
    "layers.*.attention.softmax": "Cell or operator: 'layers.*' is there, below it are 'input_layernorm', "
    "'self_attn', 'mlp' (did you mean 'self_attn'?)",
    "layers.*.self_attn.softmaxx": "Cell or operator: 'layers.*.self_attn' is there, below it are 'q_proj', "
    "'MatMul', 'Softmax', 'weights' (did you mean 'Softmax'?)",
    "layers.8-9.mlp": "Cell or operator: 'layers' is there, below it are '0-7'",
    "layers": "Cell or operator: 'layers' holds Cells but is itself never called: write 'layers.*'; below it are '0-7'",
    "layer.0": "Cell or operator: nothing is called 'layer' (did you mean 'layers' or 'input_layernorm'?)",
    "*.layer.0": "Cell or operator: nothing is called 'layer' (did you mean 'layers' or 'input_layernorm'?)",
    "xyz": "Cell or operator: nothing is called 'xyz', but there are '0-7', 'model', 'layers', 'input_layernorm', "
    "'self_attn', …",
    ".layers.0": "Cell or operator: at the root are 'model', 'Cast'; without the dot at its beginning it may begin "
    "anywhere",
    ".mode": "Cell or operator: at the root are 'model', 'Cast' (did you mean 'model'?); without the dot at its "
    "beginning it may begin anywhere",
    "0.self_attn.softmax.y": "Cell or operator: '0.self_attn.softmax' is an operator, nothing is below it",
    "0.mlp.**.q_projection": "Cell or operator: '0.mlp.**' is there, below it are 'gate_proj', 'MatMul', 'all_gather' "
    "(did you mean 'gate_proj'?)",
    "self_attn.matmul[2]": "operator: a call of a Cell has 2 of 'matmul' at most, the last one is [1]",
    "softmax[1-3]": "operator: a call of a Cell has 1 of 'softmax' at most, the last one is [0]",
    "layers.*.mlp[0]": "operator: 'mlp' is a Cell, and an index counts operators; a Cell in a list is name.0",
    "layers.*.mlpp[0]": "Cell or operator: 'layers.*' is there, below it are 'input_layernorm', 'self_attn', 'mlp' "
    "(did you mean 'mlp'?)",
}


@pytest.mark.parametrize("pattern", NOTHING)
def test_what_matches_nothing(pattern):
    assert refused(pattern) == f" matches no {NOTHING[pattern]}"


def test_no_more_than_three_near_names():
    names = [name_of((number,), "", f"Add{number}") for number in range(5)]
    with pytest.raises(ValueError, match=re.escape("(did you mean 'Add0', 'Add1' or 'Add2'?)")):
        select(["Add"], names, [((), "")])


def test_a_program_without_operators():
    with pytest.raises(ValueError, match="nothing is called 'a', but there are no names"):
        select(["a"], [], [((), "")])


def test_the_pattern_of_a_config_is_read_before_there_is_a_model():
    pattern = parse_pattern("layers.0-7.mlp", "recompute.select[4]")
    assert isinstance(pattern, Pattern)
    with pytest.raises(ValueError, match=re.escape("recompute.select[4]: 'layers.0-7.mlp' matches no Cell")):
        select([pattern], [], [((), "")])
