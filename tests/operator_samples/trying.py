"""The outcome of one target: the first sample that fits is measured."""

import re

from operator_samples.calls import Sample
from operator_samples.choice import candidates
from operator_samples.common import GENERIC
from operator_samples.measure import Outcome, measure, runs
from operator_samples.numbers import compare

__all__ = ["NO_NUMBERS", "outcome_of"]

# MindSpore has the operator, though not on this machine: capture could take it, with a shape function of our own
NO_KERNEL = (
    "unregistered|no kernel of operator|Not implement exception|Not found op|on device CPU|Kernel select failed|"
    "Create kernelmod"
)
NO_NUMBERS = "not compared: no CPU kernel"


def outcome_of(target, crashed=(), trying=lambda text, device: None, numbers=None):
    """The `Outcome` of a target.

    Args:
        target: a function, Cell, method or expression.
        crashed: `[sample, device]` of calls that ended a process, which are left out.
        trying: a function that is told of every call before it is made.
        numbers: None, or how many pairs of cuts numbers and gradients are compared for, besides single ones.
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
    if len(samples) == len(GENERIC):
        return Outcome(target, "", "no sample", errors[0])
    found = _measured(samples[0], False, crashed, trying, None)
    if found.outcome not in ("covered", "no rule"):
        is_kernel = re.search(NO_KERNEL, errors[0])
        what = f"{errors[0]} | on shapes: {errors[len(samples)]} | {found.detail}"
        found.outcome = (
            found.outcome if found.outcome in ("meta", "values", "in place") and is_kernel else "unavailable"
        )
        found.detail = what
    return found


def _measured(sample: Sample, cpu, crashed, trying, numbers):
    if [sample.text, "capture"] in crashed:
        return Outcome(sample.target, sample.text, "crashed", "MindSpore ends the process", cpu=cpu)
    trying(sample.text, "capture")
    found = measure(sample)
    found.cpu = cpu
    if numbers is not None and found.outcome == "covered":
        trying(sample.text, "numbers")
        is_fatal = [sample.text, "numbers"] in crashed
        found.numbers = "not compared: MindSpore ends the process" if is_fatal else compare(sample, cpu, numbers)
        if re.search(NO_KERNEL, found.numbers):
            found.numbers = NO_NUMBERS
    return found
