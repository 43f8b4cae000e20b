"""Patterns that are only partly there, regular expressions, and classes in the place of names: what would be right."""

import re

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from test_recompute_patterns import CELLS, NAMES, name_of, removed

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute, swap
from mindformers_core.recompute.explained import keepers_by_key
from mindformers_core.recompute.operator_names import operator_texts
from mindformers_core.recompute.patterns import select
from mindformers_core.tensor_parallel import prepare, shard

CLASSES = {
    path: {
        "": "Model",
        "input_layernorm": "RMSNorm",
        "self_attn": "Attention",
        "q_proj": "Linear",
        "mlp": "LlamaMLP",
        "gate_proj": "Linear",
        "model": "Base",
    }.get(path.rpartition(".")[2], "DecoderLayer")
    for _, path in CELLS
    if path
}


def refused(pattern, names=NAMES, cells=CELLS):
    with pytest.raises(ValueError) as error:
        select([pattern], names, cells, "recompute.select", classes=CLASSES)
    return removed(str(error.value), f"recompute.select: {pattern!r}")


PARTLY = {
    "layers.0-9.mlp": "below 'layers' are '0-7', not '8-9': write 'layers.0-7.mlp'",
    "layers.1,9.mlp": "below 'layers' are '0-7', not '9': write 'layers.1.mlp'",
    "model.layers.6-12,20.mlp.all_gather": "below 'model.layers' are '0-7', not '8-12', '20': write "
    "'model.layers.6-7.mlp.all_gather'",
    ".model.**.7-8.mlp": "below 'model.**' are '0-7', not '8': write '.model.**.7.mlp'",
    "*.5-8.self_attn.softmax": "there are '0-7', not '8': write '*.5-7.self_attn.softmax'",
    "0-8": "there are '0-7', not '8': write '0-7'",
    "2.self_attn.MatMul[1-2]": "a call of a Cell has 2 of 'MatMul' at most, not '2': write '2.self_attn.MatMul[1]'",
    "*.MatMul[0,1,4-5]": "a call of a Cell has 2 of 'MatMul' at most, not '4-5': write '*.MatMul[0-1]'",
    "7-8.self_attn.MatMul[1-2]": "there are '0-7', not '8': write '7.self_attn.MatMul[1-2]'",
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
    assert refused("0-8.mlp", [], cells).endswith("there are '0-3', not '4-8': write '0-3.mlp'")
    assert refused("encoder.*.0-3", [], cells).endswith("are '0-1', not '2-3': write 'encoder.*.0-1'")
    assert len(select(["0-8"], [], cells).cells) == 15


def test_an_index_is_there_if_any_call_has_it():
    names = [name_of((0, number), "a", "Mul", number=number, count=3) for number in range(3)]
    names += [name_of((1, 0), "b", "Mul")]
    cells = [((), ""), ((0,), "a"), ((1,), "b")]
    assert len(select(["*.mul[0-2]"], names, cells).operators) == 4
    assert refused("b.mul[0-2]", names, cells).endswith("has 1 of 'mul' at most, not '1-2': write 'b.mul[0]'")


HINT = "; patterns are no regular expressions: docs/recompute.md"


@pytest.mark.parametrize(
    "pattern", [r"layers\.\d+", "self_atn|mlp", ".*x", "mlp.+", "^mlp", "mlp$", "(mlp)", "layers.{0}"]
)
def test_regular_expressions_that_match_nothing(pattern):
    assert re.fullmatch(
        f" matches no Cell or operator: [^;]+{HINT}", refused(pattern).replace("; without", ", without")
    )


@pytest.mark.parametrize("pattern", ["layers.*.mpl", "*.x", "layers.*_x", ".x.*", "x.mlp.*", "a.MatMul[0-1]", "a+b"])
def test_patterns_are_not_taken_for_regular_expressions(pattern):
    assert "regular" not in refused(pattern)


DEEPER = {
    "layers.*.softmax": ("'layers.*'", "softmax", "layers.*.**.softmax"),
    "layers.*.MatMul[1]": ("'layers.*'", "MatMul", "layers.*.**.MatMul[1]"),
    "model.gate_proj": ("'model'", "gate_proj", "model.**.gate_proj"),
}


@pytest.mark.parametrize("pattern", DEEPER)
def test_what_is_further_down(pattern):
    led, name, better = DEEPER[pattern]
    said = f" matches no Cell or operator: {led} is there, and '{name}' is further down: write '{better}'"
    assert refused(pattern) == said
    assert any(select([better], NAMES, CELLS).by_pattern[better])
    assert "further" not in refused(pattern.replace(name, "nothing")) + refused(f".mlp.{name}")


IN_CLASSES = {
    "LlamaMLP": ["*.mlp"],
    "llama_mlp": ["*.mlp"],
    "LlamaMLP[0]": ["*.mlp"],
    "*.LlamaMLP": ["*.mlp"],
    "layers.*.LlamaMLP": ["layers.*.mlp"],
    "LlamaMLP.all_gather": ["mlp.all_gather"],
    ".Base.layers": [".model.layers"],
    "layers.1.**.Linear": ["layers.1.**.q_proj", "layers.1.**.gate_proj"],
    "Linear": ["*.q_proj", "*.gate_proj"],
    "DecoderLayer": ["layers.*"],
    "model.layers.DecoderLayer.mlp": ["model.layers.*.mlp"],
}


@pytest.mark.parametrize("pattern", IN_CLASSES)
def test_classes_in_the_place_of_names(pattern):
    name = next(part for part in re.split(r"[.\[]", pattern) if part.replace("_", "").lower() in KNOWN)
    written = ", ".join(f"'{text}'" for text in IN_CLASSES[pattern])
    about = f"'{name}' is a class, but Cells are called by their names: write {written}"
    assert refused(pattern) == f" matches no Cell or operator: {about}"


KNOWN = {name.lower() for name in CLASSES.values()}


class Product(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = nn.Dense(4, 4, has_bias=False)

    def construct(self, x):
        return ops.tanh(self.weight(x))


class Layers(nn.Cell):
    """Four layers, in each a linear one, and what is called MatMul beside it only in the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Product() for _ in range(4)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return ops.mean(ops.matmul(x, ops.transpose(x, (1, 0))))


class Around(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = Layers()

    def construct(self, x):
        return self.inner(x) * 2


def sharded():
    return shard(Layers(), init_device_mesh((1,), ("tp",))).set_train()


X = Tensor(np.ones((2, 4), np.float32))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select": "layers.2-4"}, "recompute.select: 'layers.2-4' is only partly there: below 'layers' are '0-3'"),
        ({"select": ["layers.*", "layers.4,1"]}, "recompute.select[1]: 'layers.4,1' is only partly there: below"),
        ({"full": True, "exclude": "layers.0-9"}, "recompute.exclude: 'layers.0-9' is only partly there: below"),
        ({"select": "Product"}, "'Product' is a class, but Cells are called by their names: write 'layers.*'"),
        (
            {"select": "Product.tanhh"},
            "'Product' is a class, but Cells are called by their names: write 'layers.*.tanhh'",
        ),
        ({"select": r"layers\.\d+"}, "; patterns are no regular expressions: docs/recompute.md"),
    ],
)
def test_recompute_names_them(settings, message, compiled):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(recompute(sharded(), **settings), X, compiled=compiled)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"op_swap": {"layers.2-4": True}}, "swap.op_swap['layers.2-4']: 'layers.2-4' is only partly there: below"),
        ({"op_swap": {"*.tanhh": True}}, "swap.op_swap['*.tanhh']: '*.tanhh' matches no Cell or operator"),
        ({"op_swap": [{"op_name": "Product"}]}, "swap.op_swap['Product']: 'Product' matches no Cell or operator: 'Pr"),
        (
            {"op_swap": {"layers.0-1.tanh": {"layers": "2-3"}}},
            "swap.op_swap['layers.0-1.tanh'].layers: nothing that 'layers.0-1.tanh' selects is in layers 2-3: it is in "
            "layers 0-1",
        ),
        (
            {"op_swap": {".matmul": {"layers": "1,3"}}},
            "swap.op_swap['.matmul'].layers: nothing that '.matmul' selects is in layers 1, 3: it is in no layer",
        ),
        (
            {"op_swap": {".matmul": {"layers": [7]}}},
            "swap.op_swap['.matmul'].layers: there is no layer 7: the layers are 0 to 3",
        ),
    ],
)
def test_swap_names_them(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(swap(sharded(), **settings), X)


@pytest.mark.usefixtures("one_rank")
def test_what_is_narrowed_to_some():
    """Of a Cell around layers what is in them; of several layers those that are named."""
    for pattern in ("**", "layers.1-3.tanh", "layers.2"):
        prepare(swap(sharded(), op_swap={pattern: {"layers": "0-2"}}), X)
    around = shard(Around(), init_device_mesh((1,), ("tp",))).set_train()
    frame = prepare(swap(around, op_swap={"inner": {"layers": "2-3"}}), X).frame
    swapped = {operator_texts(frame)[key] for key in keepers_by_key(frame)}
    assert swapped == {f"inner.layers.{number}.{name}" for number in (2, 3) for name in ("Tanh", "weight.MatMul")}
