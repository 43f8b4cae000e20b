"""Every way through a job reads the same samples in order: meshes, micro-batches, threads, resumes, global batches."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import pytest

from mindformers_core.batches import BatchPlan
from mindformers_core.data.mixture import Mixture
from mindformers_core.data.reading import local_batch
from mindformers_core.data.sources import Tokens
from mindformers_core.data.streams import Ahead, Sequences, Stream
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

LENGTH, BATCH, END = 8, 12, 120  # tokens of a sequence, samples of a step, and of the whole job
ROWS, WEIGHTS = (40, 17), (2, 1)  # source 0 begins its second epoch with sample 60, the first one of step 6
WAYS = {  # name -> the jobs that follow each other, each going on where the one before it was saved
    "one rank": [{}],
    "dp 2": [{"dp": 2}],
    "dp 3": [{"dp": 3}],
    "dp 4, micro-batches of 3": [{"dp": 4, "size": 3}],
    "dp 5, empty rows": [{"dp": 5}],
    "dp 16, more ranks than samples": [{"dp": 16}],
    "tp 3": [{"tp": 3}],
    "pp 2": [{"pp": 2, "micro_batches": 4}],
    "pp 4, empty micro-batches": [{"pp": 4, "micro_batches": 8}],
    "pp 2 x dp 2": [{"pp": 2, "dp": 2, "micro_batches": 3}],
    "pp 3 x dp 2 x tp 2, micro-batches of 2": [{"pp": 3, "dp": 2, "tp": 2, "size": 2, "micro_batches": 3}],
    "micro-batches of 2": [{"size": 2}],
    "micro-batches of 5, empty rows": [{"size": 5}],
    "a step in one pass": [{"size": 12}],
    "gradients of 6 passes": [{"size": 2, "micro_batches": 1}],
    "gradients of 3 pipeline runs": [{"pp": 2, "dp": 2, "micro_batches": 2}],
    "no thread": [{"threads": 0}],
    "no thread, dp 2": [{"threads": 0, "dp": 2}],
    "2 threads": [{"threads": 2}],
    "4 threads, pp 2 x dp 3": [{"threads": 4, "pp": 2, "dp": 3, "micro_batches": 2}],
    "resumed after step 1": [{"steps": 1}, {}],
    "resumed before the last step": [{"steps": 9}, {}],
    "resumed where an epoch ends": [{"steps": 5}, {}],
    "resumed in the step after": [{"steps": 6}, {}],
    "resumed twice": [{"steps": 3}, {"steps": 4}, {}],
    "resumed twice from one checkpoint": [{"steps": 3, "lost": 4}, {"steps": 0, "lost": 5}, {}],
    "resumed after each step": [{"steps": 1}] * 10,
    "resumed on other ranks": [{"steps": 3, "dp": 4}, {"steps": 4, "dp": 3, "pp": 2, "micro_batches": 2}, {"tp": 2}],
    "global batch 5": [{"samples": 5}],
    "global batch 40, dp 8": [{"samples": 40, "dp": 8}],
    "all samples in one step": [{"samples": 120, "size": 40}],
    "a global batch that grows at resumes": [{"samples": 4, "steps": 3}, {"samples": 12, "steps": 4}, {"samples": 30}],
    "another one where an epoch ends": [{"steps": 5}, {"samples": 15, "dp": 3}],
}  # fmt: skip


@cache
def stream_of(packs):
    """Two sources of documents, whose tokens are all different."""
    sources, first = [], 0
    for count, length in zip(ROWS, (30, 11), strict=True):
        ids = np.arange(first, first + count * LENGTH + 1, dtype=np.uint16)
        sources.append(Sequences(Tokens(ids, range(0, len(ids), length), "ids"), LENGTH, 2**16, packs))
        first += len(ids)
    return Stream(tuple(sources), Mixture(WEIGHTS), 5)


def steps_of(stream, consumed, dp=1, pp=1, tp=1, size=1, micro_batches=1, samples=BATCH, steps=None, lost=0, threads=1):
    """The arrays of a job's steps, without the rows that are empty: a list; ranks of one dp coordinate read alike.

    `steps`: of this job that are saved, `lost`: those after them. `threads`: 1 is the job's own one, which reads ahead.
    """
    mesh, plan = DeviceMesh((pp, dp, tp), ("pp", "dp", "tp")), BatchPlan(samples, dp, size, micro_batches)
    layouts = [Layout.on(mesh, (("dp",), ()))] * len(stream.batch(0, 1))
    readers = [partial(local_batch, plan, layouts, rank, {}, stream) for rank in range(mesh.size)]
    end = END if steps is None else consumed + (steps + lost) * samples
    starts = range(consumed, end, samples)
    if threads == 1:
        ahead = [Ahead(read) for read in readers]
        found = [[each.get(start, start + samples) for each in ahead] for start in starts]
        for each in ahead:
            each.close()
    elif threads:
        with ThreadPoolExecutor(threads) as pool:  # all at once, the last step first
            waiting = [[pool.submit(read, start) for read in readers] for start in reversed(starts)]
        found = [[each.result() for each in step] for step in reversed(waiting)]
    else:
        found = [[read(start) for read in readers] for start in starts]
    merged = []
    for step in found:
        parts = {}
        for rank, arrays in enumerate(step):
            alike = parts.setdefault(mesh.coordinate(rank, ("dp",)), arrays)
            assert all(map(np.array_equal, arrays, alike))
        rows = ([array.reshape(-1, size, LENGTH) for array in arrays] for arrays in zip(*parts.values(), strict=True))
        merged.append([np.stack(each, 1).reshape(-1, LENGTH)[:samples] for each in rows])
    return merged[: len(merged) - lost]


def job_of(packs, way):
    """The steps of jobs that follow each other."""
    stream, consumed, steps, saved = stream_of(packs), 0, [], None
    for job in way:
        stream = stream_of(packs).resumed(json.loads(saved), consumed) if saved else stream
        found = steps_of(stream, consumed, **job)
        steps, consumed = [*steps, *found], consumed + sum(len(arrays[0]) for arrays in found)
        saved = json.dumps(stream.state())
    return steps


def digests(steps):
    """Of steps with the samples in each, and of all samples."""
    whole = [np.concatenate(arrays).tobytes() for arrays in zip(*steps, strict=True)]
    of_steps = [[array.tobytes() for array in arrays] for arrays in steps]
    return [hashlib.sha256(repr(each).encode()).hexdigest() for each in (of_steps, whole)]


@cache
def truth(packs):
    return job_of(packs, [{"threads": 0}])


@pytest.mark.parametrize(("packs", "name"), [(bool(number % 2), name) for number, name in enumerate(WAYS)])
def test_every_way_through_a_job_has_the_same_steps(packs, name):
    """Hashes of steps and ordered samples; with another global batch those of the samples. Every other one packs."""
    of_steps, of_samples = digests(job_of(packs, WAYS[name]))
    expected_steps, expected_samples = digests(truth(packs))
    assert of_samples == expected_samples
    assert any("samples" in job for job in WAYS[name]) or of_steps == expected_steps


@pytest.mark.parametrize("packs", [False, True])
def test_these_steps_have_every_sample_once_an_epoch(packs):
    """Whose beginnings are where the rows of a run say so."""
    stream, samples = stream_of(packs), np.concatenate([arrays[0] for arrays in truth(packs)])
    sources, _ = stream.mixture.places(0, END)
    begun = []
    for number, source in enumerate(stream.sources):
        places, count = np.flatnonzero(sources == number), len(source)
        for start in range(0, len(places), count):
            of_epoch = [row.tobytes() for row in samples[places[start : start + count]]]
            assert len({*of_epoch}) == len(of_epoch), "a sample twice in an epoch"
            begun += [(places[start], number, start // count + 1)] if start else []
        assert stream.epochs(END)[number] == len(places) / count > 1
    said = [stream.begun(start, start + BATCH) for start in range(0, END, BATCH)]
    for place, number, epoch in begun:
        assert f"source {number} begins epoch {epoch} with sample {place}" in said[place // BATCH]
    assert "".join(said).count("begins") == len(begun) and stream.begun(0, min(begun)[0]) == ""
    assert stream.begun(1, 7 * END).startswith(f"source 0 begins epoch 2 with sample {begun[0][0]}, and epochs up to ")
