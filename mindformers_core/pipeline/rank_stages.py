"""The stages of one rank: their agreement with the stages of other ranks, and the sums over tied parameters."""

import secrets
from contextlib import contextmanager
from hashlib import blake2b

from mindspore import ops

from mindformers_core.algorithms.dropout import draws_of, next_draw, set_next_draw
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import LayoutSpec, bind_layout
from mindformers_core.pipeline.agreement import check_argument_names, check_stage_numbers, tied_parameters
from mindformers_core.pipeline.tables.step import MetaStepType, plain_steps
from mindformers_core.sharding.sharded_cells import ShardedCell, own_class, tree_of

# first entry of a message's tag; for the messages of a schedule's steps it is the type of the step
_DESCRIPTIONS, _GRADIENTS, _RESULTS, _ACTIVATIONS, _PROGRAMS, _LABELS = range(len(MetaStepType), len(MetaStepType) + 6)


class RankStages:
    """The stages of this rank, after they and those of the other ranks have exchanged their descriptions.

    All ranks of the pipeline have to construct their `RankStages` together, since they exchange messages.

    Args:
        stages: this rank's `PipelineStage`s, ascending.
        stage_ranks: for every stage of the pipeline the pipeline rank that holds it.

    Attributes:
        stages: stage index -> `PipelineStage`, of this rank.
        described: the descriptions of all stages of the pipeline, see `_description`.
        current_pass: end of the tags of the current pass, unique among passes and pipelines: a pass that failed may
            have left messages.
        draws: (micro-batch, stage) -> offset of the stage's first random draw in this pass; after the last stage, that
            of what follows. It travels with the tensors between stages, so that draws are counted as on one card.
        tied: path of a parameter that several stages hold -> `(stage, place among its parameters)` of each, ascending.

    Raises:
        ValueError: stages that don't make a pipeline, parameters of the same path that aren't alike, or layers to be
            recomputed or swapped that no stage has.
    """

    def __init__(self, stages, stage_ranks):
        self.stages = {stage.stage_index: stage for stage in stages}
        self.stage_ranks = tuple(stage_ranks)
        some = stages[0]
        self.ranks, self.rank, self.channel = some.ranks, self.stage_ranks[some.stage_index], some.channel
        self.axes = (some.axis,)
        received = self._from_all((secrets.randbits(31), [_description(stage) for stage in stages]), _DESCRIPTIONS)
        self.current_pass, self.draws, self._first_draw = (received[0][0], 0), {}, 0
        self.described = sorted((each for _, entry in received for each in entry), key=lambda each: each["stage"])
        check_stage_numbers(self.described)
        self.tied = tied_parameters(self.described)
        self._policies = {index: _policy(stage) for index, stage in self.stages.items()}
        summaries = [each["activations"] for each in self.described]
        self._awaits_programs = any(each is not None for each in summaries)  # the same on all ranks
        if self._awaits_programs:
            self._check_activations(summaries)

    def make_programs(self, table, given):
        """Make the programs of training ahead of a table's first step; all ranks of the pipeline have to call this.

        Args:
            table: the `ScheduleTable` that will run.
            given: stage index -> `(inputs, keyword arguments)` of a micro-batch, of this rank's stages; `TensorMeta`s
                will do.

        Raises:
            ValueError: on all ranks: a stage can't have a program; or a pattern of recompute or swap that matches on no
                stage, or a budget that is out of reach on one.
        """
        self._check_policies()
        split = self._split(table)
        self._on_all_stages(lambda index, stage: stage.make_program(*given[index], index in split), _PROGRAMS)
        self._check_programs()

    @contextmanager
    def running(self, training, table, names):
        """Open while the steps of a table run; after the last one gradients are added up, after an error dropped.

        Gradients of tied parameters are summed over their stages. `names` are those of the keyword arguments. An
        evaluation leaves MindSpore's default generator as it was: not all ranks know how many numbers it has drawn.

        Raises:
            ValueError: on all ranks, after the first pass: a pattern of recompute or swap that matches on no stage.
        """
        self.current_pass = self.current_pass[0], self.current_pass[1] + 1
        check_argument_names(names, self.described)
        self._check_policies()
        split, is_complete, self.draws, following = self._split(table), False, {}, next_draw()
        before_last = range(len(self.stage_ranks) - 1) if self.described[-1]["has_count"] else ()
        waiting = {*before_last, *(stage for holders in self.tied.values() for stage, _ in holders)}
        if not any(stage.weight_gradients.runs for stage in self.stages.values()):
            self._first_draw = following
        try:
            for index, stage in self.stages.items():
                stage.begin(training, table.micro_batch_num, index in split, index in waiting)
            yield
            if training:
                self._check_programs()
                for number, holders in enumerate(self.tied.values()):
                    self._sum_gradients(number, holders)
                if self.described[-1]["has_count"]:
                    self._share_labels()
                ends = [offset for (_, stage), offset in self.draws.items() if stage == len(self.stage_ranks)]
                following = max(ends, default=following)
            is_complete = True
        finally:
            set_next_draw(following)
            for stage in self.stages.values():
                stage.weight_gradients.end(is_complete)

    def forward(self, micro_index, stage_index, inputs, kwargs):
        """`PipelineStage.forward`, with the random draws of the micro-batch's rows."""
        stage = self.stages[stage_index]
        first = self.draws.setdefault((micro_index, stage_index), self._first_draw)
        with draws_of(stage.block(micro_index), first):
            outputs = stage.forward(micro_index, inputs, kwargs)
            self.draws[micro_index, stage_index + 1] = next_draw()
        return outputs

    def results(self, returned, dim, is_shared):
        """The merged outputs of the last stage: a tuple of tensors; None on other ranks unless `is_shared`.

        Args:
            returned: the outputs of all micro-batches, a list of tuples; ignored on other ranks than the last stage's.
            dim: dim for the concatenation of tensors; scalars become their mean, a sum of losses and the number of
                labels sums.
            is_shared: whether all ranks get the results.
        """
        last = len(self.stage_ranks) - 1
        tag = (_RESULTS, last, 0, *self.current_pass)
        if last not in self.stages:
            return self.channel.receive(self.global_rank(last), tag, "results") if is_shared else None
        results = _merged(returned, dim, self.stages[last])
        for rank, number in enumerate(self.ranks) if is_shared else ():
            if rank != self.rank:
                self.channel.send(results, number, tag, self.axes)
        return results

    def counted(self, stage_index):
        """For every parameter of a stage whether a norm counts it there: a tied one counts on its first stage."""
        elsewhere = {place for holders in self.tied.values() for stage, place in holders[1:] if stage == stage_index}
        return tuple(place not in elsewhere for place in range(len(self.stages[stage_index].parameters)))

    def global_rank(self, stage):
        """The global rank that holds a stage."""
        return self.ranks[self.stage_ranks[stage]]

    def _split(self, table):
        """This rank's stages with steps `BWD_INPUT` in a table."""
        steps = plain_steps(table.orders[self.rank])
        return {step.stage_index for step in steps if step.type == MetaStepType.BWD_INPUT}

    def _from_all(self, value, kind):
        """Gather `value` from all pipeline ranks, in their order, through rank 0: unbuffered sends can't deadlock."""
        if len(self.ranks) == 1:
            return [value]
        first = self.ranks[0]
        if self.rank > 0:
            self.channel.send_object(value, first, (kind, self.rank, 0))
            return self.channel.receive_object(first, (kind, self.rank, 1))
        others = list(enumerate(self.ranks))[1:]
        values = [value] + [self.channel.receive_object(rank, (kind, place, 0)) for place, rank in others]
        for place, rank in others:
            self.channel.send_object(values, rank, (kind, place, 1))
        return values

    def _on_all_stages(self, function, kind):
        """Call `function(index, stage)` for this rank's stages; on all ranks raise the error of the first stage."""
        errors = []
        for index, stage in self.stages.items():
            try:
                function(index, stage)
            except (ValueError, TypeError) as error:
                errors.append((index, str(error)))
        errors = sorted(tuple(error) for received in self._from_all(errors, kind) for error in received)
        if errors:
            raise ValueError(errors[0][1])

    def _check_policies(self):
        """Raise `ValueError` where `recompute()` or `swap()` was called since the stages have exchanged summaries."""
        for index, stage in self.stages.items():
            if _policy(stage) is not self._policies[index]:
                raise ValueError(
                    f"recompute() or swap() was called with the Cell of stage {index} after the stages had met: call "
                    "it before, and make the PipelineStage, and the schedule, anew"
                )

    def _check_programs(self):
        """Check the activations once more when all stages have programs; later calls do nothing."""
        if self._awaits_programs:
            own = [(index, _summary(stage)) for index, stage in self.stages.items()]
            summaries = {index: summary for entries in self._from_all(own, _ACTIVATIONS) for index, summary in entries}
            self._check_activations([summaries[index] for index in sorted(summaries)], have_programs=True)
            self._awaits_programs = False

    def _check_activations(self, summaries, have_programs=False):
        """Raise `ValueError`, on all ranks, where a stage's policy finds a fault in the summaries of all stages."""

        def check(index, stage):
            policy = self._policies[index]
            if policy is not None:
                policy.check_stages(summaries, stage.compiled)
                if have_programs:
                    policy.validate_for_backward()

        self._on_all_stages(check, _ACTIVATIONS)

    def _share_labels(self):
        """Tell all stages the number of labels of the current pass."""
        last = len(self.stage_ranks) - 1
        tag = (_LABELS, last, 0, *self.current_pass)
        if last in self.stages:
            labels = self.stages[last].labels.item()
            for rank in self.ranks[: self.rank] + self.ranks[self.rank + 1 :]:
                self.channel.send_object(labels, rank, tag)
        else:
            labels = self.channel.receive_object(self.global_rank(last), tag)
        for stage in self.stages.values():
            stage.weight_gradients.labels = (stage.weight_gradients.labels or 0) + labels

    def _sum_gradients(self, number, holders):
        """The first stage's rank sums in the order of stages, and sends the sum to the others: equal bits on all."""
        root = self.stage_ranks[holders[0][0]]
        places = {stage: place for stage, place in holders if stage in self.stages}
        sums = {stage: self.stages[stage].weight_gradients.of_run for stage in places}
        keys = {stage: sums[stage].number(place) for stage, place in places.items()}
        own = {stage: sums[stage].sums[key] for stage, key in keys.items()}
        if not own:
            return

        def tag(stage):
            return (_GRADIENTS, stage, number, *self.current_pass)

        everyone, what = len(self.stage_ranks), "the gradient of a weight that stages share"
        if self.rank == root:
            total = own[holders[0][0]]
            for stage, _ in holders[1:]:
                total = total + (
                    own[stage] if stage in own else self.channel.receive(self.global_rank(stage), tag(stage), what)[0]
                )
            for rank in sorted({self.stage_ranks[stage] for stage, _ in holders} - {root}):
                self.channel.send((total,), self.ranks[rank], tag(everyone), self.axes)
        else:
            for stage, gradient in own.items():
                self.channel.send((gradient,), self.ranks[root], tag(stage), self.axes)
            total = self.channel.receive(self.ranks[root], tag(everyone), what)[0]
        for stage, key in keys.items():
            sums[stage].sums[key] = total


def _description(stage):
    """The description of a `PipelineStage` for the other ranks: JSON data.

    Under "inputs" for every argument its name and the entries of its layout; None where the Cell isn't sharded. Under
    "parameters" path, global shape, dtype, mesh axes by dim, and whether it is trained; under "values" a digest of each
    trained one of `tied`.
    """
    cell, inputs = stage.cell, None
    if isinstance(cell, ShardedCell):
        declaration = tree_of(cell).declarations.get("")
        declared = declaration.inputs if declaration else {}
        inputs = [[name, _entries(declared.get(name))] for name in stage.function.by_place]
    parameters, values = [], {}
    for path, parameter in cell.parameters_and_names():
        shape, layout = getattr(parameter, "global_shape", parameter.shape), getattr(parameter, "layout", None)
        dims = None if layout is None else [list(axes) for axes in layout.dims]
        parameters.append([path, list(shape), dtype_name(parameter.dtype), dims, bool(parameter.requires_grad)])
        if path in stage.tied and parameter.requires_grad and stage.stage_num > 1:
            values[path] = blake2b(parameter.get_bytes(), digest_size=16).hexdigest()
    return {
        "stage": stage.stage_index,
        "stage_num": stage.stage_num,
        "cell": own_class(cell).__name__,
        "takes": list(stage.function.takes),
        "takes_any": stage.function.takes_any,
        "inputs": inputs,
        "tied": list(stage.tied),
        "has_count": stage.has_count,
        "activations": _summary(stage),
        "parameters": parameters,
        "values": values,
    }


def _entries(declared):
    """The entries of a declared layout, `"..."` for `...`."""
    if declared is None:
        return ["..."]
    entries = declared.entries if isinstance(declared, LayoutSpec) else bind_layout(declared, None).dims
    return ["..." if entry is ... else entry for entry in entries]


def _policy(stage):
    """The `ActivationPolicy` of a stage's Cell; None of a Cell that isn't sharded."""
    return tree_of(stage.cell).activations if isinstance(stage.cell, ShardedCell) else None


def _summary(stage):
    """The summary of a stage's `ActivationPolicy` for those of other stages, JSON data; None if it has none."""
    policy = _policy(stage)
    summary = None if policy is None else policy.stage_summary()
    return None if summary is None else summary | {"compiled": stage.compiled}


def _merged(returned, dim, stage):
    """The results of all micro-batches, a list of tuples, as one tuple, see `RankStages.results`."""
    label = stage.label
    counts = sorted({len(each) for each in returned})
    if len(counts) > 1:
        raise ValueError(f"{label} returned {counts} tensors for different micro-batches: should be as many")
    merged = []
    for place, tensors in enumerate(zip(*returned)):
        shape = tuple(tensors[0].shape)
        if len(tensors) == 1:
            merged.append(tensors[0])
        elif not shape:
            total = sum(tensors[1:], tensors[0])
            merged.append(total if stage.has_count and place < 2 else total / len(tensors))
        elif not -len(shape) <= dim < len(shape):
            raise ValueError(f"output {place} of {label} has the shape {shape}: no dim {dim} to join it along")
        else:
            merged.append(ops.concat(tensors, dim))
    return tuple(merged)
