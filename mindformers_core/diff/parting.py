"""Where two recorded runs part: the first step, and in it the first tensor, that differs. Pure Python."""

from dataclasses import dataclass

from mindformers_core.diff.comparing import Comparison, compare_steps

__all__ = ["Parting", "part"]


@dataclass(frozen=True, eq=False)
class Parting:
    """The comparison of two runs up to the first step that differs.

    Attributes:
        runs: the two `Run`s.
        facts: name of a tensor -> dict, of both runs.
        steps: numbers of the steps that were compared; the last one may differ.
        last: the `Comparison` of the last one.
        agree: number of tensors that agree, of all steps.
        perturbed: whether the tolerances come from a perturbed run.
        note: what was not compared, and why; or "".
    """

    runs: tuple
    facts: dict
    steps: list
    last: Comparison
    agree: int
    perturbed: bool
    note: str

    @property
    def first(self):
        """The first `Difference`, or None."""
        return self.last.differ[0] if self.last.differ else None


def part(run_a, run_b, noise=None):
    """The `Parting` of two recorded runs.

    Args:
        run_a, run_b: the `Run`s.
        noise: one of these runs, and the same run perturbed; or None.

    Raises:
        ValueError: no step in common, or steps that take different data.
    """
    steps = [step for step in run_a.steps if step in run_b.steps]
    if not steps:
        shown = " and ".join(f"'{run.folder}' has {_numbers(run.steps)}" for run in (run_a, run_b))
        raise ValueError(f"no step is recorded in both runs: {shown}")
    facts, alike = run_b.facts | run_a.facts, _alike(run_a.facts, run_b.facts)
    passes_agree, note = _passes_agree(run_a, run_b), ""
    if not passes_agree:
        note = "passes have other sequences in A and B: gradients, norm and weights after them are compared"
    agree, found = 0, None

    def is_compared(key):
        return key[1] is None or passes_agree and key[2] in alike

    for step in steps:
        noisy = noise is not None and all(step in run.steps for run in noise)
        of_step = [run.step(step) for run in noise] if noisy else None
        found = compare_steps(run_a.step(step), run_b.step(step), facts, of_step, found, is_compared)
        agree += len(found.agree)
        if found.differ:
            steps = steps[: steps.index(step) + 1]
            break
    return Parting((run_a, run_b), facts, steps, found, agree, noise is not None, note)


def _numbers(steps):
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step that all its ranks have recorded"


def _passes_agree(run_a, run_b):
    """Whether passes of both runs have the same data; raise `ValueError` where not even steps have."""
    ours, theirs = (run.about.get("sequences") for run in (run_a, run_b))
    if ours is None or theirs is None or ours == theirs:
        return True
    counts = [sum(map(len, passes)) for passes in (ours, theirs)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"a step of A takes {counts[0]} sequences, one of B {counts[1]}: give both the same global batch, as "
            f"b:training.global_batch_size={counts[0]}, and a local_batch_size that divides it"
        )
    return False


def _alike(ours, theirs):
    """The names of tensors that mean the same in both runs: of a Cell's operators those before the first other one."""
    alike = {name for name in ours if name in theirs and "#" not in name}
    of_calls = [_by_call(facts) for facts in (ours, theirs)]
    for call, made in of_calls[0].items():
        for one, other in zip(made, of_calls[1].get(call, ())):
            if one != other:
                break
            alike.add(f"{call}:{one[0]}.{one[1]}")
    return alike | {name for name in ours if name in theirs and "#" in name and ":constant" in name}


def _by_call(facts):
    """Call of a Cell -> (place of the node, number of the output, operator, shape) of its operators, in order."""
    found = {}
    for name, each in facts.items():
        call, _, place = name.rpartition(":")
        if "#" in call and not place.startswith("constant"):
            node, output = map(int, place.split("."))
            found.setdefault(call, []).append((node, output, each["operator"], tuple(each["shape"])))
    return {call: sorted(made) for call, made in found.items()}
