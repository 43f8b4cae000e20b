"""Random things to verify: Cells under random plans, `hsdp()`, `recompute()`, `swap()`, and recipes of a tiny Llama."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from models import EXAMPLES, axes_of
from models.example import columns, rows
from support.launch import ROOT
from support.small_zero import Net, array

from mindformers_core import recompute, shard, swap, verify
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.zero import hsdp

sys.path.append(str(Path(__file__).parent.parent / "ranks"))

from random_cells import random_cell, random_plan  # noqa: E402 (found by the path)

__all__ = ["TINY", "Tower", "check_delicate", "check_example", "check_hsdp", "check_plan", "check_recipe"]

MESHES = (((2,), ("dp",)), ((2,), ("tp",)), ((4,), ("dp",)), ((2, 2), ("dp", "tp")), ((2, 2), ("cp", "tp")))
MESHES += (((2, 2, 2), ("dp", "cp", "tp")),)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zb_v": 2, "dualpipe_v": 2}
TINY = (
    "training.local_batch_size=4",
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "train_dataset.seq_length=8",
)
TINY += ("model.max_position_embeddings=8", "parallelism.pipeline_parallel_microbatch_size=1")


def one_of(random, choices):
    """An entry of a sequence, whatever its type."""
    return choices[random.integers(len(choices))]


class Tower(nn.Cell):
    """Layers that share a weight and one called twice, a frozen parameter, integers, booleans, a keyword argument."""

    def __init__(self, random, depth):
        super().__init__()
        seeds = random.integers(1000, size=depth)
        self.layers = nn.CellList([nn.Dense(8, 8, weight_init=Tensor(array(8, 8, seed=seed))) for seed in seeds])
        self.words = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm((8,))
        self.norm.gamma.requires_grad = bool(random.integers(2))
        if depth > 2:
            self.layers[2].weight = self.layers[0].weight

    def construct(self, ids, keep, scale=1.0, bias=None):
        x = self.words(ids) * scale
        for layer in (*self.layers, self.layers[0]):
            x = x + ops.tanh(self.norm(layer(x)))
        x = ops.where(keep, x, ops.zeros_like(x))
        x = x if bias is None else x + bias
        return ops.mean(ops.square(x))


def check_example(name, mesh):
    """Verify a model of `models`, with the same values at every call, of which no gradient is rounding errors alone."""
    example, axes, random = EXAMPLES[name], axes_of(mesh), np.random.default_rng(0)
    args, kwargs = example.inputs(1)
    cell = example.make()
    for parameter in cell.trainable_params():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.5))
    return verify(cell, mesh, *args, plan=example.plan(axes), config=example.config(axes), **kwargs), mesh


def check_plan(seed):
    """Verify a random Cell with random declared layouts."""
    case, mesh = random_cell(seed), DeviceMesh(*MESHES[seed % len(MESHES)])
    return verify(case.make(), mesh, *map(Tensor, case.inputs), plan=random_plan(seed, mesh, case.block)), mesh


def check_hsdp(seed):
    """Verify a Cell under `hsdp()`, sharded over other axes or plain, perhaps recomputed."""
    random = np.random.default_rng([seed, 1])
    dp, tp = one_of(random, [(2, 1)] * 6 + [(4, 1), (2, 2), (2, 2), (4, 2), (2, 4)])
    mesh = DeviceMesh((dp, tp), ("dp", "tp"))
    settings = _hsdp_settings(random, dp)
    make, inputs, named = _tower(random, 2 * dp) if tp == 1 and random.random() < 0.7 else _net(random, tp, 2 * dp)
    is_plain, of_dp = tp == 1 and random.random() < 0.5, random.random() < 0.6
    axes = "dp" if of_dp and not is_plain else None
    whole = {"full": True} if "layers" in dict(make().name_cells()) else {"select": ["first"]}
    recomputed = one_of(random, [None, None, whole, {"select": ["*.Tanh"]}])
    swapped = random.random() < 0.15 and not recomputed

    def build():
        net = make()
        if is_plain:
            return hsdp(net, mesh=DeviceMesh((dp,), ("dp",)), **settings)
        plan = {"": {"input": {name: layout(axes) if axes else layout() for name in net.arguments}}}
        own = mesh if of_dp else mesh.sub_mesh(("tp",), world().rank)
        net = shard(net, own, plan=plan)
        net = recompute(net, **recomputed) if recomputed else net
        net = swap(net, op_swap={"*.Tanh": {}}) if swapped else net
        return hsdp(net, mesh=None if of_dp else mesh, **settings)

    return verify(build, mesh if not is_plain else DeviceMesh((dp,), ("dp",)), *inputs, **named), mesh


def _hsdp_settings(random, dp):
    """Keyword arguments of `hsdp()`."""
    return {
        "shard_size": one_of(random, [size for size in (1, 2, 4) if size <= dp]),
        "threshold": one_of(random, [0, 0, 0.05, 0.2]),
        "optimizer_level": one_of(random, ["level1", "level2", "level3"]),
        "accumulate_grad_step": one_of(random, [1, 1, 1, 2, 3]),
        "comm_fusion": one_of(random, ["auto", 0, 0.0003, {"mode": "index", "config": [2, 4]}]),
        "gradient_accumulation_shard": one_of(random, [None, True, False]),
        "reshard_after_forward": one_of(random, [None, True, False]),
        "prefetch": one_of(random, [0, 1, 2]),
    }


def _tower(random, batch):
    """A function that makes a `Tower`, and its inputs."""
    seed, depth = int(random.integers(1000)), one_of(random, [1, 2, 3])
    inputs = Tensor(random.integers(0, 16, (batch, 4)).astype(np.int32)), Tensor(random.random((batch, 4, 8)) < 0.8)
    named = {"bias": Tensor(array(batch, 4, 8, seed=seed))} if random.random() < 0.5 else {"scale": 0.5}

    def make():
        net = Tower(np.random.default_rng(seed), depth)
        net.arguments = ["ids", "keep", *(["bias"] if "bias" in named else [])]
        return net

    return make, inputs, named


def _net(random, tp, batch):
    """A function that makes a `Net` of random layouts, and its inputs."""
    layouts = [layout("tp", None), layout(None, "tp"), layout(None, None), None]
    chosen = [one_of(random, layouts) if tp > 1 else None for _ in range(2)]

    def make():
        net = Net(*chosen)
        net.arguments = ["x"]
        return net

    return make, (Tensor(array(batch, 8, seed=int(random.integers(1000)))),), {}


class Delicate(nn.Cell):
    """Numbers that rounding changes much: half precision, norms over a small batch, differences from means, a head of
    one output, ReLUs."""

    def __init__(self, random, width, is_plain=False):
        super().__init__()
        self.half, self.centres = one_of(random, ["", "", "to_float", "cast"]), one_of(random, ["", "mean", "var"])
        sizes = [(6, width), (width, width), (width, one_of(random, [1, 1, 2]))]
        weights = [Tensor(array(out, size, seed=random.integers(1000))) for size, out in sizes]
        self.layers = nn.CellList([nn.Dense(*size, weight_init=weight) for size, weight in zip(sizes, weights)])
        self.layers[1].to_float(ms.float16) if self.half == "to_float" else None
        norms = [None, nn.LayerNorm((width,)), *(nn.BatchNorm1d(width) for _ in range(0 if is_plain else 2))]
        self.norm = one_of(random, norms)
        self.act = one_of(random, [ops.relu, ops.tanh, ops.gelu])

    def construct(self, x):
        x = self.layers[0](x)
        if self.centres:
            x = x - mint.mean(x, 0, True)
        if self.centres == "var":
            x = x / ops.sqrt(mint.mean(ops.square(x), 0, True) + 1e-3)
        x = self.act(x)
        if self.half == "cast":
            x = ops.matmul(x.astype(ms.float16), self.layers[1].weight.astype(ms.float16).T) + self.layers[1].bias
        else:
            x = self.layers[1](x)
        x = self.act(x if self.norm is None else self.norm(x.astype(ms.float32)))
        return ops.square(self.layers[2](x.astype(ms.float32))).mean()


def check_delicate(seed):
    """Verify a `Delicate` on 2, 3, 4 or 6 ranks: under `hsdp()`, or sharded."""
    random = np.random.default_rng([seed, 4])
    ranks, width = one_of(random, [(2,), (3,), (3,), (5,), (6,), (2, 3), (3, 2)]), one_of(random, [6, 12, 30])
    mesh = DeviceMesh(ranks, ("dp", "tp")[: len(ranks)])
    x, plan = Tensor(array(2 * ranks[0], 6, seed=seed)), {"": {"input": {"x": layout("dp")}}}
    if len(ranks) > 1:
        plan |= {"layers.0": columns(axes_of(mesh)), "layers.1": rows(axes_of(mesh))}
    if len(ranks) > 1 or random.random() < 0.6:
        return verify(Delicate(random, width).set_train(), mesh, x, plan=plan), mesh
    settings, seed = _hsdp_settings(random, ranks[0]), random.integers(99)
    settings["shard_size"] = one_of(random, [1, ranks[0]])

    def build():
        return hsdp(Delicate(np.random.default_rng(seed), width, is_plain=True).set_train(), mesh=mesh, **settings)

    return verify(build, mesh, x), mesh


def check_recipe(seed):
    """Verify a step of a recipe."""
    random = np.random.default_rng([seed, 2])
    dp, tp, pp = one_of(
        random, [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4), (4, 1, 1)]
    )
    schedule = one_of(random, list(SCHEDULES))
    stages = pp * SCHEDULES[schedule]
    replicas = one_of(random, [1, dp]) if dp > 1 else 1
    recomputed = one_of(
        random, ["false", "false", "true", "{select: ['*.mlp']}", "{select: ['*.SiLU', '*.core_attention']}"]
    )
    rows = max(4, 2 * pp) if schedule == "dualpipe_v" else 4  # which takes two micro-batches, of one row, for each rank
    given = {
        "parallelism.data_parallel_replicate": replicas,
        "parallelism.data_parallel_shard": dp // replicas,
        "parallelism.tensor_parallel": tp,
        "parallelism.sequence_parallel": tp > 1 and bool(random.integers(2)),
        "parallelism.pipeline_parallel": pp,
        "parallelism.pipeline_parallel_schedule": schedule if pp > 1 else "1f1b",
        "parallelism.pipeline_parallel_interleave_num": SCHEDULES[schedule] if pp > 1 else 1,
        "parallelism.zero_level": one_of(random, [0, 1, 2, 3]) if dp > replicas else 0,
        "parallelism.zero_threshold_kb": one_of(random, [0, 1]),
        "training.local_batch_size": rows,
        "training.global_batch_size": rows * dp * one_of(random, [1, 1, 2]) - one_of(random, [0, 1, 2]),
        "model.num_hidden_layers": max(2, stages),
        "model.tie_word_embeddings": bool(random.integers(2)),
        "model.num_key_value_heads": one_of(random, [2, 4]),
        "recompute": recomputed,
    }
    overrides = [
        *TINY,
        *(f"{key}={str(value).lower() if value in (True, False) else value}" for key, value in given.items()),
    ]
    recipe = load_recipe(str(ROOT / "configs/llama_tiny_pp.yaml"), overrides)
    return verify_recipe(recipe, full=True), f"{dp} x {tp} x {pp}"
