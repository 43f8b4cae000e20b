"""Pipeline parallelism: schedules as tables, stages that run them, and tools that check, simulate and draw a table.

The public names load the module behind them when they are first used: schedules and tables need no MindSpore.
"""

from mindformers_core.lazy_exports import lazy_exports

_EXPORTS = {
    "tables.step": "MetaStep MetaStepType overlapped",
    "tables.table": "ScheduleTable",
    "tables.simulating": "StepCosts simulate measured_costs",
    "tables.lowering": "lowered forward_only",
    "tables.validating": "validate",
    "tables.table_files": "load_table save_table",
    "tables.drawing": "draw_schedule",
    "tables.chrome_trace": "save_chrome_trace",
    "schedules.base": "PipelineScheduleBase PipelineScheduleMulti PipelineScheduleSingle PlannedStage",
    "schedules.gpipe": "ScheduleGPipe ScheduleLoopedBFS",
    "schedules.one_f_one_b": "Schedule1F1B",
    "schedules.interleaved": "ScheduleInterleaved1F1B",
    "schedules.zb_h1": "ScheduleZBH1",
    "schedules.zb_v": "ScheduleZBV",
    "schedules.dualpipe_v": "ScheduleDualPipeV",
    "schedules.named": "schedule_class",
    "schedules.from_table": "schedule_of_table",
    "stage": "PipelineStage",
    "pipeline_cell": "PipelineCell",
    "layer_split": "split_layers stages_of_rank",
    "layer_offset": "get_transformer_layer_offset",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
