"""Jobs of ranks that go on by themselves: what is left is the run that would have been. More of them: `trials.py`.

Daily the ranks have no MindSpore, which takes long to start; states in memory: `test_memory`.
"""

import re
import shutil
from pathlib import Path

import pytest
from support.job_events import pooled_ettr
from support.stand_in import worker
from support.trial_points import Samples
from trials import Job, StandIn, check, trials

from mindformers_core.data.order import shuffled

pytestmark = pytest.mark.ranks
TWO = ("parallelism.tensor_parallel=1", "training.steps=12", "checkpoint.replicas=1")
STATES = ("checkpoint.replicas_interleaved_steps=3", "checkpoint.save_interleaved_steps=100")


@pytest.fixture
def start(tmp_path):
    """A function that starts a `Job` in a folder of a name; all are ended."""
    jobs = []

    def start(name, *arguments, **variables):
        jobs.append(Job(tmp_path / name, *arguments, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def lose(job, *ranks):
    """Kill ranks, as if machines were lost: with the memory of each. Returns the rows that there are."""
    processes, memory = job.processes(), None
    assert {*map("rank {}".format, ranks)} <= {*processes}, job.tail()
    for rank in ranks:
        processes[f"rank {rank}"].suspend()
        memory = Path(processes[f"rank {rank}"].environ()["MINDFORMERS_MEMORY"])
        shutil.rmtree(memory / str(rank))
    for rank in ranks:
        processes[f"rank {rank}"].kill()
    return job.rows(), memory


def check_events(job):
    """After each death the job goes on from the newest checkpoint that was complete; each is complete once."""
    whole = [(time, step) for time, what, step in job["events"] if what == ("complete" if job["async"] else "save")]
    assert [step for _, step in whole] == sorted({step for _, step in whole})
    for trial in job["trials"]:
        end = trial["time"] + trial["ended"]
        following = [(what, step) for time, what, step in job["events"] if time > end and what in ("step", "death")]
        what, step = following[0]
        assert what == "death" or step - 1 == max([step for time, step in whole if time < end], default=0), trial


@pytest.mark.waits
@pytest.mark.nightly
def test_a_killed_rank(tmp_path):
    """After step 8, with a state in memory every 3 steps: no byte is read from disk, where there is no checkpoint yet.

    The steps after that state are those of before, bit by bit. Rank 1 is slow before, which is told.
    """
    job = Job(tmp_path / "job", 2, *TWO, *STATES, SLOW_RANK="1")
    try:
        assert job.wait(400, lambda: len(job.rows()) >= 8), job.output.read_text()
        before, memory = lose(job, 1)
        assert job.wait(400), job.output.read_text()
    finally:
        job.end()
    rows, said = job.rows(), job.output.read_text()
    check(job, [*before, *rows[len(before) :]])
    (loaded,) = [row for row in rows if "loaded_from_disk" in row]
    assert loaded["loaded_from_disk"] == 0 < loaded["loaded_from_memory"] and ", 0 bytes from disk" in said
    assert re.search("plans and generated modules: 2 taken from .*/programs/rank_0\n", said), "none is made anew"
    assert loaded["step"] > len(before) - 3 and "exit code 137: restart 1" in said
    assert "warning: rank 1 is slow: a step takes it" in said and {row.get("slow_rank") for row in rows} & {1}
    assert [path.name for path in (job.run / "checkpoint").iterdir()] == ["step_12"] and not memory.exists()


@pytest.mark.waits
def test_a_sample_of_trials(tmp_path):
    """Eight signals, with ranks that start at once; those of a recipe's job are nightly."""
    jobs = [*trials(tmp_path, 8, seed=3, kind=StandIn, of_a_job=4)]
    assert sum(len(job["trials"]) for job in jobs) == 8
    for job in jobs:
        check_events(job)


class Long(StandIn):
    """With steps enough to lose a machine and to have it back."""

    steps = 400


@pytest.mark.waits
@pytest.mark.nightly
def test_a_machine_that_does_not_come_back_in_time(tmp_path):
    """Two supervisors of 2 ranks each: all of one is killed; the other goes on, and grows when it is there again."""

    def start(machine):
        return Long(tmp_path, 4, machine=machine, machines=2, MIN_WORKERS="2", REJOIN_TIMEOUT="12")

    jobs = [start(0), start(1)]
    try:
        for loses, after in ((True, 20), (False, 60)):
            assert jobs[0].wait(120, lambda after=after: len(jobs[0].rows()) >= after), jobs[0].tail()
            assert jobs[0].process.poll() is None, jobs[0].tail()
            if loses:
                jobs[1].end()
                assert jobs[0].wait(120, lambda: "goes on with 1 of 2 machines" in jobs[0].tail()), jobs[0].tail()
            else:
                jobs[1] = start(1)
        for job in jobs:
            check(job, [*worker.calm_rows(4, Long.steps)])
    finally:
        for job in jobs:
            job.end()
    said = jobs[0].output.read_text()
    assert said.count("2 of 4 workers start here") == 2 and said.count("2 of 2 workers start here") == 1
    assert "goes on with other workers" in said and said.count("exit code 75: restart") == 1


@pytest.mark.nightly
def test_a_killed_rank_and_its_neighbour(start):
    """With a state in memory each step one is lost at most, saving beside training; without both memories all since
    the newest checkpoint are. Losses are those of a calm job without any of that.
    """
    calm = start("calm", 2, *TWO[:1], "training.steps=24")
    assert calm.wait(400), calm.output.read_text()
    saving = "checkpoint.save_interleaved_steps=5", "checkpoint.async_save=true"
    job = start("job", 2, *TWO, "training.steps=24", *saving)
    done = []
    for ranks, after, saved in (((1,), 7, 0), ((0,), 12, 0), ((0, 1), 18, 10)):

        def is_there(after=after, saved=saved):  # a writer that a death ends leaves the checkpoint before
            return len(job.rows()) >= after and max(job.whole, default=0) >= saved

        assert job.wait(400, is_there), job.output.read_text()
        done.append(len(lose(job, *ranks)[0]))
        assert job.wait(100, lambda: job.restarts() == len(done)), job.output.read_text()
    newest = max(job.whole)
    check(job, calm.rows())
    said = job.output.read_text()
    steps = [int(step) for step in re.findall(r"loaded .*: all, of step (\d+);", said)]
    assert all(lost in (0, 1) for lost in (done[0] - steps[0], done[1] - steps[1])), (done, steps)
    assert steps[2] == newest >= 10 and said.count(", 0 bytes from disk") == 2
    assert re.search(r"the state in memory isn't whole \(nothing is there\): it is loaded from disk", said)
    assert {row["loaded_from_memory"] for row in job.rows() if row["step"] == newest + 1} == {0}


@pytest.mark.nightly
def test_an_error_that_comes_again(start):
    """A sample of step 7 that can't be read: the job ends the second time, with the exit code of the error."""
    bad = int(shuffled(50, len(Samples()), seed=5, epoch=0))
    job = start("job", 2, *TWO, "train_dataset.seed=5", BAD_SAMPLE=str(bad))
    assert job.wait(400) and job.process.returncode == 2, job.tail()
    said = job.output.read_text()
    assert said.count("supervisor: exit code 2: restart 1 of 1000") == 1 == job.restarts(), said
    assert re.search(r"supervisor: the same error twice, at step 7: .*a bad sample", said.splitlines()[-1]), said
    assert len(job.rows()) == 6 and not job.processes()


@pytest.mark.nightly
def test_trials(tmp_path):
    """Also their ETTR, all together, is what the simulator foretells."""
    jobs = [*trials(tmp_path, 30, seed=0, of_a_job=15)]
    assert sum(len(job["trials"]) for job in jobs) == 30
    for job in jobs:
        check_events(job)
    for is_async in (False, True):
        measured, simulated = pooled_ettr([job for job in jobs if job["async"] == is_async], 2)
        assert simulated == pytest.approx(measured, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cut", "excluded", "ranks"),
    [
        (("tensor_parallel=1", "data_parallel_shard=4"), "3", 3),
        (("tensor_parallel=1", "data_parallel_shard=4", "zero_level=2"), "2 3", 2),
        (("tensor_parallel=2",), "3", 2),
        (("tensor_parallel=1", "pipeline_parallel=2", "zero_level=0"), "0", 2),
    ],
)
def test_fewer_ranks_and_all_again(start, tmp_path, cut, excluded, ranks):
    """dp shrinks to those that there are after step 3, and grows after step 6: the curve of an undisturbed run."""
    cut = *(f"parallelism.{key}" for key in cut), "training.steps=12", "model.num_hidden_layers=2"
    calm = start("calm", 4, *cut)
    assert calm.wait(240) and calm.process.returncode == 0, calm.output.read_text()
    file = tmp_path / "excluded"
    file.write_text("")
    job = start("job", 4, *cut, EXCLUDE=str(file), MIN_WORKERS="1")
    for after, text in ((3, excluded), (8, "")):
        assert job.wait(240, lambda after=after: len(job.rows()) >= after), job.output.read_text()
        file.write_text(text)
    assert job.wait(240), job.output.read_text()
    check(job, job.rows())
    said = job.output.read_text()
    assert said.count("goes on with other workers") == 2 and f"{ranks} of {ranks} workers start here" in said
    losses = [[row["loss"] for row in each.rows()] for each in (calm, job)]
    assert len(losses[0]) == len(losses[1]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
