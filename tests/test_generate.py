"""Generation: tokens and logits of the full forward pass without a cache, on any mesh; draws; errors."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from hugging_face_llama import CONFIG, weights, write_folder
from mindspore import Tensor, nn

from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.tensors import load_parameters, model_parts
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.models.spec import ModelSpec
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.serving.predict import infer_predict_layout, load_distributed_checkpoint
from mindformers_core.serving.prompts import encode_prompts, padded, tokens_of
from mindformers_core.serving.sampling import Sampling, next_tokens
from mindformers_core.sharding.inspecting import programs
from mindformers_core.tensor_parallel import shard
from mindformers_core.trainer.checkpoints import save_job
from mindformers_core.trainer.command_line import main
from mindformers_core.trainer.data import TokenDataset
from mindformers_core.trainer.generating import Request, continue_prompts, generate, make_generator
from mindformers_core.trainer.recipe import Parallelism, recipe_mesh
from mindformers_core.trainer.recipe_loader import load_recipe
from mindformers_core.trainer.training_loop import begin_job, train_step
from mindformers_core.verification import verify

RECIPE = str(Path(__file__).parent.parent / "configs" / "llama_tiny_pp.yaml")
SMALL = (
    "training.local_batch_size=2", "training.global_batch_size=8", "train_dataset.seq_length=16",
    "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=4", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.initializer_range=0.4", "model.max_position_embeddings=256",
    "lr_scheduler.learning_rate=0.01", "lr_scheduler.warmup_steps=0",
)  # fmt: skip
PROMPTS = [list(b"def main("), list(b"import"), list(b"x"), list(b"    return self.value")]
COUNT = 200


def mesh(pp=1, dp=1, tp=1, **others):
    """Overrides of `parallelism`."""
    keys = {"pipeline_parallel": pp, "data_parallel_shard": dp, "tensor_parallel": tp, "zero_level": 0} | others
    return [f"parallelism.{key}={value}" for key, value in keys.items()]


def recipe_of(*overrides):
    return load_recipe(RECIPE, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps on (dp 2, tp 2), with sequence parallelism and ZeRO 2."""
    folder = str(tmp_path_factory.mktemp("trained"))
    recipe = recipe_of(
        *mesh(dp=2, tp=2, sequence_parallel="true"), "parallelism.zero_level=2", f"training.output_dir={folder}"
    )
    data = TokenDataset(np.random.default_rng(0).integers(0, 256, 5000), 16, seed=1)

    def work(rank):
        job = begin_job(recipe, recipe_mesh(recipe), rank, data)
        for _ in range(2):
            train_step(job)
        save_job(job)

    with custom_gradients():
        SimulatedRanks(4).run(work)
    return folder


@pytest.fixture(scope="module")
def forward(trained):
    """A function of ids that returns the logits of all positions, of the plain model on one card without a cache."""
    recipe = recipe_of()
    net = recipe.spec.build(recipe.model).set_train(False)
    load_parameters(checkpoint_of(trained), model_parts([net], 0), SimpleNamespace(rank=0, gather=lambda v: {0: v}))
    return lambda ids: net(Tensor(np.array([ids], np.int32))).asnumpy()[0]


def checkpoint_of(folder):
    return open_checkpoint(find_checkpoint(folder))


def generated(folder, *overrides, sampling=Sampling(), count=COUNT, prompts=PROMPTS):
    """Of every rank the new tokens, the logits of every pass (None on a rank without them), and its Cells."""
    recipe, checkpoint = recipe_of(*overrides), checkpoint_of(folder)
    ranks, length = recipe_mesh(recipe), max(map(len, prompts))

    def work(rank):
        generator = make_generator(recipe, ranks, rank, len(prompts), length, count, checkpoint)
        passes, one_pass = [], generator.logits
        generator.logits = lambda *given: passes.append(one_pass(*given)) or passes[-1]
        return generator.run(prompts, count, sampling), passes, [stage.cell for stage in generator.stages.values()]

    return SimulatedRanks(ranks.size).run(work)


def check_against_forward(forward, tokens, passes):
    """Each new token is the likeliest one of the full forward pass, with the logits of that."""
    assert len(passes) == COUNT
    for row, (prompt, new) in enumerate(zip(PROMPTS, tokens, strict=True)):
        expected = forward(prompt + new[:-1])[len(prompt) - 1 :]
        np.testing.assert_allclose(np.stack(passes)[:, row], expected, rtol=1e-5, atol=1e-5 * abs(expected).max())
        assert new == expected.argmax(-1).tolist()
        assert len(set(new)) > 5  # not one token over and over


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["context.engine=eager", "context.engine=generated", "context.mode=0"])
def test_greedy_tokens_are_those_of_the_full_forward_pass(trained, forward, mode):
    """Prompts of four lengths in one batch; one program each of the prompts' pass and of a token's."""
    recipe = recipe_of(*mesh(), mode)
    generator = make_generator(recipe, recipe_mesh(recipe), 0, 4, 21, COUNT, checkpoint_of(trained))
    passes, one_pass = [], generator.logits
    generator.logits = lambda *given: passes.append(one_pass(*given)) or passes[-1]
    tokens = generator.run(PROMPTS, COUNT, Sampling())
    check_against_forward(forward, tokens, passes)
    count = 0 if "eager" in mode else 2
    assert len(programs(generator.stages[0].cell)) == count
    again = [*reversed(PROMPTS)]  # the caches are written over
    assert generator.run(again, COUNT, Sampling()) == tokens[::-1]
    assert len(programs(generator.stages[0].cell)) == count


MESHES = {
    "tp 2": mesh(tp=2),
    "tp 2, eager": [*mesh(tp=2), "context.engine=eager"],
    "dp 2, tp 2": mesh(dp=2, tp=2),
    "pp 2, tp 2": mesh(pp=2, tp=2, sequence_parallel="true"),
    "pp 2 in a V": mesh(pp=2, pipeline_parallel_schedule="zb_v", pipeline_parallel_interleave_num=2),
    "pp 2, interleaved": mesh(
        pp=2, pipeline_parallel_schedule="interleaved_1f1b", pipeline_parallel_interleave_num=2
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_generates_the_same(trained, forward, name):
    """The same 200 tokens on all ranks, logits of the last position where the last stage is; caches are cut."""
    found = generated(trained, *MESHES[name])
    check_against_forward(forward, found[0][0], next(passes for *_, passes, _ in found if passes[0] is not None))
    for tokens, passes, cells in found:
        assert tokens == found[0][0]
        assert all(each is None or each.shape == (4, 256) for each in passes)
        for cell in cells:
            assert len(programs(cell)) == (0 if "eager" in name else 2)
            for path, parameter in cell.parameters_and_names():
                if ".cache." in path:
                    dp, tp = (2 if f"{axis} 2" in name else 1 for axis in ("dp", "tp"))
                    assert parameter.shape == (21 + COUNT, 4 // dp, 2 // tp, 4)


def test_draws_are_the_same_on_any_mesh(trained):
    """And of a prompt for itself, with its number."""
    sampling = Sampling(temperature=0.9, top_p=0.8, seed=5)
    one = generated(trained, *mesh(), sampling=sampling, count=40)[0][0]
    for name in ("tp 2", "dp 2, tp 2", "pp 2, tp 2"):
        assert [tokens for tokens, *_ in generated(trained, *MESHES[name], sampling=sampling, count=40)] == [one] * (
            2 if name == "tp 2" else 4
        )
    alone = generated(trained, *mesh(), sampling=sampling, count=40, prompts=PROMPTS[:1])[0][0]
    assert alone == one[:1]
    assert generated(trained, *mesh(), sampling=Sampling(0.9, 0.8, 6), count=40)[0][0] != one


def test_texts_in_batches_of_any_size(trained):
    """The last batch is filled up; the file's prompts keep their numbers."""
    texts = tuple(bytes(prompt).decode() for prompt in PROMPTS[:3])
    results = []
    for overrides, batch in ((mesh(), 8), (mesh(), 2), (mesh(dp=2), 1)):
        recipe, checkpoint = recipe_of(*overrides), checkpoint_of(trained)
        request, ranks = Request(texts, 20, Sampling(0.7, 0.9, 1), batch), recipe_mesh(recipe)
        results += SimulatedRanks(ranks.size).run(
            lambda rank, given=(recipe, ranks, checkpoint, request): continue_prompts(*given[:2], rank, *given[2:])
        )
    assert all(each == results[0] for each in results)
    assert all(text.startswith(prompt) for text, prompt in zip(results[0], texts, strict=True))


def test_a_row_ends_after_a_stop(trained):
    recipe = recipe_of(*mesh())
    whole = generated(trained, *mesh(), count=30)[0][0]
    stop = whole[0][4]

    def work(rank):
        generator = make_generator(recipe, recipe_mesh(recipe), rank, 4, 21, 30, checkpoint_of(trained))
        return generator.run(PROMPTS, 30, Sampling(), stops=(stop,))

    for row, full in zip(SimulatedRanks(1).run(work)[0], whole, strict=True):
        assert row == (full[: full.index(stop) + 1] if stop in full else full)


@pytest.mark.parametrize("slots", [5, 1])
def test_the_cache_is_verified(slots):
    """`verify`: every tensor of the pass over prompts, and of the pass for a token, on (dp 2, tp 2)."""
    recipe = recipe_of()
    net = recipe.spec.build(recipe.model).set_train(False)
    net.add_caches(2, 9)
    ids, starts = padded([[3] * slots, [7] * max(1, slots - 2)], slots)
    given = Tensor(ids), None, Tensor(np.arange(4, 4 + slots, dtype=np.int32)), Tensor(starts)
    check = verify(net, DeviceMesh((2, 2), ("dp", "tp")), *given, config=Parallelism())
    assert not check.faults, check.report()
    assert check.compared > 500


def test_the_nucleus():
    """Of probabilities .5, .3, .15, .05: those before which less than top_p is; frequencies are theirs."""
    logits = np.log([[0.15, 0.5, 0.05, 0.3]]).repeat(4000, 0)
    numbers, positions = range(4000), [9] * 4000

    def share(sampling):
        chosen = next_tokens(logits, sampling, numbers, positions)
        return np.bincount(chosen, minlength=4) / 4000

    np.testing.assert_allclose(share(Sampling(1.0)), [0.15, 0.5, 0.05, 0.3], atol=0.03)
    np.testing.assert_allclose(share(Sampling(1.0, 0.79)), [0, 0.625, 0, 0.375], atol=0.03)
    np.testing.assert_allclose(share(Sampling(1.0, 0.5)), [0, 1, 0, 0])
    np.testing.assert_allclose(share(Sampling(0.5)), np.array([0.0225, 0.25, 0.0025, 0.09]) / 0.365, atol=0.03)
    np.testing.assert_allclose(share(Sampling(1e-4, seed=3)), [0, 1, 0, 0])
    np.testing.assert_allclose(share(Sampling()), [0, 1, 0, 0])
    draws = [next_tokens(logits[:50], Sampling(1.0), range(50), [place] * 50).tolist() for place in (9, 10)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature: -1.0 should be 0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, "top_p: 0.0 should be a probability above 0"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"seed": -1}, "seed: -1"),
    ],
)
def test_sampling_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_prompts_that_do_not_fit(tmp_path):
    data = tokens_of("bytes", str(tmp_path), False)
    for texts, message in (
        ([], "no prompt: give --prompt TEXT"),
        (["a", ""], "prompt 1 is empty"),
        (["ab", "abcdef"], "prompt 1 has 6 tokens, and 5 more are 11, but model.max_position_embeddings is 10"),
        (["a\N{PILCROW SIGN}"], "prompt 0 has token 194, not below model.vocab_size 128"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_prompts(texts, data, 5, 128, 10)
    assert encode_prompts(["ab"], data, 8, None, 10) == [[97, 98]]
    assert data.decode([97, 300, 98]) == "a\N{REPLACEMENT CHARACTER}b"
    with pytest.raises(ValueError, match="no tokenizer: .* wasn't trained with bytes of text: give --tokenizer FILE"):
        tokens_of("", str(tmp_path), False)
    with pytest.raises(FileNotFoundError, match="--tokenizer: there is no file 'nowhere.json'"):
        tokens_of("nowhere.json", str(tmp_path), True)


class Words:
    """What the package `tokenizers` does, of words."""

    def __init__(self, words):
        self.words = words

    @classmethod
    def from_file(cls, path):
        return cls(json.loads(Path(path).read_text()))

    def encode(self, text):
        return SimpleNamespace(ids=[self.words.index(word) for word in text.split()])

    def decode(self, ids):
        return " ".join(self.words[number] for number in ids)


@pytest.mark.usefixtures("one_rank")
def test_a_hugging_face_folder_with_its_tokenizer(tmp_path, monkeypatch):
    """Their weights continue prompts; without the package, or without a tokenizer, it is an error."""
    write_folder(tmp_path / "theirs", CONFIG, weights(CONFIG))
    section = {key: CONFIG[key] for key in ("num_hidden_layers", "rope_theta", "intermediate_size", "head_dim")}
    recipe = recipe_of(
        *mesh(), *(f"model.{key}={value}" for key, value in section.items()), "model.max_position_embeddings=64",
        f"checkpoint.load_path={tmp_path / 'theirs'}",
    )  # fmt: skip
    with pytest.raises(ValueError, match="no tokenizer: "):
        generate(recipe, Request(("w1 w2",), 8))
    (tmp_path / "theirs/tokenizer.json").write_text(json.dumps([f"w{number}" for number in range(256)]))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"tokenizer.json needs the package tokenizers: pip install"):
        generate(recipe, Request(("w1 w2",), 8))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Words))
    (text,), _ = generate(recipe, Request(("w1 w2",), 8))
    assert text.startswith("w1 w2 w") and len(text.split()) <= 10


class Plain(nn.Cell):
    """A model without caches."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Dense(2, 2)


@pytest.mark.usefixtures("one_rank")
def test_a_model_without_caches(trained):
    recipe = recipe_of(*mesh())
    other = SimpleNamespace(**{key: getattr(recipe, key) for key in ("parallelism", "training", "context", "model")})
    other.spec, other.model_name = ModelSpec(Plain, type(recipe.model)), "mine:Plain"
    with pytest.raises(ValueError, match=r"model.name: mine:Plain can't generate: Plain has no method add_caches"):
        make_generator(other, recipe_mesh(recipe), 0, 1, 4, 4, checkpoint_of(trained))


@pytest.mark.usefixtures("one_rank")
def test_the_command(trained, tmp_path, capsys):
    (tmp_path / "prompts").write_text("import\n\nx\n")
    arguments = ["generate", "--config", RECIPE, "--tokens", "5", *SMALL, *mesh()]
    load = f"checkpoint.load_path={trained}"
    assert main([*arguments, load, "--prompt", "def main(", "--prompts", str(tmp_path / "prompts")]) == 0
    printed = capsys.readouterr().out
    expected = generated(trained, *mesh(), count=5)[0][0]
    texts = [bytes(prompt + new).decode(errors="replace") for prompt, new in zip(PROMPTS[:3], expected)]
    assert printed == "\n\n".join(texts) + "\n"
    for changes, message in (
        ([load], "no prompt: give --prompt TEXT"),
        (["--prompt", "a"], "checkpoint.load_path: generate needs weights"),
        ([load, "--prompt", "a", "--top-p", "2"], "top_p: 2.0 should be"),
        ([load, "--prompts", "nowhere"], "--prompts: there is no file 'nowhere'"),
        ([load, "--prompt", "a" * 250, "--tokens", "9"], "prompt 0 has 250 tokens, and 9 more are 259"),
        ([load, "--prompt", "a", "model.hidden_size=32"], "hidden_size 16, but model.hidden_size is 32"),
    ):
        assert main([*arguments, *changes]) == 2
        assert f"error: {message}" in capsys.readouterr().err or message.startswith("hidden_size")


@pytest.mark.usefixtures("one_rank")
def test_the_names_of_mindspore(trained, forward):
    """`infer_predict_layout` and `load_distributed_checkpoint`."""
    recipe, ids = recipe_of(), [5, 6, 7]
    with ms.DeviceCtx("meta"):
        net = recipe.spec.build(recipe.model).set_train(False)
    x = Tensor(np.array([ids], np.int32))
    with pytest.raises(TypeError, match="isn't sharded|is no sharded|not sharded"):
        infer_predict_layout(net, x)
    shard(net, init_device_mesh((1, 1), ("dp", "tp")), Parallelism())
    strategy = infer_predict_layout(net, x)
    assert strategy["lm_head.weight"].dims == (("tp",), ())
    report = load_distributed_checkpoint(net, trained, strategy)
    assert report.read == report.needed > 0
    np.testing.assert_allclose(net(x).full_tensor().asnumpy()[0], forward(ids), rtol=1e-5, atol=1e-5)
    wrong = {"lm_head.weight": strategy["model.norm.weight"]}
    with pytest.raises(ValueError, match="predict_strategy: parameter 'lm_head.weight' as .* lives as "):
        load_distributed_checkpoint(net, trained, wrong)
    with pytest.raises(ValueError, match="parameter 'head' as .* isn't one of the network"):
        load_distributed_checkpoint(net, trained, {"head": strategy["lm_head.weight"]})
