"""What a picture and a trace of a schedule have in common. Pure Python."""

import os

from mindformers_core.hints import nearest
from mindformers_core.pipeline.tables.simulating import StepCosts, Timeline, simulate
from mindformers_core.pipeline.tables.table import ScheduleTable

__all__ = ["as_timeline", "checked_suffix"]


def as_timeline(schedule, costs=None):
    """The `Timeline` of a schedule (anything with a `.table`) or table, simulated with `costs`; a `Timeline` as it is.

    Raises:
        TypeError: something else, or `costs` beside a `Timeline`, whose times are settled.
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


def checked_suffix(path, allowed):
    """The suffix of `path`, in lower case, without the dot.

    Raises:
        ValueError: another suffix than the `allowed` ones.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix[1:] not in allowed:
        names = " or ".join(f".{name}" for name in allowed)
        raise ValueError(f"{os.fspath(path)!r}: the name should end with {names}{nearest(suffix, allowed)}")
    return suffix[1:]
