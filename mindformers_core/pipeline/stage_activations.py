"""What is wrong with `recompute()` and `swap()` on the stages of a pipeline together: an error on all of its ranks."""

from mindformers_core.pipeline.agreement import raise_first
from mindformers_core.sharding.sharded_cells import ShardedCell, tree_of

__all__ = ["StageActivations", "activations_of", "summary_of"]


def activations_of(cell):
    """The `ActivationPolicy` of a stage's Cell; None of one that isn't sharded."""
    return tree_of(cell).activations if isinstance(cell, ShardedCell) else None


def summary_of(stage):
    """What the policy of a `PipelineStage`'s Cell tells those of others, as JSON can hold it; None: nothing."""
    policy = activations_of(stage.cell)
    summaries = None if policy is None else policy.stage_summary()
    return None if summaries is None else summaries | {"compiled": stage.compiled}


class StageActivations:
    """What becomes of the activations of this rank's stages, after all stages have exchanged what they know.

    Args:
        stages: stage index -> `PipelineStage`, of this rank.
        summaries: `stage_summary` of the `ActivationPolicy` of every stage, ascending; None of those without one.
        from_all: gives what every pipeline rank gives, in their order; all of them have to call it.

    Raises:
        ValueError: a policy finds something wrong with the summaries.
    """

    def __init__(self, stages, summaries, from_all):
        self._stages, self._from_all = stages, from_all
        self._policies = {index: activations_of(stage.cell) for index, stage in stages.items()}
        self._waits = any(each is not None for each in summaries)  # for programs: the same on all ranks
        if self._waits:
            self._check(summaries)

    def check_unchanged(self):
        """Raise `ValueError` where a stage was given another policy since."""
        for index, stage in self._stages.items():
            if activations_of(stage.cell) is not self._policies[index]:
                raise ValueError(
                    f"recompute() or swap() was called with the Cell of stage {index} after the stages had met: call "
                    "it before, and make the PipelineStage, and the schedule, anew"
                )

    def check_programs(self):
        """The same as at first, once more, now that all stages have programs; later calls do nothing."""
        if not self._waits:
            return
        own = [(index, summary_of(stage)) for index, stage in self._stages.items()]
        collected = sorted(self._collected(own), key=lambda entry: entry[0])
        self._check([summary for _, summary in collected], have_programs=True)
        self._waits = False

    def _check(self, summaries, have_programs=False):
        problems = [(index, self._problem(index, summaries, have_programs)) for index in self._stages]
        raise_first(self._collected(problems))

    def _collected(self, own):
        return [tuple(entry) for entries in self._from_all(own) for entry in entries]

    def _problem(self, index, summaries, have_programs):
        policy = self._policies[index]
        try:
            if policy is not None:
                policy.check_stages(summaries)
                if self._stages[index].compiled:
                    policy.check_compiled_stage(summaries)
                if have_programs:
                    policy.validate_for_backward()
        except ValueError as error:
            return str(error)
        return ""
