"""Weights that are stored with zeros behind a dim that its axes don't divide: `layout(…, pad=True)`."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.checkpoint_states import without_threads
from support.nightly import daily
from support.small_cells import cell_of

from mindformers_core import explain, full_parameters, shard, verify
from mindformers_core.checkpoint.checkpointer import Checkpointer
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.adapters import add_adapters
from mindformers_core.tensor_parallel import layers
from mindformers_core.zero import hsdp

pytestmark = pytest.mark.long

TP, ROWS, WIDTH = DeviceMesh((4,), ("tp",)), 7, 6
IDS = np.array([[0, 6, 4, 3], [5, 2, 6, 0]], np.int32)
LABELS = np.array([[6, 1, 5, -100], [0, 3, 6, 2]], np.int32)


class Decoder(nn.Cell):
    """Embedding, output layer and loss of a language model."""

    def __init__(self, tied):
        super().__init__()
        self.embed = layers.VocabParallelEmbedding(ROWS, WIDTH)
        self.head = None if tied else layers.VocabParallelLinear(WIDTH, ROWS, has_bias=True, bias_init=0.3)
        self.loss = layers.VocabParallelCrossEntropy()

    def construct(self, ids, labels=None):
        hidden = ops.tanh(self.embed(ids) * 40)
        logits = layers.vocabulary_logits(hidden, self.embed.weight) if self.head is None else self.head(hidden)
        return layers.without_columns(logits, ROWS) if labels is None else self.loss(logits, labels)


GIVEN = {"loss": (IDS, LABELS), "logits": (IDS,)}
HEADS = [(3, False, "loss"), (4, True, "logits"), (3, False, "logits"), (4, True, "loss")]


@pytest.mark.parametrize(("size", "tied", "given"), daily(HEADS[:2], HEADS))
def test_vocabulary_that_its_axis_does_not_divide(size, tied, given):
    """Ids of the last row, and labels that don't count; logits without the padding's columns."""
    check = verify(Decoder(tied), DeviceMesh((size,), ("tp",)), *map(Tensor, GIVEN[given]))
    assert not check.faults, check.report()


def test_padded_parts_under_hsdp():
    mesh = DeviceMesh((2, 3), ("dp", "tp"))

    def build():
        net = shard(Decoder(False), mesh, plan={"": {"input": (layout("dp"), layout("dp"))}})
        return hsdp(net, 2, optimizer_level="level3", threshold=0)

    check = verify(build, mesh, Tensor(IDS), Tensor(LABELS))
    assert not check.faults, check.report()


def test_an_adapter_of_a_padded_layer():
    """Its parts are those of the layer's weight, also in the copies that `verify` makes."""
    net = Decoder(False)
    add_adapters(net, 2, ["head"])
    net.head.lora_B.set_data(ops.arange(14, dtype=ms.float32).reshape(7, 2) / 10)
    check = verify(net, TP, Tensor(IDS), Tensor(LABELS))
    assert not check.faults, check.report()
    (graph, _) = check.plans[0, TP]
    assert graph.uses.parameters["head.lora_B"].part_sizes == ((2, 2, 2, 1), None)


PADDED = {
    "embed": {"weight": {"embedding_table": layout("tp", pad=True)}},
    "head": {"weight": {"weight": layout("tp", pad=True), "bias": layout("tp", pad=True)}},
}


@pytest.mark.parametrize("plan", [{}, {"**": {"eager": True}}], ids=["generated", "eager"])
def test_code_that_knows_nothing_of_padding(plan):
    """It has the weights without zeros, and computes on the whole."""

    def construct(self, ids, labels):
        return ops.cross_entropy(self.head(self.embed(ids)) * self.head.weight.shape[0], labels)

    net = cell_of(construct, embed=nn.Embedding(ROWS, WIDTH), head=nn.Dense(WIDTH, ROWS))
    check = verify(net, TP, Tensor(IDS[0]), Tensor(LABELS[1]), plan=PADDED | plan)
    assert not check.faults, check.report()


@pytest.mark.parametrize("sizes", [(2, 2, 1, 0), (1, 2, 1, 1)])
def test_zeros_are_in_no_file(sizes, tmp_path, monkeypatch):
    """Of 5 rows as 8 the last rank may have none; built with values or without, on other meshes."""
    without_threads(monkeypatch)

    def net_of(size, meta, seed=0):
        with ms.DeviceCtx("meta" if meta else "CPU"):
            net = layers.VocabParallelEmbedding(5, 2)
        pad = sizes if size == 4 and all(sizes) else True
        return shard(net, DeviceMesh((size,), ("tp",)), seed=seed, plan={"": {"weight": layout("tp", pad=pad)}})

    def save(rank):
        net = net_of(4, True)
        assert net.weight.global_shape == (5, 2) and net.weight.part_sizes == (sizes, None)
        held, whole, first = net.weight.asnumpy(), full_parameters(net)["weight"].asnumpy(), sum(sizes[:rank])
        assert (held[: sizes[rank]] == whole[first : first + sizes[rank]]).all()
        assert held.shape == (2, 2) and not held[sizes[rank] :].any()
        Checkpointer(tmp_path, net).save(1)
        found = net(Tensor([[-1, -5, 2]], ms.int32)).to_local().asnumpy()  # negative ids count from the last row of 5
        assert (found == whole[[[-1, -5, 2]]]).all()
        return whole

    expected = SimulatedRanks(4).run(save)[0]
    assert expected.shape == (5, 2) and expected.all()

    def load(rank, size):
        net = net_of(size, False, seed=rank)
        Checkpointer(tmp_path, net).load()
        return full_parameters(net)["weight"].asnumpy(), net.weight.asnumpy()

    for size in (1, 3, 4):
        for whole, part in SimulatedRanks(size).run(lambda rank, size=size: load(rank, size)):
            assert (whole == expected).all() and part.shape == (-(-5 // size), 2)


SIZES = 10, 20, 30, 4


class Columns(nn.Cell):
    """Looks up each column of ids, two for each part, in its part of a table."""

    def __init__(self):
        super().__init__()
        self.table = ms.Parameter(Tensor(np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)))
        self.gather = ops.Gather().shard(((4, 1), (1, 4))).add_prim_attr("manual_split", SIZES)
        self.head = nn.Dense(24, 2)

    def construct(self, ids):
        return self.head(ops.reshape(self.gather(self.table, ids, 0), (ids.shape[0], -1)))


def columns_of(sizes, rows):
    """Ids of two columns for each part, the first and the last row of each among them."""
    draw, starts = np.random.default_rng(1), np.cumsum((0, *sizes))
    pairs = [(first, last) for first, last in zip(starts, starts[1:]) for _ in range(2)]
    drawn = np.stack([draw.integers(first, last, rows - 2) for first, last in pairs], 1)
    return np.vstack([[first for first, _ in pairs], [last - 1 for _, last in pairs], drawn]).astype(np.int32)


@pytest.mark.parametrize("plan", [{}, {"**": {"eager": True}}], ids=["generated", "eager"])
def test_manual_split_equals_one_table(plan):
    """MindSpore's attribute; the batch is cut, too, and nothing is sent for the lookup."""
    mesh, ids = DeviceMesh((2, 4), ("dp", "tp")), Tensor(columns_of(SIZES, 6))
    table = {"": {"weight": {"table": layout("tp", pad=SIZES)}, "input": layout("dp")}}
    check = verify(Columns(), mesh, ids, plan=table | plan)
    assert not check.faults, check.report()
    if plan:
        return

    def work(rank):
        lines = explain(shard(Columns(), mesh, plan=table), ids[:3]).splitlines()
        sent = [line for line in lines if "→" in line and "over tp" in line]
        assert len(sent) == 1 and "all_gather dim 1 over tp" in sent[0] and "for Reshape" in sent[0], (
            "behind the lookup"
        )
        net = shard(Columns(), mesh, plan=table | {"head": {"input": layout("dp", "tp")}})
        assert net.table.shape == (30, 3) and net.table.asnumpy()[SIZES[rank % 4] :].any() == False  # noqa: E712
        assert (full_parameters(net)["table"].asnumpy() == Columns().table.asnumpy()).all()
        return explain(net, ids[:3])

    lookup, _, head = SimulatedRanks(8).run(work)[0].partition("head  Dense")
    assert [line for line in lookup.splitlines() if "→" in line and "over tp" in line] == [] and "→" in head


@pytest.mark.usefixtures("rank_0_of_4")
def test_manual_split_errors():
    ids = Tensor(columns_of(SIZES, 3))
    for pad, given, message in (
        ((10, 20, 34), ids, r"'table' .* pad=\(10, 20, 34\) should have the sizes of the parts of the one dim"),
        (
            False,
            ids,
            r"manual_split=\(10, .* is stored as \[tp, -\], .* declare .* layout\(axis, pad=\(10, 20, 30, 4\)",
        ),
        (SIZES, ids[:, :6], r"have 6 columns, which can't be divided evenly among the 4 parts"),
    ):
        with pytest.raises(ValueError, match=message):
            explain(shard(Columns(), TP, plan={"": {"weight": {"table": layout("tp", pad=pad)}}}), given)


@pytest.mark.usefixtures("rank_0_of_4")
def test_what_is_said():
    net = shard(layers.VocabParallelEmbedding(ROWS, WIDTH), TP)
    assert "weight is padded with zeros, dim 0: 7 stored as 8, parts of 2 + 2 + 2 + 1" in explain(net, Tensor(IDS))
    with pytest.raises(
        ValueError, match=r"parameter 'weight' of .* \(Dense\) of shape \(7, 6\): dim 0 has size 7, .*tp"
    ) as raised:
        shard(nn.Dense(WIDTH, ROWS), TP, plan={"": {"weight": layout("tp")}})
    assert "a size that 4 divides, 4 or 8, or other axes, or store zeros" in str(raised.value)
    assert "layout(…, pad=True)" in str(raised.value)

    with pytest.raises(TypeError, match="pad=4 should be True, or the sizes of the parts"):
        layout("tp", pad=4)

    def construct(self):
        self.count += 1
        return self.count

    counting = cell_of(construct, count=ms.Parameter(ops.zeros(5), name="count", requires_grad=False))
    with pytest.raises(ValueError, match="parameter 'count' is stored with padding, and a Cell can't write it"):
        shard(counting, TP, plan={"": {"weight": layout("tp", pad=True)}})()
