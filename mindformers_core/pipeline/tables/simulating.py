"""Simulates the time and memory of a pipeline table. Pure Python."""

from dataclasses import dataclass
from itertools import accumulate

from mindformers_core.pipeline.tables.execution import run_orders
from mindformers_core.pipeline.tables.step import COMPUTE, SENDS, MetaStepType
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.pipeline.tables.validating import validate

# type of a compute step -> the field of StepCosts with its duration
_COSTS = dict(zip(COMPUTE, ("forward", "backward", "backward_input", "backward_weight")))


@dataclass(frozen=True)
class StepCosts:
    """The durations of steps, in any unit of time: each is a number, or a tuple with one for every stage.

    Attributes:
        forward: of `FWD`.
        backward_input: of `BWD_INPUT`.
        backward_weight: of `BWD_WEIGHT`.
        transfer: between a send and the arrival of the message, by sending stage. Ranks compute meanwhile.
        backward: of `BWD`; None: the sum of `backward_input` and `backward_weight`.
    """

    forward: float | tuple = 1.0
    backward_input: float | tuple = 1.0
    backward_weight: float | tuple = 1.0
    transfer: float | tuple = 0.0
    backward: float | tuple | None = None


@dataclass(frozen=True)
class Timeline:
    """The result of `simulate`. Times are in the unit of the costs, from the start of the first step.

    Attributes:
        spans: for every rank the tuple of its `Span`s in order; the parts of an `OVERLAP` come one after another.
            A span contains no waiting.
        makespan: end of the last step of all ranks.
        bubble_fraction: idle time of all ranks within the makespan, divided by number of ranks x makespan. (GPipe's is
            (p - 1) / (m + p - 1) in the literature, for p stages and m micro-batches.)
        span_bubble_fractions: for every rank its idle time between the start of its first and the end of its last
            compute step, divided by the time between them: the loss if the rank has other work before and after.
        peak_live: for every rank the largest number of live micro-batches, those whose activations the rank keeps, in
            units of the activations of all the rank's stages: each of v stages counts 1/v. Activations live from the
            start of FWD to the end of BWD or BWD_WEIGHT; 0 if the table is forward only.
        messages: for every rank the number of messages that it sends.
    """

    spans: tuple
    makespan: float
    bubble_fraction: float
    span_bubble_fractions: tuple
    peak_live: tuple
    messages: tuple


def measured_costs(seconds, transfer=0.0):
    """`StepCosts` from measurements.

    Args:
        seconds: {(`MetaStepType`, stage): seconds} for FWD, BWD, BWD_INPUT and BWD_WEIGHT; types that a table doesn't
            contain may be left out.
        transfer: as in `StepCosts`.

    Raises:
        ValueError: other step types.
    """
    stages = range(1 + max((stage for _, stage in seconds), default=-1))
    for kind, stage in seconds:
        if kind not in _COSTS:
            known = ", ".join(known.name for known in _COSTS)
            raise ValueError(f"measured_costs: {kind!r} of stage {stage} isn't one of {known}")
    fields = {field: tuple(seconds.get((kind, stage)) for stage in stages) for kind, field in _COSTS.items()}
    return StepCosts(transfer=transfer, **fields)


def simulate(table, costs=StepCosts()):  # noqa: B008 (frozen)
    """Simulate a table: every step starts as soon as its rank is free and its inputs have arrived.

    The running time is linear in the number of steps.

    Args:
        table: a lowered `ScheduleTable`, of training or forward only.
        costs: the durations of steps.

    Returns:
        A `Timeline`.

    Raises:
        ValueError: a table that `validate` rejects; costs that are negative, missing, or of another number of stages.
    """
    training = any(step[1] in COMPUTE[1:] for step in table.steps)
    validate(table, training=training)
    durations, transfers = _durations(table, costs), _by_stage(costs, "transfer", table)
    if None in transfers:
        raise ValueError(f"StepCosts.transfer: there is none for stage {transfers.index(None)}")
    spans, _ = run_orders(table, durations, transfers)
    makespan = max((rank_spans[-1].end for rank_spans in spans if rank_spans), default=0.0)
    computes = [[span for span in rank_spans if span.step[1] in COMPUTE] for rank_spans in spans]
    busy = [sum(end - start for _, start, end in rank_spans) for rank_spans in computes]
    lengths = [rank_spans[-1].end - rank_spans[0].start if rank_spans else 0.0 for rank_spans in computes]
    return Timeline(
        spans=tuple(map(tuple, spans)),
        makespan=makespan,
        bubble_fraction=_idle_fraction(sum(busy), makespan * table.rank_num),
        span_bubble_fractions=tuple(map(_idle_fraction, busy, lengths)),
        peak_live=tuple(
            _peak_live(rank_spans) / max(1, table.stage_ranks.count(rank)) if training else 0.0
            for rank, rank_spans in enumerate(computes)
        ),
        messages=tuple(sum(span.step[1] in SENDS for span in rank_spans) for rank_spans in spans),
    )


def timeline_of(schedule, costs=None):
    """Simulate a schedule (an object with a `.table`) or a table with `costs`; a `Timeline` is returned unchanged.

    Raises:
        TypeError: another object; or `costs` for a `Timeline`, which has its times already.
        ValueError: as `simulate`.
    """
    if isinstance(schedule, Timeline):
        if costs is not None:
            raise TypeError("costs are for schedules and tables: the times of a Timeline are settled")
        return schedule
    table = getattr(schedule, "table", schedule)
    if not isinstance(table, ScheduleTable):
        raise TypeError(f"a schedule, a ScheduleTable or a Timeline is needed, not {type(schedule).__name__}")
    return simulate(table, StepCosts() if costs is None else costs)


def _by_stage(costs, name, table):
    """A field of costs as a sequence by stage; None for a missing duration."""
    cost = getattr(costs, name)
    by_stage = cost if isinstance(cost, tuple | list) else (cost,) * table.stage_num
    if len(by_stage) != table.stage_num:
        raise ValueError(f"StepCosts.{name}: {cost} has {len(by_stage)} numbers, the table {table.stage_num} stages")
    for stage, number in enumerate(by_stage):
        if number is not None and not 0 <= number < float("inf"):
            raise ValueError(f"StepCosts.{name}: {number!r} for stage {stage} should be a number from 0 on")
    return by_stage


def _durations(table, costs):
    """{(type, stage): duration} of the compute steps in the table."""
    durations = {
        (kind, stage): number
        for kind, field in _COSTS.items()
        for stage, number in enumerate(_by_stage(costs, field, table))
    }
    for stage in range(table.stage_num):
        parts = [durations[kind, stage] for kind in (MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)]
        if durations[MetaStepType.BWD, stage] is None and None not in parts:
            durations[MetaStepType.BWD, stage] = sum(parts)
    if None in durations.values():
        for kind, stage in sorted({step[1:3] for step in table.steps}):
            if durations.get((kind, stage), 0.0) is None:
                raise ValueError(f"StepCosts.{_COSTS[kind]}: there is none for stage {stage}, and the table needs it")
    return durations


def _idle_fraction(busy, length):
    return max(0.0, 1.0 - busy / length) if length else 0.0


def _peak_live(spans):
    """The largest number of FWD so far whose BWD or BWD_WEIGHT hasn't run."""
    kinds = (step.type for step, _, _ in spans if step.type != MetaStepType.BWD_INPUT)
    return max(accumulate(1 if kind == MetaStepType.FWD else -1 for kind in kinds), default=0)
