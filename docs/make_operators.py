"""Writes docs/operators.md: what becomes of each operator of MindSpore's table of constraints, measured.

python docs/make_operators.py
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests")]

from operator_coverage import measure_all  # noqa: E402
from operator_samples.seed import CONSTRAINTS, IMPOSSIBLE, ROWS, spellings  # noqa: E402

__all__ = ["PAGE", "page", "row"]

PAGE = ROOT / "docs" / "operators.md"
HEAD = """# Operators

Made by `python docs/make_operators.py`, which calls every spelling of every operator with a sample of its own, captures
it, derives layouts with its inputs whole and with each dim of each input cut over an axis of two, and makes the
programs; a test holds this page to it. `python scripts/operator_coverage.py` does the same for all functions of `mint`,
`mint.nn`, `ops`, `nn` and for all methods of tensors, and with `--numbers` compares values and gradients with one card.

The rows are those of MindSpore's table of usage constraints of operator-level parallelism. Two of its rows stand twice,
TensorScatterMax and TensorScatterAdd, where Min and Sub are meant. There a constraint is what a user has to keep to;
here a dim that an operator needs whole is gathered first, or a distributed algorithm runs, and the numbers are those of
one card.

*Stays cut*, *gathered first*, *algorithm*: `1.0` is dim 0 of input 1, in the sample call of the first spelling that is
covered. The algorithms are in `mindformers_core/algorithms`. *State*: of how many spellings a parallel program is made.
"""
COLUMNS = "| operator | spellings | sample | stays cut | gathered first | algorithm | constraint there | state here |"


def row(name, outcomes):
    """The line of an operator; `outcomes`: target -> outcome, a dict."""
    found = [outcomes[target] for target in spellings(name)]
    covered = [each for each in found if each["outcome"] == "covered"]
    dims, sample = (covered[0]["dims"], covered[0]["sample"]) if covered else ({}, "")
    ways = {dim: [way for way in how.split(", ") if way] for dim, how in dims.items()}
    gathered = [dim for dim, way in ways.items() if "gathered" in way]
    named = [f"{dim} {', '.join(other)}" for dim, way in ways.items() if (other := [w for w in way if w != "gathered"])]
    stays = [dim for dim in dims if dim not in gathered]
    spelled = ", ".join(f"`{target}`" for target in spellings(name))
    sample = f"`{sample.strip('; ')}`" if sample else ""
    cells = [name, spelled, sample, " ".join(stays), " ".join(gathered), "; ".join(named), CONSTRAINTS.get(name, "")]
    return f"| {' | '.join([*cells, _state(name, found, len(covered))])} |"


def _state(name, found, covered):
    """How many spellings are covered, and why the others aren't."""
    judged = [each for each in found if each["outcome"] != "unavailable"]
    missing = [f"`{each['target']}`: {_reason(name, each)}" for each in judged if each["outcome"] != "covered"]
    count = f"{covered} of {len(judged)}" if missing else f"all {covered}"
    unknown = len(found) - len(judged)
    more = [f"{unknown} can't be called on this machine"] if unknown else []
    return "; ".join([count, *missing, *more])


def _reason(name, outcome):
    if outcome["outcome"] == "no rule":
        return f"no rule for {', '.join(outcome['missing'])}"
    return IMPOSSIBLE.get(name, outcome["outcome"])


def page(outcomes):
    """The text of docs/operators.md."""
    rows = [row(name, outcomes) for name in ROWS]
    count = sum("| all " in line for line in rows)
    summary = f"{len(rows)} operators, {count} of them in every spelling that can be called here.\n"
    return "\n".join([HEAD, summary, COLUMNS, "|---" * COLUMNS.count(" | ") + "|---|", *rows]) + "\n"


def measured(names):
    """Target -> outcome of all spellings of some operators."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_all(list(dict.fromkeys(t for name in names for t in spellings(name))), folder)


if __name__ == "__main__":
    PAGE.write_text(page(measured(ROWS)), encoding="utf-8")
