"""A whole model as a pipeline by marks on its Cells: MindSpore's `pipeline_stage` and `PipelineCell`."""

from mindspore import nn

from mindformers_core.communication import world
from mindformers_core.hints import nearest
from mindformers_core.mesh import DeviceMesh
from mindformers_core.pipeline.schedules.one_f_one_b import Schedule1F1B
from mindformers_core.pipeline.stage import PipelineStage
from mindformers_core.program.structure import call_signature, tree_leaves
from mindformers_core.sharding.inspecting import programs
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import own_class


class PipelineCell:
    """A model, with its loss, whose Cells say on which stage they are: `net.layers[3].pipeline_stage = 1`.

    The model has to be a chain: each marked Cell takes the result of the one before as its first argument, and returns
    one tensor. Its other arguments are arguments of the model. All operators are in marked Cells, a Cell within a
    marked one belongs to it; the last one returns the loss. For other models: `PipelineStage`, and Cells of your own.

    >>> net.encoder.pipeline_stage, net.decoder.pipeline_stage, net.loss.pipeline_stage = 0, 1, 1
    >>> pipeline = PipelineCell(net, 4)
    >>> optimizer = nn.SGD(pipeline.trainable_params())
    >>> loss = pipeline(x, target)
    >>> optimizer(pipeline.gradients)

    Args:
        network: the model on one card, the same on all ranks. Here it loses the Cells of other ranks' stages.
        micro_size: number of micro-batches that a batch, dim 0 of all arguments, is split into.
        stage_config: path of a Cell -> its stage, in the place of a mark or beside them.
        mesh: the `DeviceMesh` of all ranks. Default: all ranks on one axis.
        axis: its axis of the pipeline, with one stage for each coordinate. Default: `"pp"`.
        schedule: class of the schedule. Default: `Schedule1F1B`.
        compiled: whether forward and backward pass are compiled. Default: no.
        settings: further arguments of `shard()` over the other axes.

    Attributes:
        stage: the `PipelineStage` of this rank; schedule: the schedule that runs it.

    Raises:
        ValueError: stages that aren't 0 to the number of ranks along `axis`; an unknown path; a Parameter of several
            stages. At the first call: an operator outside of marked Cells, several results of a stage.
    """

    def __init__(
        self, network, micro_size, stage_config=None, *, mesh=None, axis="pp", schedule=Schedule1F1B, compiled=False,
        **settings,
    ):  # fmt: skip
        mesh = DeviceMesh((world().size,), (axis,)) if mesh is None else mesh
        self._marked = marked_cells(network, stage_config or {})
        stage_num, (index,) = mesh.axis_size(axis), mesh.coordinate(world().rank, (axis,))
        if {*self._marked.values()} != {*range(stage_num)}:
            raise ValueError(
                f"PipelineCell(): Cells are marked with pipeline_stage {sorted({*self._marked.values()})}, and the "
                f"{stage_num} ranks along '{axis}' need 0 to {stage_num - 1}"
            )
        keep_stage(network, self._marked, index)
        others = tuple(each for each in mesh.axis_names if each != axis)
        inner = mesh.sub_mesh(others, world().rank) if others else DeviceMesh((1,), ("dp",), (world().rank,))
        shard(network, inner, **settings)
        self.stage = PipelineStage(network, index, stage_num, mesh, axis, compiled=compiled)
        self.schedule = schedule(self.stage, micro_size, share_outputs=True)
        self._arguments, self._checked = list(call_signature(own_class(network).construct).parameters)[1:], None

    def __call__(self, *args, **kwargs):
        """A training pass over a batch; returns the loss, on all ranks. The gradients are those of this pass."""
        self.stage.zero_gradients()
        loss = self.schedule.run(*args[:1], **dict(zip(self._arguments[1:], args[1:])), **kwargs)
        ran = programs(self.stage.cell)[-1]
        if ran is not self._checked:
            check_chain(ran.graph, self._marked)
            self._checked = ran
        return loss

    @property
    def gradients(self):
        """The gradients of `trainable_params()`, of the mean over micro-batches, as `PipelineStage.gradients`."""
        return self.stage.gradients

    def trainable_params(self):
        """The Parameters of this rank's stage, as a list."""
        return list(self.stage.parameters)


def check_chain(graph, marked):
    """Raise `ValueError` where a model, from its `CellGraph` on a stage, isn't a chain of the Cells in `marked`.

    On a stage, Cells of others pass on their first argument: a tensor that takes another way would be another one.
    """
    first, *others = graph.arguments.values()
    last, given = tree_leaves(first)[0], {value.id for value in tree_leaves(others)}
    for node in graph.nodes:
        if all(value.constant for value in node.made):
            continue
        where, path = f"{graph.label}, {node.source}: ", getattr(getattr(node, "graph", None), "path", None)
        if path is None:
            raise ValueError(
                f"{where}operator '{node.operator}' is in no Cell with a pipeline_stage, and every stage would compute "
                "it: put it into a Cell with one"
            )
        taken = [value.id for value in node.taken if not value.constant]
        if taken[:1] != [last.id] or not given.issuperset(taken[1:]):
            raise ValueError(
                f"{where}Cell '{path}' should take the result of the Cell before first, and arguments of the model "
                "other than the first one: build the stages yourself, PipelineStage(…)"
            )
        if path not in marked:
            check_chain(node.graph, marked)
        last, *_ = node.made
    if tree_leaves(graph.result) != [last]:
        raise ValueError(f"{graph.label} should return what its last Cell with a pipeline_stage does, one tensor")


class _Passed(nn.Cell):
    """In the place of a Cell of another stage."""

    def construct(self, x, *others, **named):
        return x


def marked_cells(network, stage_config):
    """Path -> stage, of the outermost Cells that have one.

    Raises:
        ValueError: `stage_config` names a path that isn't there; two stages share a Parameter.
    """
    cells, marked, owners = dict(network.cells_and_names()), {}, {}
    for path in stage_config:
        if path not in cells:
            raise ValueError(f"PipelineCell(): stage_config names no Cell by '{path}'{nearest(path, cells)}")
    for path, cell in cells.items():
        stage = stage_config.get(path, getattr(cell, "pipeline_stage", None))
        if stage is not None and not any(path.startswith(f"{outer}.") for outer in marked):
            marked[path] = stage
            for parameter in cell.get_parameters():
                if owners.setdefault(id(parameter), stage) != stage:
                    raise ValueError(
                        f"PipelineCell(): parameter '{parameter.name}' is on stages {owners[id(parameter)]} and "
                        f"{stage}: build the stages yourself, PipelineStage(…, tied=…)"
                    )
    return marked


def keep_stage(network, marked, stage):
    """Replace, in place, the Cells of other stages; `marked`: as `marked_cells` returns them."""
    cells = dict(network.cells_and_names())
    for path in [path for path, at in marked.items() if at != stage]:
        above, _, name = path.rpartition(".")
        owner = cells[above]
        if isinstance(owner, (nn.CellList, nn.SequentialCell)):
            owner[int(name)] = _Passed()
        else:
            setattr(owner, name, _Passed())
