"""`split()`: one linear layer or embedding, sharded over several devices, after Paddle's `paddle.distributed.split`.

Paddle keeps the new parameters in its static program. Here parameters are attributes of Cells: `split_layer` builds the
Cell of the layer, for a model that `shard()` shards later; `split` builds, shards and applies one at once.
"""

from collections import OrderedDict

import mindspore as ms
from mindspore import nn

from mindformers_core.communication import world
from mindformers_core.hints import nearest
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.shard import shard
from mindformers_core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

_OPERATIONS = ("linear", "embedding")


def split(
    x,
    size,
    operation,
    axis=0,
    num_partitions=1,
    gather_out=True,
    weight_attr=None,
    bias_attr=None,
    name=None,
    mesh=None,
):
    """Applies a new layer to `x`, its weight sharded over the `tp` axis of a mesh.

    The initial values depend on `name` and `size` alone: two calls with the same ones draw the same values.

    Args:
        x: input: (…, N) for a linear layer, ids of an int dtype for an embedding.
        size, operation, axis, gather_out, weight_attr, bias_attr: as `split_layer`.
        num_partitions: number of parts: the size of the mesh's `tp` axis. Default: 1.
        name: path of the layer, for its parameters' names. Default: the operation.
        mesh: a mesh with an axis `tp`. Default: all ranks on one such axis.

    Returns:
        The layer's output.

    Raises:
        TypeError, ValueError: as `split_layer`; also an input that doesn't fit, or another size of axis `tp`.
    """
    if isinstance(num_partitions, bool) or not isinstance(num_partitions, int):
        raise TypeError(f"num_partitions: expected an int, not {num_partitions!r}")
    mesh = DeviceMesh((world().size,), ("tp",)) if mesh is None else mesh
    if mesh.axis_size("tp") != num_partitions:
        raise ValueError(
            f"num_partitions: {num_partitions} should be {mesh.axis_size('tp')}, the size of axis 'tp' of {mesh}; "
            "or give another mesh"
        )
    with ms.DeviceCtx("meta"):
        layer = split_layer(size, operation, axis, gather_out, weight_attr, bias_attr)
        cell = nn.SequentialCell(OrderedDict([(name or operation, layer)]))
    if operation == "linear" and x.shape[-1] != size[0]:
        raise ValueError(f"x of shape {tuple(x.shape)}: the last dim should be size[0] = {size[0]}")
    return shard(cell, mesh)(x)


def split_layer(size, operation, axis=0, gather_out=True, weight_attr=None, bias_attr=None):
    """The Cell of a linear layer or embedding whose weight `shard()` shards along `axis`, for a model.

    - `embedding`, axis 0: rows are sharded; every rank looks up the ids of its rows, and the results are summed.
    - `linear`, axis 0 (row parallel): input features are sharded; every rank computes a term of the sum.
    - `linear`, axis 1 (column parallel): output features are sharded, and the output is gathered.

    Args:
        size: (N, M), the weight's shape: N ids or input features, M output features. A linear layer stores (M, N).
        operation: "linear" or "embedding".
        axis: the sharded dim of (N, M). Default: 0.
        gather_out: whether every rank gets the global output. Else the output is partial (row; but reduced if it is a
            result of the Cell that `shard()` was called with) or sharded on the last dim (column). The output of an
            embedding is always global. Default: True.
        weight_attr: the weight's initializer: a MindSpore `Initializer`, its name or a number. Default: Normal(0.02).
        bias_attr: the bias's initializer, as `weight_attr`; False for no bias. Default: zeros.

    Raises:
        TypeError, ValueError: an argument of another type or value.
    """
    _check_arguments(size, operation, axis, gather_out, bias_attr)
    if operation == "embedding":
        return VocabParallelEmbedding(*size, weight_init=weight_attr)
    settings = {"has_bias": bias_attr is not False, "weight_init": weight_attr}
    settings["bias_init"] = "zeros" if bias_attr is None else bias_attr
    if axis == 0:
        return RowParallelLinear(*size, reduce_output=gather_out, **settings)
    return ColumnParallelLinear(*size, gather_output=gather_out, **settings)


def _check_arguments(size, operation, axis, gather_out, bias_attr):
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(part, int) for part in size):
        raise TypeError(f"size: expected two ints (N, M), the shape of the weight, not {size!r}")
    if min(size) < 1:
        raise ValueError(f"size: {tuple(size)} should be at least 1 in both dims")
    if operation not in _OPERATIONS:
        allowed = " or ".join(map(repr, _OPERATIONS))
        raise ValueError(f"operation: {operation!r} should be {allowed}{nearest(operation, _OPERATIONS)}")
    if axis not in (0, 1):
        raise ValueError(f"axis: {axis!r} should be 0 (rows of the weight) or 1 (columns)")
    if operation == "embedding" and (axis != 0 or not gather_out or bias_attr):
        raise ValueError(
            f"operation 'embedding' is cut along axis 0, summed, and has no bias; not with axis={axis}, "
            f"gather_out={gather_out}, bias_attr={bias_attr!r}: leave these at their defaults"
        )
