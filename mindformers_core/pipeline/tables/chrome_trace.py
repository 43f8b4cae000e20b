"""Traces of pipeline schedules for chrome://tracing and Perfetto. Pure Python.

The format is Google's "Trace Event Format": complete events (`X`) for steps, flow events (`s`, `f`) for messages.
"""

import json

from mindformers_core.files import write_whole
from mindformers_core.pipeline.tables.execution import Span
from mindformers_core.pipeline.tables.simulating import timeline_of
from mindformers_core.pipeline.tables.step import SENDS, MetaStepType
from mindformers_core.pipeline.tables.table_files import checked_suffix

_MICROSECONDS = 1e6
_KINDS = {  # type of a compute step -> category of the event, and its colour, a name of the viewer's palette
    MetaStepType.FWD: ("forward", "thread_state_runnable"),  # blue
    MetaStepType.BWD: ("backward", "thread_state_iowait"),  # orange
    MetaStepType.BWD_INPUT: ("input gradient", "terrible"),  # red
    MetaStepType.BWD_WEIGHT: ("weight gradient", "thread_state_running"),  # green
}
_FLOWS = {  # distance of the stage that needs the result -> types of the steps
    1: (MetaStepType.FWD,),
    -1: (MetaStepType.BWD, MetaStepType.BWD_INPUT),
}


def save_chrome_trace(schedule, path, costs=None):
    """Write the steps of all ranks with their times as JSON, for chrome://tracing or https://ui.perfetto.dev.

    The pipeline is one process and every rank is a thread of it. Steps that take no time are left out, such as sends
    and receives of a simulation; an arrow connects the step that computes a message with the step that needs it.

    Args:
        schedule: a schedule, a `ScheduleTable`, a `Timeline`, or for every rank the sequence of its `Span`s, as
            measured. Times are taken for seconds.
        path: of the file, which ends with .json.
        costs: `StepCosts` of a schedule or table that is simulated; default as in `simulate`.

    Raises:
        TypeError: an object without spans.
        ValueError: another suffix, or a table or costs that `simulate` rejects.
    """
    checked_suffix(path, ("json",))
    spans = [[span for span in rank_spans if span.end > span.start] for rank_spans in _spans(schedule, costs)]
    events = [_event("process_name", "M", 0, args={"name": "pipeline"})]
    events += [_event("thread_name", "M", rank, args={"name": f"rank {rank}"}) for rank in range(len(spans))]
    events += [_step_event(rank, span) for rank, rank_spans in enumerate(spans) for span in rank_spans]
    lines = ",\n".join(map(json.dumps, [*events, *_arrows(spans)]))
    write_whole(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


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


def _event(name, phase, rank, **fields):
    return {"name": name, "ph": phase, "pid": 0, "tid": rank, **fields}


def _step_event(rank, span):
    step, start, end = span
    category, colour = _KINDS.get(step.type, ("send" if step.type in SENDS else "receive", "grey"))
    times = {"ts": _MICROSECONDS * start, "dur": _MICROSECONDS * (end - start)}
    where = {"micro-batch": step.micro_index, "stage": step.stage_index}
    return _event(str(step), "X", rank, cat=category, **times, cname=colour, args=where)


def _arrows(spans):
    """Pairs of flow events: from the step that computes a message to the step that needs it, on another rank."""
    events = []
    for distance, kinds in _FLOWS.items():
        ends = {  # (micro-batch, stage) -> (rank, Span)
            (span.step.micro_index, span.step.stage_index): (rank, span)
            for rank, rank_spans in enumerate(spans)
            for span in rank_spans
            if span.step.type in kinds
        }
        for (micro, stage), (sender, source) in ends.items():
            receiver, target = ends.get((micro, stage + distance), (sender, None))
            if receiver != sender:
                # a viewer binds an arrow to the step around its time: the end of a step is outside of the step
                departure = source.end - 0.01 * (source.end - source.start)
                flow = {"cat": "message", "id": len(events) // 2}
                events.append(_event("message", "s", sender, ts=_MICROSECONDS * departure, **flow))
                events.append(_event("message", "f", receiver, ts=_MICROSECONDS * target.start, bp="e", **flow))
    return events
