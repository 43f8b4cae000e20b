"""`python -m mindformers_core data`: what a recipe's data are, and its first samples. Nothing is trained."""

import os

import numpy as np

from mindformers_core.data.datasets import dataset_of
from mindformers_core.data.packing import packed_row
from mindformers_core.data.streams import IGNORED, Sequences, Stream
from mindformers_core.recipe.sections import batch_plan, mesh_shape
from mindformers_core.serving.prompts import BYTES, TOKENIZER, tokens_of

_CHECKED = 64  # sequences whose documents are counted
_SHOWN = 300  # characters of a sample


def data_report(recipe, count=2):
    """Text about the sources of a recipe's data, and its first `count` samples; errors as of `dataset_of`."""
    dataset, training = dataset_of(recipe), recipe.training
    plan = batch_plan(recipe, 1 if recipe.parallelism.data_parallel_shard == -1 else mesh_shape(recipe)[1])
    total = training.steps * plan.samples
    lines = [f"{training.steps:,} steps of {plan.samples:,} samples: {total:,} samples"]
    if isinstance(dataset, Stream):
        weights = dataset.mixture.weights
        for source, epochs, weight in zip(dataset.sources, dataset.epochs(total), weights, strict=True):
            share = f"{weight / sum(weights):.1%} of the samples, " if len(weights) > 1 else ""
            lines.append(f"{_about(source)}; {share}{epochs:.2f} epochs")
    arrays, decode = dataset.batch(0, count), _decoder(recipe, dataset)
    for row in range(count):
        lines += ["", f"sample {row}: " + ", ".join(f"{each.dtype} {list(each.shape[1:])}" for each in arrays)]
        if decode is not None:
            ids, labels, *_ = (each[row] for each in arrays)
            lines += [_cut(decode(ids.tolist())), f"{np.mean(labels == IGNORED):.1%} of its labels are ignored"]
    return "\n".join(lines)


def _about(source):
    """A clause about a source."""
    if not isinstance(source, Sequences):
        return f"{source.factory}: {len(source):,} samples"
    ids, starts = source.source.ids, source.source.starts
    text = f"{source.source.name}: {len(ids):,} tokens ({ids.dtype}) in {len(starts):,} documents: {len(source):,} "
    text += f"sequences of {source.seq_length}"
    if not source.packs:
        return f"{text}, {len(ids) - len(source) * source.seq_length:,} tokens left out at the end"
    lost = 1 - len(ids) / (len(source) * source.seq_length)
    rows = np.linspace(0, len(source) - 1, min(_CHECKED, len(source))).astype(int).tolist()
    pieces = [len(packed_row(row, len(ids), starts, source.seq_length)) for row in rows]
    return f"{text} with {np.mean(pieces):.1f} documents or parts of them, {lost:.1%} padding"


def _decoder(recipe, dataset):
    """The function of a sample's ids that returns their text, or numbers; None where samples may be no tokens."""
    sources = dataset.sources if isinstance(dataset, Stream) else (None,)
    if not all(isinstance(source, Sequences) for source in sources):
        return None
    folder = os.path.expanduser(recipe.train_dataset.tokenizer)
    if not folder and any(source.source.ids.dtype != np.uint8 for source in sources):
        return lambda ids: " ".join(map(str, ids))
    return tokens_of(os.path.join(folder, TOKENIZER) if folder else BYTES, "", True).decode


def _cut(text):
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
