"""Swapped: losses and gradients are bit by bit what they are without; results wait on the host, and come back ahead."""

import gc
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.kept_tensors import bytes_of, tensors_in
from support.nightly import daily
from support.recomputed_models import INPUTS, Half, Net, drawn, equal, llama, sharded, steps_of, without
from support.saved_tensors import scalar_of

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.hints import bytes_shown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.recompute import keeping, recompute, swap
from mindformers_core.recompute.offloading import Offloaded, OnHost
from mindformers_core.recompute.selection import NamedProgram
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import explain, prepare, programs, shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
SETTINGS = [
    (llama, {"swap": True}),
    (llama, {"op_swap": {"*.attention": True, "layers.*.mlp": {"layers": [0], "backward_prefetch": 20}}}),
    (Net, {"op_swap": {"*.tanh": True, "*.Transpose": True, "*.dropout": True}, "default_prefetch": 2}),
    (Half, {"op_swap": {"**": True}}),
]


@pytest.mark.parametrize("make, settings", daily([SETTINGS[0], *SETTINGS[2:]], SETTINGS))
def test_the_same_bits(make, settings):
    assert equal(steps_of(swap(sharded(make), **settings), make)[0], without(make))


def test_beside_recompute():
    settings = {"select": ["layers.*.mlp", "layers.0.self_attn"]}
    net = swap(recompute(sharded(llama), **settings), op_swap={"layers.1-2.self_attn": True})
    assert equal(steps_of(net, llama)[0], without(llama))
    text = explain(net)
    assert "swap: results of" in text and "recompute: " in text


class Views(nn.Cell):
    """Saves tensors that are views, and others, and a scalar."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, 8)

    def construct(self, x):
        y = ops.exp(x * 0.1).reshape(8, 4)
        y = ops.sin(ops.transpose(ops.tanh(y * y), (1, 0))).reshape(4, 8)
        first, second = ops.split(ops.tanh(self.dense(y)), 4, axis=1)
        return ops.cat((first * second, second * second), 1) * x * ops.exp(y.mean())


@pytest.mark.parametrize("pattern", ["**", "*.tanh", "*.exp", "*.Reshape", "*.Transpose", "*.Split*", "dense"])
def test_gradients_of_gradients(pattern):
    """The host's copies take part in them as the tensors would."""
    x = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))

    def second(net):
        first = ms.grad(lambda given: net(given).to_local().square().sum(), 0)
        return ms.grad(lambda given: first(given).square().sum(), 0)(x).asnumpy()

    plain, swapped = (shard(drawn(Views()).set_train(), init_device_mesh((1,), ("tp",))) for _ in range(2))
    assert np.array_equal(second(swap(swapped, op_swap={pattern: True}, default_prefetch=2)), second(plain))


class Tied(nn.Cell):
    """Of what it saves one is a view of a weight, and one of integers, which stays on the device."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm((8,))

    def construct(self, ids):
        hidden = self.norm(self.embedding(ids)).astype(ms.float32)
        scores = ops.matmul(ops.tanh(hidden), self.embedding.embedding_table.T)
        return ops.gather_elements(scores, 2, (ids * 1).expand_dims(-1)).square().sum()


PATTERNS = ["Reshape", "core_attention", "mlp.*", "*"]
FORETOLD = [
    *((make, settings, {}) for make, settings in SETTINGS),
    *((llama, {"op_swap": {f"**.{pattern}": True}}, {}) for pattern in PATTERNS),
    (llama, {"op_swap": {"*.self_attn": True}}, {"full": [1], "exclude": "*.self_attn"}),
    (llama, {"op_swap": {"*.self_attn.value": True}}, {"select": ["*.attention", "*.mlp"]}),
    *((Half, {"op_swap": {f"layers.*.{name}": True}}, {}) for name in ("**.Cast", "**.Transpose", "0")),
    (Tied, {"op_swap": {"**": True}}, {}),
    (Tied, {"op_swap": {"*.ExpandDims": True, "*.norm": True}}, {}),
    *((Views, {"op_swap": {pattern: True}}, {}) for pattern in ("*.Transpose", "*.Split*", "**")),
]


@pytest.mark.parametrize("make, settings, recomputing", daily(FORETOLD[::4], FORETOLD))
def test_what_is_saved_waits_on_the_host(monkeypatch, make, settings, recomputing):
    """What explain() foretells of each instruction, and nothing on the device but what wasn't swapped."""
    own_inputs = {Tied: Tensor(np.arange(8).reshape(2, 4), ms.int32), Views: Tensor(np.ones((4, 8), np.float32))}
    inputs = (own_inputs[make],) if make in own_inputs else INPUTS[make]()
    net = swap(recompute(sharded(make), **recomputing), **settings)
    net(*inputs)
    packed, calls, kept = [], [], {}
    pack, handles = keeping._pack, OnHost.handles
    monkeypatch.setattr(keeping, "_pack", lambda tensor: packed.append(pack(tensor)) or packed[-1])
    monkeypatch.setattr(OnHost, "handles", lambda self, tensors: calls.append(handles(self, tensors)) or calls[-1])

    def forward(*inputs):
        result = scalar_of(net(*inputs))
        gc.collect()
        copies = [[entry for entry in call if entry.host is not None] for call in calls]
        kept["host"] = sorted(sum(entry.host.nbytes for entry in entries) for entries in copies if entries)
        kept["fetched"] = [entry for entries in copies for entry in entries if entry.device is not None]
        kept["device"] = bytes_of(tensors_in(packed, set()), net, inputs)
        return result

    ms.value_and_grad(forward, None, net.trainable_params())(*inputs)
    plan = programs(net)[-1].plan
    explained = tree_of(net).activations.explained(plan)
    marks = [mark.nbytes for mark in explained.notes.values() if mark.kind == "on host"]
    assert kept["fetched"] == [] and sum(kept["host"]) == sum(marks)
    if make is not Net:  # it has a distributed algorithm, of several calls, and seeds
        assert kept["host"] == sorted(marks)
        of_all = bytes_shown(sum(marks) + kept["device"])
        assert (
            f"swap: results of {len(marks)} instructions wait on the host, {bytes_shown(sum(marks))} of {of_all} that "
            "are kept"
        ) in explained.lines
        assert explained.lines[-1].startswith("nothing is swapped: no gradient needs") == (not marks)


@pytest.mark.parametrize("prefetch", daily([2], [1, 2, 5]))
def test_results_come_back_ahead_of_use(monkeypatch, prefetch):
    """So many as were asked for are on the device besides the one that is used, and never more."""
    net = swap(sharded(llama), layer_swap=[{"layers": True, "backward_prefetch": prefetch}])
    entries, most = [], []
    make_entry, fetch = Offloaded.__init__, Offloaded.fetch
    monkeypatch.setattr(Offloaded, "__init__", lambda self, *given: entries.append(self) or make_entry(self, *given))

    def counted(self):
        result = fetch(self)
        most.append(sum(entry.device is not None for entry in entries))
        return result

    monkeypatch.setattr(Offloaded, "fetch", counted)
    gradient_of = ms.value_and_grad(lambda *given: net(*given).to_local(), None, net.trainable_params())
    gradient_of(*INPUTS[llama]())
    assert prefetch < max(most) <= prefetch + 4  # an operator asks for up to two; some are saved several times
    assert all(entry.device is None for entry in entries)


BOTH = [  # what recompute() and swap() are told, an operator that both take, and who asks for it
    ({"full": "0-1"}, {"layer_swap": [{"layers": "1-2"}]}, "layers.1.mlp.SiLU",
        "recompute.full and swap.layer_swap[0]"),
    (
        {"select": ["*.tanh", "*.mlp", "layers.1.*.silu"]},
        {"op_swap": {"*.self_attn": True, "**.silu": {"layers": [1]}}},
        "layers.1.mlp.SiLU",
        "recompute.select '*.mlp' and recompute.select 'layers.1.*.silu' and swap.op_swap['**.silu']",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "swapping", "name", "asked"), BOTH)
def test_who_asks_for_what_is_recomputed_and_swapped(settings, swapping, name, asked):
    settings, swapping = RecomputeSettings(**settings), SwapSettings(**swapping)
    layers = {number: [f"model.layers.{number}"] for number in range(3)}
    program = NamedProgram(prepare(sharded(llama), *INPUTS[llama]()).plan, "", layers, algorithm_of)
    again, on_host = program.recomputed(settings), program.swapped(swapping)
    (key,) = (key for key, text in operator_texts(program.plan).items() if text == f"model.{name}")
    assert key in again and key in on_host
    message = f"model.{name} of the Net is recomputed and swapped, by {asked}: what is computed again"
    with pytest.raises(ValueError, match=re.escape(message)):
        program.check_apart(settings, swapping, [key], "the Net")
    program.check_apart(settings, swapping, [], "the Net")


def test_what_cant_be():
    with pytest.raises(ValueError, match=r"swap\(\) was called with the root Cell \(Net\) already"):
        swap(swap(sharded(Net), swap=True, op_swap={"*.tanh": True}), swap=True)
    with pytest.raises(ValueError, match="swap: compiled functions can only recompute whole Cells"):
        value_and_grad(hsdp(swap(sharded(llama), swap=True)), compiled=True)(*INPUTS[llama]())
    both = swap(recompute(sharded(llama), full="0-1"), layer_swap=[{"layers": [1]}])
    with pytest.raises(ValueError, match=r"model.layers.1.input_layernorm.RMSNorm .* and swapped, by recompute.full"):
        both(*INPUTS[llama]())
    with pytest.raises(ValueError, match=r"swap.op_swap\['\*.softmx'\]: '\*.softmx' matches no Cell or operator"):
        swap(sharded(llama), op_swap={"*.softmx": True})(*INPUTS[llama]())
    with pytest.raises(ValueError, match=r"swap.layer_swap\[0\].layers: there is no layer 7: the layers are 0 to 2"):
        swap(sharded(llama), layer_swap=[{"layers": [7]}])(*INPUTS[llama]())
    with pytest.raises(TypeError, match=r"swap\(\) takes a Cell that shard\(\) was called with, not Net"):
        swap(drawn(Net()), swap=True)
    with_result = swap(sharded(Net), op_swap={".Mean*": True})
    with_result(Tensor(np.eye(4, 8, dtype=np.float32)))
    assert "swap: results of 0 instructions wait on the host" in explain(with_result)
    both = swap(recompute(sharded(Net), select=[".Square"]), op_swap={".Square": True})
    with pytest.raises(ValueError, match=r"Square of the root Cell \(Net\) is recomputed"):
        both(Tensor(np.eye(4, 8, dtype=np.float32)))
    meant = r"swap.swap: true, which means op_swap\['\*.self_attn'\]"
    with pytest.raises(ValueError, match=rf"{meant}: '\*.self_attn' matches no Cell or operator"):
        swap(sharded(Net), swap=True)(Tensor(np.eye(4, 8, dtype=np.float32)))
    both = swap(recompute(sharded(llama), full=True), swap=True)
    with pytest.raises(ValueError, match=rf"is recomputed and swapped, by recompute.full and {meant}"):
        both(*INPUTS[llama]())
    assert swap(sharded(Net), swap=False, op_swap={"*.tanh": True})(Tensor(np.eye(4, 8, dtype=np.float32))) is not None
