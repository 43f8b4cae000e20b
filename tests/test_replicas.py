"""Weights that ranks hold alike and that drift apart are found, on simulated ranks; so are facts that differ."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.launch import ROOT
from support.small_zero import Net

from mindformers_core import check_replicas
from mindformers_core.communication.messages import check_equal
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.sharding.replicas import check_result
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer import trainer
from mindformers_core.zero import hsdp

SIZES, AXES = (2, 2), ("dp", "tp")


def errors_of(function, size=4):
    """What the function says on every rank, or None."""

    def run(rank):
        try:
            function(rank)
        except ValueError as error:
            return str(error)

    return SimulatedRanks(size).run(run)


def change(parameter):
    """By one bit."""
    array = parameter.asnumpy().copy()
    array.reshape(-1).view(np.uint32)[-1] ^= 1
    parameter.set_data(Tensor(array))


ALIKE = {  # of the changed tensor; hsdp cuts it along dp
    (None, "weight"): (("dp",), [0, 2]),
    ("level1", "weight"): ((), []),
    (None, "moment"): (("dp", "tp"), [0, 1, 2, 3]),
    ("level1", "moment"): (("tp",), [2, 3]),
    ("level3", "moment"): (("tp",), [2, 3]),
}


@pytest.mark.parametrize(("level", "what"), ALIKE)
def test_a_weight_or_a_moment_that_drifts_apart(level, what):
    """On rank 2, at dp 1 and tp 0: found by the ranks that have the tensor alike."""

    def train(rank, bad):
        net = shard(Net(second=layout(None, "tp")), init_device_mesh(SIZES, AXES))
        if level:
            hsdp(net, 2, threshold=0, optimizer_level=level)
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        if rank == bad:
            change(net.trainable_params()[1] if what == "weight" else optimizer.moments[0])
        check_replicas(net, optimizer)

    assert errors_of(lambda rank: train(rank, None)) == [None] * 4
    said, (axes, ranks) = errors_of(lambda rank: train(rank, 2)), ALIKE[level, what]
    assert [rank for rank in range(4) if said[rank]] == ranks, said
    for rank in ranks:
        name = "second.weight" if what == "weight" else "moments.first.weight"
        assert f"the checksum of '{name}'" in said[rank] and f"alike along {', '.join(axes)}, is" in said[rank]
        assert " on rank 2" in said[rank]


@pytest.mark.parametrize("use", [hsdp, lambda net: net(Tensor(np.ones((2, 8), np.float32)))], ids=["hsdp", "call"])
def test_ranks_that_were_given_other_initial_weights(use):
    """By another seed, for instance."""

    def call(rank, differs):
        net = shard(Net(second=layout(None, "tp")), init_device_mesh(SIZES, AXES))
        if differs and rank % 2:
            change(net.first.weight)
        use(net)

    assert errors_of(lambda rank: call(rank, False)) == [None] * 4
    for text in errors_of(lambda rank: call(rank, True)):
        assert "the checksum of 'first.weight', which lies as [-, -], so alike along dp, tp, is" in text
        assert " on ranks 0, 2 and " in text and "on ranks 1, 3" in text


def test_a_run_compares_weights_at_its_begin_and_end_with_saves_and_every_few_steps(tmp_path, monkeypatch):
    """Where they differ it tells when they were equal, also from a checkpoint on."""
    seen, differs = [], []

    def compare(cells, optimizer):
        seen.append(bool(cells and optimizer))
        if differs:
            raise ValueError("the checksum of 'norm' differs")

    def job(number, *keys):
        places = [f"training.output_dir={tmp_path / str(number)}", f"train_dataset.cache_dir={tmp_path}"]
        given = [*small, *places, f"train_dataset.data_path={ROOT / 'README.md'}", *keys]
        return trainer.Trainer(load_recipe(str(ROOT / "configs" / "llama_tiny_cpu_1p.yaml"), given))

    monkeypatch.setattr(trainer, "check_replicas", compare)
    small = ["training.steps=3", "train_dataset.seq_length=16", "monitor.plot=false"]
    small += ["model.hidden_size=16", "model.intermediate_size=16", "model.num_hidden_layers=1"]
    saving = "checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=2", "checkpoint.check_replicas=true"
    cases = ((2,), 3), ((0,), 0), ((0, *saving), 3)
    for number, ((every, *keys), times) in enumerate(cases):
        seen.clear()
        job(number, f"context.check_replicas={every}", *keys).run()
        assert seen == [True] * times
    differs.append(True)
    with pytest.raises(ValueError, match="'norm' differs; they were equal after step 3"):
        job(number, "training.resume=auto", "training.steps=4").run()
    with pytest.raises(ValueError, match="'norm' differs$"):
        job("new").run()


def test_results_that_are_declared_whole():
    mesh = init_device_mesh(SIZES, AXES)
    whole = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)

    def result(rank, factor, dims=((), ()), partial=(), dtype=ms.float32):
        tensor = Tensor(whole * (factor if rank == 3 else 1.0), dtype)
        check_result(tensor, Layout.on(mesh, dims, partial), "the result")

    for dtype in (ms.float32, ms.bfloat16, ms.complex64):
        said = errors_of(lambda rank, dtype=dtype: result(rank, 1.5, dtype=dtype))
        assert all(f"along dp, tp, but rank {rank} has other values" in text for rank, text in enumerate(said)), said
    assert errors_of(lambda rank: result(rank, 1 + 1e-6)) == [None] * 4  # summed in another order
    assert errors_of(lambda rank: result(rank, 2, (("dp", "tp"), ()))) == [None] * 4  # parts
    said = errors_of(lambda rank: result(rank, 2, (("dp",), ()), {"tp": "sum"}))
    assert said == [None] * 4  # terms
    said = errors_of(lambda rank: result(rank, 2, ((), ("tp",))))
    assert [bool(text) for text in said] == [False, True, False, True]


def test_facts_that_differ():
    mesh = init_device_mesh((3,), ("rank",))

    def facts(rank):
        check_equal(mesh, {"same": [1, "a"], "seed": 7 if rank == 1 else 42} | ({"more": None} if rank else {}), "stop")

    expected = "more is missing on rank 0 and null on ranks 1, 2; seed is 42 on ranks 0, 2 and 7 on rank 1: stop"
    assert errors_of(facts, 3) == [expected] * 3
    assert errors_of(lambda rank: check_equal(mesh, {"seed": 42}, "stop"), 3) == [None] * 3
