"""Where zero-bubble schedules compute weight gradients: in the gaps of the other steps. Pure Python."""

from collections import deque

from mindformers_core.pipeline.tables.step import MetaStepType


def with_weight_steps(orders, stage_num, live_limit):
    """Insert the weight-gradient steps into orders of forward and input-gradient steps where they cost least.

    A rank takes its oldest weight-gradient step when it would wait for another rank otherwise, or when so many of its
    micro-batches are live that it can't begin another one (the principle of Qi et al., "Zero bubble pipeline
    parallelism", 2023). The schedule is simulated in ticks: every step takes one.

    Args:
        orders: for every rank the list of its FWD and BWD_INPUT steps; every stage's micro-batches from 0 on.
        stage_num: number of stages, over all ranks.
        live_limit: largest number of FWD of a rank whose BWD_WEIGHT hasn't run.

    Returns:
        For every rank the list of its steps.
    """
    forwards, inputs = [0] * stage_num, [0] * stage_num  # for every stage the number of FWD, of BWD_INPUT so far
    pending, weights, live = [deque(order) for order in orders], [deque() for _ in orders], [0] * len(orders)
    results = [[] for _ in orders]

    def is_ready(rank, step):
        micro, kind, stage, _ = step
        if kind == MetaStepType.FWD:
            return live[rank] < live_limit and (stage == 0 or forwards[stage - 1] > micro)
        return forwards[stage] > micro and (stage == stage_num - 1 or inputs[stage + 1] > micro)

    def next_step(rank):
        if pending[rank] and is_ready(rank, pending[rank][0]):
            return pending[rank].popleft()
        return weights[rank].popleft() if weights[rank] else None

    while any(pending) or any(weights):
        steps = [(rank, step) for rank in range(len(orders)) if (step := next_step(rank))]
        assert steps, f"{live_limit} live micro-batches on a rank are too few for this order"
        for rank, step in steps:
            results[rank].append(step)
            if step.type == MetaStepType.FWD:
                forwards[step.stage_index] += 1
                live[rank] += 1
            elif step.type == MetaStepType.BWD_INPUT:
                inputs[step.stage_index] += 1
                weights[rank].append(step._replace(type=MetaStepType.BWD_WEIGHT))
            else:
                live[rank] -= 1
    return results
