"""Where recomputing could go wrong silently: results that callers change, evaluation, settings that change nothing."""

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.recomputations import count_recomputations
from support.small_cells import Doubled, cell_of
from support.small_pipelines import Scale, pipeline
from test_recompute_gradients import INPUTS, Net, equal, llama, sharded

import mindformers_core
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import list_operators, recompute, swap, write_curve
from mindformers_core.recompute.explained import keepers_by_key
from mindformers_core.sharding.inspecting import explain_activations
from mindformers_core.sharding.recordings import forget_recordings
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import explain, prepare, programs, shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
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


@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("change", ["setitem", "copy_", "assign_value"])
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
    net, inputs = recompute(sharded(llama), full=True), INPUTS[llama]()
    expected = float(net(*inputs).to_local())
    compiled = ms.jit(lambda_of(net))
    with pytest.raises(RuntimeError, match=r"make it before: prepare\(cell, \*inputs, compiled=True\)"):
        compiled(*inputs)
    prepare(net, *inputs, compiled=True)
    np.testing.assert_allclose(float(ms.jit(lambda_of(net))(*inputs)), expected, 1e-6)


def lambda_of(net):
    def call(ids, labels):
        return net(ids, labels)

    return call


def test_each_program_is_explained_as_it_is():
    net, inputs = recompute(sharded(Net), budget=0.95), INPUTS[Net]()
    net(*inputs)
    training = explain(net)
    net.set_train(False)
    net(*inputs)
    assert explain(net) != training
    net.set_train(True)
    net(*inputs)
    assert explain(net) == training


def test_operators_are_listed_with_and_without_recompute():
    inputs = INPUTS[llama]()
    plain, chosen = (list_operators(net, *inputs) for net in (sharded(llama), recompute(sharded(llama), full=True)))
    assert str(plain) == str(chosen)
    assert sum(entry.saved_bytes for entry in plain) > 0
    assert plain[0].name == "model.embed_tokens.Gather"
    (weights,) = [entry for entry in plain if entry.name == "model.layers.1.self_attn.core_attention.weights"]
    assert "Softmax" in weights.others and weights.saved_bytes > 0
    attention, mlp, layer = (
        next(entry for entry in plain.cells if entry.name == f"model.layers.1{part}")
        for part in (".self_attn", ".mlp", "")
    )
    assert (attention.operator, layer.operator) == ("LlamaAttention", "LlamaDecoderLayer")
    assert weights.saved_bytes < attention.saved_bytes < layer.saved_bytes - mlp.saved_bytes
    assert "model.layers.1.self_attn.core_attention.weights" in str(plain) and "LlamaAttention" in str(plain)
    with pytest.raises(TypeError, match="Dense isn't sharded: call shard"):
        list_operators(nn.Dense(2, 2))


def test_operators_are_listed_where_a_pattern_is_wrong():
    """It is what one calls then; and the wrong pattern is an error still."""
    inputs = INPUTS[llama]()
    net = recompute(sharded(llama), select="*.softmx")
    listed = list_operators(net, *inputs)
    assert str(listed) == str(list_operators(sharded(llama), *inputs))
    with pytest.raises(ValueError, match="'\\*.softmx' matches no Cell or operator"):
        net(*inputs)
    assert str(list_operators(net, *inputs)) == str(listed)


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


def test_a_budget_leaves_alone_what_is_swapped():
    net, inputs = swap(recompute(sharded(llama), budget=0.6), op_swap={"*.mlp": True}), INPUTS[llama]()
    net(*inputs)
    kinds = {keeper.name for keeper in keepers_by_key(programs(net)[-1].plan).values()}
    assert "recomputed" in kinds and len(kinds) > 1


def test_the_package_is_the_function_too():
    net = sharded(llama)
    assert mindformers_core.recompute(net, full=True) is net and tree_of(net).activations.settings.full is True
    assert mindformers_core.hsdp is hsdp and mindformers_core.swap is swap


@pytest.mark.parametrize(
    ("function", "settings", "kind", "message"),
    [
        (recompute, {"selct": "a"}, TypeError, r"^recompute.selct: unknown setting \(did you mean 'select'\?\); kno"),
        (recompute, {"settings": "a"}, TypeError, "takes a RecomputeSettings, or its keys by name, not 'a'"),
        (recompute, {"select": ["a", 3]}, TypeError, r"^recompute.select\[1\]: 3 should be a pattern"),
        (swap, {"default_prefetch": 3}, ValueError, r"^swap.default_prefetch: 3 is given, but nothing to swap"),
    ],
)
def test_errors_of_settings_begin_as_those_of_a_recipe(function, settings, kind, message):
    with pytest.raises(kind, match=message):
        function(sharded(Net), **settings)


def test_cells_that_run_eagerly_are_named_some():
    net = shard(llama().set_train(), init_device_mesh((1, 1), ("dp", "tp")), mode="eager")
    with pytest.raises(ValueError, match=r"^the root Cell \(.*: runs operator by operator \(eager\), where") as caught:
        recompute(net, full=True)
    assert str(caught.value).count("Cell '") == 4 and ", …: runs" in str(caught.value)


OUT_OF_REACH = "recompute.budget: 0.001 is out of reach: with all computed again that may be"


def result(net, *inputs):
    ms.manual_seed(5)
    return net(*inputs).asnumpy()


@pytest.mark.parametrize("make", [llama, Net])
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
    inputs, found = INPUTS[Net](), []
    for settings in ({}, {"budget": 0.6}):
        net = recompute(sharded(Net), **settings).set_train(False)
        ms.manual_seed(5)
        loss, gradients = value_and_grad(hsdp(net))(*inputs)
        found.append([loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)])
    assert all(map(np.array_equal, *found))
    gradient_of = value_and_grad(hsdp(recompute(sharded(Net), budget=0.001).set_train(False)))
    for _ in range(2):
        with pytest.raises(ValueError, match=OUT_OF_REACH):
            gradient_of(*inputs)


GATHERS = "recompute.parallel_optimizer_comm_recompute: True is about the gathered weights of hsdp(optimizer_level="


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"full": True, "exclude": "**"},
            "full (True), so nothing is recomputed: exclude less, or leave recompute out"),
        ({"full": [0, 2], "exclude": "layers.*"}, "full ([0, 2]), so"),
        ({"select": "*.mlp", "exclude": "*.mlp"}, "select (['*.mlp']), so"),
        ({"full": [1], "select": "*.mlp", "exclude": ["layers.1", "mlp"]}, "full ([1]) and select (['*.mlp']), so"),
    ],
)  # fmt: skip
def test_all_is_excluded(settings, asked):
    expected = re.escape(f" takes out all that is asked for by {asked}")
    for compiled in (False, True):
        with pytest.raises(ValueError, match=f"^recompute.exclude: .*{expected}"):
            prepare(recompute(sharded(llama), **settings), *INPUTS[llama](), compiled=compiled)
    net = recompute(sharded(llama), **settings).set_train(False)
    net(*INPUTS[llama]())
    with pytest.raises(ValueError, match=expected):
        ms.value_and_grad(net, None, net.trainable_params())(*INPUTS[llama]())


def test_operators_that_are_excluded():
    with pytest.raises(ValueError, match=r"takes out all that is asked for by select \(\['\*.softmax'\]\)"):
        prepare(recompute(sharded(llama), select="*.softmax", exclude="*.weights"), *INPUTS[llama]())
    prepare(recompute(sharded(llama), select=["*.self_attn", "*.mlp"], exclude="*.mlp"), *INPUTS[llama]())


@pytest.mark.parametrize("level", [None, "level2"])
def test_gathered_weights_at_other_levels(level):
    """In either order; where `hsdp()` may still come, a call without gradients is no error."""

    def told(net):
        return net if level is None else hsdp(net, optimizer_level=level)

    settings = {"full": True, "parallel_optimizer_comm_recompute": True}
    instead = f"optimizer_level is '{level}'" if level else "hsdp() wasn't called"
    expected = "^.*" + re.escape(f"{GATHERS}'level3'), but {instead}: leave it out, or use hsdp(")
    if level:
        with pytest.raises(ValueError, match=expected):
            recompute(told(sharded(Net)), **settings)
    for compiled in (False, True):
        net = recompute(sharded(Net), **settings)
        net(*INPUTS[Net]())
        told(net)
        with pytest.raises(ValueError, match=expected):
            if level:
                value_and_grad(net, compiled)(*INPUTS[Net]())
            else:
                ms.value_and_grad(net, None, net.trainable_params())(*INPUTS[Net]())
    cells = [shard(Scale(number, number == 1), init_device_mesh((1,), ("dp",))) for number in range(2)]
    with pytest.raises(ValueError, match=expected):
        pipeline([told(recompute(cell, is_part=True, **settings)) for cell in cells], 2).meet()
    value_and_grad(hsdp(recompute(sharded(Net), **settings), optimizer_level="level3"))(*INPUTS[Net]())
    stays = recompute(sharded(Net), full=True, parallel_optimizer_comm_recompute=False)  # true at every level
    value_and_grad(told(stays) if level else hsdp(stays, optimizer_level="level2"))(*INPUTS[Net]())


@pytest.mark.parametrize("path", ["", "model.layers.0"])
def test_mindspore_s_own_recompute_afterwards(path):
    called = r"recompute\(\) or swap\(\) was called with the root Cell .* already: select .* there"
    for chosen in (recompute(sharded(llama), select="*.mlp"), swap(sharded(llama), op_swap={"*.mlp": True})):
        with pytest.raises(ValueError, match=called):
            dict(chosen.cells_and_names())[path].recompute()
    net = sharded(llama)
    net.model.layers["0"].recompute()
    with pytest.raises(ValueError, match="is recomputed by its own recompute"):
        recompute(net, full=True)
