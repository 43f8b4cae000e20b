"""Capture and `@ms.jit`: what would be compiled runs as Python meanwhile, and nowhere else."""

import os

import mindspore as ms
import pytest
from mindspore import nn, ops
from support.captured_models import Function
from test_capture import only_operators

from mindformers_core.capture.capture import _WITHOUT_COMPILING, capture
from mindformers_core.operators import tensor_meta

X = tensor_meta((2, 4), "float32")


@pytest.mark.parametrize("mode", ["ast", "trace", "bytecode"])
def test_all_modes_of_jit_run_as_python(mode, capfd):
    before = [getattr(owner, name) for owner, name, _ in _WITHOUT_COMPILING]

    class Jitted(nn.Cell):
        @ms.jit(capture_mode=mode)
        def construct(self, x):
            return ops.exp(x) * 2

    @ms.jit(capture_mode=mode)
    def squashed(x):
        return ops.tanh(x)

    for _ in range(2):
        assert only_operators(capture(Jitted(), X)) == ["Exp", "Muls"]
        assert only_operators(capture(Function(lambda x: squashed(squashed(x))), X)) == ["Tanh", "Tanh"]
    assert "ERROR" not in capfd.readouterr().err
    assert [getattr(owner, name) for owner, name, _ in _WITHOUT_COMPILING] == before


def test_processes_started_meanwhile_compile():
    """What another thread starts while a Cell is captured inherits no variable that forbids it."""
    environment = dict(os.environ)

    def construct(x):
        assert dict(os.environ) == environment
        return ms.jit(ops.exp)(x)

    assert only_operators(capture(Function(construct), X)) == ["Exp"]
