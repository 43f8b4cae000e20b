"""The learning rate as a pure function of the step: in a resumed run it is the same, and it needs no device."""

import math

__all__ = ["learning_rate"]


def learning_rate(recipe, step):
    """The learning rate of `step`, 1 being the first and `training.steps` the last.

    Rises linearly to `lr_scheduler.learning_rate`, which it has at the last warm-up step. After that it stays
    (ConstantWarmUpLR), or falls to `lr_end` at the last step, linearly (LinearWithWarmUpLR) or as half a cosine
    (CosineWithWarmUpLR; Loshchilov and Hutter 2017, without restarts).
    """
    schedule, warmup = recipe.lr_scheduler, recipe.lr_scheduler.warmup_steps
    if schedule.warmup_ratio is not None:
        warmup = math.ceil(schedule.warmup_ratio * recipe.training.steps)
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
