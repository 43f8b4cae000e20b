"""MindSpore's names of distributed inference, over checkpoints that belong to no mesh."""

from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.hugging_face import ignored_tensors
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.tensors import load_parameters, model_parts, ranks_of
from mindformers_core.communication.world import world
from mindformers_core.models.registry import MODELS
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.sharding.sharded_cells import tree_and_path


def infer_predict_layout(network, *predict_data):
    """The layouts of all Parameters: a dict, path -> `Layout`; the program of a call is made, nothing is computed.

    Args:
        network: after `shard()`.
        predict_data: the arguments of a call, this rank's parts, or `TensorMeta`s.

    Raises:
        TypeError: `network` isn't sharded. ValueError: the call can't be captured.
    """
    prepare(network, *predict_data)
    return {path: parameter.layout for path, parameter in network.parameters_and_names()}


def load_distributed_checkpoint(network, checkpoint_filenames, predict_strategy=None, train_strategy_filename=None):
    """Give the Parameters of a sharded Cell the values of a checkpoint; all ranks of its mesh call this.

    Args:
        network: after `shard()`, on any mesh.
        checkpoint_filenames: path of a checkpoint or run folder of ours, or of a Hugging Face folder, whose names of
            tensors must be the paths of the Parameters. What old files of `MODELS` have beside them is left out.
        predict_strategy: layouts that the Parameters have to have, as `infer_predict_layout` returns them. Default:
            those that they have.
        train_strategy_filename: not needed, and never read: tensors of a checkpoint are global.

    Raises:
        TypeError: `network` isn't sharded. FileNotFoundError: no such checkpoint. ValueError: on all ranks: tensors
            that differ from the Parameters, a damaged file; or a Parameter of another layout.
    """
    tree, _ = tree_and_path(network)
    parameters = dict(network.parameters_and_names())
    for path, layout in (predict_strategy or {}).items():
        if path not in parameters or parameters[path].layout != layout:
            here = f"lives as {parameters[path].layout}" if path in parameters else "isn't one of the network"
            raise ValueError(f"predict_strategy: parameter '{path}' as {layout}, but it {here}: shard() it so")
    parts = model_parts([network], world().rank)
    ranks = ranks_of(tree.mesh, world().rank)
    checkpoint = open_checkpoint(find_checkpoint(checkpoint_filenames))
    names = [name for _, name in checkpoint.tensors]
    ignored = [name for spec in MODELS.values() for name in ignored_tensors(spec, names)]
    return load_parameters(checkpoint, parts, ranks, True, ignored)
