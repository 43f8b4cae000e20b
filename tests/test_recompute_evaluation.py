"""Evaluation asks for nothing that only gradients need: a budget that is out of reach stops these, and no call."""

import mindspore as ms
import numpy as np
import pytest
from test_recompute_gradients import INPUTS, Net, llama, sharded

from mindformers_core.recompute import recompute, write_curve
from mindformers_core.sharding.inspecting import explain_activations
from mindformers_core.sharding.recordings import forget_recordings
from mindformers_core.tensor_parallel import explain
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
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
