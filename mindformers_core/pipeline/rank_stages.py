"""The stages of one rank together: what they agree on with those of other ranks, and what is summed over stages."""

import secrets

from mindformers_core.pipeline.agreement import check_names, check_stages, raise_first, tied_parameters
from mindformers_core.pipeline.stage_activations import StageActivations
from mindformers_core.pipeline.tables.step import MetaStepType

__all__ = ["RankStages"]

# kinds of messages, in the place where those of a schedule's steps have the type of the step
_DESCRIPTIONS, _DIGESTS, _GRADIENTS, _RESULTS, _ACTIVATIONS, _PROGRAMS = range(len(MetaStepType), len(MetaStepType) + 6)


class RankStages:
    """The stages of this rank, after they and those of the other ranks have exchanged their descriptions.

    All ranks of the pipeline have to make theirs at the same time: they talk.

    Args:
        stages: this rank's `PipelineStage`s, ascending.
        stage_ranks: for every stage of the pipeline the pipeline rank that holds it.

    Attributes:
        described: what every stage of the pipeline says of itself (`PipelineStage.description`).
        current_pass: what tags of the pass that runs have in common, and no other of any pipeline: a pass that failed
            may have left messages.
        tied: path of a parameter that several stages hold -> `(stage, place among its parameters)` of each, ascending.

    Raises:
        ValueError: stages that don't make a pipeline, parameters of the same path that aren't alike, or layers to be
            recomputed or swapped that no stage has.
    """

    def __init__(self, stages, stage_ranks):
        self.stages = {stage.stage_index: stage for stage in stages}
        self.stage_ranks, self._passes = tuple(stage_ranks), 0
        some = stages[0]
        self.ranks, self.rank, self.channel = some.ranks, self.stage_ranks[some.stage_index], some.channel
        self.axes = (some.axis,)
        received = self._from_all((secrets.randbits(31), [stage.description() for stage in stages]), _DESCRIPTIONS)
        self._number = received[0][0]
        self.described = sorted((each for _, entry in received for each in entry), key=lambda each: each["stage"])
        check_stages(self.described)
        self.tied = tied_parameters(self.described)
        self._check_values()
        received = [each["activations"] for each in self.described]
        self._activations = StageActivations(self.stages, received, lambda value: self._from_all(value, _ACTIVATIONS))

    def prepare(self, table, given):
        """Make the programs of training ahead of a table's first step; all ranks of the pipeline have to call this.

        Args:
            table: the `ScheduleTable` that will run.
            given: stage index -> `(inputs, keyword arguments)` of a micro-batch, of this rank's stages; `TensorMeta`s
                will do.

        Raises:
            ValueError: on all ranks: a stage can't have a program; or a pattern of recompute or swap that matches on no
                stage, or a budget that is out of reach on one.
        """
        self._activations.check_unchanged()
        split, problems = self._split(table), []
        for index, stage in self.stages.items():
            try:
                stage.prepare(*given[index], index in split)
                problems.append((index, ""))
            except (ValueError, TypeError) as error:  # the others are to know it, too
                problems.append((index, str(error)))
        raise_first(problem for received in self._from_all(problems, _PROGRAMS) for problem in received)
        self._activations.check_programs()

    @property
    def current_pass(self):
        return self._number, self._passes

    def begin(self, training, table, names):
        """Before the first step of a table; `names` are those of the keyword arguments."""
        self._passes += 1
        check_names(names, self.described)
        self._activations.check_unchanged()
        split = self._split(table)
        for index, stage in self.stages.items():
            stage.begin(training, table.micro_batch_num, index in split)

    def finish(self, training):
        """After the last step: gradients of tied parameters are summed over their stages, and all added up.

        Raises:
            ValueError: on all ranks, after the first pass: a pattern of recompute or swap that matches on no stage.
        """
        if training:
            self._activations.check_programs()
            for number, holders in enumerate(self.tied.values()):
                self._sum_gradients(number, holders)
        for stage in self.stages.values():
            stage.finish()

    def end(self):
        """After a pass, also one that failed."""
        for stage in self.stages.values():
            stage.end()

    def share(self, results):
        """The last stage's results, a tuple of tensors, on all ranks; `results` counts on its rank alone."""
        last = len(self.stage_ranks) - 1
        tag = (_RESULTS, last, 0, *self.current_pass)
        if last not in self.stages:
            return self.channel.receive(self._global_rank(last), tag)
        for rank, number in enumerate(self.ranks):
            if rank != self.rank:
                self.channel.send(results, number, tag, self.axes)
        return results

    def counted(self, stage_index):
        """For every parameter of a stage whether it is counted there: of tied ones the first stage's is."""
        elsewhere = {place for holders in self.tied.values() for stage, place in holders[1:] if stage == stage_index}
        return tuple(place not in elsewhere for place in range(len(self.stages[stage_index].parameters)))

    def _split(self, table):
        """Those of this rank's stages that have steps `BWD_INPUT` in a table."""
        steps = [part for step in table.orders[self.rank] for part in step.sub_steps or (step,)]
        return {step.stage_index for step in steps if step.type == MetaStepType.BWD_INPUT}

    def _global_rank(self, stage):
        return self.ranks[self.stage_ranks[stage]]

    def _from_all(self, value, kind):
        """What every pipeline rank gives, in their order: rank 0 collects and hands out, so sends may wait."""
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

    def _check_values(self):
        """Tied parameters have to begin alike: else each stage would go its own way."""
        if not self.tied:
            return
        own = [
            [path, index, self.stages[index].digest(place)]
            for path, holders in self.tied.items()
            for index, place in holders
            if index in self.stages
        ]
        first = {}
        for path, index, digest in sorted(entry for received in self._from_all(own, _DIGESTS) for entry in received):
            stage, expected = first.setdefault(path, (index, digest))
            if digest != expected:
                raise ValueError(
                    f"parameter '{path}' has other values on stage {index} than on stage {stage}, but a path is one "
                    "parameter: give both the same initial values (shard() and materialize() draw them from seed and "
                    "path), or, if they are to be two parameters, two paths"
                )

    def _sum_gradients(self, number, holders):
        """The first stage's rank sums in the order of stages, and tells the others: all get the same bits."""
        root = self.stage_ranks[holders[0][0]]
        own = {stage: self.stages[stage].new_gradients[place] for stage, place in holders if stage in self.stages}
        elsewhere = [stage for stage, _ in holders if self.stage_ranks[stage] != root]
        if not own:
            return

        def tag(stage):
            return (_GRADIENTS, stage, number, *self.current_pass)

        everyone = len(self.stage_ranks)
        if self.rank == root:
            total = own[holders[0][0]]
            for stage, _ in holders[1:]:
                sent = stage in elsewhere
                added = self.channel.receive(self._global_rank(stage), tag(stage))[0] if sent else own[stage]
                total = total + added
            for rank in sorted({self.stage_ranks[stage] for stage in elsewhere}):
                self.channel.send((total,), self.ranks[rank], tag(everyone), self.axes)
        else:
            for stage, gradient in own.items():
                self.channel.send((gradient,), self.ranks[root], tag(stage), self.axes)
            total = self.channel.receive(self.ranks[root], tag(everyone))[0]
        for stage, place in holders:
            if stage in self.stages:
                self.stages[stage].new_gradients[place] = total
