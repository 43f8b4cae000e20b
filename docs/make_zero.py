"""Writes the tables of docs/zero.md. What is computed, in one process; what is measured, on four:

python docs/make_zero.py
bash scripts/msrun_launch.sh docs/make_zero.py 4 4
"""

import os
import tempfile
from pathlib import Path

import mindspore as ms
from page_blocks import filled

from mindformers_core.communication import init_distributed, shutdown, world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaForCausalLM
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import MESH_AXES, mesh_shape
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.trainer import Trainer
from mindformers_core.zero import MixedPrecision, hsdp, memory_report

__all__ = ["LARGE", "PAGE", "computed_tables", "measured_table"]

DOCS = Path(__file__).resolve().parent
PAGE, CONFIGS = DOCS / "zero.md", DOCS.parent / "configs"
MIXED = MixedPrecision(parameter="float32", compute="bfloat16", gradient="bfloat16")
TINY = ("training.gradient_accumulation_steps=1", "parallelism.comm_fusion=0.02", "monitor.plot=false")
LARGE = {"llama3_8b": (64, 1), "llama3_70b": (16, 8)}  # recipe -> sizes of dp and tp
LEVELS = {"plain": (1, "level1")} | {f"level {number}": (None, f"level{number}") for number in (1, 2, 3)}
HEAD = ("level", "at", "weights", "parts", "gradients", "state", "buckets", "together")
KINDS = ("weights", "parts", "gradients", "state", "buckets", "total")


def table(head, rows):
    """Rows of texts as Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def computed_tables(names=tuple(LARGE)):
    """Name of a block -> the table of a large recipe's model, gigabytes on a rank."""
    tables = {}
    for name, sizes in ((name, LARGE[name]) for name in names):
        rows = [row for level in LEVELS for row in _computed_rows(name, sizes, level)]
        tables[f"{name}, dp {sizes[0]}, tp {sizes[1]}"] = table([*HEAD, "states"], rows)
    return tables


def _computed_rows(name, sizes, level):
    recipe = load_recipe(str(CONFIGS / f"{name}.yaml"))
    init_distributed("fake", world_size=sizes[0] * sizes[1], rank=0)
    try:
        with ms.DeviceCtx("meta"):
            net = LlamaForCausalLM(recipe.model)
        shard(net, init_device_mesh(sizes, ("dp", "tp")), recipe.parallelism)
        shard_size, optimizer_level = LEVELS[level]
        report = memory_report(hsdp(net, shard_size or sizes[0], 64, optimizer_level, mixed_precision=MIXED))
    finally:
        shutdown()
    states = [f"{report.states / 1e9:.1f}", ""]
    for place, (moment, title) in enumerate((("pass", "forward, backward"), ("update", "update"))):
        figures = [f"{getattr(report.computed[moment], kind) / 1e9:.1f}" for kind in KINDS]
        yield ["" if place else level, title, *figures, states[place]]


def measured_table():
    """The table of the tiny recipe on four ranks, kilobytes on this one; all ranks call it."""
    rows = []
    for number, level in enumerate(LEVELS):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [f"parallelism.zero_level={number}", f"training.output_dir={folder}", *TINY]
            recipe = load_recipe(str(CONFIGS / "llama_tiny_zero.yaml"), overrides)
        mesh = init_device_mesh(mesh_shape(recipe, world().size), MESH_AXES)
        job = Trainer(recipe, mesh=mesh)
        job.train_step()
        report = memory_report(job.cells[0], job.optimizer)
        for place, (moment, title) in enumerate((("pass", "forward, backward"), ("update", "update"))):
            measured = [f"{getattr(report.measured[moment], kind) / 1e3:.1f}" for kind in KINDS]
            computed = f"{report.computed[moment].total / 1e3:.1f}"
            rows.append(["" if place else level, title, *measured, computed])
    return table([*HEAD, "computed"], rows)


if __name__ == "__main__":
    if "RANK_ID" in os.environ:
        init_distributed()
        blocks = {"measured": measured_table()}
    else:
        blocks = computed_tables()
    if int(os.environ.get("RANK_ID", 0)) == 0:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
