"""docs/zero.md: its table of measured memory is up to date, and its code runs and learns."""

import sys

from support.documents import code_blocks
from support.launch import ROOT, on_ranks

sys.path.insert(0, str(ROOT / "docs"))
from make_zero import PAGE, measured_table  # noqa: E402
from page_blocks import filled  # noqa: E402

from mindformers_core.communication import world  # noqa: E402


@on_ranks(nightly=(4,))
def case_the_measured_table_of_the_page():
    """As rank 0 sees it."""
    table, page = measured_table(), PAGE.read_text(encoding="utf-8")
    if world().rank == 0:
        assert filled(page, {"measured": table}) == page, "run bash scripts/msrun_launch.sh docs/make_zero.py 4 4"


@on_ranks(nightly=(4,))
def case_the_code_of_the_zero_page():
    """The loss falls, also that of the evaluation; measured memory is that computed."""
    names = {"__name__": "page"}
    (source,) = [block for block in code_blocks(PAGE, "python") if "import hsdp" in block or "hsdp, " in block]
    exec(compile(source, "zero.md", "exec"), names)
    losses, report = names["losses"], names["report"]
    assert len(losses) == 7 and losses[4] < losses[0] and losses[5] < losses[1] and names["norm"] > 0, losses
    assert losses[6] < (losses[4] + losses[5]) / 2
    for moment, measured in report.measured.items():
        assert abs(measured.total / report.computed[moment].total - 1) < 0.02, (moment, str(report))
