"""Recomputed: bit by bit the losses and gradients that are without; what is kept, measured as it runs, is foretold."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.kept_tensors import bytes_of, kept_tensors, others
from support.nightly import daily
from support.recomputations import count_recomputations
from support.recomputed_models import INPUTS, Cast, Half, Net, Views, drawn, equal, llama, sharded, step, without
from support.saved_tensors import distinct, measured, saved_bytes
from support.small_cells import Doubled, cell_of

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.communication.raw import RawCollective
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute, swap, write_curve
from mindformers_core.recompute.explained import keepers_by_key
from mindformers_core.sharding.inspecting import explain_activations
from mindformers_core.sharding.recordings import forget_recordings
from mindformers_core.tensor_parallel import explain, prepare, programs, shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
CELLS = [
    (llama, {"full": True}),
    (llama, {"select": ["layers.*.self_attn", "layers.0.mlp"]}),
    (llama, {"select": "*.self_attn"}),
    (Net, {"full": [0, 2]}),
    (Half, {"full": True}),
]
OPERATORS = [
    (llama, {"select": ["*.attention", "*.mlp.silu", "layers.0-1.*.*.Dense"]}),
    (llama, {"full": True, "exclude": ["*.attention", "layers.*.mlp.mul"]}),
    (Net, {"select": ["*.tanh", "*.split", "blocks.0-1.h", "*.mixed[0]"]}),
    (llama, {"budget": 0.5}),
    (Net, {"budget": 0.4, "exclude": "*.softmax"}),
    (Half, {"budget": 0.3}),
    (Cast, {"budget": 0.3}),
    (Views, {"budget": 0.6}),
    (Views, {"select": ["*.Transpose", "*.Split", "*.Sin"]}),
]
EVERY = [*((*case, False) for case in CELLS), (*CELLS[3], True), (*CELLS[2], True)]


@pytest.mark.parametrize("make, settings, compiled", daily([EVERY[0], *EVERY[3:5]], EVERY))
def test_whole_cells_give_the_same_bits(make, settings, compiled):
    found, count = step(make, compiled, **settings)
    assert equal(found, without(make, compiled))
    assert compiled or count > 0


@pytest.mark.parametrize("make, settings", daily([OPERATORS[0], OPERATORS[6], OPERATORS[8]], OPERATORS))
def test_operators_give_the_same_bits(make, settings):
    found, count = step(make, **settings)
    assert equal(found, without(make))
    assert count > 0


def test_operators_in_a_graph_are_an_error():
    with pytest.raises(ValueError, match="compiled functions can only recompute whole Cells"):
        step(Net, compiled=True, **OPERATORS[2][1])


SETTINGS = [
    (llama, {"full": True}),
    (llama, {"select": ["*.Softmax", "*.silu"]}),
    (llama, {"full": True, "exclude": ["*.core_attention.Attention", "layers.2.mlp"]}),
    (llama, {"budget": 0.5}),
    (Net, {"select": ["*.Transpose", "*.tanh", "blocks.1.*[0-2]"]}),
    (Half, {"select": ["layers.*.*.half", "layers.1", ".Transpose"]}),
    (Cast, {"select": ["**"]}),
    (Cast, {"select": ["*.sin", "*.exp", "*.tanh"]}),
    (Views, {"select": ["*.Transpose", "*.Split", "*.Exp"]}),
    (Views, {"budget": 0.6}),
]


@pytest.mark.parametrize("make, settings", daily(SETTINGS[2::2], SETTINGS))
def test_measured_is_foretold(monkeypatch, make, settings):
    inputs = INPUTS[make]()
    plain = sharded(make)
    plain(*inputs)
    before = measured(lambda *given: plain(*given), *inputs, exclude=others(plain, inputs))
    net = recompute(sharded(make), **settings)
    net(*inputs)
    tensors, again = kept_tensors(monkeypatch, net, inputs)
    after = bytes_of(tensors, net, inputs)
    plan = programs(net)[-1].plan
    keys = frozenset(keepers_by_key(plan))
    foretold = saved_bytes(plan, keys, algorithm_of)
    seeds = 6 * 8 * (make is Net)  # of the draws: after manual_seed they are all one, the generator's own
    assert foretold - seeds <= after <= foretold < before == saved_bytes(plan, frozenset(), algorithm_of)
    if make is not Net:  # a distributed algorithm is several calls
        assert again == len(Prediction(plan, algorithm_of).recomputed(frozenset(keys)))


def test_full_recompute_keeps_one_tensor_of_a_layer(monkeypatch):
    """Its input, which is the result of the layer before it, and nothing else."""
    net, inputs = recompute(sharded(llama), full=True), INPUTS[llama]()
    net(*inputs)
    tensors, _ = kept_tensors(monkeypatch, net, inputs)
    hidden = [tensor for tensor in distinct(tensors, others(net, inputs)) if tensor.shape == (2, 8, 32)]
    layers, head = 3, 1  # the final norm keeps the last layer's result, and the output layer its input
    assert len(hidden) == layers + 1 + head


@pytest.mark.parametrize("settings", [{"full": True}, {"select": "**"}])
def test_explain_foretells_what_runs_again_under_hsdp(settings):
    """Integers of the loss are kept, whatever is selected: autograd keeps them as they are."""
    net = hsdp(recompute(sharded(llama), **settings))
    with count_recomputations() as counted:
        value_and_grad(net)(*INPUTS[llama]())
    assert f"recompute: {sum(counted.values())} of " in explain(net)


def test_operators_whose_results_are_marked(monkeypatch):
    """What tensor parallelism marks as varying is what gradients keep: the mark goes with the operator."""
    shutdown()
    init_distributed("fake", world_size=2)
    monkeypatch.setattr(RawCollective, "all_reduce", lambda self, x, op: x + 0)  # of its own, as a real one's is
    inputs = INPUTS[llama]()
    net = shard(drawn(llama()).set_train(), init_device_mesh((1, 2), ("dp", "tp")))
    net = recompute(net, select="*.input_layernorm.RMSNorm")
    net(*inputs)
    tensors, again = kept_tensors(monkeypatch, net, inputs)
    plan = programs(net)[-1].plan
    keys = frozenset(keepers_by_key(plan))
    foretold = saved_bytes(plan, keys, algorithm_of)
    assert bytes_of(tensors, net, inputs) == foretold < saved_bytes(plan, frozenset(), algorithm_of)
    assert again == len(Prediction(plan, algorithm_of).recomputed(frozenset(keys))) >= 6


ROOT = Path(__file__).parent.parent


# An evaluation and a short step come first: what MindSpore takes once isn't counted.
MEASURED = """
import gc, json, re, sys
import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindformers_core.communication import init_distributed
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.recompute import list_operators, recompute
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import hsdp, value_and_grad

def peak():
    with open("/proc/self/status") as status:  # ru_maxrss counts what the parent process has
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])

init_distributed()
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
                     num_attention_heads=4, max_position_embeddings=256)
with ms.DeviceCtx("meta"):
    net = LlamaForCausalLM(config).set_train()
net = shard(net, init_device_mesh((1, 1), ("dp", "tp")), seed=0)
is_compiled = sys.argv[2] == "compiled"
gradient_of = value_and_grad(hsdp(recompute(net, **json.loads(sys.argv[1]))), is_compiled)
ids = Tensor(np.arange(1024).reshape(4, 256) % 64, ms.int32)
if not is_compiled:
    gradient_of(ids[:, :8], ids[:, :8])
    net(ids, ids).asnumpy()
gc.collect()
before = peak()
for _ in range(2):
    loss, gradients = gradient_of(ids, ids)
    loss.asnumpy(), [gradient.asnumpy() for gradient in gradients]
rise = peak() - before
kept = sum(operator.saved_bytes for operator in list_operators(net, ids, ids))
print(json.dumps({"rise": rise, "kept": kept, "loss": float(loss)}))
"""


@cache
def step_of(mode="pynative", **settings):
    """What a process says of its steps: by how much its peak has risen, what is kept without recompute, the loss."""
    environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURED, json.dumps(settings), mode]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_a_step_takes_what_it_keeps():
    without = step_of()
    assert 0.8 < without["rise"] / without["kept"] < 1.5


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["pynative", "compiled"])
def test_full_recompute_takes_a_layer_instead_of_all(mode):
    """Of 8 layers one is there at once, with gradients within it; compiled ones share the memory of one function."""
    without, full = step_of(mode), step_of(mode, full=True)
    assert full["loss"] == without["loss"]
    assert full["rise"] < 0.5 * without["rise"]


X = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))


def layers(self, x):
    for layer in self.layers:
        x = ops.exp(layer(x) * 0.1)
    return ops.exp(self.dropout(x))


def make(**settings):
    """A Cell that returns a tensor; every other layer has a bprop."""
    ms.set_seed(1)
    every_other = nn.CellList([nn.Dense(8, 8), Doubled(), nn.Dense(8, 8), Doubled()])
    net = cell_of(layers, layers=every_other, dropout=nn.Dropout(p=0.2))
    shard(net.set_train(), init_device_mesh((1,), ("tp",)))
    for parameter in net.get_parameters():
        values = np.random.default_rng(len(parameter.name)).normal(size=parameter.shape)
        parameter.set_data(Tensor(values.astype(np.float32)))
    return recompute(net, **settings)


def gradients(net, function):
    ms.manual_seed(3)
    return [g.asnumpy() for g in ms.grad(function, None, net.trainable_params())(X)]


@pytest.mark.parametrize(
    ("change", "way"), [("setitem", "recompute"), ("copy_", "swap"), ("assign_value", "recompute")]
)
def test_a_result_that_the_caller_changes(change, way):
    """What is computed again, or copied to the host, must not take the changed tensor for what the program gave."""

    def twice(net, x):
        y = net(x).to_local()
        other = ops.ones_like(y) * 3
        if change == "setitem":
            y[0] = 3.0
        elif change == "copy_":
            y.copy_(other)
        else:
            y.assign_value(other)
        return net(y).to_local().sum()

    plain = make()
    net = make(select="*.exp") if way == "recompute" else swap(make(), op_swap={"*.exp": True})
    assert equal(gradients(net, lambda x: twice(net, x)), gradients(plain, lambda x: twice(plain, x)))


def test_cells_with_a_bprop():
    """Are kept where others are selected with them; alone they are an error."""
    plain = make()
    expected = gradients(plain, lambda x: plain(x).to_local().sum())
    for settings in ({"full": True}, {"select": "layers.*"}, {"select": "**.*", "exclude": "layers.1"}):
        net = make(**settings)
        assert equal(gradients(net, lambda x, net=net: net(x).to_local().sum()), expected), settings
    with pytest.raises(ValueError, match=r"recompute.select: 'layers.1' selects Cells with a bprop of their own"):
        make(select="layers.1")(X)


def test_evaluation_needs_nothing_of_what_training_has():
    net = recompute(sharded(Net), full=True, exclude="*.dropout*")
    inputs = INPUTS[Net]()
    net(*inputs)
    net.set_train(False)
    net(*inputs)
    net = recompute(sharded(Net), select="*.tanhh")
    with pytest.raises(ValueError, match="matches no Cell or operator"):
        net(*inputs)


def test_plain_jit_of_a_prepared_program():
    net, inputs = recompute(sharded(Cast), full=True), INPUTS[Cast]()
    expected = float(net(*inputs).to_local())
    compiled = ms.jit(lambda_of(net))
    with pytest.raises(RuntimeError, match=r"make it before: prepare\(cell, \*inputs, compiled=True\)"):
        compiled(*inputs)
    prepare(net, *inputs, compiled=True)
    np.testing.assert_allclose(float(ms.jit(lambda_of(net))(*inputs)), expected, 1e-6)


def lambda_of(net):
    def call(x):
        return net(x)

    return call


def test_gradients_of_a_cell_itself_recompute_and_swap():
    """`mindspore.value_and_grad(net)`: MindSpore says within the call only that there is to be a gradient."""
    inputs = INPUTS[llama]()
    plain = sharded(llama)
    expected = ms.value_and_grad(plain, None, plain.trainable_params())(*inputs)[1]
    net = recompute(sharded(llama), full=True)
    with count_recomputations() as counted:
        _, found = ms.value_and_grad(net, None, net.trainable_params())(*inputs)
    assert sum(counted.values()) > 0
    assert all(np.array_equal(one.asnumpy(), other.asnumpy()) for one, other in zip(found, expected, strict=True))


OUT_OF_REACH = "recompute.budget: 0.001 is out of reach: with all computed again that may be"


def result(net, *inputs):
    ms.manual_seed(5)
    return net(*inputs).asnumpy()


@pytest.mark.parametrize("make", daily([Net], [llama, Net]))
def test_a_budget_that_is_out_of_reach_stops_no_evaluation(make, tmp_path):
    net, inputs = recompute(sharded(make), budget=0.001).set_train(False), INPUTS[make]()
    expected = result(sharded(make).set_train(False), *inputs)
    assert np.array_equal(result(net, *inputs), expected)
    assert "recompute: 0 of " in explain(net)
    with pytest.raises(ValueError, match=OUT_OF_REACH):
        write_curve(net, tmp_path / "curve.svg")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=OUT_OF_REACH):
        explain_activations(net, *inputs)
    assert np.array_equal(result(net, *inputs), expected)
    with pytest.raises(ValueError, match=OUT_OF_REACH):
        net.set_train()(*inputs)
    with pytest.raises(ValueError, match=OUT_OF_REACH):
        ms.value_and_grad(net.set_train(False), None, net.trainable_params())(*inputs)
    forget_recordings()


def test_gradients_in_evaluation_mode():
    """A budget in reach is kept there, too; one out of reach is told before weights are gathered."""
    inputs, found = INPUTS[Cast](), []
    for settings in ({}, {"budget": 0.3}):
        net = recompute(sharded(Cast), **settings).set_train(False)
        loss, gradients = value_and_grad(hsdp(net))(*inputs)
        found.append([loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)])
    assert all(map(np.array_equal, *found))
    gradient_of = value_and_grad(hsdp(recompute(sharded(Net), budget=0.001).set_train(False)))
    for _ in range(2):
        with pytest.raises(ValueError, match=OUT_OF_REACH):
            gradient_of(*INPUTS[Net]())
