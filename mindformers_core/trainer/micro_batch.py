"""What the Cells of a recipe's model are called with, as shapes and dtypes. No MindSpore is called here."""

from mindformers_core.operators.signature import tensor_meta
from mindformers_core.trainer.data import dataset_of

__all__ = ["micro_batch"]


def micro_batch(recipe, stage=0):
    """The tensors that one forward pass of a stage takes, as this rank's parts: a tuple of `TensorMeta`s.

    The first stage, or the whole model, takes what the dataset gives: input ids and labels of shape (sequences, tokens
    of a sequence), or the arrays of a dataset of one's own. In the place of the first, every other stage takes
    the hidden states that the stage before it sends.

    Args:
        recipe: the `Recipe`.
        stage: number of the stage.
    """
    sizes, length = recipe.parallelism, recipe.train_dataset.seq_length
    is_whole = sizes.pipeline_parallel == 1
    batch = recipe.training.local_batch_size if is_whole else sizes.pipeline_parallel_microbatch_size
    if recipe.train_dataset.factory:
        arrays = dataset_of(recipe).batch(0, 1)
        first, *others = (tensor_meta((batch, *array.shape[1:]), str(array.dtype)) for array in arrays)
    else:
        first, *others = [tensor_meta((batch, length), "int32")] * 2
    if stage > 0:
        length = length // sizes.tensor_parallel if sizes.sequence_parallel else length
        first = recipe.spec.boundary(recipe.model, batch, length)
    return first, *others
