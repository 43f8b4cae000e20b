"""Pipeline parallelism: schedules as tables, stages that run them, and tools that check, simulate and draw a table.

The public names load the module behind them when they are first used: schedules and tables need no MindSpore.
"""

from mindformers_core.lazy_exports import lazy_exports

_PUBLIC = {
    "MetaStep": "tables.step",
    "MetaStepType": "tables.step",
    "overlapped": "tables.step",
    "ScheduleTable": "tables.table",
    "StepCosts": "tables.simulating",
    "simulate": "tables.simulating",
    "measured_costs": "tables.simulating",
    "lowered": "tables.lowering",
    "forward_only": "tables.lowering",
    "validate": "tables.validating",
    "load_table": "tables.table_files",
    "save_table": "tables.table_files",
    "draw_schedule": "tables.drawing",
    "save_chrome_trace": "tables.chrome_trace",
    "PipelineScheduleBase": "schedules.base",
    "PipelineScheduleMulti": "schedules.base",
    "PipelineScheduleSingle": "schedules.base",
    "PlannedStage": "schedules.base",
    "ScheduleGPipe": "schedules.gpipe",
    "Schedule1F1B": "schedules.one_f_one_b",
    "ScheduleInterleaved1F1B": "schedules.interleaved",
    "ScheduleZBH1": "schedules.zb_h1",
    "ScheduleZBV": "schedules.zb_v",
    "ScheduleDualPipeV": "schedules.dualpipe_v",
    "ScheduleLoopedBFS": "schedules.gpipe",
    "schedule_class": "schedules.named",
    "schedule_of_table": "schedules.from_table",
    "PipelineStage": "stage",
    "split_layers": "layer_split",
    "stages_of_rank": "layer_split",
}

__all__ = [*_PUBLIC]

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
