"""MindSpore's functions and optimizers that compute with whole tensors: errors where a rank has parts of them."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore.experimental import optim
from mindspore.ops import clip_by_global_norm
from support.small_zero import Net

from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline import PipelineStage
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import Lamb, all_finite, hsdp


@pytest.fixture(autouse=True)
def rank_0(rank_0_of_4):
    """Rank 0 of 4, in which nothing is sent."""


def sharded(**weights):
    return shard(Net(**weights), init_device_mesh((2, 2), ("dp", "tp")))


def gradients_of(parameters):
    return tuple(Tensor(np.full(p.shape, 2, np.float32)) for p in parameters)


CUT = {
    "shard": (lambda: sharded(second=layout(None, "tp")), r"'second\.weight', \(8, 8\), .* \(8, 4\), \[-, tp\]"),
    "hsdp": (lambda: hsdp(sharded(), 2, threshold=0), r"'(first|second)\.weight', \(8, 8\), .* \(4, 8\), \[dp, -\]"),
}
CLIP_ONE = nn.ClipByNorm()


def clipped_together(*given):
    return clip_by_global_norm(given, 0.5)


def clipped(*given):
    return ops.clip_by_norm(given[1], 0.5)


def clipped_by_a_cell(*given):
    return CLIP_ONE(given[1], Tensor(0.5))


def finite(*given):
    return amp.all_finite(given)


FUNCTIONS = {
    "ops.clip_by_global_norm": clipped_together,
    "ops.clip_by_norm": clipped,
    "nn.ClipByNorm": clipped_by_a_cell,
    "amp.all_finite": finite,
}


@pytest.mark.parametrize("how", CUT)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_parts(how, name):
    make, text = CUT[how]
    net = make()
    with pytest.raises(ValueError, match=rf"{name} .* gradients of {text}, in the root Cell \(Net\): use mindformers_"):
        FUNCTIONS[name](*gradients_of(net.trainable_params()))


@pytest.mark.parametrize("name", ("ops.clip_by_global_norm", "amp.all_finite"))
def test_gradients_of_parts_in_a_graph(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MS_OM_PATH", str(tmp_path))
    net = CUT["shard"][0]()
    function = FUNCTIONS[name]
    with pytest.raises(ValueError, match=rf"{name} .* gradients of 'second\.weight'"):
        ms.jit(function)(*gradients_of(net.trainable_params()))
    whole = gradients_of([net.first.weight] * 6)
    assert str(ms.jit(function)(*whole)) == str(function(*whole))


def test_what_is_whole_is_as_in_mindspore():
    net = sharded()
    gradients = gradients_of(net.trainable_params())
    size = sum(gradient.size for gradient in gradients)
    np.testing.assert_allclose(clip_by_global_norm(gradients, 0.5)[0], 0.5 / np.sqrt(size), rtol=1e-6)
    parts = gradients_of(CUT["shard"][0]().trainable_params())  # of a Cell that nobody has any more
    assert clip_by_global_norm(parts, 0.5) and amp.all_finite(parts)
    net = CUT["shard"][0]()
    assert clip_by_global_norm(gradients, 0.5)
    parts = gradients_of(net.trainable_params())
    assert all_finite(None, parts)  # this rank's, as its caller says
    assert clip_by_global_norm((*parts, Tensor([1.0])), 0.5)  # no gradients of its parameters


def test_gradients_of_one_stage_of_several():
    stage = PipelineStage(Net(), 1, 2)
    gradients = gradients_of(stage.parameters)
    with pytest.raises(ValueError, match="gradients of the Net of stage 1, one of 2: use"):
        clip_by_global_norm(gradients, 0.5)
    assert ops.clip_by_norm(gradients[0], 0.5).shape == (8, 8)  # of one whole weight


BY_TENSOR = {
    "Lamb": lambda parts: nn.Lamb(parts, 0.1),
    "LARS": lambda parts: nn.LARS(nn.Momentum(parts, 0.1, 0.9)),
    "AdaFactor": lambda parts: nn.AdaFactor(parts),
    "CAME": lambda parts: type("CAME", (nn.Momentum,), {})(parts, 0.1, 0.9),
}


@pytest.mark.parametrize("how", CUT)
@pytest.mark.parametrize("name", BY_TENSOR)
def test_optimizers_whose_steps_need_whole_tensors(name, how):
    make, text = CUT[how]
    with pytest.raises(ValueError, match=rf"{name} computes .* {text}: use mindformers_core\.zero\.Lamb.*WeightDecay"):
        BY_TENSOR[name](make().trainable_params())
    BY_TENSOR[name](hsdp(sharded()).trainable_params())  # every tensor is whole


def test_optimizers_that_update_element_by_element():
    parts = CUT["hsdp"][0]().trainable_params()
    kinds = (nn.Adam, nn.AdamWeightDecay, nn.AdaMax, nn.FTRL, nn.LazyAdam, nn.ASGD, nn.Rprop, Lamb)
    optimizers = [kind(parts) for kind in kinds]
    optimizers += [kind(parts, 0.1) for kind in (nn.SGD, nn.Adagrad, nn.Adadelta, nn.RMSProp, nn.ProximalAdagrad)]
    optimizers += [kind(parts, lr=0.1) for kind in (optim.AdamW, optim.NAdam, optim.RAdam, optim.Rprop, optim.ASGD)]
    assert optimizers


def test_centralized_gradients():
    parts = hsdp(sharded(second=layout(None, "tp")), 2, threshold=0).trainable_params()
    groups = [{"params": parts[:1], "grad_centralization": True}, {"params": parts[1:]}]
    nn.Momentum(groups, 0.1, 0.9)  # rows are whole: [dp, -]
    groups = [{"params": parts, "grad_centralization": True}]
    with pytest.raises(ValueError, match=r"Momentum .*grad_centralization=True.*'second\.weight'.* \[dp, tp\]: leave"):
        nn.Momentum(groups, 0.1, 0.9)
