"""What the Cells of a recipe's model are called with, as shapes and dtypes. No MindSpore is called here."""

from mindformers_core.operators import tensor_meta

__all__ = ["micro_batch"]


def micro_batch(recipe, stage=0):
    """The two tensors that one forward pass of a stage takes, as this rank's parts: a tuple of `TensorMeta`s.

    The first stage, or the whole model, takes input ids of shape (sequences, tokens of a sequence), every other one
    the hidden states of those. Labels are as ids.

    Args:
        recipe: the `Recipe`.
        stage: number of the stage.
    """
    sizes, length = recipe.parallelism, recipe.train_dataset.seq_length
    is_whole = sizes.pipeline_parallel == 1
    batch = recipe.training.local_batch_size if is_whole else sizes.pipeline_parallel_microbatch_size
    ids = tensor_meta((batch, length), "int32")
    if stage == 0:
        return ids, ids
    length = length // sizes.tensor_parallel if sizes.sequence_parallel else length
    return tensor_meta((batch, length, recipe.model.hidden_size), recipe.model.dtype), ids
