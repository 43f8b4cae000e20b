"""Before a sharded Cell first computes, its ranks compare what it is called with."""

import copy
import logging
import tempfile

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from support.launch import on_ranks
from support.small_cells import cell_of

from mindformers_core import full_parameters, init_device_mesh, jit, shard
from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import layout
from mindformers_core.zero import hsdp

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32) % 4
PLAN = {"": {"input": {"x": layout("dp", None), "labels": layout("dp")}}, "fc": {"weight": {"weight": layout("tp")}}}


def loss(self, x, labels):
    return ops.mean(ops.sum(self.fc(x), 1) * labels)


def net_on(mesh, **settings):
    """A linear layer and a loss of its results that is quickly planned, the same on every mesh."""
    ms.set_seed(1)
    net = cell_of(loss, fc=mint.nn.Linear(8, 4, bias=False))
    return net if mesh is None else shard(net, mesh, plan=PLAN, **settings)


def loss_of(net, rows, compiled=False):
    """The loss of some rows, and what was logged."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("mindformers_core").addHandler(handler)
    try:
        loss = (_compiled(net) if compiled else net)(Tensor(X[rows]), Tensor(LABELS[rows]))
    finally:
        logging.getLogger("mindformers_core").removeHandler(handler)
    return float(loss if compiled else loss.full_tensor()), said


def _compiled(net):
    @jit
    def forward(x, labels):
        return net(x, labels)

    return forward


@on_ranks(4)
def case_inputs_are_compared_before_the_first_step():
    """The whole batch on every rank, different rows within tp, different shapes; generated, compiled and eager."""
    mesh, rank, whole = init_device_mesh((2, 2), ("dp", "tp")), world().rank, slice(0, 8)
    (dp,) = mesh.coordinate(rank, ("dp",))
    mine, expected = slice(4 * dp, 4 * dp + 4), loss_of(net_on(None), whole, compiled=True)[0]
    for mode, compiled in (("generated", False), ("generated", True), ("eager", False)):
        if not compiled:
            loss, said = loss_of(net_on(mesh, mode=mode), mine)
            np.testing.assert_allclose(loss, expected, 1e-6)
            assert said == []
            assert loss_of(net_on(mesh, mode=mode, check_inputs=False), whole)[1] == []
            loss, said = loss_of(net_on(mesh, mode=mode, inputs="full_batch"), whole)
            np.testing.assert_allclose(loss, expected, 1e-6)
            assert said == []
        (said,) = loss_of(net_on(mesh, mode=mode), whole, compiled)[1]
        assert "on all 2 ranks of dp" in said and 'inputs="full_batch"' in said
        uneven = slice(0, 3 if rank == 2 else 4)
        with pytest.raises(ValueError, match=r"ranks 0, 1, 3 .*\[4, 8\].*; ranks 2 .*\[3, 8\].*pad or drop"):
            loss_of(net_on(mesh, mode=mode), uneven, compiled)
    (said,) = loss_of(net_on(mesh), slice(2 * rank, 2 * rank + 2))[1]
    assert "different values of 'x', 'labels' on the ranks of tp" in said
    net = net_on(mesh)
    with count_collectives() as first:
        loss_of(net, mine)
    with count_collectives() as second:
        loss_of(net, mine)
    assert first == second  # what ranks tell each other isn't counted


@on_ranks(4)
def case_whole_parameters():
    """Saved and loaded they are what one card has, sharded over tp and, by `hsdp`, over dp; some of them are whole."""
    mesh, alone = init_device_mesh((2, 2), ("dp", "tp")), nn.SequentialCell(nn.LayerNorm((8,)), nn.Dense(8, 4))
    plan = {"1": {"weight": {"weight": layout("tp", None)}}}
    for level in (None, "level1", "level2", "level3"):
        net = shard(copy.deepcopy(alone), mesh, plan=plan)
        net = net if level is None else hsdp(net, 2, threshold=0.04, optimizer_level=level)
        assert net.trainable_params()[2].shape != alone[1].weight.shape
        assert net.trainable_params()[0].shape == alone[0].gamma.shape
        with tempfile.TemporaryDirectory() as folder:
            ms.save_checkpoint(full_parameters(net), f"{folder}/whole.ckpt")
            loaded = nn.SequentialCell(nn.LayerNorm((8,), "zeros"), nn.Dense(8, 4))
            lacking = ms.load_param_into_net(loaded, ms.load_checkpoint(f"{folder}/whole.ckpt"), strict_load=True)
        assert lacking == ([], [])
        for one, other in zip(loaded.get_parameters(), alone.get_parameters(), strict=True):
            np.testing.assert_array_equal(one.asnumpy(), other.asnumpy(), f"{level}: {other.name}")
