"""Patterns that select Cells and operators: examples, and what is said of those that match nothing, or in part."""

import re

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from support.pattern_programs import CELLS, LAYERS, NAMES, name_of, select
from support.small_cells import cell_of

from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.recompute import recompute, swap
from mindformers_core.recompute.explained import keepers_by_key
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import prepare, shard


def chosen(*patterns):
    found = select(patterns, NAMES, CELLS, "recompute.select")
    return found.cells, found.operators


def refused(pattern, names=NAMES, cells=CELLS):
    """What the error says of a pattern, behind it."""
    with pytest.raises(ValueError) as error:
        select([pattern], names, cells, "recompute.select")
    start, _, said = str(error.value).partition(repr(pattern))
    assert start == "recompute.select: "
    return said


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


PARTLY = {
    "layers.0-9.mlp": "below 'layers' are '0-7', not '8-9'",
    "model.layers.6-12,20.mlp.all_gather": "below 'model.layers' are '0-7', not '8-12', '20'",
    ".model.**.7-8.mlp": "below 'model.**' are '0-7', not '8'",
    "*.5-8.self_attn.softmax": "there are '0-7', not '8'",
    "2.self_attn.MatMul[1-2]": "a call of a Cell has 2 of 'MatMul' at most, not '2'",
    "*.MatMul[0,1,4-5]": "a call of a Cell has 2 of 'MatMul' at most, not '4-5'",
    "7-8.self_attn.MatMul[1-2]": "there are '0-7', not '8'",
}


@pytest.mark.parametrize("pattern", PARTLY)
def test_what_is_only_partly_there(pattern):
    assert refused(pattern) == f" is only partly there: {PARTLY[pattern]}"
    assert any(select([pattern], NAMES, CELLS, required=False).by_pattern[pattern])


def test_a_number_is_there_if_any_list_on_the_way_has_it():
    """Two lists of Cells; one of other Cells doesn't count."""
    lists = {"encoder.layers": 2, "decoder.layers": 4, "experts": 9}
    paths = [f"{path}.{number}" for path, count in lists.items() for number in range(count)]
    paths += [f"{path}.mlp" for path in paths if "layers" in path]
    cells = [((), ""), *(((place,), path) for place, path in enumerate(paths))]
    assert len(select(["layers.0-3.mlp", "*.0-3.mlp"], [], cells).cells) == 6
    assert refused("0-8.mlp", [], cells).endswith("there are '0-3', not '4-8'")
    assert refused("encoder.*.0-3", [], cells).endswith("are '0-1', not '2-3'")
    assert len(select(["0-8"], [], cells).cells) == 15


def test_an_index_is_there_if_any_call_has_it():
    names = [name_of((0, number), "a", "Mul", number=number, count=3) for number in range(3)]
    names += [name_of((1, 0), "b", "Mul")]
    cells = [((), ""), ((0,), "a"), ((1,), "b")]
    assert len(select(["*.mul[0-2]"], names, cells).operators) == 4
    assert refused("b.mul[0-2]", names, cells).endswith("has 1 of 'mul' at most, not '1-2'")


@pytest.mark.parametrize("pattern", [r"layers\.\d+", "self_atn|mlp", ".*x", "mlp.+", "^mlp", "mlp$", "layers.{0}"])
def test_regular_expressions_that_match_nothing(pattern):
    assert refused(pattern).endswith("; patterns are no regular expressions: docs/recompute.md")


@pytest.mark.parametrize("pattern", ["layers.*.mpl", "*.x", "layers.*_x", ".x.*", "x.mlp.*", "a.MatMul[0-1]", "a+b"])
def test_patterns_are_not_taken_for_regular_expressions(pattern):
    assert "regular" not in refused(pattern)


def layers():
    """Four layers, in each a linear one, and what is called MatMul beside it only in the last."""

    def product(self, x):
        return ops.tanh(self.weight(x))

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return ops.mean(ops.matmul(x, ops.transpose(x, (1, 0))))

    products = [cell_of(product, weight=nn.Dense(4, 4, has_bias=False)) for _ in range(4)]
    return cell_of(construct, layers=nn.CellList(products))


def sharded():
    return shard(layers(), init_device_mesh((1,), ("tp",))).set_train()


X = Tensor(np.ones((2, 4), np.float32))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select": "layers.2-4"}, "recompute.select: 'layers.2-4' is only partly there: below 'layers' are '0-3'"),
        ({"select": ["layers.*", "layers.4,1"]}, "recompute.select[1]: 'layers.4,1' is only partly there: below"),
        ({"full": True, "exclude": "layers.0-9"}, "recompute.exclude: 'layers.0-9' is only partly there: below"),
        ({"select": "layers.0.tanhh"}, "below 'layers.0' are 'weight', 'Tanh' (did you mean 'Tanh'?)"),
        ({"op_swap": {"layers.2-4": True}}, "swap.op_swap['layers.2-4']: 'layers.2-4' is only partly there: below"),
        ({"op_swap": {"*.tanhh": True}}, "swap.op_swap['*.tanhh']: '*.tanhh' matches no Cell or operator"),
        ({"op_swap": {"layers.0-1.tanh": {"layers": "2-3"}}},
            "swap.op_swap['layers.0-1.tanh'].layers: nothing that 'layers.0-1.tanh' selects is in layers [2, 3]"),
        ({"op_swap": {".matmul": {"layers": "1,3"}}},
            "swap.op_swap['.matmul'].layers: nothing that '.matmul' selects is in layers [1, 3]"),
        ({"op_swap": {".matmul": {"layers": [7]}}},
            "swap.op_swap['.matmul'].layers: there is no layer 7: the layers are 0 to 3"),
    ],
)  # fmt: skip
def test_recompute_and_swap_name_them(settings, message):
    swaps = "op_swap" in settings
    for compiled in (False,) if swaps else (False, True):
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare((swap if swaps else recompute)(sharded(), **settings), X, compiled=compiled)


@pytest.mark.usefixtures("one_rank")
def test_what_is_narrowed_to_some():
    """Of a Cell around layers what is in them; of several layers those that are named."""
    for pattern in ("**", "layers.1-3.tanh", "layers.2"):
        prepare(swap(sharded(), op_swap={pattern: {"layers": "0-2"}}), X)
    around = cell_of(lambda self, x: self.inner(x) * 2, inner=layers())
    around = shard(around, init_device_mesh((1,), ("tp",))).set_train()
    plan = prepare(swap(around, op_swap={"inner": {"layers": "2-3"}}), X).plan
    swapped = {operator_texts(plan)[key] for key in keepers_by_key(plan)}
    assert swapped == {f"inner.layers.{number}.{name}" for number in (2, 3) for name in ("Tanh", "weight.MatMul")}


class Block(nn.Cell):
    """A user's own Cell, without Cells in it."""

    def construct(self, x):
        return x.exp().tanh()


def mlp():
    return nn.SequentialCell(nn.Dense(8, 8), nn.Tanh(), mint.nn.Linear(8, 8))


def layers_of(asked=True, **cells):
    return tree_of(with_cells(**cells, settings={"full": asked})).activations.recomputed_cells


def with_cells(settings=None, swapped=None, **cells):
    net = shard(cell_of(lambda self, x: x, **cells), init_device_mesh((1,), ("tp",)))
    return swap(recompute(net, **(settings or {})), **(swapped or {}))


@pytest.mark.usefixtures("one_rank")
def test_layers_are_in_lists_and_sequences_of_more_than_single_cells():
    two = nn.CellList([mlp(), mlp()])
    assert layers_of(stem=mlp(), layers=two, head=mlp()) == ["layers.0", "layers.1"]
    assert layers_of(layers=nn.CellList([nn.Dense(8, 8)])) == ["layers.0"]
    assert layers_of(layers=nn.SequentialCell(Block(), Block()), head=mlp()) == ["layers.0", "layers.1"]
    assert layers_of([1], blocks=nn.SequentialCell(mlp(), mlp(), nn.GELU())) == ["blocks.1"]
    assert layers_of(named=nn.CellDict([("first", Block()), ("second", Block())])) == ["named.first", "named.second"]
    assert layers_of([0], one=nn.CellList([mlp()]), other=nn.CellList([mlp(), mlp()])) == ["one.0", "other.0"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"settings": {"full": [1, 4]}}, "recompute.full"),
        ({"swapped": {"layer_swap": [{"layers": [4]}]}}, "swap.layer_swap[0].layers"),
        ({"swapped": {"op_swap": {"*.dense": {"layers": [4]}}}}, "swap.op_swap['*.dense'].layers"),
    ],
)
def test_a_number_of_no_layer(given, where):
    head = nn.SequentialCell(nn.Dense(8, 8), nn.GELU(), nn.Dense(8, 8), nn.GELU(), nn.Dense(8, 1))
    with pytest.raises(ValueError, match=f"^{re.escape(where)}: there is no layer 4: .* 0 to 1, 'layers.0-1'$"):
        with_cells(layers=nn.CellList([mlp(), mlp()]), head=head, **given)
    lists = {f"list{number}": nn.CellList([mlp() for _ in range(number % 2 + 1)]) for number in range(6)}
    expected = "the layers are 0 to 1, 'list0.0', 'list1.0-1', 'list2.0', 'list3.0-1', 'list4.0', …"
    with pytest.raises(ValueError, match=f"there is no layer 4: {expected}$"):
        with_cells(**lists, **given)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "given", [{"settings": {"full": True}}, {"swapped": {"layer_swap": [{"layers": True}]}}], ids=["full", "layer_swap"]
)
def test_a_model_without_layers(given):
    what = r"in a SequentialCell with more in it than single Cells of MindSpore, such as Dense and GELU"
    with pytest.raises(ValueError, match=f": the model has no layers, .*{what}; its Cells are 'stem', 'head', which s"):
        with_cells(stem=nn.Dense(8, 8), head=mlp(), **given)
