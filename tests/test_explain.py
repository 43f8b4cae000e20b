"""What is said of a plan: counts and bytes are those found by hand, the text is complete, the page stands alone."""

import re
from functools import cache
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from mindspore import Parameter, Tensor, nn, ops
from models import EXAMPLES, axes_of
from support.captured_models import Function, small_llama
from support.planned_models import captured, planned, silent_algorithm
from support.small_cells import cell_of

from mindformers_core.analysis.traffic import bytes_by_axes, collectives_of
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.explaining.page import page
from mindformers_core.explaining.report import make_report
from mindformers_core.explaining.text import explain_plan
from mindformers_core.hints import bytes_shown
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import Redistribution
from mindformers_core.propagation.propagate import propagate
from mindformers_core.redistribution import DeviceModel, Link
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear

TP = init_device_mesh((2,), ("tp",))
MESH = init_device_mesh((2, 2), ("dp", "tp"))
WHOLE = 4 * 6 * 8 * 4  # bytes of a float32 tensor of shape (4, 6, 8)


def construct(self, x):
    """A norm, a column-parallel and a row-parallel layer, (4, 6, 8) → the same."""
    return self.down(ops.relu(self.up(self.norm(x))))


def block():
    parts = {"norm": RMSNorm(8), "up": ColumnParallelLinear(8, 16), "down": RowParallelLinear(16, 8)}
    return cell_of(construct, **parts)


def feed_forward(sequence_parallel):
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    arriving = {"x": layout(None, "tp") if sequence_parallel else layout()}
    _, plan = planned(block().set_train(), TP, (tensor_meta((4, 6, 8), "float32"),), config=config, arriving=arriving)
    return plan


def test_totals_of_a_feed_forward_block():
    """The sum of the row-parallel layer's terms forward, that of the input's gradients backward, 2 (n - 1) / n each."""
    report = make_report(feed_forward(sequence_parallel=False))
    assert bytes_by_axes(report.traffic) == {("tp",): (WHOLE, WHOLE)}
    assert collectives_of(report.traffic) == {"all_reduce": (1, 1)}


def test_totals_with_sequence_parallel():
    """The input is gathered and the result scattered, (n - 1) / n each; the norm's weight sees half of the sequence."""
    report = make_report(feed_forward(sequence_parallel=True))
    weight = 8 * 4
    assert bytes_by_axes(report.traffic) == {("tp",): (WHOLE, WHOLE + weight)}
    assert collectives_of(report.traffic) == {"all_gather": (1, 1), "all_reduce": (0, 1), "reduce_scatter": (1, 1)}


def test_activations_of_a_feed_forward_block():
    """At the end what gradients keep of the norm and of the ReLU, and the results of `down` and of the sum. With
    sequence parallel the last is a half, and the gathered result is kept in the norm's place."""
    whole, halved = (make_report(feed_forward(sequence_parallel)) for sequence_parallel in (False, True))
    assert whole.training_bytes == 4 * WHOLE
    assert halved.training_bytes == 3 * WHOLE + WHOLE // 2
    assert whole.evaluation_bytes == halved.evaluation_bytes == 2 * WHOLE  # what a linear layer takes, and gives


def evaluation_bytes(function):
    _, plan = planned(Function(function), TP, (tensor_meta((16,), "float32"),), arriving={"inputs": layout("tp")})
    return make_report(plan).evaluation_bytes // 32  # in numbers of local tensors


def residual(x):
    y = ops.exp(x)
    return ops.sin(ops.cos(y)) + y


MEMORY = {
    "chain": (lambda x: ops.exp(ops.exp(ops.exp(x))), 2),
    "residual": (residual, 3),
    "results are held": (lambda x: (ops.exp(x), ops.sin(x), ops.cos(x)), 3),
    "unused": (lambda x: (ops.exp(x), ops.sin(x))[1], 1),
    "view": (lambda x: ops.exp(ops.reshape(ops.exp(x), (4, 4))), 2),
    "a view holds its source": (lambda x: (ops.reshape(ops.exp(x), (4, 4)), ops.sin(ops.cos(x)))[0], 3),
    "arguments are the caller's": (lambda x: ops.reshape(x, (4, 4)), 0),
}


@pytest.mark.parametrize("name", MEMORY)
def test_the_peak_in_evaluation(name):
    function, tensors = MEMORY[name]
    assert evaluation_bytes(function) == tensors


def planned_with_weight(construct, shape, arriving):
    """The plan of `construct` of the Cell, whose weight is 2, and of an input of this shape."""
    cell = cell_of(construct, weight=Parameter(Tensor([2.0])))
    return planned(cell, TP, (tensor_meta(shape, "float32"),), arriving={"x": arriving})[1]


def test_what_no_gradient_keeps_is_freed_in_training():
    """The product keeps what is multiplied with the weight, and the others what they take; the first is freed."""

    def construct(self, x):
        return ops.sin(ops.cos(ops.mul(ops.exp(ops.exp(x)), self.weight)))

    report = make_report(planned_with_weight(construct, (16,), layout("tp")))
    assert (report.training_bytes, report.evaluation_bytes) == (4 * 32, 2 * 32)


def cut_softmax():
    """The plan of a softmax of what was multiplied with a weight."""
    return planned_with_weight(lambda self, x: ops.softmax(ops.mul(x, self.weight), -1), (4, 8), layout(None, "tp"))


@pytest.mark.usefixtures("rank_0_of_4")
def test_what_a_distributed_algorithm_sends():
    """Of a softmax: a maximum without a gradient, a sum with one; both are as long as the reduced tensor."""
    traffic = make_report(cut_softmax(), algorithm_of).traffic
    weight, reduced = 4, 4 * 4
    assert collectives_of(traffic) == {"all_reduce": (2, 2)}
    assert bytes_by_axes(traffic) == {("tp",): (2 * reduced, reduced + weight)}
    assert "distributed algorithm 'softmax' over tp" in explain_plan(make_report(cut_softmax(), algorithm_of))


def test_an_algorithm_is_not_left_out():
    with pytest.raises(ValueError, match=r"Softmax \(.*test_explain.py:\d+\) runs the distributed algorithm 'softmax'"):
        make_report(cut_softmax())


def unsent(plan):
    """The report of a plan, without what distributed algorithms send."""
    return make_report(plan, silent_algorithm)


def example(name):
    example, axes = EXAMPLES[name], axes_of(MESH)
    args, named = example.inputs(1)
    return planned(example.make().set_train(), MESH, args, named, example.config(axes), example.plan(axes))[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_totals_are_the_sums_of_all_moves(name):
    plan = example(name)
    report = unsent(plan)
    moves = [move for _, found in plan.walk() for move in found.redistributions]
    forward = sum(step.forward[1] for move in moves for step in move.steps)
    backward = sum(step.backward[1] for move in moves if move.gradient for step in move.steps)
    assert [sum(both) for both in zip(*bytes_by_axes(report.traffic).values())] == [forward, backward]
    assert forward and backward
    lines = explain_plan(unsent(plan)).splitlines()
    assert max(map(len, lines)) <= 120


@cache
def llama(layers=4):
    model, make = small_llama(num_hidden_layers=layers)
    args, named = make(1)
    config = SimpleNamespace(sequence_parallel=True)
    arriving = {"input_ids": layout("dp"), "labels": layout("dp")}
    return planned(model.set_train(), MESH, args, named, config, arriving=arriving)[1]


def test_the_text():
    text = explain_plan(unsent(llama()))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0] == "LlamaForCausalLM on the mesh (dp=2, tp=2), captured in training: 58 calls of Cells"
    assert sum(line.strip().startswith("layers.") for line in lines) == 2
    assert "    layers.1 … layers.3  DecoderLayer: as model.layers.0" in lines
    assert "        v_proj  ColumnParallelLinear: as model.layers.0.self_attn.k_proj" in text
    pattern = r"%2 = SiLU\(%1\)  feed_forward\.py:\d+ +float32 \[2, 8, 40\] -> \[1, 8, 20\] +\[dp, -, tp\]"
    assert len(re.findall(pattern, text)) == 1
    (gather,) = [
        place for place, line in enumerate(lines) if "(for input 'hidden_states' of Cell" in line and "mlp" in line
    ]
    assert "all_gather dim 1 over tp, 384 B; backward: reduce_scatter, 384 B" in lines[gather - 1] + lines[gather]
    assert re.search(
        r"^  all +[\d.]+ KiB +[\d.]+ KiB   all_gather 9 \+ 9, .*reduce_scatter 9 \+ 9$", text, re.MULTILINE
    )
    assert lines[-1].startswith("Activations that one rank holds at the peak: ")


def test_arrows_mark_what_communicates():
    plan = feed_forward(sequence_parallel=True)
    marked = [line.split()[1] for line in explain_plan(make_report(plan)).splitlines() if line.strip().startswith("→")]
    rows = [row.report for row in make_report(plan).root.rows if row.report is not None]
    moves = [row for report in rows for row in report.rows if isinstance(row.entry, Redistribution)]
    assert len(marked) == 3 and marked.count("weight") == 1
    assert len(moves) + sum(isinstance(row.entry, Redistribution) for row in make_report(plan).root.rows) == 3


def test_operators_of_one_line_come_together():
    """In the page they can be opened; where one line has few, each is shown."""

    def losses(self, x):
        few = ops.exp(ops.sin(ops.cos(ops.tan(x))))
        return ops.tan(ops.exp(ops.sin(ops.cos(ops.tan(few)))))

    report = unsent(planned(cell_of(losses), TP, (tensor_meta((3,), "float32"),))[1])
    shown = [line.split("  test_")[0].strip() for line in explain_plan(report).splitlines()[6:12]]
    *alone, names, last = shown
    assert [line.split()[2] for line in alone] == ["Tan(x)", "Cos(%1)", "Sin(%2)", "Exp(%3)"]
    assert names == "· 4 operators: Tan, Cos, Sin, Exp" and last == "%9 = Tan(%8)"
    found = "".join(Reader(page(report, "losses")).text)
    assert "4 operators: Tan, Cos, Sin, Exp" in found and "Exp(%7)" in found


def test_what_is_sent_of_parameters_is_in_the_table():
    """In a step of several micro-steps, with what the passes send as often."""
    report = make_report(feed_forward(False), None, None, 2, {(("tp", "hsdp"), "backward", "all_reduce"): (3, 7)})
    lines = explain_plan(report).splitlines()
    start = lines.index("One rank sends in a step of 2 micro-steps:")
    rows = [line.split() for line in lines[start + 2 : start + 5]]
    assert rows[0][:1] == ["tp"] and rows[0][-4:] == ["all_reduce", "2", "+", "2"]
    assert rows[1] == ["tp,", "hsdp", "0", "7", "B", "all_reduce", "0", "+", "3"]
    assert rows[2][-4:] == ["all_reduce", "2", "+", "5"]
    assert "a step of 2 micro-steps" in page(report, "sums") and "tp, hsdp" in page(report, "sums")


def test_nothing_to_say():
    _, plan = planned(Function(ops.exp), TP, (tensor_meta((3,), "float32"),))
    assert "Nothing is communicated." in explain_plan(make_report(plan))
    assert "Nothing is communicated." in page(make_report(plan), "alone")


def test_a_cell_whose_code_is_in_no_file():
    """As at Python's prompt."""
    made = {"nn": nn, "ops": ops}
    exec("class Typed(nn.Cell):\n    def construct(self, x):\n        return ops.exp(x)", made)
    _, plan = planned(made["Typed"](), TP, (tensor_meta((3,), "float32"),))
    assert re.search(r"Exp\(x\) +float32 \[3\]", explain_plan(make_report(plan)))
    assert "Exp" in page(make_report(plan), "typed")


def test_bytes_as_words():
    assert [bytes_shown(count) for count in (0, 7, 1023, 1024, 1536, 200 * 1024, 3 << 30, 5 << 50)] == [
        *("0", "7 B", "1023 B", "1.0 KiB", "1.5 KiB", "200 KiB", "3.0 GiB", "5120 TiB")
    ]


class Reader(HTMLParser):
    """Reads a page: elements that are open, all identifiers, links, attributes, and the text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all_of(self, attribute):
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def test_the_page_stands_alone():
    source = page(unsent(llama()), "Llama")
    found = Reader(source)
    assert not found.open
    assert not {tag for tag, _ in found.elements} & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"https?:|src=|url\(|@import|//", source)
    identifiers = found.all_of("id")
    assert len(set(identifiers)) == len(identifiers)
    links = found.all_of("href")
    assert links and {link.removeprefix("#") for link in links} <= set(identifiers)


def test_the_page_says_what_the_text_says():
    plan = llama()
    found = Reader(page(unsent(plan), "Llama"))
    text = "".join(found.text)
    report = unsent(plan)
    assert bytes_shown(report.training_bytes) in text and bytes_shown(report.evaluation_bytes) in text
    bands = [kind for kind in found.all_of("class") if kind.startswith("move sends")]
    arrows = [line for line in explain_plan(unsent(plan)).splitlines() if line.strip().startswith("→")]
    assert len(bands) == len(arrows)
    assert "layers.1 … layers.3  ×3" in text and "8→4dp a dim cut, global → local" in text
    assert any("[2, 8, 40] -> [1, 8, 20] [dp, -, tp]" in title for title in found.all_of("title"))


def test_the_page_grows_with_what_differs_only():
    sizes = [len(page(unsent(llama(layers)), "Llama")) for layers in (2, 8)]
    assert abs(sizes[1] - sizes[0]) < 100


def test_everything_is_escaped():
    odd = block()
    type(odd).__qualname__ = "Odd<b>&amp;"
    _, plan = planned(odd, TP, (tensor_meta((4, 6, 8), "float32"),))
    source = page(make_report(plan), "<script>&\"'")
    found = Reader(source)
    text = "".join(found.text)
    assert text.count("<script>&\"'") == 2 and text.count("Odd<b>&amp;") == 3
    assert not found.open and "script" not in {tag for tag, _ in found.elements}


def test_links_decide():
    """Over fast links a weight in parts is gathered; over slow ones the smaller batch goes where the parts are."""
    parts = {"norm": RMSNorm(4096), "fc": nn.Dense(4096, 64)}
    cell, mesh = cell_of(lambda self, x: self.fc(self.norm(x)), **parts).set_train(), init_device_mesh((4,), ("dp",))
    plan = {"fc": {"weight": {"weight": layout(None, "dp"), "bias": layout(None)}}}
    x = tensor_meta((64, 4096), "float32")
    call = captured(cell, mesh, (x,), plan=plan, arriving={"x": layout("dp")})
    fast = DeviceModel("fast", 1e12, 100e-6, Link(1e-6, 1e12))
    slow = DeviceModel("slow", 1e12, 0.0, Link(1e-6, 0.1e9))
    sent = {}
    for model in (fast, slow):
        report = make_report(propagate(*call, device_model=model), algorithm_of)
        sent[model.name], text = collectives_of(report.traffic), " ".join(explain_plan(report).split())
        prices = f"by the prices of the device model {model.name} ({model.link.bandwidth / 1e9:g} GB/s over all axes)"
        assert prices in text and "Declared cuts" not in text
    assert sent["fast"] == {"all_gather": (1, 0), "reduce_scatter": (0, 1), "all_reduce": (0, 2)}
    assert sent["slow"]["all_to_all"][0] == 1 and sent["slow"].get("all_gather", (0, 0))[0] == 0


def test_declarations_decide():
    """A weight that is declared cut stays so, also where a gather of it would send fewer bytes."""
    mesh, example = init_device_mesh((2, 2), ("dp", "tp")), EXAMPLES["classifier"]
    inputs, _ = example.inputs(0)
    given, arriving = example.plan(axes_of(mesh)), {"image": layout("dp"), "label": layout("dp")}
    _, plan = planned(example.make().set_train(), mesh, inputs, plan=given, arriving=arriving)
    text = " ".join(explain_plan(make_report(plan, algorithm_of)).split())
    assert "Declared cuts come before prices: of the batch over dp and of weights over tp." in text
    moves = [(move, inner) for _, inner in plan.walk() for move in inner.redistributions]
    weights = [move for move, inner in moves if move.value.id in {use.value.id for use in inner.graph.parameters}]
    assert [move.source.cut_axes for move in weights] == [move.target.cut_axes for move in weights] == [{"tp"}] * 5
