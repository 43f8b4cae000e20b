"""Traces of pipeline schedules for chrome://tracing and Perfetto. Pure Python.

The format is Google's "Trace Event Format": complete events (`X`) for steps, flow events (`s`, `f`) for messages.
"""

import json

from mindformers_core.files import write_whole
from mindformers_core.pipeline.tables.simulating import Span, timeline_of
from mindformers_core.pipeline.tables.step import MetaStepType
from mindformers_core.pipeline.tables.table_files import checked_suffix

__all__ = ["save_chrome_trace"]

_MICROSECONDS = 1e6
# What a step is called there, and its colour, one of the viewer's own names.
_KINDS = {
    MetaStepType.FWD: ("forward", "thread_state_runnable"),  # blue
    MetaStepType.BWD: ("backward", "thread_state_iowait"),  # orange
    MetaStepType.BWD_INPUT: ("input gradient", "terrible"),  # red
    MetaStepType.BWD_WEIGHT: ("weight gradient", "thread_state_running"),  # green
    MetaStepType.FWD_RECV: ("receive", "grey"),
    MetaStepType.FWD_SEND: ("send", "grey"),
    MetaStepType.BWD_RECV: ("receive", "grey"),
    MetaStepType.BWD_SEND: ("send", "grey"),
}
_BACKWARD = (MetaStepType.BWD, MetaStepType.BWD_INPUT)


def save_chrome_trace(schedule, path, costs=None):
    """Write when every rank does what as JSON, to be opened in chrome://tracing or https://ui.perfetto.dev.

    The pipeline is one process and every rank a thread of it. Steps that take no time are left out, as sends and
    receives in a simulation; an arrow goes from the step that makes what another rank needs to the step that takes it.

    Args:
        schedule: a schedule, a `ScheduleTable`, a `Timeline`, or for every rank the sequence of its `Span`s, as
            measured. Times are taken for seconds.
        path: of the file, which ends with .json.
        costs: `StepCosts` of a schedule or table that is simulated; default as in `simulate`.

    Raises:
        TypeError: nothing that has spans.
        ValueError: another suffix, or a table or costs that `simulate` rejects.
    """
    checked_suffix(path, ("json",))
    spans = _spans(schedule, costs)
    names = [_metadata("process_name", 0, "pipeline")]
    names += [_metadata("thread_name", rank, f"rank {rank}") for rank in range(len(spans))]
    steps = [_complete(rank, span) for rank, rank_spans in enumerate(spans) for span in rank_spans if _lasts(span)]
    events = ",\n".join(map(json.dumps, [*names, *steps, *_arrows(spans)]))
    write_whole(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n')


def _spans(schedule, costs):
    """For every rank its spans."""
    if not isinstance(schedule, list | tuple):
        return timeline_of(schedule, costs).spans
    if costs is not None:
        raise TypeError("costs are for schedules and tables: the times of measured spans are settled")
    for rank, spans in enumerate(schedule):
        if not isinstance(spans, list | tuple) or not all(isinstance(span, Span) for span in spans):
            raise TypeError(f"entry {rank} of the measured spans should be a sequence of Span, not {spans!r:.80}")
    return schedule


def _lasts(span):
    return span.end > span.start


def _metadata(name, rank, value):
    return {"name": name, "ph": "M", "pid": 0, "tid": rank, "args": {"name": value}}


def _complete(rank, span):
    """The event of a step."""
    step, start, end = span
    category, colour = _KINDS[step.type]
    times = {"ts": _MICROSECONDS * start, "dur": _MICROSECONDS * (end - start)}
    where = {"micro-batch": step.micro_index, "stage": step.stage_index}
    return {
        "name": str(step),
        "cat": category,
        "ph": "X",
        "pid": 0,
        "tid": rank,
        **times,
        "cname": colour,
        "args": where,
    }


def _arrows(spans):
    """Pairs of flow events, from the computation of what is sent to that for which it is received."""
    forward, backward = {}, {}  # (micro-batch, stage) -> (rank, Span)
    for rank, rank_spans in enumerate(spans):
        for span in filter(_lasts, rank_spans):
            if span.step.type == MetaStepType.FWD:
                forward[span.step.micro_index, span.step.stage_index] = rank, span
            elif span.step.type in _BACKWARD:
                backward[span.step.micro_index, span.step.stage_index] = rank, span
    pairs = [(forward[micro, stage], forward.get((micro, stage + 1))) for micro, stage in forward]
    pairs += [(backward[micro, stage], backward.get((micro, stage - 1))) for micro, stage in backward]
    events = []
    for number, ((sender, made), taken) in enumerate(pairs):
        if taken is not None and taken[0] != sender:
            common = {"name": "message", "cat": "message", "id": number, "pid": 0}
            # An arrow belongs to the step in which it starts and ends: the very end of a step isn't in it.
            departure = made.end - 0.01 * (made.end - made.start)
            events.append({**common, "ph": "s", "tid": sender, "ts": _MICROSECONDS * departure})
            events.append({**common, "ph": "f", "bp": "e", "tid": taken[0], "ts": _MICROSECONDS * taken[1].start})
    return events
