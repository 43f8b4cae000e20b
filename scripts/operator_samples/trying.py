"""The outcome of one target: the first sample that fits is measured."""

from operator_samples.calls import Sample
from operator_samples.choice import candidates
from operator_samples.measure import Outcome, measure, runs
from operator_samples.numbers import compare

__all__ = ["outcome_of"]


def outcome_of(target, crashed=(), trying=lambda text, device: None, numbers=False):
    """The `Outcome` of a target.

    Args:
        target: a function, Cell, method or expression.
        crashed: `[sample, device]` of calls that ended a process, which are left out.
        trying: a function that is told of every call before it is made.
        numbers: whether numbers and gradients are compared, too.
    """
    samples, errors = candidates(target), []
    for device in ("CPU", "meta"):
        for sample in samples:
            error = "it crashes"
            if [sample.text, device] not in crashed:
                trying(sample.text, device)
                error = runs(sample, device)
            if not error:
                return _measured(sample, device == "CPU", crashed, trying, numbers)
            errors.append(error)
    if len(samples) > 1:
        return Outcome(target, "", "no sample", errors[0])
    found = _measured(samples[0], False, crashed, trying, False)
    if found.outcome != "covered":
        found.outcome, found.detail = "unavailable", f"{errors[0]} | on shapes: {errors[1]} | {found.detail}"
    return found


def _measured(sample: Sample, cpu, crashed, trying, numbers):
    if [sample.text, "capture"] in crashed:
        return Outcome(sample.target, sample.text, "crashed", "MindSpore ends the process", cpu=cpu)
    trying(sample.text, "capture")
    found = measure(sample)
    found.cpu = cpu
    if numbers and cpu and found.outcome == "covered":
        if [sample.text, "numbers"] in crashed:
            found.numbers = "MindSpore ends the process"
        else:
            trying(sample.text, "numbers")
            found.numbers = compare(sample)
    return found
