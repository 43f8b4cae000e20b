"""Schedules by name, and a user's own schedules by import path or by the file of a table. Pure Python."""

from types import MappingProxyType

from mindformers_core.hints import nearest
from mindformers_core.lazy_exports import import_object
from mindformers_core.pipeline.schedules.base import PipelineScheduleBase
from mindformers_core.pipeline.schedules.dualpipe_v import ScheduleDualPipeV
from mindformers_core.pipeline.schedules.from_table import schedule_of_table
from mindformers_core.pipeline.schedules.gpipe import ScheduleGPipe, ScheduleLoopedBFS
from mindformers_core.pipeline.schedules.interleaved import ScheduleInterleaved1F1B
from mindformers_core.pipeline.schedules.one_f_one_b import Schedule1F1B
from mindformers_core.pipeline.schedules.zb_h1 import ScheduleZBH1
from mindformers_core.pipeline.schedules.zb_v import ScheduleZBV
from mindformers_core.pipeline.tables.table_files import SUFFIXES, load_table

SCHEDULES = MappingProxyType(
    {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved_1f1b": ScheduleInterleaved1F1B,
        "zb_h1": ScheduleZBH1,
        "zb_v": ScheduleZBV,
        "dualpipe_v": ScheduleDualPipeV,
        "looped_bfs": ScheduleLoopedBFS,
    }
)


def schedule_class(name):
    """The class of a schedule.

    Args:
        name: a key of `SCHEDULES`; or the import path of a subclass of `PipelineScheduleBase`, `my.module.MySchedule`
            or `my.module:MySchedule`; or the file of a table, `tables/mine.csv` (see `load_table`).

    Raises:
        TypeError: `name` is no string, or the imported object is no such class.
        ValueError: no such name, module or attribute, with the nearest ones that exist; a file without a valid table.
        FileNotFoundError: no such file.
    """
    if not isinstance(name, str):
        raise TypeError(f"a schedule's name or import path is a string, not {name!r}")
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name.lower().endswith(tuple(f".{suffix}" for suffix in SUFFIXES)):
        return schedule_of_table(load_table(name))
    if not name.strip(".:").rpartition(":" if ":" in name else ".")[0]:
        raise ValueError(
            f"no pipeline schedule is called {name!r}{nearest(name, SCHEDULES)}: use {', '.join(SCHEDULES)}, the "
            "import path of a class, as my.module.MySchedule, or a table's file, as my_table.csv"
        )
    found = import_object(name, "pipeline schedule")
    if not (isinstance(found, type) and issubclass(found, PipelineScheduleBase)):
        raise TypeError(
            f"pipeline schedule {name!r} is {found!r}: it should be a subclass of PipelineScheduleSingle or "
            "PipelineScheduleMulti"
        )
    return found
