"""Losses that are a sum and a number of labels: what a Cell returns, and the factor that makes the mean."""

from mindspore import Tensor, dtype as mstype

from mindformers_core.communication import communicator
from mindformers_core.dtypes import dtype_name


def label_count(results, label):
    """The number of labels that a Cell's results have second, an integer tensor without dims.

    Raises:
        ValueError: no such result; names the Cell, `label`.
    """
    if len(results) < 2 or results[1].ndim > 0 or "int" not in dtype_name(results[1].dtype):
        shown = (f"{dtype_name(each.dtype)} {list(each.shape)}" for each in results)
        found = ", ".join(shown) if len(results) > 1 else "a loss alone"
        raise ValueError(
            f'{label} should return the sum of its losses and the number of labels, an integer, as loss="sum" says: it '
            f"gave {found}"
        )
    return results[1]


def scale_of_labels(count, settings):
    """The factor of sums of losses that makes the mean over all labels.

    Args:
        count: number of labels, of this rank's batches.
        settings: the `HsdpSettings`, or None. Where ranks have losses of their own, all of them call this function.
    """
    if settings is not None and settings.gradients_mean:
        axes = (*settings.replicate_axes, *settings.shard_axes)
        count = communicator(settings.mesh).make("all_reduce", axes, op="sum")(Tensor(count, mstype.float32)).item()
    return 1 / max(count, 1)
