"""What a first compilation through `jit()` leaves on the screen and in the working directory: nothing but errors."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import daily

PREPARED = """
import sys
from itertools import count
import mindspore as ms
from mindspore import Tensor, nn, ops
from mindformers_core import init_distributed
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import jit, programs, shard

class Sum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(4, 4, weight_init="ones", has_bias=False)

    def construct(self, x):
        return self.inner(x).sum()

def sharded():
    net = Sum()
    net.inner.weight.name = f"weight{next(numbers)}"
    return shard(net, mesh)

def mark():
    for stream in (sys.stdout, sys.stderr):
        print("MARK", file=stream, flush=True)

init_distributed()
mesh, numbers = init_device_mesh((1,), ("dp",)), count()

@ms.jit
def double(x):
    return 2 * x

double(ops.ones((2, 4)))  # what MindSpore says once in a process
mark()
"""
QUIET = """
one, other = sharded(), sharded()
optimizer = nn.SGD(one.trainable_params(), 0.0)

def forward(x):
    return one(x), one(x[:1])

gradient_of = ms.value_and_grad(forward, None, one.trainable_params(), has_aux=True)

@jit
def step(x, y):
    (loss, part), gradients = gradient_of(x)
    optimizer(gradients)
    if x.sum() > 0:
        loss = loss + other(y)
    else:
        loss = loss - other(x)
    return loss, part, gradients

for sign, rows, expected in (1, 2, 4 * 4 * (2 + 3)), (-1, 2, 0), (1, 5, 4 * 4 * (5 + 3)):
    loss, part, gradients = step(sign * ops.ones((rows, 4)), ops.ones((3, 4)))
    assert (float(loss), float(part)) == (expected, sign * 16), (loss, part)
    assert (gradients[0] == sign * rows).all()
assert (len(programs(one)), len(programs(other))) == (3, 3)
"""
ERROR = """
net = sharded()

def step(x):
    loss = net(x)
    return ops.matmul(x, x) + loss  # 2 x 4 by 2 x 4

jit(step)(ops.ones((2, 4)))
"""


def run(tmp_path, code, level):
    """Exit status, and what a program wrote to stdout and stderr after the mark."""
    (tmp_path / "step.py").write_text(PREPARED + code)
    root, environment = Path(__file__).parents[1], {"PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path.parent)}
    environment |= {"PYTHONPATH": str(root)} | ({} if level is None else {"GLOG_v": level})
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "step.py"], check=False, **options)
    return done.returncode, *(text.partition("MARK\n")[2] for text in (done.stdout, done.stderr))


@pytest.mark.long
@pytest.mark.parametrize("level", daily([None], [None, "3"]))
def test_a_first_compilation_is_silent(tmp_path, level):
    """Several Cells, signatures and compilations, gradients, an update, a branch; at both ends of what is logged."""
    assert run(tmp_path, QUIET, level) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["step.py"]


def test_an_error_of_the_users_own_is_shown_with_its_line(tmp_path):
    status, _, shown = run(tmp_path, ERROR, "3")
    assert status == 1 and "return ops.matmul(x, x) + loss  # 2 x 4 by 2 x 4" in shown
    assert "has_no_program_yet" not in shown and "no program yet" not in shown
