"""Ranks of a checkpoint as threads of this process, with arrays as their tensors; file layers that count and fail."""

import os
import threading
from concurrent.futures import Future

import numpy as np

from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Part, Ranks
from mindformers_core.checkpoint.regions import inside, local_box, shape_of
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.slices import FileLayer
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16, "int64": np.uint64, "bool": np.uint8}


class QuickFiles(FileLayer):
    """Waits for no disk."""

    def sync(self, descriptor):
        pass


class CountingFiles(QuickFiles):
    """Counts the bytes that all threads read and write."""

    def __init__(self):
        self.__dict__["counts"] = {"read": 0, "written": 0}

    def read(self, descriptor, buffer, position):
        count = super().read(descriptor, buffer, position)
        self.counts["read"] += count
        return count

    def write(self, descriptor, data, position):
        count = super().write(descriptor, data, position)
        self.counts["written"] += count
        return count


class NoThread:
    """Instead of a `ThreadPoolExecutor`: faster here."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        found = Future()
        found.set_result(function(*arguments))
        return found


def without_threads(monkeypatch):
    """Compute checksums in the thread that reads and writes."""
    for module in ("save", "load"):
        monkeypatch.setattr(f"mindformers_core.checkpoint.{module}.ThreadPoolExecutor", NoThread)


def on_threads(ranks, function):
    """Call `function(Ranks)` for each of the numbers `ranks`, all at once; returns all results, or raises an error."""
    numbers = list(ranks)
    barrier, values, results, errors = threading.Barrier(len(numbers)), {}, {}, {}

    def work(rank):
        def gather(value):
            values[rank] = value
            barrier.wait(30)
            found = dict(values)
            barrier.wait(30)
            return found

        try:
            results[rank] = function(Ranks(rank, gather))
        except BaseException as error:
            errors[rank] = error
            if not isinstance(error, (OSError, ValueError)):
                barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors.values():
        if not isinstance(error, threading.BrokenBarrierError):
            assert isinstance(error, (OSError, ValueError)) is False or len({str(e) for e in errors.values()}) == 1
            raise error
    return results


class State:
    """Global tensors, as bits, and the parts of them that the ranks of a mesh hold.

    Args:
        tensors: a dict, (group, name) -> (dtype, array of unsigned numbers).
        layouts: a dict, (group, name) -> list of `Layout`s, each on other ranks or on all.
    """

    def __init__(self, tensors, layouts):
        self.tensors, self.layouts = tensors, layouts

    @property
    def ranks(self):
        """All ranks."""
        return sorted({rank for each in self.layouts.values() for layout in each for rank in layout.mesh.rank_list})

    def parts(self, rank):
        """The `Part`s of a rank."""
        return [
            Part(*key, dtype, array.shape, local_box(layout, array.shape, rank))
            for key, (dtype, array) in self.tensors.items()
            for layout in self.layouts[key]
            if rank in layout.mesh.rank_list
        ]

    def value(self, part):
        """The array of a part."""
        return self.tensors[part.key][1][inside(part.box, [(0, size) for size in part.shape])]

    def save(self, folder, documents=(), files=None):
        """Save by all ranks."""
        return on_threads(
            self.ranks,
            lambda ranks: save(
                folder, self.parts(ranks.rank), self.value, dict(documents), ranks, files=files or QuickFiles()
            ),
        )

    def load(self, folder, files=None, **options):
        """Load by all ranks: rank -> (part -> array, `LoadReport`)."""

        def work(ranks):
            found = {}
            report = load(
                open_checkpoint(folder), self.parts(ranks.rank), found.__setitem__, ranks, files=files, **options
            )
            return found, report

        return on_threads(self.ranks, work)

    def check(self, folder, files=None):
        """Load by all ranks, and compare every bit; returns the reports."""
        found = self.load(folder, files)
        for rank, (arrays, _) in found.items():
            assert list(sorted(arrays, key=str)) == sorted(self.parts(rank), key=str)
            for part, array in arrays.items():
                assert array.shape == shape_of(part.box) and array.dtype == BITS[part.dtype]
                np.testing.assert_array_equal(array, self.value(part), err_msg=f"{part} on rank {rank}")
        return [report for _, report in found.values()]


def random_tensors(rng, shapes, group="model"):
    """Tensors with random bits, of several dtypes."""
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        dtype = list(BITS)[number % 4]
        bits = rng.integers(0, np.iinfo(BITS[dtype]).max, shape, BITS[dtype], endpoint=True)
        found[group, name] = dtype, bits
    return found


class Killed(BaseException):
    """The end of a process, which nothing catches."""


class FaultyFiles(QuickFiles):
    """Records the calls that change the disk, or open a file, and fails at one of them.

    A failing `write` writes half; folders are removed name by name, the list of checksums last. After `Killed` each
    call raises it.

    Args:
        number: of the call that fails, from 1 on; 0: none.
        fault: function that raises the error, or kills the process.
    """

    def __init__(self, number=0, fault=None):
        self.__dict__.update(number=number, fault=fault, calls=[], paths={}, is_dead=False)

    def _call(self, name, path, partly=None):
        if self.is_dead:
            raise Killed
        self.calls.append((name, path))
        if len(self.calls) == self.number:
            if partly:
                partly()
            try:
                self.fault()
            except Killed:
                self.__dict__["is_dead"] = True
                raise

    def make_folder(self, path):
        self._call("make_folder", path)
        super().make_folder(path)

    def open(self, path, mode):
        self._call("make" if mode == "make" else "open", path)
        descriptor = super().open(path, mode)
        self.paths[descriptor] = path
        return descriptor

    def resize(self, descriptor, nbytes):
        self._call("resize", self.paths[descriptor])
        super().resize(descriptor, nbytes)

    def write(self, descriptor, data, position):
        half = data[: len(data) // 2]
        self._call("write", self.paths[descriptor], lambda: os.pwrite(descriptor, half, position))
        return super().write(descriptor, data, position)

    def sync(self, descriptor):
        self._call("sync", self.paths[descriptor])

    def rename(self, path, target):
        self._call("rename", path)
        super().rename(path, target)

    def remove(self, folder):
        for path, _, names in os.walk(folder, topdown=False):
            for name in sorted(names, key=lambda name: (name == "checksums.json", name)):
                self._call("unlink", os.path.join(path, name))
                os.unlink(os.path.join(path, name))
            self._call("rmdir", path)
            os.rmdir(path)


SHAPES = {  # a column weight, a row weight, one of three dims, a small one, a scalar, one on two stages
    "layers.0.column": (8, 12),
    "layers.1.row": (12, 8),
    "layers.0.kernel": (4, 8, 4),
    "layers.1.norm": (12,),
    "layers.0.scale": (),
    "embed": (16, 4),
}
MESHES = {  # (pp, dp, tp), ZeRO shards over dp
    "one": ((1, 1, 1), False),
    "dp": ((1, 4, 1), False),
    "zero": ((1, 4, 1), True),
    "tp": ((1, 1, 4), False),
    "dp_tp": ((1, 2, 2), False),
    "zero_tp": ((1, 2, 2), True),
    "pp_tp": ((2, 1, 2), False),
    "pp_zero_tp": ((2, 2, 2), True),
}


def state_on(tensors, name):
    """The tensors on a mesh of `MESHES`: stage 0 has layers.0, stage 1 layers.1, both have `embed`."""
    sizes, is_sharded = MESHES[name]
    mesh = DeviceMesh(sizes, ("pp", "dp", "tp"))
    stages = [mesh.sub_mesh(("dp", "tp"), rank) for rank in range(0, mesh.size, mesh.size // sizes[0])]
    layouts = {}
    for group, path in tensors:
        shape, zero = SHAPES[path], ("dp",) if is_sharded else ()
        dims = {"layers.0.column": (("tp", *zero), ()), "layers.1.row": (zero, ("tp",)), "embed": (("tp",), zero)}
        dims |= {"layers.0.kernel": ((), ("tp",), zero)}
        on = stages if path == "embed" else [stages[-1 if path.startswith("layers.1") else 0]]
        layouts[group, path] = [Layout.on(stage, dims.get(path, ((),) * len(shape))) for stage in on]
    return State(tensors, layouts)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return random_tensors(rng, SHAPES) | random_tensors(rng, SHAPES, "optimizer")


def save_after_two(job):
    """Let a `Job` save a checkpoint after its second step."""
    from mindformers_core.trainer.checkpoints import save_job  # MindSpore

    run_step = job.run_step

    def step(*arguments):
        found = run_step(*arguments)
        if job.step == 2:
            save_job(job)
        return found

    job.run_step = step
