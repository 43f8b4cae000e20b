"""Peak resident memory of a real training step falls by what recompute doesn't keep; each run is its own process."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

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


def test_a_step_takes_what_it_keeps():
    without = step_of()
    assert 0.8 < without["rise"] / without["kept"] < 1.5


@pytest.mark.parametrize("mode", ["pynative", "compiled"])
def test_full_recompute_takes_a_layer_instead_of_all(mode):
    """Of 8 layers one is there at once, with gradients within it; compiled ones share the memory of one function."""
    without, full = step_of(mode), step_of(mode, full=True)
    assert full["loss"] == without["loss"]
    assert full["rise"] < 0.5 * without["rise"]
