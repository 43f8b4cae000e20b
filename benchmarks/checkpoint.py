"""What saving and loading cost: our checkpoints against `mindspore.save_checkpoint` and `load_checkpoint`, same state.

By hand: `python benchmarks/checkpoint.py`. Two ranks hold halves of 24 float32 matrices of 8 MB, cut in dim 0.

- `save/…`: the base is MindSpore's, where every rank saves its own parameters into a file, with its checksum
  (`crc_check=True`), and waits until it is on the disk, as ours does. `save/mindspore, bare` has neither.
- `load/…`: the base is MindSpore's of the rank's own file, checksum included, and `load_param_into_net`; `bare` has no
  checksum. Ours verifies checksums, too; `other mesh` loads halves that are cut in dim 1, `one rank` the whole on
  rank 0.
- `async/blocked` is how long training stands still for `checkpoint.async_save`, compared with `save/ours`, and
  `async/written` how long it would then have to wait until the checkpoint is on the disk.
- `relayout` moves the state to the other mesh in memory.
"""

import os
import shutil
import sys
import tempfile

import harness
import mindspore as ms
import numpy as np
from mindspore import Parameter, nn

from mindformers_core import init_device_mesh, relayout, shard
from mindformers_core.checkpoint.background import BackgroundSave
from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts, values_of
from mindformers_core.communication import world
from mindformers_core.communication.messages import gather_values
from mindformers_core.layout import layout

COUNT, SHAPE = 24, (1024, 2048)
LIMITS = {"save/ours": 1.1, "load/ours, same mesh": 1.1, "load/ours, other mesh": 1.3, "async/blocked": 0.1}
TITLE = "Checkpoints: 200 MB of float32 on two ranks"
FOLDER = os.path.join(tempfile.gettempdir(), "mindformers_core_benchmark_checkpoint")


class Weights(nn.Cell):
    """Matrices, all of one layout.

    Args:
        placed: the layout.
    """

    def __init__(self, placed):
        super().__init__()
        self.placed, rng = placed, np.random.default_rng(0)
        for number in range(COUNT):
            setattr(self, f"w{number}", Parameter(ms.Tensor(rng.standard_normal(SHAPE, np.float32))))

    def shard(self, config):
        """The layouts of all matrices."""
        return None, None, dict.fromkeys(self._params, self.placed)


def main():
    """Time and show; the exit code is 1 where a rank failed."""
    return harness.run_benchmark(__file__, 2, make_variants, TITLE, remarks)


def remarks(results):
    """Each limit beside the ratio that was measured."""
    bases = {name: results[results[name].base].median for name in LIMITS}
    ratios = {name: results[name].median / bases[name] for name in LIMITS}
    return [
        f"- {name}: {ratios[name]:.2f} of {results[name].base}; limit {limit:g}, "
        f"{'kept' if ratios[name] <= limit else 'EXCEEDED'}"
        for name, limit in LIMITS.items()
    ], all(ratios[name] <= limit for name, limit in LIMITS.items())


def make_variants():
    """Saving, and loading what was saved; all are compared bit by bit before."""
    mesh, rank = init_device_mesh((world().size,), ("tp",)), world().rank
    ranks = Ranks(rank, lambda value: gather_values(mesh, value))
    rows, columns = (shard(Weights(placed), mesh) for placed in (layout("tp", None), layout(None, "tp")))
    whole, folder, own = Weights(None), f"{FOLDER}/ours", f"{FOLDER}/rank_{rank}.ckpt"
    parts = {name: model_parts([cell], rank) for name, cell in (("rows", rows), ("columns", columns), ("whole", whole))}
    os.makedirs(FOLDER, exist_ok=True)
    plans, background = {}, BackgroundSave(ranks)

    def save_ours():
        plans["rows"] = save(
            folder, list(parts["rows"]), lambda part: values_of(parts["rows"][part]), {}, ranks, plans.get("rows")
        )

    def save_theirs():
        ms.save_checkpoint(rows, own, crc_check=True)
        descriptor = os.open(own, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def load_ours(name, ranks=ranks):
        def run():
            load(
                open_checkpoint(folder),
                list(parts[name]),
                lambda part, array: fill_parameter(parts[name][part], array),
                ranks,
            )

        return run

    def save_bare():
        ms.save_checkpoint(rows, own)
        return ()

    def load_theirs(checks=True):
        ms.load_param_into_net(rows, ms.load_checkpoint(own, crc_check=checks))

    def start():
        own_parts = list(parts["rows"])
        background.start(f"{folder}_async", own_parts, lambda part: values_of(parts["rows"][part]), {}, (0, 0))

    save_ours(), save_theirs()
    load_ours("columns")(), load_theirs(), load_ours("rows")()
    expected = Weights(None)
    for name in ("rows", "columns"):
        for part, parameter in parts[name].items():
            value = expected._params[part.name].asnumpy()[tuple(slice(*ends) for ends in part.box)]
            np.testing.assert_array_equal(parameter.asnumpy(), value, err_msg=f"{name} {part.name}")
    return [
        harness.Variant("save/mindspore", "save/mindspore", save_theirs),
        harness.Variant("save/mindspore, bare", "save/mindspore", save_bare),
        harness.Variant("save/ours", "save/mindspore", save_ours),
        harness.Variant("load/mindspore", "load/mindspore", load_theirs, lambda: save_theirs() or ()),
        harness.Variant("load/mindspore, bare", "load/mindspore", lambda: load_theirs(False), save_bare),
        harness.Variant("load/ours, same mesh", "load/mindspore", load_ours("rows")),
        harness.Variant("load/ours, other mesh", "load/mindspore", load_ours("columns")),
        harness.Variant("load/ours, one rank", "load/mindspore", load_ours("whole", Ranks()), ranks=(0,)),
        harness.Variant("relayout", "load/mindspore", lambda: relayout(rows, columns)),
        harness.Variant("async/blocked", "save/ours", start),
        harness.Variant("async/written", "save/ours", background.settle),
    ]


if __name__ == "__main__":
    code = main()
    shutil.rmtree(FOLDER, ignore_errors=True)
    sys.exit(code)
