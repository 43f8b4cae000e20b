"""The outcomes as text: the table by namespace, and what is missing by reason."""

import json
from collections import Counter

from operator_samples.trying import NO_NUMBERS

__all__ = ["COLUMNS", "details", "missing_operators", "recorded", "report", "row"]

_NOT_JUDGED = ("unavailable", "no sample")
COLUMNS = (
    "surface", "public", "judged", "covered", "%", "no rule", "in place", "values", "meta device", "rejected/other",
    "parallel", "run on CPU", "covered of these",
)  # fmt: skip


def row(space, outcomes):
    """The numbers of a namespace, as `COLUMNS`."""
    kinds = Counter(each["outcome"] for each in outcomes)
    judged = len(outcomes) - sum(kinds[kind] for kind in _NOT_JUDGED)
    other = sum(kinds[kind] for kind in ("capture", "rejected", "program", "crashed"))
    covered = [each for each in outcomes if each["outcome"] == "covered"]
    parallel = sum(not each["dims"] or any("gathered" not in how for how in each["dims"].values()) for each in covered)
    on_cpu = [each for each in outcomes if each["cpu"]]
    share = f"{100 * len(covered) / judged:.1f}" if judged else ""
    counts = [kinds[kind] for kind in ("no rule", "in place", "values", "meta")]
    last = [other, parallel, len(on_cpu), sum(each["outcome"] == "covered" for each in on_cpu)]
    return [space, len(outcomes), judged, len(covered), share, *counts, *last]


def missing_operators(found):
    """Operator without a rule -> the targets that call it, most wanted first."""
    wanted = {}
    for target, each in found.items():
        for name in each["missing"]:
            wanted.setdefault(name, []).append(target)
    return dict(sorted(wanted.items(), key=lambda entry: (-len(entry[1]), entry[0])))


def recorded(spaces, found):
    """The counts of each namespace, and what isn't covered by outcome, as JSON: what a test holds."""
    counts, missing = {}, {}
    for space, targets in spaces.items():
        cells = dict(zip(COLUMNS, row(space, [found[target] for target in targets])))
        counts[space] = {name: cells[name] for name in ("public", "judged", "covered")}
    for target, each in found.items():
        if each["outcome"] != "covered":
            missing.setdefault(each["outcome"], []).append(target)
    return json.dumps({"counts": counts, "missing": missing}, indent=1) + "\n"


def details(found):
    """One paragraph for each target."""
    lines = []
    for target, each in found.items():
        lines.append(f"{target}({each['sample']}): {each['outcome']}{', on CPU' if each['cpu'] else ''}")
        lines.append(f"    operators: {', '.join(each['operators']) or '-'}")
        if each["missing"]:
            lines.append(f"    without a rule: {', '.join(each['missing'])}")
        if each["detail"]:
            lines.append(f"    {each['detail']}")
        if each["dims"]:
            lines.append(f"    cut: {', '.join(f'{dim} {how or chr(61)}' for dim, how in each['dims'].items())}")
        if each["numbers"]:
            lines.append(f"    numbers: {each['numbers']}")
    return "\n".join(lines) + "\n"


def report(spaces, found):
    """The whole text."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for space, targets in spaces.items():
        outcomes = [found[target] for target in targets]
        if outcomes:
            lines.append(f"| {' | '.join(map(str, row(space, outcomes)))} |")
    for title, kinds in _SECTIONS.items():
        chosen = [each for each in found.values() if each["outcome"] in kinds]
        if chosen:
            lines += ["", f"{title} ({len(chosen)}):"]
            lines += [f"- {each['target']}({each['sample']}): {_why(each)}" for each in chosen]
    missing = missing_operators(found)
    if missing:
        lines += ["", f"Operators without a rule ({len(missing)}), with the functions that call them:"]
        lines += [f"- {name}: {', '.join(targets)}" for name, targets in missing.items()]
    return "\n".join([*lines, *_numbers(found.values())]) + "\n"


def _numbers(outcomes):
    """The lines about numbers and gradients, where they were compared."""
    kinds = Counter(each["numbers"].partition(":")[0].partition(",")[0] for each in outcomes if each["numbers"])
    if kinds:
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        yield from ("", f"Numbers and gradients of all placements: {counts}:")
    for each in outcomes:
        if each["numbers"] not in ("", "equal", NO_NUMBERS):
            yield f"- {each['target']}({each['sample']}): {each['numbers']}"


_SECTIONS = {
    "No rule": ("no rule",),
    "Refused in place": ("in place",),
    "Need a tensor's values while captured": ("values",),
    "MindSpore can't run them on the meta device": ("meta",),
    "Rejected by a rule": ("rejected",),
    "Can't be captured for another reason": ("capture",),
    "No program": ("program",),
    "End the process": ("crashed",),
    "Fail on plain tensors too": ("unavailable",),
    "No sample fits": ("no sample",),
}


def _why(each):
    return ", ".join(each["missing"]) or each["detail"]
