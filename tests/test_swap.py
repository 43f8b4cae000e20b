"""Swapped: losses and gradients are bit by bit what they are without; results wait on the host, and come back ahead."""

import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from test_recompute_gradients import INPUTS, Net, drawn, llama, sharded
from test_recompute_measured import others, place_of, tensors_in

from mindformers_core.recompute import keeping, offloading, recompute, swap
from mindformers_core.recompute.algorithms import algorithm_of
from mindformers_core.recompute.explained import keepers_by_key
from mindformers_core.recompute.prediction import saved_activations
from mindformers_core.tensor_parallel import explain, programs
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
SETTINGS = [
    (llama, {"swap": True}),
    (llama, {"layer_swap": [{"layers": "0-1", "backward_prefetch": 3}]}),
    (llama, {"op_swap": {"*.softmax": True, "layers.*.mlp": {"layers": [0], "backward_prefetch": 20}}}),
    (Net, {"layer_swap": [{"layers": True}]}),
    (Net, {"op_swap": {"*.tanh": True, "*.Transpose": True, "*.dropout": True}, "default_prefetch": 2}),
]


def step(net, make):
    """Loss and gradients of two steps."""
    gradient_of = value_and_grad(hsdp(net))
    ms.manual_seed(3)
    found = []
    for _ in range(2):
        loss, gradients = gradient_of(*INPUTS[make]())
        found += [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    return found


@pytest.mark.parametrize("make, settings", SETTINGS)
def test_the_same_bits(make, settings):
    expected, found = step(sharded(make), make), step(swap(sharded(make), **settings), make)
    assert all(map(np.array_equal, found, expected))


def test_beside_recompute():
    settings = {"select": ["layers.*.mlp", "layers.0.self_attn"]}
    net = swap(recompute(sharded(llama), **settings), op_swap={"layers.1-2.self_attn": True})
    assert all(map(np.array_equal, step(net, llama), step(sharded(llama), llama)))
    text = explain(net)
    assert "swap: results of" in text and "recompute: " in text


@pytest.mark.parametrize("make, settings", SETTINGS)
def test_what_is_saved_waits_on_the_host(monkeypatch, make, settings):
    """Nothing on the device but what wasn't swapped; on the host what was foretold."""
    net, inputs = swap(sharded(make), **settings), INPUTS[make]()
    net(*inputs)
    packed, kept = [], {}
    pack = keeping._pack
    monkeypatch.setattr(keeping, "_pack", lambda tensor: packed.append(pack(tensor)) or packed[-1])

    def forward(*inputs):
        result = net(*inputs).to_local()
        gc.collect()
        handles = {id(s.handle): s.handle for s in packed if isinstance(s, keeping._Saved) and s.handle is not None}
        kept["host"] = sum(handle.call._entries[handle.index].host.nbytes for handle in handles.values())
        kept["fetched"] = [h for h in handles.values() if h.call._entries[h.index].device is not None]
        kept["device"] = {place_of(t): t.untyped_storage().nbytes() for t in tensors_in(plain(packed), set())}
        return result

    def plain(packed):
        return [s for s in packed if not isinstance(s, keeping._Saved) or s.handle is None]

    ms.value_and_grad(forward, None, net.trainable_params())(*inputs)
    frame = programs(net)[-1].frame
    swapped = keepers_by_key(frame)
    saved = saved_activations(frame, algorithm=algorithm_of)
    assert kept["fetched"] == []
    assert kept["host"] > 0
    outside = set(map(place_of, others(net, inputs)))
    on_device = sum(nbytes for place, nbytes in kept["device"].items() if place not in outside)
    if make is llama:
        assert kept["host"] == sum(tensor.nbytes for tensor in saved if tensor.key in swapped)
        assert on_device == sum(tensor.nbytes for tensor in saved if tensor.key not in swapped)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_results_come_back_ahead_of_use(monkeypatch, prefetch):
    """So many as were asked for are on the device besides the one that is used, and never more."""
    net = swap(sharded(llama), layer_swap=[{"layers": True, "backward_prefetch": prefetch}])
    entries, most = [], []
    make_entry, fetch = offloading._Entry.__init__, offloading._Entry.fetch
    monkeypatch.setattr(offloading._Entry, "__init__", lambda self, t: entries.append(self) or make_entry(self, t))

    def counted(self):
        result = fetch(self)
        most.append(sum(entry.device is not None for entry in entries))
        return result

    monkeypatch.setattr(offloading._Entry, "fetch", counted)
    gradient_of = ms.value_and_grad(lambda *given: net(*given).to_local(), None, net.trainable_params())
    gradient_of(*INPUTS[llama]())
    assert prefetch < max(most) <= prefetch + 4  # an operator asks for up to two; some are saved several times
    assert all(entry.device is None for entry in entries)


def test_what_cant_be():
    with pytest.raises(ValueError, match=r"swap\(\) was called with the root Cell \(Net\) already"):
        swap(swap(sharded(Net), swap=True, op_swap={"*.tanh": True}), swap=True)
    with pytest.raises(ValueError, match="swap: nothing of the root Cell .* can be swapped in a compiled function"):
        value_and_grad(hsdp(swap(sharded(llama), swap=True)), compiled=True)(*INPUTS[llama]())
    both = swap(recompute(sharded(llama), full="0-1"), layer_swap=[{"layers": [1]}])
    with pytest.raises(ValueError, match=r"model.layers.1.input_layernorm.Square .* is recomputed and swapped"):
        both(*INPUTS[llama]())
    with pytest.raises(ValueError, match=r"swap.op_swap\['\*.softmx'\]\[0\]: '\*.softmx' matches no Cell or operator"):
        swap(sharded(llama), op_swap={"*.softmx": True})(*INPUTS[llama]())
    with pytest.raises(ValueError, match=r"swap.layer_swap\[0\].layers: there is no layer 7: the layers are 0 to 2"):
        swap(sharded(llama), layer_swap=[{"layers": [7]}])(*INPUTS[llama]())
    with pytest.raises(TypeError, match=r"swap\(\) takes a Cell that shard\(\) was called with, not Net"):
        swap(drawn(Net()), swap=True)
    assert swap(sharded(Net), swap=False, op_swap={"*.tanh": True})(Tensor(np.eye(4, 8, dtype=np.float32))) is not None
