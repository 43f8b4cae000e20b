"""Continuing prompts with a model on any mesh: one pass over all slots of the prompts, then one for every token."""

import numpy as np
from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.communication.point_to_point import channel
from mindformers_core.passes.stage_function import StageFunction
from mindformers_core.serving.prompts import padded
from mindformers_core.serving.sampling import next_tokens

_OUTPUTS, _TOKENS = -1, -2  # first entries of the messages' tags; those of pipelines are from 0


class Generator:
    """A model with caches on this rank, whole or as stages of a pipeline; all ranks of its mesh call it together.

    A Cell takes ids (batch, length), or the outputs of the stage before, the slots of these positions (length,), the
    same for all rows, and of each row its first slot that isn't padding (batch,); its caches hold the keys and values
    of all slots so far. The last one returns the global logits of the last position, (batch, 1, vocab_size).

    Args:
        cells: number of a stage -> its Cell, sharded, of this rank.
        stage_ranks: for every stage the global rank that holds it for this rank's part of the batch.
        rank: this rank's number.
        rows: slice of the batch that this rank computes.
        length: number of slots of prompts; those of longer ones don't fit.
        compiled: whether the passes are compiled.
    """

    def __init__(self, cells, stage_ranks, rank, rows, length, compiled=False):
        self.stages = {number: StageFunction(cell, None, compiled) for number, cell in cells.items()}
        self.stage_ranks, self.rank, self.rows, self.length = tuple(stage_ranks), rank, rows, length
        self._channel = channel() if len(set(stage_ranks)) > 1 else None
        self._passes = 0

    def logits(self, ids, slots, starts):
        """One pass, whose keys and values are written: the logits (batch, vocab_size), float32, on the last stage's
        ranks, None on others. Arguments are int32 arrays; of the global batch.
        """
        self._passes += 1
        named = {"slots": Tensor(slots), "starts": Tensor(starts[self.rows])}
        passed, last = (Tensor(ids[self.rows]),), len(self.stage_ranks) - 1
        for number, function in self.stages.items():
            tag = _OUTPUTS, number, self._passes
            if number > 0 and self.stage_ranks[number - 1] != self.rank:
                passed = self._channel.receive(self.stage_ranks[number - 1], tag)
            function.make_program(passed, named)
            passed = function(passed, named)
            if number < last and self.stage_ranks[number + 1] != self.rank:
                self._channel.send(passed, self.stage_ranks[number + 1], (_OUTPUTS, number + 1, self._passes), ("pp",))
        return ops.cast(passed[0], mstype.float32).asnumpy()[:, -1] if last in self.stages else None

    def run(self, prompts, count, sampling, numbers=None, stops=()):
        """Continue one batch of prompts.

        Args:
            prompts: as many lists of token ids as the caches have rows, at most `length` in each.
            count: number of tokens, at most the caches' slots less `length`.
            numbers: of the prompts, for the draws. Default: from 0.
            stops: ids after which a row ends.

        Returns:
            A list of the new tokens for every prompt, on every rank; less than `count` where one of `stops` came, which
            is the last of them.

        Raises:
            ValueError: on every rank: logits that aren't finite.
        """
        ids, starts = padded(prompts, self.length)
        numbers, found = range(len(prompts)) if numbers is None else numbers, []
        slots = np.arange(self.length, dtype=np.int32)
        for slot in range(self.length, self.length + count):
            logits, chosen = self.logits(ids, slots, starts), None
            if logits is not None:
                chosen = next_tokens(logits, sampling, numbers, slot - starts)
            found.append(self._on_all_stages(chosen))
            if (found[-1] < 0).any():
                raise ValueError(
                    f"the model's logits aren't finite: those of prompt {numbers[int(found[-1].argmin())]} for its new "
                    f"token {len(found) - 1}: check the weights, or compute with another model.dtype"
                )
            if stops and np.isin(found, stops).any(0).all():
                break
            ids, slots = found[-1][:, None], np.array([slot], np.int32)
        return [_until(row, stops) for row in np.array(found).reshape(-1, len(prompts)).T.tolist()]

    def _on_all_stages(self, chosen):
        """The tokens that the last stage has chosen."""
        source, tag = self.stage_ranks[-1], (_TOKENS, 0, self._passes)
        if self.rank != source:
            return self._channel.receive(source, tag)[0].asnumpy()
        for rank in sorted(set(self.stage_ranks) - {source}):
            self._channel.send((Tensor(chosen),), rank, tag, ("pp",))
        return chosen


def _until(row, stops):
    """The tokens up to the first of `stops`."""
    ends = [place for place, token in enumerate(row) if token in stops]
    return row[: ends[0] + 1] if ends else row
