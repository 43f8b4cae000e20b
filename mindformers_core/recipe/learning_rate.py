"""The learning rate of every step: by name, or by the import path of a user's function or class. Pure Python."""

import inspect
import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import ClassVar, Literal

from mindformers_core.lazy_exports import import_object
from mindformers_core.ranges import bounded

MOST_STEPS = 10**9
_REST = {  # fraction of the steps after warm-up -> remaining fraction of learning_rate - lr_end
    "ConstantWarmUpLR": lambda progress, _: 1.0,
    "LinearWithWarmUpLR": lambda progress, _: 1.0 - progress,
    "CosineWithWarmUpLR": lambda progress, _: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "WarmUpStableDecayLR": lambda progress, start: min(1.0, (1.0 - progress) / (1.0 - start)),
}


@dataclass(frozen=True)
class ScheduleSettings:
    """What every schedule has."""

    type: str = ""
    page: ClassVar = "docs/optimizers.md"


@dataclass(frozen=True)
class LrScheduler(ScheduleSettings):
    """The learning rate at every step: linear from 0 during warm-up, then as `type` selects, see optimizers.md."""

    type: Literal[
        "ConstantWarmUpLR", "LinearWithWarmUpLR", "CosineWithWarmUpLR", "InverseSquareRootLR", "WarmUpStableDecayLR"
    ] = "CosineWithWarmUpLR"
    learning_rate: float = bounded(1e-5, 0.0, 100)  # at the end of warm-up
    lr_end: float = bounded(0.0, 0.0, 100)  # at the last step
    warmup_steps: int = bounded(0, 0, MOST_STEPS)
    warmup_ratio: float | None = bounded(None, 0.0, below=1.0)  # of training.steps, instead of warmup_steps
    decay_start_ratio: float = bounded(0.9, 0.0, below=1.0)  # WarmUpStableDecayLR: of training.steps, before the decay


SCHEDULES = {name: LrScheduler for name in (*_REST, "InverseSquareRootLR")}


def learning_rate(recipe, step, samples=1):
    """The learning rate of `step`, from 1; it needs no device, and is the same in a resumed run.

    During warm-up the rate increases linearly to `lr_scheduler.learning_rate`. After it the rate is constant
    (ConstantWarmUpLR), or decreases to `lr_end` at the last step, linearly (LinearWithWarmUpLR), as half a cosine
    (CosineWithWarmUpLR; Loshchilov and Hutter 2017, without restarts), or constant up to a share of all steps and then
    linearly (WarmUpStableDecayLR; Hu et al., MiniCPM, 2024). InverseSquareRootLR is the rate times
    sqrt(warm-up / step), never below `lr_end` (Vaswani et al. 2017; a warm-up of 0 counts as 1). In
    steps after the last one, which a loop of one's own may run, the rate stays at `lr_end`.

    A user's schedule may ask for the number of steps, and for the tokens of one, of so many `samples`.

    Raises:
        ValueError, TypeError: a user's schedule gives no finite number from 0 up.
    """
    schedule, steps = recipe.lr_scheduler, recipe.training.steps
    if not isinstance(schedule, LrScheduler):
        return _users(schedule, {"steps": steps, "tokens": samples * recipe.train_dataset.seq_length}, step)
    warmup, peak = schedule.warmup_steps, schedule.learning_rate
    if schedule.warmup_ratio is not None:
        warmup = math.ceil(schedule.warmup_ratio * steps)
    if step < warmup:
        return peak * step / warmup
    if schedule.type == "InverseSquareRootLR":
        return max(schedule.lr_end, peak * math.sqrt(max(1, warmup) / step))
    after = max(1, steps - warmup)
    start = max(0.0, (schedule.decay_start_ratio * steps - warmup) / after)
    return schedule.lr_end + (peak - schedule.lr_end) * _REST[schedule.type](min(1.0, (step - warmup) / after), start)


def _users(schedule, offered, step):
    """The rate by a component of an import path."""
    component = import_object(schedule.type, "lr_scheduler.type")
    settings = {each.name: getattr(schedule, each.name) for each in fields(schedule) if each.name != "type"}
    settings |= {name: offered[name] for name in offered.keys() & inspect.signature(component).parameters.keys()}
    rate = component(**settings)(step) if isinstance(component, type) else component(step, **settings)
    if not isinstance(rate, Real) or not 0 <= rate < math.inf:
        raise ValueError(f"lr_scheduler.type: {schedule.type} gave {rate!r} at step {step}: it should be from 0 up")
    return float(rate)
