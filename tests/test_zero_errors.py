"""What `hsdp()` and `value_and_grad` can't do: errors that name Cell, parameter, axis and size, and what would work."""

import gc
import re

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.experimental import optim
from support.small_zero import Net

from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import LossScale, hsdp, value_and_grad
from mindformers_core.zero.gradient_reducer import check_optimizers
from mindformers_core.zero.storage import storage_of

SIZES, AXES = (2, 2), ("dp", "tp")


@pytest.fixture(autouse=True)
def rank_0(rank_0_of_4):
    """Rank 0 of 4, in which nothing is sent."""


def sharded(mesh=None, **weights):
    return shard(Net(**weights), mesh or init_device_mesh(SIZES, AXES))


def level3(cell, **arguments):
    return hsdp(cell, **{"shard_size": 2, "optimizer_level": "level3", **arguments})


class Training(nn.Cell):
    """Holds a model's optimizer."""

    def __init__(self, net):
        super().__init__()
        self.update = nn.Adam(net.trainable_params())


OPTIMIZERS = {
    "Adam": lambda net: nn.Adam(net.trainable_params()),
    "SGD": lambda net: optim.SGD([{"params": net.trainable_params()[1:]}], lr=0.1),
    "AdamW": lambda net: AdamW(net.trainable_params()),
    "LARS": lambda net: nn.LARS(nn.Momentum(net.trainable_params(), 0.1, 0.9)),
    "Adam in a Cell": Training,
}


@pytest.mark.parametrize("make", [Net, sharded], ids=["plain", "sharded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_was_built_before_hsdp(name, make):
    net = make()
    optimizer = OPTIMIZERS[name](net)
    text = r"was built with parameters of the root Cell \(Net\), '(first|second).weight' for one, before hsdp\(\)"
    with pytest.raises(ValueError, match=f"{name.split()[0]}|Momentum.*{text}.*cell.trainable_params"):
        hsdp(net)
    del optimizer
    hsdp(net)  # nothing was changed by the first attempt


def test_an_optimizer_that_nobody_has_any_more():
    net = sharded()
    optimizer = nn.Adam(net.trainable_params())
    optimizer.itself = [optimizer]
    gc.disable()
    try:
        del optimizer
        hsdp(net)
    finally:
        gc.enable()


def test_a_model_that_keeps_a_list_of_its_parameters_is_no_optimizer():
    net = Net()
    net.parameters = ms.ParameterTuple(net.trainable_params())
    hsdp(net)


def inside(net):
    return nn.SequentialCell([net])


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (lambda: hsdp(sharded()), r"hsdp\(\) was called with the root Cell \(Net\) already: call it once"),
        (lambda: hsdp(Net()), r"hsdp\(\) was called with the root Cell \(Net\) already"),
        (lambda: inside(hsdp(Net())), r"Cell '0' \(Net\) is under hsdp\(\) already"),
        (lambda: sharded().first, r"as shard\(\) was called with it: this is Cell 'first' \(Linear\) in the root Cell"),
        (lambda: inside(sharded()), r"Cell '0' \(Net\) in the root Cell \(SequentialCell\) is sharded by itself"),
    ],
)
def test_cells_that_hsdp_cannot_take(cell, text):
    cell = cell()
    with pytest.raises(ValueError, match=text):
        hsdp(cell)


@pytest.mark.parametrize("cell", [3, None, Net], ids=str)
def test_what_is_no_cell(cell):
    with pytest.raises(TypeError, match=r"hsdp\(\) takes a Cell"):
        hsdp(cell)
    with pytest.raises(TypeError, match="isn't a Cell"):
        value_and_grad(cell)


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [
        (
            "shard_size",
            3,
            ValueError,
            r"3\): doesn't divide the 4 ranks of axis 'dp' of .*choose of 1, 2",
        ),
        ("shard_size", 0, ValueError, "at least 1"),
        ("shard_size", 2.0, TypeError, r"2\.0\): should be an int"),
        ("threshold", -1, ValueError, "at least 0 KB"),
        ("threshold", "64", TypeError, "a number of KB"),
        ("optimizer_level", "level4", ValueError, r"choose of level1, level2, level3 \(did you mean 'level3'\?\)"),
        ("accumulate_grad_step", 0, ValueError, "at least 1"),
        ("axis", ("dp", 1), TypeError, "the name of a mesh axis, or a tuple of names"),
        ("mesh", (2, 2), TypeError, "a DeviceMesh"),
        ("mesh", DeviceMesh((2,), ("dp",), (2, 3)), ValueError, "this is rank 0, which isn't in it"),
        ("gradients_mean", "yes", TypeError, "True or False"),
        ("comm_fusion", "atuo", ValueError, r"'atuo' .*did you mean 'auto'"),
        ("reshard_after_forward", "yes", TypeError, "True or False"),
        ("prefetch", -1, ValueError, "at least 0"),
        ("mixed_precision", "float16", TypeError, r"a MixedPrecision, such as MixedPrecision\(compute="),
        ("units", "first", TypeError, r"'first'\): should be a tuple of paths"),
        ("units", ("frist",), ValueError, r"no Cell 'frist' in the root Cell \(Net\) \(did you mean 'first'\?\)"),
        ("units", ("first", "second", "first"), ValueError, "Cell 'first' is given twice"),
        ("units", ("rest", "rest.0"), ValueError, r"Cell 'rest\.0' lies in 'rest': give one of the two"),
    ],
)
def test_arguments_that_cannot_be(argument, value, error, text):
    net = Net()
    with pytest.raises(error, match=f"{argument}.*{text}"):
        level3(net, **{argument: value})
    level3(net)  # nothing was changed by the first attempt


def test_a_shard_size_that_does_not_divide_a_meshs_axis():
    net = sharded()
    with pytest.raises(ValueError, match=r"3\): doesn't divide the 2 ranks of axis 'dp' of \(dp=2, tp=2\): .*of 1, 2$"):
        hsdp(net, 3)
    hsdp(net, 2)


@pytest.mark.parametrize("axis", ["dq", "data"])
def test_an_axis_that_the_mesh_does_not_have(axis):
    nearest = r" \(did you mean 'dp'\?\)" if axis == "dq" else ""
    with pytest.raises(ValueError, match=rf"axis='{axis}'\): the mesh has the axes dp, tp{nearest};.*mesh=…"):
        hsdp(sharded(), axis=axis)


def test_axes_that_the_data_parallel_axis_would_be_cut_into():
    net = sharded(init_device_mesh((4, 1), ("dp", "dp_shard")))
    with pytest.raises(ValueError, match=r"cuts axis 'dp' .* into dp_replicate and dp_shard, but .* axis 'dp_shard'"):
        hsdp(net, shard_size=2)


def test_meshes_that_conflict():
    mesh, line = init_device_mesh(SIZES, AXES), init_device_mesh((4,), ("dp",))
    with pytest.raises(ValueError, match=r"mesh=DeviceMesh\(\(4,\).*: the root .*\(\(2, 2\), .*: leave mesh out"):
        hsdp(sharded(mesh), mesh=line)
    for own in (init_device_mesh((4,), ("tp",)), DeviceMesh((2,), ("pp",))):
        with pytest.raises(ValueError, match=r"the root Cell \(Net\) is sharded over .* which isn't what rank 0 has"):
            hsdp(sharded(own), mesh=mesh)
    hsdp(sharded(mesh.sub_mesh("tp", 0)), mesh=mesh)
    with pytest.raises(ValueError, match=r"axis='dp'\): the mesh has the axes tp.* give the whole mesh"):
        hsdp(sharded(mesh.sub_mesh("tp", 0)))


def test_the_mean_of_terms_of_one_loss():
    with pytest.raises(ValueError, match=r"gradients_mean=True\): the root Cell \(Net\) is sharded over axis 'dp'"):
        hsdp(sharded(), gradients_mean=True)
    hsdp(Net(), gradients_mean=True)


def test_cells_that_have_no_gradients():
    with pytest.raises(ValueError, match=r"the root Cell \(Net\) isn't under hsdp\(\): call hsdp\(cell\) first"):
        value_and_grad(sharded())
    with pytest.raises(ValueError, match=r"Cell 'first' \(Linear\) isn't what hsdp\(\) was called with: give the root"):
        value_and_grad(hsdp(sharded()).first)
    with pytest.raises(ValueError, match=r"the root Cell \(ReLU\) has no parameters to train"):
        value_and_grad(hsdp(nn.ReLU()))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"compiled": "yes"}, TypeError, "compiled='yes'"),
        ({"loss_scale": 1024.0}, TypeError, r"loss_scale=1024\.0\): should be a LossScale"),
    ],
)
def test_arguments_of_value_and_grad(arguments, error, text):
    with pytest.raises(error, match=text):
        value_and_grad(hsdp(sharded()), **arguments)


def test_a_loss_scale_that_ranks_do_not_agree_about():
    mesh = init_device_mesh(SIZES, AXES)
    with pytest.raises(ValueError, match=r"trained by the 4 ranks of \(dp=2, tp=2\), .*LossScale\(mesh=mesh\)"):
        value_and_grad(hsdp(sharded(mesh)), loss_scale=LossScale())
    value_and_grad(hsdp(sharded(mesh)), loss_scale=LossScale(mesh=mesh))


def test_shard_after_hsdp():
    for net in (hsdp(Net()), hsdp(sharded())):
        with pytest.raises(ValueError, match=r"Net, or a Cell in it, is sharded by hsdp\(\): call shard\(\) first"):
            shard(net, init_device_mesh(SIZES, AXES))


def test_an_optimizer_of_the_weights_that_compute():
    net = hsdp(sharded(), 2, threshold=0)
    optimizer = nn.Adam(list(net.first._params.values()))
    with pytest.raises(
        ValueError, match=r"Adam holds 'first.weight' of the root Cell \(Net\) as it computes.*trainable"
    ):
        check_optimizers(storage_of(net))
    del optimizer


@pytest.mark.ranks("dead_in_step.py", 4)
def test_a_rank_that_dies_in_a_step_ends_the_others(launches):
    """At once, with errors that name the collective and the ranks; their parameters are what they were."""
    launched = launches["dead_in_step.py"].result()
    for survivor, other in ((0, 1), (2, 3)):
        text = launched.logs[survivor].partition("ended after ")[2]
        named = (
            rf"reduce_scatter over dp \(ranks {survivor}, {other}\) failed on rank {survivor}: another rank has died"
        )
        assert re.match(r"\d s with: " + named, text), text
        assert "parameters are as before: True" in text, text
