"""Carries out one rank's part of a schedule's table, step by step. Pure Python: stages and the channel do the work."""

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["run_table"]


def run_table(schedule, table, micro_batches, training):
    """Run this rank's order of a table.

    Args:
        schedule: a `PipelineScheduleBase` with its stages.
        table: the `ScheduleTable` to run, lowered.
        micro_batches: a list of `(args, kwargs)`, one for each micro-batch; of the args only the first stage sees
            anything.
        training: whether gradients are taken.

    Returns:
        The last stage's results, merged over micro-batches: one by itself, several as a tuple. None on other ranks,
        unless `schedule.share_outputs`.

    Raises:
        ValueError: another number of micro-batches than the table's.
        ValueError, TypeError, RuntimeError: a step failed; the error names the stage, its rank and the step.
    """
    if len(micro_batches) != table.micro_batch_num:
        raise ValueError(
            f"{type(schedule).__name__} is a schedule for {table.micro_batch_num} micro-batches, not for "
            f"{len(micro_batches)}"
        )
    stages = schedule.meet()
    try:
        stages.begin(training, table, {name for _, kwargs in micro_batches for name in kwargs})
        run = _Run(schedule, table, micro_batches, stages.current_pass)
        for step in table.orders[run.rank]:
            run.carry_out(step)
        stages.finish(training)
    finally:
        stages.end()
    results = run.results()
    if schedule.share_outputs:
        results = stages.share(results)
    return results[0] if results is not None and len(results) == 1 else results


class _Run:
    """One pass over a batch on this rank: the mailbox between steps, and what each type of step does."""

    def __init__(self, schedule, table, micro_batches, current_pass):
        self.schedule, self.table, self.micro_batches = schedule, table, micro_batches
        self.current_pass = current_pass
        self.stages = {stage.stage_index: stage for stage in schedule.stages}
        some = schedule.stages[0]
        self.ranks, self.axis, self.channel = some.ranks, some.axis, some.channel
        self.rank = table.stage_ranks[some.stage_index]
        self.last = table.stage_num - 1
        self.inputs, self.outputs = {}, {}  # (micro-batch, stage) -> tensors for a stage's forward pass, and of it
        self.gradients_in, self.gradients_out = {}, {}  # the same, of the backward pass
        self.returned = {}  # micro-batch -> what the last stage returned
        self.actions = {
            MetaStepType.FWD: self.forward,
            MetaStepType.BWD: self.backward,
            MetaStepType.BWD_INPUT: self.backward,
            MetaStepType.BWD_WEIGHT: self.backward_weight,
            MetaStepType.FWD_SEND: self.send,
            MetaStepType.BWD_SEND: self.send,
            MetaStepType.FWD_RECV: self.receive,
            MetaStepType.BWD_RECV: self.receive,
        }

    def carry_out(self, step):
        """Do what a step says."""
        if step.type == MetaStepType.OVERLAP:
            for part in step.sub_steps:
                self.carry_out(part)
            return
        try:
            self.actions[step.type](step)
        except Exception as error:
            raise _located(error, self.where(step)) from error

    def forward(self, step):
        """FWD: the output is returned, left for the sending step, or handed to the next stage on this rank."""
        micro, stage = step.micro_index, step.stage_index
        args, kwargs = self.micro_batches[micro]
        inputs = args if stage == 0 else self.inputs.pop((micro, stage))
        try:
            outputs = self.stages[stage].forward(micro, inputs, kwargs)
        except Exception as error:
            if stage == 0:
                raise
            shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in inputs)
            raise _located(error, f"with {shapes} from stage {stage - 1}") from error
        if stage == self.last:
            self.returned[micro] = outputs
        elif stage + 1 in self.stages:
            self.inputs[micro, stage + 1] = outputs
        else:
            self.outputs[micro, stage] = outputs

    def backward(self, step):
        """BWD, BWD_INPUT: the gradient of the input goes the other way."""
        micro, stage = step.micro_index, step.stage_index
        own = self.stages[stage]
        taken = own.backward if step.type == MetaStepType.BWD else own.backward_input
        gradients = taken(micro, None if stage == self.last else self.gradients_in.pop((micro, stage)))
        if stage == 0:
            return
        if stage - 1 in self.stages:
            self.gradients_in[micro, stage - 1] = gradients
        else:
            self.gradients_out[micro, stage] = gradients

    def backward_weight(self, step):
        """BWD_WEIGHT: nothing is given to anyone."""
        self.stages[step.stage_index].backward_weight(step.micro_index)

    def send(self, step):
        """FWD_SEND, BWD_SEND."""
        box = self.outputs if step.type == MetaStepType.FWD_SEND else self.gradients_out
        tensors = box.pop((step.micro_index, step.stage_index))
        self.channel.send(tensors, self.rank_of(_partner(step)), self.tag(step), axes=(self.axis,))

    def receive(self, step):
        """FWD_RECV, BWD_RECV."""
        sender = _partner(step)
        box = self.inputs if step.type == MetaStepType.FWD_RECV else self.gradients_in
        tensors = self.channel.receive(self.rank_of(sender), self.tag(sender))
        box[step.micro_index, step.stage_index] = tensors

    def results(self):
        """The merged results, a tuple, on the last stage's rank."""
        if not self.returned:
            return None
        collected = [self.returned[micro] for micro in range(self.table.micro_batch_num)]
        return self.stages[self.last].merge(collected, self.schedule.output_concat_dim)

    def tag(self, sending):
        """What tells a message from others, also of a pass that failed: both ends take it from the step that sends."""
        return int(sending.type), sending.stage_index, sending.micro_index, *self.current_pass

    def rank_of(self, step):
        """The global rank of a step's stage."""
        return self.ranks[self.table.stage_ranks[step.stage_index]]

    def where(self, step):
        """A step, for errors."""
        text = f"stage {step.stage_index} (rank {self.rank_of(step)}), step {step}"
        if step.type in (MetaStepType.FWD_RECV, MetaStepType.BWD_RECV):
            sender = _partner(step)
            text += f", waiting for {sender} of stage {sender.stage_index} (rank {self.rank_of(sender)})"
        return text


_PARTNERS = {  # type of a sending or receiving step -> type of the other end's, and its stage's distance
    MetaStepType.FWD_SEND: (MetaStepType.FWD_RECV, 1),
    MetaStepType.FWD_RECV: (MetaStepType.FWD_SEND, -1),
    MetaStepType.BWD_SEND: (MetaStepType.BWD_RECV, -1),
    MetaStepType.BWD_RECV: (MetaStepType.BWD_SEND, 1),
}


def _partner(step):
    """The receiving step of a sending one, and the other way round."""
    kind, distance = _PARTNERS[step.type]
    return MetaStep(step.micro_index, kind, step.stage_index + distance)


def _located(error, where):
    """An error of the same kind that says where it happened."""
    kind = next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)
    return kind(f"{where}: {error}")
