"""Settings that would change nothing are errors, at the latest where gradients are taken."""

import re

import mindspore as ms
import pytest
from support.small_pipelines import Scale, pipeline
from test_recompute_gradients import INPUTS, Net, llama, sharded

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute, swap
from mindformers_core.tensor_parallel import prepare, shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
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
