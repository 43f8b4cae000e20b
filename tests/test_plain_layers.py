"""What a layer of MindSpore's own Cells sends is what one of our Llama sends."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.captured_models import small_llama
from support.launch import ROOT
from support.plan_checks import MESH, plan_of
from support.planned_models import silent_algorithm

from mindformers_core.explaining.report import make_report
from mindformers_core.layout import layout
from mindformers_core.operators import tensor_meta

sys.path.insert(0, str(ROOT / "examples"))
import vit  # noqa: E402


class Plain(nn.Cell):
    """Words and places → the mean loss, of the layers of `examples/vit.py`, which are MindSpore's own."""

    def __init__(self, layers):
        super().__init__()
        self.words, self.places = nn.Embedding(64, vit.SIZE), Parameter(Tensor(np.zeros((8, vit.SIZE), np.float32)))
        self.layers = nn.CellList([vit.Layer() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((vit.SIZE,)), nn.Dense(vit.SIZE, 64)

    def construct(self, input_ids, labels):
        x = self.words(input_ids) + self.places
        for layer in self.layers:
            x = layer(x)
        return ops.cross_entropy(self.head(self.norm(x)).reshape(-1, 64), labels.reshape(-1))


def sent_by_a_layer(make, size, config, plan=None):
    """`(direction, collective)` -> `(calls, bytes)` over tp of one more layer, the bytes in hidden states of a rank."""
    ids, arriving = (tensor_meta((4, 8), "int32"),) * 2, dict.fromkeys((0, 1), layout("dp", None).bind(MESH))
    one, two = (
        make_report(plan_of(make(count).set_train(), ids, {}, config, plan, arriving), silent_algorithm).traffic
        for count in (1, 2)
    )
    more = {key: [after - before for after, before in zip(two[key], one[key])] for key in two if key[0] == ("tp",)}
    return {(way, kind): (calls, sent / (2 * 8 * size * 4)) for (_, way, kind), (calls, sent) in more.items() if calls}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_of_plain_cells_sends_what_one_of_llama_sends(sequence_parallel):
    """Two collectives each way, each of a hidden state; with sequence parallelism two pairs of half as much."""
    sequence = layout("dp", "tp", None) if sequence_parallel else None
    row, column = {"weight": layout(None, "tp")}, {"weight": layout("tp", None), "bias": layout("tp")}
    plan = {f"layers.*.{name}": {"weight": column} for name in ("attention.[qkv]", "up")}
    plan |= {f"layers.*.{name}": {"weight": row} for name in ("attention.o", "down")}
    plan |= {"layers.*.norm[12]": {"input": sequence}, "layers.*": {"input": sequence, "output": sequence}}
    config = SimpleNamespace(batch_axes="dp", sequence_parallel=sequence_parallel)
    plain = sent_by_a_layer(Plain, vit.SIZE, config, plan)
    assert plain == sent_by_a_layer(lambda count: small_llama(num_hidden_layers=count)[0], 24, config)
    both = {("all_gather", 0.5), ("reduce_scatter", 0.5)} if sequence_parallel else {("all_reduce", 1)}
    assert plain == {(way, kind): (2, 2 * size) for way in ("forward", "backward") for kind, size in both}
