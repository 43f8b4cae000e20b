"""The key of a captured graph: equal for identical layers, and different where anything that matters differs."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops
from support.captured_models import small_llama
from support.small_cells import cell_of

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


def variant(function, trainable=True):
    """A Cell with a parameter, whose function gets both."""
    weight = Parameter(Tensor(FIVE), requires_grad=trainable)
    return cell_of(lambda self, x, *more, **named: function(x, self.weight, *more, **named), weight=weight)


PLAIN = variant(lambda x, w: x * w), (X,), {}
VARIANTS = {  # name -> (one, other): pairs that differ in one thing
    "shape": (PLAIN, (PLAIN[0], (tensor_meta((3, 4), "float32"),), {})),
    "dtype": (PLAIN, (PLAIN[0], (tensor_meta((2, 4), "float16"),), {})),
    "operator": (PLAIN, (variant(lambda x, w: x + w), (X,), {})),
    "order": (PLAIN, (variant(lambda x, w: w * x), (X,), {})),
    "trained": (PLAIN, (variant(lambda x, w: x * w, trainable=False), (X,), {})),
    "training": (PLAIN, (variant(lambda x, w: x * w).set_train(), (X,), {})),
    "unused": (PLAIN, (variant(lambda x, w: (x + w, x * w)[1]), (X,), {})),
    "result": (PLAIN, (variant(lambda x, w: (x * w,)), (X,), {})),
    "result kind": ((variant(lambda x, w: [x * w]), (X,), {}), (variant(lambda x, w: (x * w,)), (X,), {})),
    "contents": (
        (variant(lambda x, w: x * Tensor(FIVE)), (X,), {}),
        (variant(lambda x, w: x * Tensor(SIX)), (X,), {}),
    ),
    "number": ((variant(lambda x, w: x * 2), (X,), {}), (variant(lambda x, w: x * 2.0), (X,), {})),
    "attribute": (
        (variant(lambda x, w: ops.Concat(0)((x, x))), (X,), {}),
        (variant(lambda x, w: ops.Concat(1)((x, x))), (X,), {}),
    ),
    "arguments": (
        (variant(lambda x, w, y: x * y), (X, X), {}),
        (variant(lambda x, w, y: x * y), (X,), {"y": X}),
    ),
    "argument": (
        (variant(lambda x, w, y: x * w), (X, 1), {}),
        (variant(lambda x, w, y: x * w), (X, 2), {}),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_key_tells_graphs_apart(name):
    one, other = (capture(cell, *args, **named).key for cell, args, named in VARIANTS[name])
    assert one != other
    cell, args, named = VARIANTS[name][0]
    assert one == capture(cell, *args, **named).key
