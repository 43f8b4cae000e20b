"""Tiny runs for the tests of `diff`, on simulated ranks, and faults planted into them while they run."""

import re
from dataclasses import dataclass
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.communication import world
from mindformers_core.diff.runs import Run
from mindformers_core.program.observer import Instrumentation
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.sharding.sharded_cells import tree_and_path

RECIPE = "configs/llama_tiny_cpu_1p.yaml"
TINY = (
    "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "train_dataset.seq_length=16",
    "train_dataset.max_bytes=90000", "lr_scheduler.warmup_steps=0", "monitor.digests=true",
)  # fmt: skip
TP = ("parallelism.tensor_parallel=2",)
DP = ("parallelism.data_parallel_shard=2", "training.local_batch_size=2")
ZERO3 = (*DP, "parallelism.zero_level=3", "parallelism.zero_threshold_kb=0")
PP = (
    "parallelism.pipeline_parallel=2", "training.local_batch_size=8", "parallelism.pipeline_parallel_microbatch_size=4",
)  # fmt: skip


def recorded(folder, overrides=(), steps=1, prepare=None):
    """The `Run` of a tiny recipe."""
    recipe = load_recipe(RECIPE, [*TINY, f"training.output_dir={folder}", *overrides])
    run_simulated(recipe, steps, prepare)
    return Run(f"{folder}/digests")


class _Backward(nn.Cell):
    """The identity, whose gradient goes through a function."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def construct(self, x):
        return ops.stop_gradient(x)

    def bprop(self, x, out, dout):
        return (self.change(dout),)


@dataclass(frozen=True)
class Planted:
    """A fault in generated functions: what they compute as `variable` in a Cell is changed.

    Attributes:
        cell, variable: path of the Cell, and variable of its function, or the beginning of the line that assigns it.
        change: function of a tensor.
        ranks: where; None for all.
        backward: whether the gradient is changed, in the place of the tensor.
        source: in the place of `change`, the expression for the variable.
    """

    cell: str
    variable: str
    change: object = None
    ranks: tuple | None = None
    backward: bool = False
    source: str = ""

    def enter(self, monkeypatch):
        """Plant the fault until the test ends."""
        before_text, before_loaded = Instrumentation.text, Instrumentation.loaded
        variable = self.variable.partition(" = ")[0]
        line = re.escape(self.variable) if variable != self.variable else rf"{variable}(?:, \w+)* = "
        pattern = re.compile(rf"^    {line}.*$", re.MULTILINE)

        def text(given, source):
            last = f"    {variable} = planted(self, {variable}, {self.source or None})"
            return pattern.sub(lambda match: f"{match[0]}\n{last}", before_text(given, source))

        def loaded(given, module, source):
            before_loaded(given, module, source)
            module.planted = partial(self._planted, world().rank)

        monkeypatch.setattr(Instrumentation, "text", text)
        monkeypatch.setattr(Instrumentation, "loaded", loaded)

    def _planted(self, rank, cell, tensor, other):
        if tree_and_path(cell)[1] != self.cell or self.ranks is not None and rank not in self.ranks:
            return tensor
        if self.source and other is not None:
            return other
        return _Backward(self.change)(tensor) if self.backward else self.change(tensor)


def at_one_place(amount):
    """Adds to one element."""

    def change(tensor):
        array = np.zeros(tensor.shape, np.float32)
        array.flat[array.size // 2] = amount
        return tensor + ms.Tensor(array).astype(tensor.dtype)

    return change


def stale():
    """The tensor of the first call, at every call."""
    kept = []

    def change(tensor):
        kept.append(tensor.asnumpy().copy())
        return tensor - ops.stop_gradient(tensor) + ms.Tensor(kept[0])

    return change


def rolled(dim):
    """Parts along a dim in the wrong place."""
    return lambda tensor: ops.cat(ops.split(tensor, tensor.shape[dim] // 2, dim)[::-1], dim)


def scaled(factor):
    """A wrong factor."""
    return lambda tensor: tensor * factor


def coarse(tensor):
    """Computed in float16."""
    return tensor.astype(ms.float16).astype(tensor.dtype)
