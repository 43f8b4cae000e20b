"""The load of ranks with experts, and `moe.placement`: experts that move between them after a step."""

import numpy as np
from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.checkpoint.hugging_face import tensor_map
from mindformers_core.checkpoint.tensor_map import placed
from mindformers_core.checkpoint.tensors import fill_parameter
from mindformers_core.models.expert_placement import placed_by_loads
from mindformers_core.scopes import errors_at


class ExpertPlacement:
    """Where the experts of a job lie; all ranks call the methods alike.

    Weights, their moments and averages are moved by the `Checkpointer`, for which another place is another tensor map:
    files have each expert under its own number.

    Args:
        recipe, mesh, cells, checkpointer: of the job.

    Raises:
        ValueError: experts are to move, but files have those of a layer in one tensor.
    """

    def __init__(self, recipe, mesh, cells, checkpointer):
        self._settings, self._checkpointer = recipe.moe.placement, checkpointer
        self._ranks = mesh.axis_size(*recipe.parallelism.expert_parallel)
        self._map, self._experts, self._counts, self._layers = tensor_map(recipe.spec, recipe.model), None, None, {}
        paths = {id(cell): path for net in cells.values() for path, cell in net.cells_and_names()}
        for net in cells.values() if self._settings.interval else ():
            blocks = {place: block.experts for place, block in net.mixtures().items()}
            self._layers |= {place: (paths[id(block)], block) for place, block in blocks.items()}
        with errors_at("moe.placement: "):
            self._entries({place: range(block.num_experts) for place, (_, block) in self._layers.items()})

    def after_step(self, step, counts):
        """The numbers that the row of a step has, see docs/metrics.md; experts move where it is time.

        Args:
            step: its number.
            counts: float32 (layers with experts, experts), choices of experts by number; None of a skipped step, and of
                a model without experts.
        """
        if counts is None or self._ranks == 1:
            return {}
        if self._experts is None:
            self._experts = _in_order(*counts.shape)
        loads = ops.gather_elements(counts, 1, Tensor(self._experts))
        loads = ops.sum(ops.reshape(loads, (counts.shape[0], self._ranks, -1)), -1)
        row = {"rank_load": ops.amax(ops.div(ops.amax(loads, -1), ops.mean(loads, -1)))}
        if self._settings.interval:
            self._counts = counts if self._counts is None else self._counts + counts
            if step % self._settings.interval == 0:
                given = zip(self._counts.asnumpy(), self._experts)
                found = [placed_by_loads(own, self._ranks, at, self._settings.threshold) for own, at in given]
                row["experts_moved"], self._counts = self._move(np.stack(found)), None
        return row

    def state(self):
        """The expert at each position, and the loads since the last look, as lists; None where experts don't move."""
        if self._experts is None or not self._settings.interval:
            return None
        loads = None if self._counts is None else self._counts.asnumpy().tolist()
        return {"experts": self._experts.tolist(), "loads": loads}

    def restore(self, state):
        """Move experts to where they were in a job on any ranks, and go on from its loads; None: all are in order."""
        if state and self._settings.interval and self._ranks > 1:
            experts, loads = np.array(state["experts"], np.int32), state["loads"]
            self._experts, self._counts = _in_order(*experts.shape), loads and Tensor(loads, mstype.float32)
            self._move(experts)

    def _move(self, experts):
        """Move experts to these positions (layers, experts); the number of those that moved."""
        moved, self._experts = int((self._experts != experts).sum()), experts
        if moved == 0:
            return 0
        self._checkpointer.arrange((*self._entries(dict(enumerate(self._experts.tolist()))), *self._map))
        for place, (_, block) in self._layers.items():
            by_number = np.argsort(self._experts[place]).astype(np.int32)
            for moved_by in (each for each in block.get_parameters(expand=False) if getattr(each, "is_state", False)):
                fill_parameter(moved_by, by_number - np.arange(by_number.size, dtype=np.int32))
        return moved

    def _entries(self, experts):
        """Entries of a tensor map for this rank's layers, by the experts at their positions, by place."""
        return [
            placed(self._map, f"{path}.{name}", experts[place])
            for place, (path, block) in self._layers.items()
            for name, each in block.parameters_and_names(expand=False)
            if not getattr(each, "is_state", False)
        ]


def _in_order(layers, count):
    """The expert at each position of all layers, in their order."""
    return np.tile(np.arange(count, dtype=np.int32), (layers, 1))
