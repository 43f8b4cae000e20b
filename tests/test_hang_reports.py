"""Desyncs planted in launches: within the deadline and 5 seconds all ranks end with one text that names the late rank
and where all are; a healthy run has no report and leaves nothing."""

import re
import signal
import time

import psutil
import pytest
from support.launch import run_ranks
from support.nightly import daily

pytestmark = [pytest.mark.ranks, pytest.mark.waits]
DEADLINE = 3
IN_MODEL = r"(model|loss|the root Cell)\S* \(.+\), \w+\.py:\d+"  # the Cell, and a line of the user's code
IN_PLAN = rf"#\d+ over (tp|dp)( and tp)? \(call \d+\), float\d+ \[.*\].*, for {IN_MODEL}"
HERE = r"desync\.py:\d+ in "
CHECKED, UNCHECKED = 1, 0
FAULTS = {  # name: (function, collective, ranks, whether collectives are compared, step, what the first line says)
    "skipped forward": ("skipped", 3, 2, CHECKED, "model", r"rank 1 issued all_reduce #\d+.* was skipped"),
    "skipped backward": ("skipped", 12, 2, CHECKED, "model", "rank 1 issued all_reduce"),
    "skipped, 4 ranks": ("skipped", 3, 4, CHECKED, "model", r"rank 3 issued all_reduce #\d+"),
    "skipped, not compared": ("skipped", 3, 2, UNCHECKED, "model", "rank 1"),
    "skipped, without a plan": ("skipped", 6, 2, UNCHECKED, "plain", "rank 1 is in Python|rank 1 has ended"),
    "reordered forward": ("reordered", 9, 2, CHECKED, "model", "rank 1 issued all_reduce"),
    "reordered, 4 ranks": ("reordered", 3, 4, CHECKED, "model", r"rank 3 issued all_reduce #\d+"),
    "other shape forward": ("other_shape", 4, 2, CHECKED, "model", r"ranks disagree.* \[4, 8, 16\]"),
    "other shape backward": ("other_shape", 12, 2, CHECKED, "model", r"ranks disagree.*backward of #\d+"),
    "other shape, 4 ranks": ("other_shape", 4, 4, CHECKED, "model", "rank 3"),
    "other dtype": ("other_dtype", 4, 2, CHECKED, "model", "ranks disagree.*float16"),
    "other kind": ("other_kind", 4, 2, CHECKED, "model", "rank 1 (issued )?all_gather"),
    "other group": ("other_group", 3, 4, CHECKED, "model", "rank 3"),
    "one more": ("extra", 3, 2, CHECKED, "model", "rank [01] issued all_reduce"),
    "killed forward": ("killed", 3, 2, CHECKED, "model", "rank 1 was killed by SIGKILL"),
    "killed backward, 4 ranks": ("killed", 16, 4, CHECKED, "model", "rank 3 was killed by SIGKILL"),
    "gone without a word": ("gone", 3, 2, CHECKED, "model", "rank 1 has died"),
    "raises": ("raises", 3, 2, CHECKED, "model", r"rank 1 has failed with KeyError: 'the cause' \(at .*desync"),
    "raises, message": ("raises", 1, 2, CHECKED, "message", "receive from rank 1.*rank 1 has failed with KeyError: "),
    "stopped forward": ("stopped", 3, 2, CHECKED, "model", "rank 1 is stopped .*, before #"),
    "stopped backward, 4 ranks": ("stopped", 16, 4, CHECKED, "model", "rank 3 is stopped .*, before "),
    "stuck in Python": ("stuck_asleep", 3, 2, CHECKED, "model", rf"rank 1 is in Python at .*{HERE}stuck_asl"),
    "stuck in Python, 4 ranks": ("stuck_busy", 16, 4, CHECKED, "model", rf"rank 3 is in Python at .*{HERE}stuck_busy"),
    "stuck with the lock": ("stuck_with_lock", 3, 2, CHECKED, "model", rf"rank 1 is in Python at .*{HERE}stuck_with"),
    "slow": ("slow", 3, 2, CHECKED, "model", rf"rank 1 is in Python at .*{HERE}slow, before #"),
    "slow, large tensors": ("slow", 2, 2, CHECKED, "large", rf"rank 1 is in Python at .*{HERE}slow, before "),
    "message not sent": ("stuck_asleep", 1, 2, CHECKED, "message", r"receive from rank 1.*rank 1 is in Python"),
    "compiled, stuck": ("stuck_asleep", 1, 2, CHECKED, "compiled", r"compiled function .*compiled_part.*rank 1 is"),
    "compiled, killed": ("killed", 1, 2, CHECKED, "compiled", "rank 1 was killed by SIGKILL"),
    "compiled, stopped": ("stopped", 1, 2, CHECKED, "compiled", "rank 1 is stopped"),
}  # fmt: skip
BY_DAY = "skipped forward", "compiled, stuck"


def launch(fault, at, ranks, check, step):
    launched = run_ranks(ranks, "tests/ranks/desync.py", fault, at, DEADLINE, check, step, timeout=90)
    return launched, time.time()


def report_in(log):
    """The report in a rank's log: from its first line to the last place; None if there is none."""
    found = re.search(r"^(.*)\nWhere the ranks are:\n((?:- rank.*\n?)+)", log, re.MULTILINE)
    return found and (found[1], found[2].splitlines())


@pytest.mark.parametrize("name", daily(BY_DAY, FAULTS))
def test_a_desync_is_reported_by_all_ranks(tmp_path, name):
    fault, at, ranks, check, step, said = FAULTS[name]
    launched, ended = launch(fault, at, ranks, check, step)
    shown = "\n".join(f"--- rank {rank}\n{launched.tail(rank, 40)}" for rank in range(ranks))
    planted = float(re.search(r"planted at (\S+)", launched.logs[ranks - 1])[1])
    print(f"{name}: {ended - planted:.1f} s of {DEADLINE + 5}")
    alone = {"killed": -signal.SIGKILL, "raises": 1, "stopped": -signal.SIGKILL, "stuck_with_lock": -signal.SIGKILL}
    assert launched.exit_code in {75, alone.get(fault, 75)}, shown
    assert ended - planted < DEADLINE + 5, shown
    able = range(ranks - (fault in ("killed", "gone", "raises")))
    logs = [launched.logs[rank] for rank in able]
    reports = [report_in(log) for log in logs if "all steps are done" not in log]
    assert all(reports), shown
    assert all(report == reports[0] for report in reports), shown
    first, places = reports[0]
    assert re.search(said, first), shown
    assert {rank for line in places for rank in ranks_of(line)} == {*range(ranks)}, shown
    if step == "model":
        assert all(re.search(IN_PLAN, line) or "desync.py" in line for line in places), shown
    if fault.startswith("stuck"):
        assert f"Python stack of rank {ranks - 1}, innermost first:" in launched.logs[0], shown


def ranks_of(line):
    """The ranks that a line of the report is about: `- ranks 0-1, 3: …`."""
    for part in re.match(r"- ranks? ([\d, -]+): ", line)[1].split(", "):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def test_a_slow_but_healthy_run_has_no_report_and_leaves_nothing(tmp_path):
    launched, _ = launch("healthy", 3, 2, CHECKED, "model")
    for rank in range(2):
        assert "all steps are done" in launched.logs[rank] and not report_in(launched.logs[rank]), launched.tail(rank)
    assert launched.exit_code == 0
    assert not [each for each in psutil.process_iter(["cmdline"]) if "desync.py" in str(each.info["cmdline"])]
