"""A Cell that communicates one tensor of any dtype in several ways, and the bytes that its plan foretells."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindformers_core.analysis.traffic import summed
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.explaining.report import make_report
from mindformers_core.layout import layout
from mindformers_core.redistribution import DeviceModel, Link
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.tensor_parallel import shard

DTYPES = ("bool", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
WITHOUT_SUM, WITHOUT_PAD = ("bool", "bfloat16"), ("complex64", "bfloat16")  # as MindSpore has no kernel on CPU
SLOW = DeviceModel("slow", 1e15, 0.0, Link(0.0, 1.0))  # so that bytes alone count
WITH_GRADIENT = ("float16", "bfloat16", "float32", "float64")


class Same(nn.Cell):
    """Its argument, which a plan wants in some layout."""

    def construct(self, x):
        return x.reshape(x.shape)


class Moves(nn.Cell):
    """Rows to columns, columns to whole, rows by one, and where a sum is possible, that of all rows."""

    def __init__(self, dtype):
        super().__init__()
        self.columns, self.whole = Same(), Same()
        self.sums, self.pads = dtype not in WITHOUT_SUM, dtype not in WITHOUT_PAD
        self.is_trained = dtype in WITH_GRADIENT
        if self.is_trained:
            self.scale = Parameter(Tensor(np.ones((64, 8), np.float32)), name=f"scale_{dtype}")

    def construct(self, x):
        if self.is_trained:
            x = x * ops.cast(self.scale, x.dtype)
        results = [self.whole(self.columns(x))]
        if self.pads:
            results.append(ops.pad(x, (0, 0, 1, -1)))
        return (*results, ops.sum(x, 0)) if self.sums else tuple(results)


def sharded(dtype, mesh, mode="generated"):
    """A `Moves`, and this rank's part of its argument, 64 x 8 numbers."""
    outputs = [layout(), *[layout("tp")] * (dtype not in WITHOUT_PAD), *[layout()] * (dtype not in WITHOUT_SUM)]
    plan = {
        "": {"input": {"x": layout("tp")}, "output": outputs},
        "columns": {"input": {"x": layout(None, "tp")}},
        "whole": {"input": {"x": layout()}},
    }
    if dtype in WITH_GRADIENT:
        plan[""]["weight"] = {"scale": layout("tp")}
    part = Tensor(np.ones((64 // mesh.axis_size("tp"), 8)), getattr(ms, dtype))
    return shard(Moves(dtype), mesh, plan=plan, mode=mode, device_model=SLOW), part


def loss_of(results):
    """A number, to which all results contribute."""
    return sum(ops.cast(result, ms.float32).sum() for result in results)


def foretold(dtype, mesh):
    """`(kind, axes)` -> calls and bytes of a step, forward and backward, by the plan of a `Moves`."""
    cell, x = sharded(dtype, mesh)
    traffic = make_report(prepare(cell, x).plan, algorithm_of).traffic
    return summed(((name, axes), counts) for (axes, _, name), counts in traffic.items())
