"""The report of a hang: over random programs in which one rank goes wrong, the report names it, and where all are."""

import os
import random
import re
import tempfile
import weakref

import pytest

from mindformers_core.hangs import board as hangs_board
from mindformers_core.hangs.board import Board, join_board
from mindformers_core.hangs.recorder import Recorder
from mindformers_core.hangs.records import Issued, RankState
from mindformers_core.hangs.report import blamed, explain_hang, shown_ranks
from mindformers_core.trainer.measuring import Pace, slow_rank

FAULTS = ("in Python", "dead", "stopped", "skips", "reorders", "other shape", "other group")


def random_program(rng):
    """`(groups of all axes, a list of (axis, kind, shape))` for a mesh of two axes."""
    rows, columns = rng.choice([(1, 2), (1, 4), (2, 2), (2, 4), (3, 3)])
    ranks = [[row * columns + column for column in range(columns)] for row in range(rows)]
    groups = {"tp": [tuple(row) for row in ranks], "dp": [tuple(column) for column in zip(*ranks)]}
    axes = ["tp"] if rows == 1 else ["tp", "dp"]
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return groups, [(rng.choice(axes), rng.choice(kinds), (rng.randint(1, 9), 4)) for _ in range(rng.randint(4, 12))]


def run(groups, program, bad, fault, at):
    """`RankState`s when nobody can go on: every rank issues its calls in order, each waits for its whole group."""
    size = sum(map(len, groups["tp"]))
    calls = {rank: [(axis, kind, shape, number) for number, (axis, kind, shape) in enumerate(program, 1)]
             for rank in range(size)}  # fmt: skip
    mine = calls[bad]
    axis, kind, shape, number = mine[at]
    if fault == "skips":
        del mine[at]
    elif fault == "reorders":
        mine[at : at + 2] = reversed(mine[at : at + 2])
    elif fault == "other shape":
        mine[at] = axis, kind, (*shape, 2), number
    elif fault == "other group":
        mine[at] = "dp" if axis == "tp" else "tp", kind, shape, number
    else:
        del mine[at:]
    issued, counts = {rank: [] for rank in range(size)}, {}
    moving = True
    while moving:
        moving = False
        for rank, rest in calls.items():
            if rest and (not issued[rank] or _done(issued[rank][-1], issued)):
                axis, kind, shape, number = rest.pop(0)
                group = next(group for group in groups[axis] if rank in group)
                count = counts[rank, group] = counts.get((rank, group), -1) + 1
                issued[rank].append(
                    Issued(rank, count, kind, (axis,), group, shape, "float32", "net.layer", f"#{number}")
                )
                moving = True
    states = []
    for rank, history in issued.items():
        history = [Issued(**{**vars(one), "done": _done(one, issued)}) for one in history][-32:]
        condition = fault if rank == bad and fault in ("dead", "stopped") else "running"
        stack = () if history and not history[-1].done or condition != "running" else ("net.py:7 in construct",)
        states.append(RankState(rank, condition, tuple(history), stack))
    return states


def _done(one, issued):
    alike = [[each for each in issued[rank] if each.call == one.call] for rank in one.ranks]
    return all(alike) and len({each[0].signature for each in alike}) == 1


@pytest.mark.parametrize("seed", range(42))
@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_goes_wrong_is_named(fault, seed):
    rng = random.Random(f"{fault} {seed}")
    groups, program = random_program(rng)
    while fault == "other group" and len(groups["tp"]) == 1:
        groups, program = random_program(rng)
    if fault == "reorders":  # of equal calls, nothing is out of order
        program = [(axis, kind, (place, 4)) for place, (axis, kind, _) in enumerate(program)]
    at = rng.randrange(len(program) - 1)
    bad = rng.randrange(sum(map(len, groups["tp"])))
    states = run(groups, program, bad, fault, at)
    if fault == "reorders" and all(state.current is None for state in states):
        return  # two groups of which the other ranks come first: nobody waits
    text, (ranks, _) = explain_hang(states), blamed(states)
    assert bad in ranks, text
    assert len(ranks) <= 2 or len(program) == 1, text
    assert len(text.splitlines()) <= 25
    assert re.search(rf"rank {bad}\b|ranks .*\b{bad}\b", text.splitlines()[0]), text
    if fault in ("dead", "stopped"):
        assert f"rank {bad} {RankState(bad, fault).condition}" in text.splitlines()[0], text
    for state in states:
        if state.current:
            assert state.current.described in text or "more places" in text


def gathered(rank, ranks=(0, 1, 2), done=False, **fields):
    return Issued(rank, 0, "all_gather", ("tp",), ranks, (2,), "float32", done=done, **fields)


def test_a_rank_that_has_issued_the_call_is_not_behind():
    """As the root of a broadcast, which has sent and goes on."""
    states = [RankState(0, history=(gathered(0, done=True),)), RankState(1, history=(gathered(1),)), RankState(2)]
    assert blamed(states)[0] == {2}


def test_equal_ranks_are_one_line_and_there_are_at_most_25():
    states = [RankState(rank, history=(gathered(rank, tuple(range(64))),)) for rank in range(63)]
    text = explain_hang([*states, RankState(63, stack=tuple(f"a.py:{n} in f" for n in range(40)))], size=128)
    assert "- ranks 0-62: in all_gather over tp (call 0), float32 [2]" in text
    assert "64 more of 128 ranks are on other hosts" in text
    different = [RankState(rank, history=(gathered(rank, tuple(range(64)), place=str(rank)),)) for rank in range(63)]
    assert len(explain_hang([*different, *states[63:]]).splitlines()) <= 25 and len(text.splitlines()) <= 25


LIBRARY = f"{os.path.dirname(os.__file__)}/threading.py:9 in wait"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({}, {"error": "KeyError: 3 (at a.py:1 in f)", "state": "ended"}, "; rank 1 has failed with KeyError: 3 (at"),
        ({}, {"stack": (LIBRARY, "/site-packages/x.py:2 in g", "mine.py:3 in h")}, "mine.py:3 in h, which is in /"),
        ({}, {"stack": (LIBRARY, LIBRARY)}, f"rank 1 is in Python at {LIBRARY}, before"),
        ({"number": 4}, {"number": 5}, "is in compiled function f (call 4), rank 1 in call 5 of it: graphs of these"),
        ({"number": 4}, {"number": 4, "computed": 0.2}, "rank 1 computes in compiled function f (call 4)"),
        ({"number": 4}, {"number": 5, "done": True}, "in Python code, after call 5 of it, and not in call 4: their"),
        ({"kind": "start"}, {"state": "absent"}, "waits in init_distributed() for f; rank 1 has not called it on this"),
    ],
)  # fmt: skip
def test_what_the_report_says_of_the_rank_that_is_behind(one, other, said):
    def state(rank, number=0, kind="compiled", done=False, **fields):
        issued = Issued(rank, number, kind, (), (0, 1) if kind == "start" else (), place="f", done=done)
        return RankState(rank, history=(issued,) if number or rank == 0 else (), **fields)

    text = explain_hang([state(0, **one), state(1, **other)])
    assert said in text, text
    assert "mine.py" not in said or "    mine.py:3 in h" in text.splitlines()


def test_ranks_are_shown_as_ranges():
    assert shown_ranks({7, 0, 1, 2, 3}) == "0-3, 7"


@pytest.fixture
def recorders(monkeypatch):
    """Three ranks of this process that compare what they issue; none can write a stack."""
    monkeypatch.setattr(Board, "stack", lambda board, rank: ())
    board = Board(os.memfd_create("test_hangs"), 3, "")
    yield [Recorder(board, rank, 0, check=True) for rank in range(3)]
    os.close(board.file)


def issue(recorder, kind="all_reduce", ranks=(0, 1, 2), shape=(4, 4), dtype="Float32", options="sum"):
    return recorder.issue(kind, ("tp",), ranks, shape, dtype, options)


@pytest.mark.parametrize(
    "other", [{"kind": "all_gather"}, {"shape": (4, 8)}, {"dtype": "Float16"}, {"options": "max"}], ids=str
)
def test_the_second_of_two_different_calls_is_noticed(recorders, other):
    for _ in range(40):  # more than the board keeps
        for recorder in recorders:
            with issue(recorder) as agrees:
                assert agrees
    assert issue(recorders[0]).agrees
    assert not issue(recorders[1], **other).agrees
    text = explain_hang(recorders[0].board.states())
    assert "rank 0" in text and "rank 1 all_" in text.splitlines()[0] and "test_hangs.py" in text


def test_ranks_that_wait_for_each_other_in_different_groups_are_noticed(recorders):
    for recorder in recorders[:2]:
        for ranks in ((0, 1, 2), (0, 1)):
            issue(recorder, ranks=ranks).done = True
    assert issue(recorders[0], ranks=(0, 1, 2)).agrees
    assert not issue(recorders[1], ranks=(0, 1)).agrees


@pytest.mark.parametrize("seed", range(30))
def test_ranks_that_are_asked_leave_after_one_step(recorders, seed):
    """Whenever some are asked, in steps that none ends before all have ended the one before; as soon as possible."""
    rng, board = random.Random(seed), recorders[0].board
    steps, left, soonest = [rng.choice((0, 40))] * 3, {}, None
    for _ in range(200):
        if rng.random() < 0.1 and len(left) < 3:
            board.ask_to_leave(rng.choice([rank for rank in range(3) if rank not in left]))
            soonest = soonest or max(steps) + 1
        able = [rank for rank in range(3) if rank not in left and steps[rank] == min(steps)]
        if not able:
            break
        rank = rng.choice(able)
        steps[rank] += 1
        if board.leave_after(rank, steps[rank]):
            left[rank] = steps[rank]
    assert left == dict.fromkeys(range(3), soonest)


@pytest.mark.parametrize("ahead", [1, 9, 20, 40])
def test_a_rank_that_is_far_ahead_is_no_desync(recorders, ahead):
    for recorder in recorders:
        issue(recorder).done = True
    for _ in range(ahead):  # the root of broadcasts doesn't wait
        issue(recorders[0], "broadcast", (0, 1)).done = True
    assert issue(recorders[0]).agrees
    for _ in range(ahead):
        assert issue(recorders[1], "broadcast", (0, 1)).agrees


def test_a_report_that_fails_is_posted(recorders, monkeypatch):
    monkeypatch.setattr(Board, "states", lambda board: 1 / 0)
    assert recorders[0].board.post(0) and "the report of it has failed: ZeroDivisionError" in recorders[0].board.report


def test_permutes_and_calls_of_one_group_by_another_order_of_ranks_agree(recorders):
    for ranks in ((0, 1), (1, 0), (0, 1)):
        for recorder, shape in zip(recorders[:2], ((2,), (2,)), strict=True):
            with issue(recorder, ranks=ranks, shape=shape) as agrees:
                assert agrees


def test_ranks_find_the_board_by_its_name_until_it_is_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"mindformers_core.{os.getuid()}.job").write_text("/proc/self/fd/0 of a job that was killed")
    boards = [join_board("job", 2), join_board("job", 2)]
    boards[0].slots[1].count = 7
    assert boards[1].slots[1].count == 7
    boards[0].hide()
    assert not [*tmp_path.iterdir()]
    boards.append(join_board("job", 2))
    assert boards[2].slots[1].count == 0
    for board in boards:
        os.close(board.file)


def test_the_board_keeps_the_last_records(recorders):
    for size in range(300):
        issue(recorders[0], shape=(size, size)).done = True
    history = recorders[0].board.history(0)
    assert [one.shape[0] for one in history][-5:] == [295, 296, 297, 298, 299]
    assert all(one.done and one.kind == "all_reduce" for one in history)


def test_the_place_of_a_call_keeps_nothing_alive(recorders):
    """Looking at the variables of a frame must not make it keep what it deletes."""
    recorders[0].sources[__file__] = lambda line, variables: (variables["name"], "#3")

    class Large:
        pass

    name, large = "a", Large()
    gone = weakref.ref(large)
    assert recorders[0].place() == (name, "#3")
    assert gone() is large
    del large
    assert gone() is None
    with recorders[0].issue("all_reduce", ("tp",), (0, 1), (2,), "Float32", "sum"):
        issued = recorders[0].board.history(0)[-1]
    assert (issued.place, issued.plan, issued.done) == (name, "#3", False)
    assert recorders[0].board.history(0)[-1].done


def test_the_rank_that_the_others_wait_for(monkeypatch, capsys):
    """Of a step rank 1 computes 3 s, the others 1 s, and wait the rest, for a message or in a collective."""
    clock = [0.0]
    monkeypatch.setattr(hangs_board.time, "monotonic", lambda: clock[0])
    board = join_board(f"test.slow.{os.getpid()}", 3)
    recorders = [Recorder(board, rank, os.memfd_create("stack"), False) for rank in range(3)]
    paces = [Pace(rank) for rank in range(3)]
    for step in range(40):  # more than the ring has records
        for rank, recorder in enumerate(recorders):
            begun, waited, computes = clock[0], recorder.waited, 3.0 if rank == 1 else 1.0
            clock[0] += computes
            call = recorder.issue("all_reduce", ("dp",), (0, 1, 2), (2,), "float32", "")
            with recorder.waiting("receive", (0, rank)) if step % 2 else call:
                clock[0] += 3.5 - computes
            call.done = True
            with recorder.waiting("compiled"):
                clock[0] += 0.5
            paces[rank].add(clock[0] - begun - (recorder.waited - waited))
        told = [pace.told({rank: each.seconds for rank, each in enumerate(paces)}) for pace in paces]
        assert told == [{} if step < 4 else {"slow_rank": 1, "slow_seconds": 3.5}] * 3
    board.hide()
    assert capsys.readouterr().out == "warning: rank 1 is slow: a step takes it 3.5 s, the others 1.5 s\n"
    assert (
        slow_rank({0: 1.0}) is None and slow_rank({0: 1.4, 1: 1.0}) is None and slow_rank({0: 1.6, 1: 1.0}) is not None
    )
