"""The key of a captured graph: equal for identical layers, and different where anything that matters differs."""

import numpy as np
import pytest
from captured_models import small_llama
from mindspore import Parameter, Tensor, nn, ops

from mindformers_core.capture.capture import capture
from mindformers_core.operators import tensor_meta

X = tensor_meta((2, 4), "float32")
FIVE, SIX = np.full(4, 5, np.float32), np.full(4, 6, np.float32)


def keys(graph):
    return {call.path: call.key for call in graph.calls()}


def test_identical_layers_have_one_key():
    model, make = small_llama(num_hidden_layers=3)
    (args, named) = make(1)
    found = keys(capture(model, *args, **named))
    assert found["model.layers.0"] == found["model.layers.1"] == found["model.layers.2"]
    assert found["model.layers.0.mlp.gate_proj"] == found["model.layers.2.mlp.up_proj"]
    assert found["model.layers.0.mlp.gate_proj"] != found["model.layers.0.mlp.down_proj"]
    assert found == keys(capture(model, *args, **named))


class Variant(nn.Cell):
    """A Cell with a parameter, whose function gets both."""

    def __init__(self, function, trainable=True):
        super().__init__()
        self.weight = Parameter(Tensor(FIVE), requires_grad=trainable)
        self.function = function

    def construct(self, x, *more, **named):
        return self.function(x, self.weight, *more, **named)


PLAIN = Variant(lambda x, w: x * w), (X,), {}
VARIANTS = {  # name -> (one, other): pairs that differ in one thing
    "shape": (PLAIN, (PLAIN[0], (tensor_meta((3, 4), "float32"),), {})),
    "dtype": (PLAIN, (PLAIN[0], (tensor_meta((2, 4), "float16"),), {})),
    "operator": (PLAIN, (Variant(lambda x, w: x + w), (X,), {})),
    "order": (PLAIN, (Variant(lambda x, w: w * x), (X,), {})),
    "trained": (PLAIN, (Variant(lambda x, w: x * w, trainable=False), (X,), {})),
    "training": (PLAIN, (Variant(lambda x, w: x * w).set_train(), (X,), {})),
    "unused": (PLAIN, (Variant(lambda x, w: (x + w, x * w)[1]), (X,), {})),
    "result": (PLAIN, (Variant(lambda x, w: (x * w,)), (X,), {})),
    "result kind": ((Variant(lambda x, w: [x * w]), (X,), {}), (Variant(lambda x, w: (x * w,)), (X,), {})),
    "contents": (
        (Variant(lambda x, w: x * Tensor(FIVE)), (X,), {}),
        (Variant(lambda x, w: x * Tensor(SIX)), (X,), {}),
    ),
    "number": ((Variant(lambda x, w: x * 2), (X,), {}), (Variant(lambda x, w: x * 2.0), (X,), {})),
    "attribute": (
        (Variant(lambda x, w: ops.Concat(0)((x, x))), (X,), {}),
        (Variant(lambda x, w: ops.Concat(1)((x, x))), (X,), {}),
    ),
    "arguments": (
        (Variant(lambda x, w, y: x * y), (X, X), {}),
        (Variant(lambda x, w, y: x * y), (X,), {"y": X}),
    ),
    "argument": (
        (Variant(lambda x, w, y: x * w), (X, 1), {}),
        (Variant(lambda x, w, y: x * w), (X, 2), {}),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_key_tells_graphs_apart(name):
    one, other = (capture(cell, *args, **named).key for cell, args, named in VARIANTS[name])
    assert one != other
    cell, args, named = VARIANTS[name][0]
    assert one == capture(cell, *args, **named).key
