"""The whole parameters of a sharded Cell, for files that are to fit any mesh."""

from mindformers_core.dtensor.move import redistribute_local
from mindformers_core.layout import Layout

__all__ = ["full_parameters"]


def full_parameters(cell):
    """The whole parameters, on every rank, of a Cell that `shard()` or `hsdp()` made parallel; all ranks call this.

    `mindspore.save_checkpoint(full_parameters(net), "net.ckpt")`, on one rank, writes what one card would. All of them
    have to fit into a rank's memory at once.

    Returns:
        A dict: name of the parameter -> plain tensor of its global shape.
    """
    whole = {}
    for parameter in cell.get_parameters():
        target = Layout.on(parameter.layout.mesh, ((),) * len(parameter.global_shape))
        whole[parameter.name] = redistribute_local(parameter, parameter.layout, target, parameter.global_shape)
    return whole
