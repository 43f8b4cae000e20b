"""The state in memory: each box on two machines, little is sent; machines that are lost, and memory that is damaged."""

import os
import random
import re
import shutil
from collections import Counter
from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest
from support.checkpoint_states import MESHES, FaultyFiles, Killed, QuickFiles, state_on, tensors
from support.nightly import seeds
from test_training_loop import ONE_RANK, SMALL, rows_of

from mindformers_core import Trainer
from mindformers_core.checkpoint.load import load
from mindformers_core.checkpoint.memory.plan import plan_memory
from mindformers_core.checkpoint.memory.store import MemoryStore
from mindformers_core.checkpoint.parts import boxes_of, tensors_of
from mindformers_core.checkpoint.regions import cells, overlap, volume
from mindformers_core.checkpoint.tensors import ranks_of
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import DeviceMesh

pytestmark = pytest.mark.long

CALLS = 3800  # of the file system, in the job that dies
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}


def die():
    raise Killed


def machines_of(ranks, of_each, folder=""):
    """`of_each` ranks on a machine."""
    return {rank: ("host", f"{folder}/{rank // of_each}") for rank in ranks}


@pytest.mark.parametrize("seed", range(24))
def test_each_box_is_on_two_machines_and_only_what_one_has_is_sent(seed):
    rng = random.Random(seed)
    state = state_on(tensors(), rng.choice([name for name in MESHES if name != "one"]))
    everywhere = {rank: state.parts(rank) for rank in state.ranks}
    machines = machines_of(state.ranks, rng.choice((1, 2)))
    plan, moves = plan_memory(everywhere, machines, piece_bytes=rng.choice((48, 2**24)))
    places, held, sent = {}, boxes_of(everywhere), Counter()
    for piece in plan.pieces:
        places.setdefault((piece.key, piece.box), []).append(machines[piece.rank])
    assert all(len(found) == len({*found}) == 2 for found in places.values())
    for key, (_, shape) in tensors_of(everywhere).items():
        found = cells([(0, box) for other, box in places if other == key], shape)  # raises where some are missing
        assert sum(map(volume, found)) == int(np.prod(shape))
    for move in moves:
        on = {machines[rank] for rank, box in held[move.key] if overlap(box, move.box)}
        assert on == {machines[move.sender]} != {machines[move.receiver]}
        sent[move.key] += move.nbytes
    for key, (dtype, shape) in tensors_of(everywhere).items():
        lonely = [box for box, ranks in cells(held[key], shape).items() if len({machines[rank] for rank in ranks}) == 1]
        assert sent[key] == sum(map(volume, lonely)) * SIZES[dtype]
    for lost in combinations({*machines.values()}, 2):
        assert {*machines.values()} - {*lost} or all({*found} == {*lost} for found in places.values())


class Machines:
    """A job of simulated ranks on machines with memory of their own, below a folder.

    Args:
        folder: of all memory.
        name: of the mesh.
        of_each: ranks of a machine.
        files: the `FileLayer`.

    Attributes:
        done: steps whose state is kept.
    """

    def __init__(self, folder, name, of_each=1, files=None):
        self.ranks, self.name = state_on(tensors(), name).ranks, name
        self.machines, self.files = machines_of(self.ranks, of_each, folder), files or QuickFiles()
        self.done = set()

    def keep(self, *steps, value=None):
        """Keep the states after steps, whose tensors are drawn from their numbers, or `value(part, rank)`."""

        def work(ranks, store):
            with suppress(ValueError):
                store.find()
            for step in steps:
                state = state_on(tensors(step), self.name)
                values = state.value if value is None else lambda part: value(part, ranks.rank)
                store.keep(step, state.parts(ranks.rank), values, {"state.json": b'{"step": %d}' % step})
                self.done.add(step)

        self.run(work)

    def load(self):
        """The step of the state that is found, which is compared; or the text that says why there is none."""

        def work(ranks, store):
            checkpoint, text = store.find()
            if checkpoint is None:
                return text
            step, found = checkpoint.state["step"], {}
            state = state_on(tensors(step), self.name)
            store.bring(checkpoint, state.parts(ranks.rank))
            report = load(checkpoint, state.parts(ranks.rank), found.__setitem__, ranks)
            for part, array in found.items():
                np.testing.assert_array_equal(array, state.value(part))
            assert len(found) == len(state.parts(ranks.rank))
            assert all(path.startswith(store.folder + os.sep) for path in report.files)
            return step

        (found,) = {*self.run(work)}
        return found

    def run(self, work):
        mesh = DeviceMesh((len(self.ranks),), ("rank",))

        def on_rank(rank):
            ranks = ranks_of(mesh, rank)
            return work(ranks, MemoryStore(ranks, self.machines, self.files))

        return SimulatedRanks(len(self.ranks)).run(on_rank)


@pytest.mark.parametrize(
    ("before", "of_each", "after"), [("zero", 1, "zero"), ("pp_zero_tp", 2, "dp_tp"), ("tp", 1, "dp")]
)
def test_one_machine_less_loses_nothing_and_two_neighbours_do(tmp_path, before, of_each, after):
    """On other ranks than before. A machine that is new gets its part, and holds it after the next step."""
    job = Machines(str(tmp_path), before, of_each)
    job.keep(1, 2, 3, 4)
    assert sorted(os.listdir(tmp_path / "0")) == ["step_3", "step_4"]
    shutil.rmtree(tmp_path / "1")
    assert Machines(str(tmp_path), after).load() == 4
    assert os.listdir(tmp_path / "0") == os.listdir(tmp_path / "1") == ["step_4"]
    job.keep(5, 6)
    assert sorted(os.listdir(tmp_path / "0")) == ["step_5", "step_6"]
    shutil.rmtree(tmp_path / "0")
    shutil.rmtree(tmp_path / "1")
    assert re.fullmatch(r"of step 6 there are [\d,]+ of [\d,]+ bytes", Machines(str(tmp_path), after).load())
    assert not [*tmp_path.rglob("step_*")]


def test_a_state_that_not_all_have_completed(tmp_path):
    """As long as all boxes are there it is taken, else the one before."""
    job = Machines(str(tmp_path), "zero")
    job.keep(1, 2)
    (tmp_path / "0/step_2").rename(tmp_path / "0/step_2.incomplete")
    assert job.load() == 2
    job.keep(3, 4)
    for lost in (1, 2):
        (tmp_path / f"{lost}/step_4").rename(tmp_path / f"{lost}/step_4.incomplete")
    assert job.load() == 3


@pytest.mark.parametrize("seed", seeds(6, 300))
def test_a_job_that_dies_while_it_keeps_its_state(tmp_path, seed):
    """At any call of the file system: the last state is left, or the one that was being made."""
    Machines(str(tmp_path), "zero").keep(1, 2)
    job = Machines(str(tmp_path), "zero", files=FaultyFiles(random.Random(seed).randint(1, CALLS), die))
    with pytest.raises(Killed):
        job.keep(3, 4, 5, 6)
    last = max(job.done, default=2)
    assert Machines(str(tmp_path), "dp_tp").load() in (last, last + 1)


def test_damage_is_found(tmp_path):
    """Of a byte, of a list; of two copies that should be alike."""
    job = Machines(str(tmp_path), "dp")
    job.keep(1)
    for path in tmp_path.rglob("model-*.safetensors"):
        contents = bytearray(path.read_bytes())
        contents[-8:] = bytes(each ^ 1 for each in contents[-8:])
        path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"model-00001.* is damaged: '.*'\[.*\] isn't what was saved"):
        job.load()
    kept = tmp_path / "2/step_1/checksums.json"
    kept.write_bytes(kept.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(ValueError, match="rank 2: .*checksums.json is damaged"):
        job.load()

    def other(part, rank):
        found = state_on(tensors(2), "dp").value(part)
        return found + rank if part.name == "embed" else found

    job.keep(2, value=other)
    with pytest.raises(ValueError, match=r"'embed'\[0:16, 0:4\] isn't what was saved"):
        job.load()


def test_memory_that_is_too_small(tmp_path):
    """Before anything is written: the error says how much it takes for all machines of a host."""

    class Full(QuickFiles):
        def free(self, folder):
            return 100

    with pytest.raises(OSError, match=r"two states in memory need 8\.3 KiB, but .* has 100 B: give it more"):
        Machines(str(tmp_path), "dp", files=Full()).keep(1)
    assert not [*tmp_path.rglob("step_*")]


@pytest.mark.usefixtures("one_rank")
def test_a_job_takes_up_its_state(tmp_path, monkeypatch, capsys):
    """From memory, of the step before the end; from disk, of step 3, where a byte in memory is another one."""
    monkeypatch.setenv("MINDFORMERS_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setenv("MINDFORMERS_RESTART", "1")
    options = [*SMALL, f"training.output_dir={tmp_path / 'a'}", "checkpoint.enable_save=true", "training.resume=auto"]
    options += ["checkpoint.save_interleaved_steps=3", "checkpoint.replicas=1", "training.seed=3"]

    def said(until, *more):
        job = Trainer(ONE_RANK, *options, *more)
        next(row for row in job.steps() if row["step"] == until)
        return capsys.readouterr().out

    assert "the state in memory isn't whole (nothing is there): the run begins anew" in said(5)
    before = rows_of(tmp_path / "a")
    assert f"loaded {tmp_path}/memory/0/step_4: all, of step 4" in said(5)
    rows = rows_of(tmp_path / "a")
    assert [row["loss"] for row in rows] == [row["loss"] for row in before] and len(rows) == 5
    assert rows[4]["loaded_from_disk"] == 0 < rows[4]["loaded_from_memory"] and "replica_seconds" not in rows[4]
    (path,) = (tmp_path / "memory/0/step_4").glob("model-*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    text = said(4)
    assert "the state in memory can't be loaded (checkpoint.load_path: " in text and "is damaged: 'model.norm" in text
    assert f"loaded {tmp_path}/a/checkpoint/step_3: all, of step 3" in text and "read 0 bytes from memory" in text
    assert [row["loss"] for row in rows_of(tmp_path / "a")] == [row["loss"] for row in before[:4]]
    monkeypatch.delenv("MINDFORMERS_MEMORY")
    assert "checkpoint.replicas has no effect, since no supervisor holds memory" in said(5)
