"""Jobs of ranks that go on by themselves: what is left is the run that would have been. More of them: `trials.py`."""

import signal

import pytest
from trials import Job, StandIn, check, trials

pytestmark = pytest.mark.ranks
TWO = ("parallelism.tensor_parallel=1", "checkpoint.save_interleaved_steps=3", "training.steps=9")


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


def test_a_killed_rank(start):
    """SIGKILL at rank 1 after step 8; the steps after the newest checkpoint are those of before, bit by bit.

    Before, rank 1 is slow.
    """
    job = start("job", 2, *TWO, SLOW_RANK="1")
    assert job.wait(120, lambda: len(job.rows()) >= 8), job.output.read_text()
    job.processes()["rank 1"].send_signal(signal.SIGKILL)
    before = [row for row in job.rows() if row["step"] <= 8]
    assert job.wait(120) and "exit code 137: restart 1" in job.output.read_text()
    check(job, [*before, *job.rows()[8:]])
    assert "warning: rank 1 is slow: a step takes it" in job.output.read_text() and job.rows()[5]["slow_rank"] == 1


def test_a_sample_of_trials(tmp_path):
    """Eight signals, with ranks that start at once; those of a recipe's job are nightly."""
    jobs = [*trials(tmp_path, 8, seed=3, kind=StandIn, of_a_job=4)]
    assert sum(len(job["trials"]) for job in jobs) == 8


@pytest.mark.nightly
def test_trials(tmp_path):
    jobs = [*trials(tmp_path, 30, seed=0)]
    assert sum(len(job["trials"]) for job in jobs) == 30


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
    cut = *(f"parallelism.{key}" for key in cut), "training.steps=12"
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
