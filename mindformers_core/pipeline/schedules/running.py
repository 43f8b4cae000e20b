"""Runs one rank's order of a schedule's table, step by step. Pure Python: stages and the channel use the tensors."""

from mindformers_core.pipeline.tables.step import FORWARD, OTHER_ENDS, MetaStepType, plain_steps


def run_table(schedule, table, micro_batches, training):
    """Run this rank's order of a table.

    Args:
        schedule: a `PipelineScheduleBase` with its stages.
        table: the `ScheduleTable` to run, lowered.
        micro_batches: a list of `(args, kwargs)`, one for each micro-batch; `args` are the first stage's inputs.
        training: whether gradients are computed.

    Returns:
        The last stage's results, merged over micro-batches: a tensor, or a tuple of several. None on other ranks,
        unless `schedule.share_outputs`.

    Raises:
        ValueError: the number of micro-batches isn't the table's.
        ValueError, TypeError, RuntimeError: a step failed; the error names the stage, its rank and the step.
    """
    if len(micro_batches) != table.micro_batch_num:
        raise ValueError(
            f"{type(schedule).__name__} is a schedule for {table.micro_batch_num} micro-batches, not for "
            f"{len(micro_batches)}"
        )
    stages = schedule.meet()
    with stages.running(training, table, {name for _, kwargs in micro_batches for name in kwargs}):
        run = _Run(stages, micro_batches)
        for step in plain_steps(table.orders[stages.rank]):
            run.carry_out(step)
    returned = [run.returned[micro] for micro in sorted(run.returned)]
    results = stages.results(returned, schedule.output_concat_dim, schedule.share_outputs)
    return results[0] if results is not None and len(results) == 1 else results


class _Run:
    """One pass over a batch on this rank: the tensors between steps, and the action of each type of step."""

    def __init__(self, stages, micro_batches):
        self.stages, self.micro_batches = stages, micro_batches
        self.last = len(stages.stage_ranks) - 1
        self.inputs, self.gradients = {}, {}  # (micro-batch, stage) -> tensors for its forward and its backward pass
        self.returned = {}  # micro-batch -> outputs of the last stage

    def carry_out(self, step):
        """Run a step; errors name the step, the stage and the rank."""
        try:
            if step.type in OTHER_ENDS:
                self.transfer(step)
            elif step.type == MetaStepType.FWD:
                self.forward(step.micro_index, step.stage_index)
            elif step.type == MetaStepType.BWD_WEIGHT:
                self.stages.stages[step.stage_index].backward_weight(step.micro_index)
            else:
                self.backward(step)
        except Exception as error:
            where = f"{self.stage_and_rank(step)}, step {step}"
            if step.type in (MetaStepType.FWD_RECV, MetaStepType.BWD_RECV):
                where += f", waiting for {step.other_end} of {self.stage_and_rank(step.other_end)}"
            raise _located(error, where) from error

    def forward(self, micro, stage):
        """FWD: the output is the input of the next stage; a later FWD_SEND sends it if that is on another rank."""
        args, kwargs = self.micro_batches[micro]
        inputs = args if stage == 0 else self.inputs.pop((micro, stage))
        try:
            outputs = self.stages.forward(micro, stage, inputs, kwargs)
        except Exception as error:
            if stage == 0:
                raise
            shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in inputs)
            raise _located(error, f"with {shapes} from stage {stage - 1}") from error
        if stage == self.last:
            self.returned[micro] = outputs
        else:
            self.inputs[micro, stage + 1] = outputs

    def backward(self, step):
        """BWD, BWD_INPUT: the gradient of the input is passed to the stage before."""
        micro, kind, stage, _ = step
        own = self.stages.stages[stage]
        gradients = own.backward_input(micro, None if stage == self.last else self.gradients.pop((micro, stage)))
        if kind == MetaStepType.BWD:
            own.backward_weight(micro)
        if stage > 0:
            self.gradients[micro, stage - 1] = gradients

    def transfer(self, step):
        """FWD_SEND, BWD_SEND, FWD_RECV, BWD_RECV: send or receive the tensors of the receiving stage."""
        other, channel = step.other_end, self.stages.channel
        is_send = step.type in (MetaStepType.FWD_SEND, MetaStepType.BWD_SEND)
        sending, receiving = (step, other) if is_send else (other, step)
        # identifies the message, also among those of a pass that failed: both ends derive it from the sending step
        tag = int(sending.type), sending.stage_index, sending.micro_index, *self.stages.current_pass
        rank = self.stages.global_rank(other.stage_index)
        tensors = self.inputs if step.type in FORWARD else self.gradients
        place = receiving.micro_index, receiving.stage_index
        drawn = place if step.type in FORWARD else (receiving.micro_index, self.last + 1)
        if is_send:
            channel.send(tensors.pop(place), rank, tag, axes=self.stages.axes, number=self.stages.draws[drawn])
        else:
            direction = "forward" if step.type in FORWARD else "backward"
            purpose = f"stage {step.stage_index}, micro-batch {step.micro_index}, {direction} pass"
            tensors[place], self.stages.draws[drawn] = channel.receive_numbered(rank, tag, purpose)

    def stage_and_rank(self, step):
        """The stage of a step and its global rank, for errors."""
        return f"stage {step.stage_index} (rank {self.stages.global_rank(step.stage_index)})"


def _located(error, where):
    """An error of the same type with its place."""
    kind = next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)
    return kind(f"{where}: {error}")
