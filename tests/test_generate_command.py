"""The command `generate`: texts, tokenizers, draws, errors; the names of MindSpore."""

import json
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.hugging_face_llama import CONFIG, weights, write_folder
from support.small_generation import (
    PROMPTS,
    RECIPE,
    SMALL,
    checkpoint_of,
    full_forward,
    generated,
    generator_of,
    mesh as small_mesh,
    recipe_of,
    train,
)

from mindformers_core.commands import generating
from mindformers_core.commands.command_line import main
from mindformers_core.commands.generating import continue_prompts, generate, make_generator, read_prompts
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models.spec import ModelSpec
from mindformers_core.recipe.sections import Parallelism, recipe_mesh
from mindformers_core.serving.generator import Generator
from mindformers_core.serving.predict import infer_predict_layout, load_distributed_checkpoint
from mindformers_core.serving.prompts import encode_prompts, tokens_of
from mindformers_core.serving.sampling import Sampling, next_tokens
from mindformers_core.tensor_parallel import shard

pytestmark = pytest.mark.long

LAYERS = "model.num_hidden_layers=2"


def mesh(**sizes):
    """Overrides of a model of two layers."""
    return [*small_mesh(**sizes), LAYERS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run whose model has its first weights."""
    folder = str(tmp_path_factory.mktemp("trained"))
    SimulatedRanks(1).run(lambda rank: train(folder, rank, *mesh(), steps=0))
    return folder


def test_texts_in_batches_of_any_size(trained):
    """The last batch is filled up; the file's prompts keep their numbers."""
    texts = tuple(bytes(prompt).decode() for prompt in PROMPTS[:3])
    results = []
    for overrides, batch in ((mesh(), 8), (mesh(), 2), (mesh(dp=2), 1)):
        recipe, checkpoint = recipe_of(*overrides), checkpoint_of(trained)
        options, ranks = (texts, 8, {"temperature": 0.7, "top_p": 0.9, "seed": 1}, batch), recipe_mesh(recipe)
        results += SimulatedRanks(ranks.size).run(
            lambda rank, given=(recipe, ranks, checkpoint, *options): continue_prompts(*given[:2], rank, *given[2:])
        )
    assert all(each == results[0] for each in results)
    assert all(text.startswith(prompt) for text, prompt in zip(results[0], texts, strict=True))


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
    draws.append(next_tokens(logits[:50], Sampling(1.0, seed=1), range(50), [9] * 50).tolist())
    assert draws[0] != draws[1] and draws[0] != draws[2]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 0.9)])
def test_logits_that_are_not_finite(sampling):
    """No token of such a row, and the same of others; a logit of -inf is a token that never comes."""
    logits = np.tile(np.float32([0.5, 2.0, -np.inf, 1.0]), (5, 1))
    expected = next_tokens(logits, sampling, range(5), [9] * 5)
    assert set(expected) <= {0, 1, 3}
    logits[1, 2], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    expected[1:4] = -1
    found = next_tokens(logits, sampling, range(5), [9] * 5)
    assert found.dtype == np.int32 and found.tolist() == expected.tolist()


@pytest.mark.parametrize("overrides", [mesh(pp=2), mesh(tp=2)])
def test_weights_that_are_not_finite(trained, overrides):
    """The error is raised on all ranks, which names the prompt and the token."""
    recipe = recipe_of(*overrides)

    def work(rank):
        generator, _ = generator_of(trained, recipe, recipe_mesh(recipe), rank, 4)
        one_pass = generator.logits

        def logits(ids, slots, starts):
            found = one_pass(ids, slots, starts)
            if found is not None and len(slots) == 1:
                found[2, 7] = np.nan
            return found

        generator.logits = logits
        with pytest.raises(ValueError, match="the model's logits aren't finite: those of prompt 6 for its new token 1"):
            generator.run(PROMPTS, 4, Sampling(0.5), range(4, 8))
        return True

    assert SimulatedRanks(2).run(work) == [True] * 2


def test_prompts_that_do_not_fit(tmp_path):
    data = tokens_of("bytes", str(tmp_path), False)
    for texts, message in (
        ([], "no prompt: give --prompt TEXT"),
        (["a", ""], "prompt 1 is empty"),
        (["a", "b\udcff"], r"prompt 1 isn't UTF-8: 'b\\udcff'"),
        (["ab", "abcdef"], "prompt 1 has 6 tokens, and 5 more are 11, but model.max_position_embeddings is 10"),
        (["a\N{PILCROW SIGN}"], "prompt 0 has token 194, not below model.vocab_size 128"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_prompts(texts, data, 5, 128, 10)
    assert encode_prompts(["ab"], data, 8, None, 10) == [[97, 98]]
    assert data.decode([97, 300, 98]) == "a\N{REPLACEMENT CHARACTER}b"
    with pytest.raises(
        ValueError, match="--tokenizer bytes: model.vocab_size 255 is too small for bytes: at least 256"
    ):
        tokens_of("bytes", str(tmp_path), False, 255)
    with pytest.raises(ValueError, match="no tokenizer: .* wasn't trained with bytes of text: give --tokenizer FILE"):
        tokens_of("", str(tmp_path), False)
    with pytest.raises(FileNotFoundError, match="--tokenizer: there is no file 'nowhere.json'"):
        tokens_of("nowhere.json", str(tmp_path), True)


def test_lines_of_prompts(tmp_path):
    """Only a line feed ends one, with a carriage return before it or not."""
    (tmp_path / "prompts").write_bytes("a\u2028b\x0cc\x1cd\n\r\n\ne\rf\r\n g".encode())
    assert read_prompts(str(tmp_path / "prompts")) == ["a\u2028b\x0cc\x1cd", "e\rf", " g"]


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


KEYS = "vocab_size", "num_hidden_layers", "rope_theta", "intermediate_size", "head_dim"


def recipe_of_theirs(tmp_path, changes=None):
    """With a Hugging Face folder."""
    write_folder(tmp_path / "theirs", CONFIG | (changes or {}), weights(CONFIG))
    section = {key: CONFIG[key] for key in KEYS}
    return recipe_of(
        *mesh(), *(f"model.{key}={value}" for key, value in section.items()), "model.tie_word_embeddings=false",
        "model.max_position_embeddings=64",
        f"checkpoint.load_path={tmp_path / 'theirs'}",
    )  # fmt: skip


@pytest.mark.usefixtures("one_rank")
def test_a_hugging_face_folder_with_its_tokenizer(tmp_path, monkeypatch):
    """Their weights continue prompts; without the package, or without a tokenizer, it is an error."""
    recipe = recipe_of_theirs(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer: "):
        generate(recipe, ["w1 w2"], 8)
    (tmp_path / "theirs/tokenizer.json").write_text(json.dumps([f"w{number}" for number in range(256)]))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"tokenizer.json needs the package tokenizers: pip install"):
        generate(recipe, ["w1 w2"], 8)
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Words))
    (text,), _ = generate(recipe, ["w1 w2"], 8)
    assert text.startswith("w1 w2 w") and len(text.split()) <= 10


class Failing(Words):
    """Raises what the package raises for other files."""

    @classmethod
    def from_file(cls, path):
        raise Exception("data did not match any variant of untagged enum ModelWrapper at line 1 column 2")


def test_a_file_that_is_no_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Failing))
    with pytest.raises(ValueError, match=r"tokenizer.json isn't a Hugging Face tokenizer: data did not match any"):
        tokens_of("", str(tmp_path), True)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stop", "expected"), [(0, [0]), (2, [2]), ([0, 2], [0, 2]), ([], []), (None, [])])
def test_ids_that_end_a_text(tmp_path, monkeypatch, stop, expected):
    """Of config.json: one, which may be 0, several or none; or of generation_config.json, which knows how to draw."""
    recipe, found = recipe_of_theirs(tmp_path, {"eos_token_id": stop}), []
    monkeypatch.setattr(generating, "tokens_of", lambda *given: found.append(given[-1]) or tokens_of(*given))
    run, drawn = Generator.run, []
    monkeypatch.setattr(Generator, "run", lambda *given: drawn.append(given[3]) or run(*given))
    generate(recipe, ["w1"], 1, {"seed": 2}, tokenizer="bytes")
    theirs = {"eos_token_id": [7], "do_sample": stop == 2, "temperature": 0.6, "top_p": None}
    (tmp_path / "theirs/generation_config.json").write_text(json.dumps(theirs))
    generate(recipe, ["w1"], 1, {"seed": 2}, tokenizer="bytes")
    assert [list(each) for each in found] == [expected, [7]]
    assert drawn == [Sampling(0.0, 1.0, 2), Sampling(0.6 if stop == 2 else 0.0, 1.0, 2)]


@pytest.mark.usefixtures("one_rank")
def test_the_package_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install -e '.[tokenizer]'")
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(256)})
    tokenizers.Tokenizer(words).save(str(tmp_path / "words.json"))
    (text,), _ = generate(recipe_of_theirs(tmp_path), ["w1"], 8, tokenizer=str(tmp_path / "words.json"))
    assert text.startswith("w1 w")


class Plain(nn.Cell):
    """A model without caches."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Dense(2, 2)


@pytest.mark.usefixtures("one_rank")
def test_a_model_without_caches(trained):
    recipe = recipe_of(*mesh())
    keys = "parallelism", "training", "context", "model", "adapters", "moe"
    theirs = {"spec": ModelSpec(Plain, type(recipe.model)), "model_name": "mine:Plain"}
    other = make_dataclass("Other", [*keys, *theirs])(*(getattr(recipe, key) for key in keys), **theirs)
    with pytest.raises(ValueError, match=r"model.name: mine:Plain can't generate: Plain has no method add_caches"):
        make_generator(other, recipe_mesh(recipe), 0, 1, 4, 4, checkpoint_of(trained))


def test_experts_with_a_capacity():
    recipe = recipe_of("model.name=qwen3_moe", "model.expert_capacity=[1,4]")
    with pytest.raises(ValueError, match=r"model.expert_capacity: \[1, 4\] .* use model.expert_capacity=null"):
        make_generator(recipe, recipe_mesh(recipe), 0, 1, 4, 4, None)


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


def test_the_names_of_mindspore(trained):
    """`infer_predict_layout` and `load_distributed_checkpoint`, on two ranks."""
    expected = full_forward(trained, LAYERS)([5, 6, 7])

    def work(rank):
        recipe, x = recipe_of(LAYERS), Tensor(np.array([[5, 6, 7]], np.int32))
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model).set_train(False)
        net.add_caches(1, 8)  # which are of no checkpoint
        with pytest.raises(TypeError, match="isn't sharded|is no sharded|not sharded"):
            infer_predict_layout(net, x)
        shard(net, init_device_mesh((1, 2), ("dp", "tp")), Parallelism())
        strategy = infer_predict_layout(net, x)
        assert strategy["model.layers.0.mlp.up_proj.weight"].dims == (("tp",), ())
        report = load_distributed_checkpoint(net, trained, strategy)
        assert report.read == report.needed > 0
        np.testing.assert_allclose(net(x).full_tensor().asnumpy()[0], expected, rtol=1e-5, atol=1e-5)
        norm = strategy["model.norm.weight"]
        wrong = {"model.layers.0.mlp.up_proj.weight": norm}
        with pytest.raises(ValueError, match="predict_strategy: parameter 'model.layers.0.mlp.up.*' as .* lives as "):
            load_distributed_checkpoint(net, trained, wrong)
        with pytest.raises(ValueError, match="parameter 'head' as .* isn't one of the network"):
            load_distributed_checkpoint(net, trained, {"head": norm})

    SimulatedRanks(2).run(work)


@pytest.mark.usefixtures("one_rank")
def test_old_files_of_hugging_face(tmp_path):
    """What they have beside the parameters is left out by `load_distributed_checkpoint`; others are errors."""
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    recipe = recipe_of_theirs(tmp_path)
    net = recipe.spec.build(recipe.model)
    shard(net, init_device_mesh((1, 1), ("dp", "tp")), Parallelism())
    write_folder(tmp_path / "old", CONFIG, weights(CONFIG) | old)
    assert load_distributed_checkpoint(net, str(tmp_path / "old")).read > 0
    np.testing.assert_array_equal(net.lm_head.weight.asnumpy(), weights(CONFIG)["lm_head.weight"])
    write_folder(tmp_path / "other", CONFIG, weights(CONFIG) | {"inv_freq": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="'inv_freq' isn't a tensor of this model"):
        load_distributed_checkpoint(net, str(tmp_path / "other"))
