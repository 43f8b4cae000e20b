"""Where the weight gradients of zero-bubble schedules go: into gaps. Pure Python."""

from collections import deque

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["with_weight_steps"]


def with_weight_steps(orders, stage_num, live_limit):
    """Orders of forward and input-gradient steps, with the weight-gradient steps put where they cost least.

    A rank takes the oldest one that is left when it would have to wait for another rank, and when it keeps so many
    micro-batches live that it can't begin another (the principle of Qi et al., "Zero bubble pipeline parallelism",
    2023). The schedule is gone through in ticks, in which every step takes one.

    Args:
        orders: for every rank the list of its FWD and BWD_INPUT steps; every stage's micro-batches from 0 on.
        stage_num: number of stages, over all ranks.
        live_limit: how many FWD a rank may be ahead of its BWD_WEIGHT.

    Returns:
        For every rank the list of its steps.
    """
    finished = {kind: [0] * stage_num for kind in (MetaStepType.FWD, MetaStepType.BWD_INPUT)}
    ranks = [_Rank(order, finished, live_limit) for order in orders]
    while working := [rank for rank in ranks if rank.pending or rank.weights]:
        steps = [step for step in [rank.tick() for rank in working] if step]
        assert steps, f"{live_limit} live micro-batches on a rank are too few for this order"
        for _, kind, stage, _ in steps:
            if kind != MetaStepType.BWD_WEIGHT:
                finished[kind][stage] += 1
    return [rank.steps for rank in ranks]


class _Rank:
    """A rank that goes through its order tick by tick."""

    def __init__(self, order, finished, live_limit):
        self.pending, self.weights, self.steps = deque(order), deque(), []
        self.finished, self.live_limit, self.live = finished, live_limit, 0

    def tick(self):
        """The step that is taken now, None while waiting."""
        step = None
        if self.pending and self.is_ready(self.pending[0]):
            step = self.pending.popleft()
            if step.type == MetaStepType.FWD:
                self.live += 1
            else:
                self.weights.append(MetaStep(step.micro_index, MetaStepType.BWD_WEIGHT, step.stage_index))
        elif self.weights:
            step = self.weights.popleft()
            self.live -= 1
        if step:
            self.steps.append(step)
        return step

    def is_ready(self, step):
        """Whether what the step needs was finished by earlier ticks, and there is room for it."""
        micro, kind, stage, _ = step
        forwards, inputs = self.finished.values()
        if kind == MetaStepType.FWD:
            return self.live < self.live_limit and (stage == 0 or forwards[stage - 1] > micro)
        return forwards[stage] > micro and (stage == len(inputs) - 1 or inputs[stage + 1] > micro)
