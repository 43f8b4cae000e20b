"""What saving and loading cost: our checkpoints against `mindspore.save_checkpoint` and `load_checkpoint`, same state.

By hand: `python benchmarks/checkpoint.py`. Two ranks hold halves of 24 float32 matrices of 8 MB, cut in dim 0; in our
checkpoints a third of them are weights, and two thirds moments, as with AdamW.

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
from dataclasses import replace

import harness
import mindspore as ms
import numpy as np
from mindspore import Parameter, nn

from mindformers_core import init_device_mesh, relayout, shard
from mindformers_core.checkpoint.background import BackgroundSave
from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts
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
    os.makedirs(FOLDER, exist_ok=True)
    own = f"{FOLDER}/rank_{rank}.ckpt"
    save_theirs, save_bare, load_theirs = _theirs(rows, own)
    save_ours, load_rows, start, settle = _ours(rows, ranks)
    (_, load_columns, *_), (_, load_whole, *_) = _ours(columns, ranks), _ours(Weights(None), Ranks())
    for run in (save_ours, save_theirs, load_columns, load_theirs, load_rows):
        run()
    _compare(rows), _compare(columns)
    return [
        harness.Variant("save/mindspore", "save/mindspore", save_theirs, _remove(own)),
        harness.Variant("save/mindspore, bare", "save/mindspore", save_bare, _remove(own)),
        harness.Variant("save/ours", "save/mindspore", save_ours, _remove(f"{FOLDER}/ours")),
        harness.Variant("load/mindspore", "load/mindspore", load_theirs, save_theirs),
        harness.Variant("load/mindspore, bare", "load/mindspore", lambda: load_theirs(False), save_bare),
        harness.Variant("load/ours, same mesh", "load/mindspore", load_rows),
        harness.Variant("load/ours, other mesh", "load/mindspore", load_columns),
        harness.Variant("load/ours, one rank", "load/mindspore", load_whole, ranks=(0,)),
        harness.Variant("relayout", "load/mindspore", lambda: relayout(rows, columns)),
        harness.Variant("async/blocked", "save/ours", start, _remove(f"{FOLDER}/async")),
        harness.Variant("async/written", "save/ours", settle),
    ]


def _remove(path):
    """A function that removes a file, or on rank 0 a folder: what the last repeat has saved."""

    def remove():
        if os.path.isfile(path):
            os.remove(path)
        elif world().rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        return ()

    return remove


def _theirs(cell, path):
    """MindSpore's ways: to save as safely as we do, to save, and to load."""

    def save_bare():
        ms.save_checkpoint(cell, path)
        return ()

    def save_safely():
        ms.save_checkpoint(cell, path, crc_check=True)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return ()

    return (
        save_safely,
        save_bare,
        lambda checks=True: ms.load_param_into_net(cell, ms.load_checkpoint(path, crc_check=checks)),
    )


def _ours(cell, ranks):
    """Ours: to save, to load, to begin saving beside other work, and to wait for that."""
    parts = {  # two thirds as the moments of an optimizer
        replace(part, group="model" if number < COUNT // 3 else "optimizer"): parameter
        for number, (part, parameter) in enumerate(model_parts([cell], world().rank).items())
    }
    plans, background = [None], BackgroundSave(ranks)
    own, folder = list(parts), f"{FOLDER}/ours"

    def values(part):
        return parts[part].asnumpy()

    def save_all():
        plans[0] = save(folder, own, values, {}, ranks, plans[0])

    return (
        save_all,
        lambda: load(open_checkpoint(folder), own, lambda part, array: fill_parameter(parts[part], array), ranks),
        lambda: background.start(f"{FOLDER}/async", own, values, {}, (0, 0)),
        background.settle,
    )


def _compare(cell):
    """Every bit with the values that all ranks began with."""
    expected = Weights(None)
    for part, parameter in model_parts([cell], world().rank).items():
        value = expected._params[part.name].asnumpy()[tuple(slice(*ends) for ends in part.box)]
        np.testing.assert_array_equal(parameter.asnumpy(), value, err_msg=part.name)


if __name__ == "__main__":
    code = main()
    shutil.rmtree(FOLDER, ignore_errors=True)
    sys.exit(code)
