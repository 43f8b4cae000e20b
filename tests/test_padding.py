"""Weights that are stored with zeros behind a dim that its axes don't divide: `layout(…, pad=True)`."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.checkpoint_states import without_threads
from support.small_cells import cell_of

from mindformers_core import explain, full_parameters, shard, verify
from mindformers_core.checkpoint.checkpointer import Checkpointer
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.tensor_parallel import layers
from mindformers_core.zero import hsdp

TP, ROWS, WIDTH = DeviceMesh((4,), ("tp",)), 7, 6
IDS = np.array([[0, 6, 4, 3], [5, 2, 6, 0]], np.int32)
LABELS = np.array([[6, 1, 5, -100], [0, 3, 6, 2]], np.int32)


class Decoder(nn.Cell):
    """Embedding, output layer and loss of a language model."""

    def __init__(self, tied, dtype=ms.float32):
        super().__init__()
        self.embed = layers.VocabParallelEmbedding(ROWS, WIDTH, dtype=dtype)
        self.head = None if tied else layers.VocabParallelLinear(WIDTH, ROWS, dtype=dtype)
        self.loss = layers.VocabParallelCrossEntropy()

    def construct(self, ids, labels=None):
        hidden = ops.tanh(self.embed(ids) * 40)
        logits = layers.vocabulary_logits(hidden, self.embed.weight) if self.head is None else self.head(hidden)
        return layers.without_columns(logits, ROWS) if labels is None else self.loss(logits, labels)


@pytest.mark.parametrize(("size", "tied"), [(3, False), (4, True)], ids=["head", "tied"])
def test_vocabulary_that_its_axis_does_not_divide(size, tied):
    """Ids of the last row, and labels that don't count; logits without the padding's columns."""
    for given in ((IDS, LABELS), (IDS,)):
        check = verify(Decoder(tied), DeviceMesh((size,), ("tp",)), *map(Tensor, given))
        assert not check.faults, check.report()


def test_padded_parts_under_hsdp():
    mesh = DeviceMesh((2, 3), ("dp", "tp"))

    def build():
        net = shard(Decoder(False), mesh, plan={"": {"input": (layout("dp"), layout("dp"))}})
        return hsdp(net, 2, optimizer_level="level3", threshold=0)

    check = verify(build, mesh, Tensor(IDS), Tensor(LABELS))
    assert not check.faults, check.report()


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


def test_zeros_are_in_no_file(tmp_path, monkeypatch):
    """Of 5 rows as 8 the last rank has none; built with values or without, on other meshes."""
    without_threads(monkeypatch)

    def net_of(mesh, meta, seed=0):
        with ms.DeviceCtx("meta" if meta else "CPU"):
            net = layers.VocabParallelEmbedding(5, 2)
        return shard(net, mesh, seed=seed)

    def save(rank):
        net = net_of(TP, True)
        assert net.weight.global_shape == (5, 2) and net.weight.padded_shape == (8, 2) and net.weight.shape == (2, 2)
        held, whole = net.weight.asnumpy(), full_parameters(net)["weight"]
        assert (held == np.pad(whole.asnumpy(), ((0, 3), (0, 0)))[2 * rank : 2 * rank + 2]).all()
        Checkpointer(tmp_path, net).save(1)
        found = net(Tensor([[-1, -5, 2]], ms.int32)).to_local().asnumpy()  # negative ids count from the last row of 5
        assert (found == whole.asnumpy()[[[-1, -5, 2]]]).all()
        return whole.asnumpy()

    expected = SimulatedRanks(4).run(save)[0]
    assert expected.shape == (5, 2) and expected.all()

    def load(rank, size):
        net = net_of(DeviceMesh((size,), ("tp",)), False, seed=rank)
        Checkpointer(tmp_path, net).load()
        return full_parameters(net)["weight"].asnumpy(), net.weight.asnumpy()

    for size in (1, 3, 4):
        for rank, (whole, part) in enumerate(SimulatedRanks(size).run(lambda rank, size=size: load(rank, size))):
            assert (whole == expected).all() and not part[max(5 - rank * len(part), 0) :].any()


@pytest.mark.usefixtures("rank_0_of_4")
def test_what_is_said():
    net = shard(layers.VocabParallelEmbedding(ROWS, WIDTH), TP)
    assert "weight is padded with zeros, dim 0: 7 stored as 8" in explain(net, Tensor(IDS))
    with pytest.raises(
        ValueError, match=r"parameter 'weight' of .* \(Dense\) of shape \(7, 6\): dim 0 has size 7, .*tp"
    ) as raised:
        shard(nn.Dense(WIDTH, ROWS), TP, plan={"": {"weight": layout("tp")}})
    assert "a size that 4 divides, 4 or 8, or other axes, or store zeros" in str(raised.value)
    assert "layout(…, pad=True)" in str(raised.value)

    def construct(self):
        self.count += 1
        return self.count

    counting = cell_of(construct, count=ms.Parameter(ops.zeros(5), name="count", requires_grad=False))
    with pytest.raises(ValueError, match="parameter 'count' is stored with padding, and a Cell can't write it"):
        shard(counting, TP, plan={"": {"weight": layout("tp", pad=True)}})()
