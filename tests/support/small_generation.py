"""A small model that was trained on (dp 2, tp 2), and what it generates on other meshes."""

from pathlib import Path

import numpy as np
from mindspore import Tensor
from support.streams import token_stream

from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.checkpoint.tensors import load_parameters, model_parts
from mindformers_core.commands.generating import make_generator
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.serving.sampling import Sampling
from mindformers_core.trainer.checkpoints import save_job
from mindformers_core.trainer.trainer import Trainer

RECIPE = str(Path(__file__).parent.parent.parent / "configs" / "llama_tiny_pp.yaml")
SMALL = (
    "training.local_batch_size=2", "training.global_batch_size=8", "train_dataset.seq_length=16",
    "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=4", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.initializer_range=0.4", "model.max_position_embeddings=256",
    "lr_scheduler.learning_rate=0.01", "lr_scheduler.warmup_steps=0", "model.vocab_size=257",
)  # fmt: skip
PROMPTS = [list(b"def main("), list(b"import"), list(b"x"), list(b"    return self.value")]
LENGTH = max(map(len, PROMPTS))
GREEDY, DRAWN = Sampling(), Sampling(temperature=0.9, top_p=0.8, seed=5)


def mesh(pp=1, dp=1, cp=1, tp=1, **others):
    """Overrides of `parallelism`."""
    keys = {"pipeline_parallel": pp, "data_parallel_shard": dp, "context_parallel": cp, "tensor_parallel": tp}
    keys |= {"zero_level": 0} | others
    return [f"parallelism.{key}={value}" for key, value in keys.items()]


TRAINED = mesh(dp=2, tp=2, sequence_parallel="true", zero_level=2)
V = mesh(pp=2, pipeline_parallel_schedule="zb_v", pipeline_parallel_interleave_num=2)


def recipe_of(*overrides):
    return load_recipe(RECIPE, [*SMALL, *overrides])


def train(folder, rank, *overrides, steps=2):
    """Steps of a rank on the mesh of the overrides; leaves a checkpoint in a run folder. Returns the job."""
    recipe = recipe_of(*overrides, f"training.output_dir={folder}")
    data = token_stream(np.random.default_rng(0).integers(0, 256, 5000), 16, seed=7)
    job = Trainer(recipe, mesh=recipe_mesh(recipe), dataset=data)
    for _ in range(steps):
        job.train_step()
    save_job(job)
    return job


def checkpoint_of(folder):
    return open_checkpoint(find_checkpoint(folder))


def full_forward(folder, *overrides):
    """A function of ids that returns the logits of all positions, of the plain model on one card without a cache."""
    recipe = recipe_of(*overrides)
    net = recipe.spec.build(recipe.model).set_train(False)
    load_parameters(checkpoint_of(folder), model_parts([net], 0), Ranks(0, lambda value: {0: value}))
    return lambda ids: net(Tensor(np.array([ids], np.int32))).asnumpy()[0]


def generator_of(folder, recipe, ranks, rank, count, prompts=PROMPTS):
    """A `Generator`, and a list that gets the logits of all its passes."""
    length = max(map(len, prompts))
    generator, passes = make_generator(recipe, ranks, rank, len(prompts), length, count, checkpoint_of(folder)), []
    one_pass = generator.logits
    generator.logits = lambda *given: passes.append(one_pass(*given)) or passes[-1]
    return generator, passes


def generated(folder, *overrides, count=10, prompts=PROMPTS):
    """Of every rank the likeliest tokens, drawn ones, the logits of the former (None where none are), its Cells."""
    recipe = recipe_of(*overrides)
    ranks = recipe_mesh(recipe)

    def work(rank):
        generator, passes = generator_of(folder, recipe, ranks, rank, count, prompts)
        greedy, cells = generator.run(prompts, count, GREEDY), [stage.cell for stage in generator.stages.values()]
        return greedy, generator.run(prompts, count // 2, DRAWN), passes[:count], cells

    return SimulatedRanks(ranks.size, plans={}).run(work)


def check_against_forward(forward, tokens, passes, rows=(0, 1, 2, 3)):
    """Each new token is the likeliest one of the full forward pass, with the logits of that."""
    for row in rows:
        prompt, new = PROMPTS[row], tokens[row]
        assert len(passes) == len(new)
        expected = forward(prompt + new[:-1])[len(prompt) - 1 :]
        np.testing.assert_allclose(np.stack(passes)[:, row], expected, rtol=1e-5, atol=1e-5 * abs(expected).max())
        assert new == expected.argmax(-1).tolist()
        assert len(set(new)) > 3  # not one token over and over
