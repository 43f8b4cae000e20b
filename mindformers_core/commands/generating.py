"""`python -m mindformers_core generate`: a checkpoint continues prompts, on any mesh."""

import os
from dataclasses import replace

import mindspore as ms

from mindformers_core.checkpoint.load import read_json
from mindformers_core.checkpoint.slices import FileLayer
from mindformers_core.checkpoint.tensors import share_weights
from mindformers_core.layout import layout
from mindformers_core.recipe.checks import layer_specs
from mindformers_core.recipe.pipeline import stage_holders
from mindformers_core.serving.generator import Generator
from mindformers_core.serving.prompts import encode_prompts, tokens_of
from mindformers_core.serving.sampling import Sampling
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.cells import build_model, shard_settings, stages_of
from mindformers_core.trainer.checkpoints import fill_weights, open_source
from mindformers_core.trainer.joining import enter_world


def generate(recipe, prompts, *options, **named_options):
    """Continue prompts: `(texts, rank)`, prompts included, on every rank; options as of `continue_prompts`.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: a recipe, option, checkpoint or tokenizer that doesn't fit.
    """
    if not recipe.checkpoint.load_path:
        raise ValueError("checkpoint.load_path: generate needs weights: give a run folder, or a Hugging Face folder")
    world, mesh = enter_world(recipe)
    checkpoint = open_source(recipe)
    texts = continue_prompts(recipe, mesh, world.rank, checkpoint, prompts, *options, **named_options)
    return texts, world.rank


def continue_prompts(recipe, mesh, rank, checkpoint, texts, count=64, sampling=None, most=8, tokenizer=""):
    """The texts of `generate`, on a mesh with the axes `MESH_AXES`, with the weights of a `Checkpoint`.

    Args:
        recipe, mesh, rank, checkpoint: as of `make_generator`.
        texts: the prompts.
        count: number of tokens to generate for each, at most.
        sampling: a dict of some fields of a `Sampling`; the others are those of `generation_config.json`.
        most: number of prompts that are continued together.
        tokenizer: as of `tokens_of`.
    """
    folder = checkpoint.base or checkpoint.folder
    data, model, config = recipe.train_dataset, recipe.model, checkpoint.config or {}
    is_text = not data.factory and not any(path.endswith(".npy") for path in data.data_path)
    theirs = read_json(folder, "generation_config.json", FileLayer()) or {}
    stops = theirs.get("eos_token_id", config.get("eos_token_id"))  # None, an id, which may be 0, or several
    keys = ("temperature", "top_p") if theirs.get("do_sample") else ()
    sampling = Sampling(**{key: theirs.get(key) or 1.0 for key in keys} | (sampling or {}))
    vocab_size, longest = (getattr(model, key, None) for key in ("vocab_size", "max_position_embeddings"))
    tokens = tokens_of(
        tokenizer, folder, is_text and checkpoint.state is not None, vocab_size,
        (stops,) if isinstance(stops, int) else stops or (),
    )  # fmt: skip
    prompts = encode_prompts(texts, tokens, count, vocab_size, longest)
    dp_size, length = mesh.axis_size("dp"), max(map(len, prompts))
    batch = -(-min(most, len(prompts)) // dp_size) * dp_size
    generator = make_generator(recipe, mesh, rank, batch, length, count, checkpoint)
    found = []
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        rows = part + part[:1] * (batch - len(part))  # the last batch is filled up
        numbers = [*range(first, first + len(part)), *(first for _ in rows[len(part) :])]
        found += generator.run(rows, count, sampling, numbers, tokens.stops)[: len(part)]
    return [tokens.decode(prompt + new) for prompt, new in zip(prompts, found, strict=True)]


def make_generator(recipe, mesh, rank, batch, length, count, checkpoint):
    """The `Generator` of a recipe's model with the weights of a `Checkpoint`.

    Args:
        recipe: the `Recipe`. Sequence parallelism, ZeRO, recomputation and offloading are of training only, and so
            is context parallelism: ranks of its axis compute alike.
        mesh: with the axes `MESH_AXES`.
        rank: this rank's number.
        batch, length: number of prompts in a batch, and of slots for their tokens.
        count: number of tokens that are generated, at most.

    Raises:
        ValueError: a model that has no caches, or experts with a capacity; on all ranks: tensors that differ from the
            model's, a damaged file.
    """
    recipe = replace(recipe, parallelism=replace(recipe.parallelism, sequence_parallel=False, context_parallel=1))
    for most, size in (spec.capacity for spec in layer_specs(recipe.model) if spec.capacity):
        raise ValueError(
            f"model.expert_capacity: [{most}, {size}] counts choices of {size} tokens of a row, but a model generates "
            "token by token: use model.expert_capacity=null, with which no choice is dropped"
        )
    cells = {}
    layers, stage_mesh, _ = stages_of(recipe, mesh, rank)
    pp_ranks, holders = mesh.group(rank, ("pp",)), stage_holders(recipe)
    for stage, part in layers.items():
        net = build_model(recipe, part).set_train(False)
        with ms.DeviceCtx("meta"):
            if not hasattr(net, "add_caches"):
                raise ValueError(
                    f"model.name: {recipe.model_name} can't generate: {type(net).__name__} has no method "
                    "add_caches(batch, slots), see docs/generate.md"
                )
            net.add_caches(batch, length + count)
        plan = {"": {"output": layout("None", "None", "None")}} if stage == len(holders) - 1 else None
        cells[stage] = shard(net, stage_mesh, recipe.parallelism, plan, check_inputs=False, **shard_settings(recipe))
    fill_weights(checkpoint, cells, recipe, mesh, rank)
    share_weights(cells.values())
    (place,), rows = mesh.coordinate(rank, ("dp",)), batch // mesh.axis_size("dp")
    rows = slice(place * rows, (place + 1) * rows)
    stage_ranks = [pp_ranks[holder] for holder in holders]
    return Generator(cells, stage_ranks, rank, rows, length, recipe.context.mode == 0)


def read_prompts(path):
    """The lines of a file that aren't empty; they end at a line feed, or a carriage return and one.

    Raises:
        FileNotFoundError: there is none.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"--prompts: there is no file '{path}'")
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        lines = (line.removesuffix("\r") for line in file.read().split("\n"))
        return [line for line in lines if line]
