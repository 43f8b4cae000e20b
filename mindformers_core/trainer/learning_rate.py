"""The learning rate as a pure function of the step.

MindSpore's own schedules are Cells that run on the device; a number that is computed here needs no device, can be drawn
and tested, and is the same in a run that was resumed.
"""

import math

from mindformers_core.trainer.recipe import warmup_steps

__all__ = ["learning_rate"]


def learning_rate(recipe, step):
    """The learning rate of `step`, 1 being the first and `training.steps` the last.

    Rises linearly to `lr_scheduler.learning_rate`, which it has at the last warm-up step. After that it stays
    (ConstantWarmUpLR), or falls to `lr_end` at the last step, linearly (LinearWithWarmUpLR) or as half a cosine
    (CosineWithWarmUpLR; Loshchilov and Hutter 2017, without restarts).
    """
    schedule, warmup = recipe.lr_scheduler, warmup_steps(recipe)
    if step < warmup:
        return schedule.learning_rate * step / warmup
    progress = (step - warmup) / max(1, recipe.training.steps - warmup)
    kept = _KEPT_SHARE[schedule.type](progress)
    return schedule.lr_end + (schedule.learning_rate - schedule.lr_end) * kept


# share of (learning_rate - lr_end) that is left when this share of the steps after warm-up is done
_KEPT_SHARE = {
    "ConstantWarmUpLR": lambda progress: 1.0,
    "LinearWithWarmUpLR": lambda progress: 1.0 - progress,
    "CosineWithWarmUpLR": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
