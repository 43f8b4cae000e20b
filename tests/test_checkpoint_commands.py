"""The commands inspect, check and convert: what they print, MindSpore's files there and back, errors in a line."""

import os
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_states import SHAPES, state_on, tensors
from support.hugging_face_llama import CONFIG, weights, write_folder
from test_training_loop import ONE_RANK, SMALL

from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.checkpoint.mindspore_files import read_ckpt, write_ckpt
from mindformers_core.commands.command_line import main
from mindformers_core.models.registry import MODELS
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.trainer import trainer

STATE = b'{"format": 1, "step": 5, "consumed": 40, "seed": 7, "loss_scale": null}'
TABLE = """\
folder     {folder}
model      6 tensors, 1.0 KiB
optimizer  6 tensors, 1.0 KiB
state      format 1, step 5, samples 40, seed 7

tensor           shape      dtype     bytes  file
layers.1.norm    (12,)      int64     96     model-00001-of-00001.safetensors
layers.0.column  (8, 12)    float32   384    model-00001-of-00001.safetensors
"""


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with all tensors of `SHAPES`."""
    state_on(tensors(), "zero_tp").save(str(tmp_path / "checkpoint/step_5"), {"state.json": STATE})
    return tmp_path / "checkpoint/step_5"


def fails(capsys, *arguments):
    """The line that a command prints, without `error: `."""
    assert main([*map(str, arguments)]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ").rstrip("\n")


def test_inspect_shows_tensors_and_state(tmp_path, folder, capsys):
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(TABLE.format(folder=folder))
    lines = out.splitlines()
    assert len(lines) == 6 + 2 * len(SHAPES)
    assert lines[-1].endswith("192    optimizer/optimizer-00001-of-00001.safetensors")
    write_folder(tmp_path / "theirs", CONFIG, weights(CONFIG))
    assert main(["inspect", str(tmp_path / "theirs")]) == 0
    assert "\nstate      none: weights only\n" in capsys.readouterr().out


def test_check_reads_all(tmp_path, folder, capsys):
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{folder} is what was saved: 12 tensors, 2.1 KiB, 36 checksums\n"
    placed = open_checkpoint(str(folder)).tensors["optimizer", "embed"]
    with open(placed.file, "r+b") as file:
        file.seek(placed.offset + 9)
        file.write(b"\x55")
    assert fails(capsys, "check", folder).startswith(f"{placed.file} is damaged: 'embed'[")
    os.truncate(placed.file, placed.offset + 5)
    assert "bytes, but the tensors of its header end at" in fails(capsys, "check", folder)
    os.remove(placed.file)
    assert fails(capsys, "check", folder) == f"[Errno 2] No such file or directory: '{placed.file}'"
    write_folder(tmp_path / "theirs", CONFIG, weights(CONFIG))
    assert "theirs has no checksums, since" in fails(capsys, "check", tmp_path / "theirs")
    for command in ("check", "inspect"):
        assert "nowhere' is neither a checkpoint" in fails(capsys, command, tmp_path / "nowhere")


def same_files(one, other):
    found = sorted(path.relative_to(one) for path in Path(one).rglob("*"))
    assert found == sorted(path.relative_to(other) for path in Path(other).rglob("*")) and len(found) == 7
    for path in found:
        assert (one / path).is_dir() or (one / path).read_bytes() == (other / path).read_bytes()


def test_a_checkpoint_becomes_a_file_and_again_a_checkpoint(tmp_path, capsys):
    """Byte for byte, with moments and state; with and without the recipe."""
    options = [*SMALL, "training.steps=2", f"train_dataset.cache_dir={tmp_path}"]
    job = trainer.Trainer(load_recipe(ONE_RANK, [*options, "checkpoint.enable_save=true",
                                                       f"training.output_dir={tmp_path / 'run'}"]))  # fmt: skip
    job.run()
    capsys.readouterr()
    file, saved = str(tmp_path / "weights.ckpt"), tmp_path / "run/checkpoint/step_2"
    assert main(["convert", str(tmp_path / "run"), file]) == 0
    found, parameters = ms.load_checkpoint(file, crc_check=True), job.optimizer.parameters
    assert len(found) == 3 * len(parameters) + 2
    for parameter in parameters:
        np.testing.assert_array_equal(found[parameter.name].asnumpy(), parameter.asnumpy())
    for folder, recipe in ((tmp_path / "one", ()), (tmp_path / "other", ("--config", str(ONE_RANK), *options))):
        assert main(["convert", file, str(folder), *recipe]) == 0
        same_files(saved, folder)
    count = 3 * len(parameters)
    assert capsys.readouterr().out == "".join(f"{tmp_path / name}: {count} tensors\n" for name in
                                              ("weights.ckpt", "one", "other"))  # fmt: skip


def old_file(tmp_path, change=lambda found: None):
    """A file as MindSpore's own callbacks leave it, of the small model."""
    recipe = load_recipe(ONE_RANK, SMALL)
    rng, found = np.random.default_rng(0), {}
    with ms.DeviceCtx("meta"):
        net = recipe.spec.build(recipe.model)
    for path, parameter in net.parameters_and_names():
        found[path] = ms.Tensor(rng.normal(0, 0.02, parameter.shape), ms.float32)
    found["adam_m.model.norm.weight"] = found["model.norm.weight"]
    found["global_step"] = ms.Tensor(12, ms.int32)
    change(found)
    path = str(tmp_path / "old.ckpt")
    ms.save_checkpoint([{"name": name, "data": value} for name, value in found.items()], path, append_dict={"a": "b"})
    return path, found


def test_a_file_of_an_old_run_is_trained_on(tmp_path, capsys):
    path, found = old_file(tmp_path)
    assert main(["convert", path, str(tmp_path / "new"), "--config", str(ONE_RANK), *SMALL]) == 0
    line = f"{tmp_path}/new: {len(found) - 2} tensors; 2 that the model doesn't have are left out: "
    assert capsys.readouterr().out == line + "adam_m.model.norm.weight, global_step\n"
    check_checksums(open_checkpoint(str(tmp_path / "new")))
    options = (f"checkpoint.load_path={tmp_path / 'new'}", f"training.output_dir={tmp_path / 'run'}")
    job = trainer.Trainer(load_recipe(ONE_RANK, [*SMALL, *options, f"train_dataset.cache_dir={tmp_path}"]))
    assert job.step == 0
    for parameter in job.optimizer.parameters:
        np.testing.assert_array_equal(parameter.asnumpy(), found[parameter.name].asnumpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found.update({"model.norm.weigth": found.pop("model.norm.weight")}),
            "old.ckpt has no model tensor 'model.norm.weight' (did you mean 'model.norm.weigth'?)",
        ),
        (
            lambda found: found.update({"model.norm.weight": ms.Tensor(np.ones(3), ms.float32)}),
            "old.ckpt: 'model.norm.weight' has shape (3,), not (",
        ),
    ],
)
def test_a_file_of_another_model_is_an_error(tmp_path, capsys, change, message):
    path, _ = old_file(tmp_path, change)
    assert message in fails(capsys, "convert", path, tmp_path / "new", "--config", ONE_RANK, *SMALL)
    assert not os.path.exists(tmp_path / "new")


def test_a_config_of_another_model_is_an_error(tmp_path, capsys):
    """That of the folder, and of the file that was made of it; ids of special tokens are kept."""
    theirs, file, new = tmp_path / "theirs", tmp_path / "a.ckpt", tmp_path / "new"
    write_folder(theirs, CONFIG, weights(CONFIG))
    keys = CONFIG.keys() & set(MODELS["llama"].hugging_face.keys) - {"rope_theta"}
    same = (f"model.{key}={CONFIG[key]}" for key in keys if CONFIG[key] is not None)
    wrong = ("--config", ONE_RANK, "train_dataset.seq_length=16", *same)
    message = "config.json has rope_theta 500000.0, but model.rope_theta is 10000.0: take the model that was saved"
    assert f"{theirs}/{message}" in fails(capsys, "convert", theirs, file, *wrong)
    assert not file.exists()
    assert main([*map(str, ("convert", theirs, file))]) == 0
    capsys.readouterr()
    assert f"{file}: {message}" in fails(capsys, "convert", file, new, *wrong)
    assert not new.exists()
    assert main([*map(str, ("convert", file, new, *wrong, "model.rope_theta=500000.0"))]) == 0
    config = open_checkpoint(str(new)).config
    assert (config["rope_theta"], config["eos_token_id"], config.get("use_cache")) == (5e5, 2, None)


def test_weights_alone_in_a_dtype(tmp_path, capsys):
    """Of float32: the nearest bfloat16, ties to even, which are the same again after a way through float32."""
    theirs, found = weights(CONFIG), {}
    theirs["model.norm.weight"][:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-7, 3.3e38
    write_folder(tmp_path / "first", CONFIG | {"torch_dtype": "float32"}, theirs)
    state_on(tensors(), "zero_tp").save(str(tmp_path / "with_state"), {"state.json": STATE})
    ways = ("first", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "source")
    for number, (source, dtype) in enumerate((*ways, ("with_state", "bfloat16"))):
        target = tmp_path / (dtype if number < 2 else str(number))
        given = map(str, ("--config", ONE_RANK, f"checkpoint.export_dtype={dtype}"))
        assert main(["convert", str(tmp_path / source), str(target), *given]) == 0
        checkpoint = open_checkpoint(str(target))
        check_checksums(checkpoint)
        wanted = "bfloat16" if dtype == "source" else dtype
        if number < 4:
            assert (
                {each.dtype for each in checkpoint.tensors.values()} == {checkpoint.config["torch_dtype"]} == {wanted}
            )
            found[number] = (target / "model-00001-of-00001.safetensors").read_bytes()
        else:  # no state, and integers as they are
            assert {group for group, _ in checkpoint.tensors} == {"model"} and checkpoint.state is None
            assert checkpoint.tensors["model", "layers.1.norm"].dtype == "int64"
    assert found[0] == found[2] == found[3] != found[1]
    for name, array in load_file(tmp_path / "float32/model-00001-of-00001.safetensors").items():
        bits = theirs[name].view(np.uint32).astype(np.uint64)
        nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(array, nearest)


def test_wrong_conversions_are_errors(tmp_path, folder, capsys):
    (tmp_path / "bad.ckpt").write_bytes(b"abcdef" * 10)
    new = tmp_path / "new"
    assert fails(capsys, "convert", tmp_path / "no.ckpt", new) == f"'{tmp_path}/no.ckpt' is no file"
    assert fails(capsys, "convert", tmp_path / "bad.ckpt", new).endswith(
        "isn't a whole MindSpore checkpoint, or can't be read"
    )
    assert fails(capsys, "convert", folder, tmp_path / "bad.ckpt").endswith("bad.ckpt' exists already")
    assert "No such file or directory" in fails(capsys, "convert", folder, tmp_path / "nowhere/a.ckpt")
    assert "neither a checkpoint" in fails(capsys, "convert", new, tmp_path / "a.ckpt")
    assert "this model" not in fails(capsys, "convert", folder, tmp_path / "a.ckpt", "--config", tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("array", "message"), [(np.ones(2, np.complex64), "dtype complex64"), (np.ones((2, 0), np.int8), "no elements")]
)
def test_tensors_that_no_file_can_hold(tmp_path, array, message):
    write_folder(tmp_path / "theirs", CONFIG, {"a": array})
    with pytest.raises(ValueError, match=f"tensor 'a' has .*{message}, which a .ckpt file can't hold"):
        write_ckpt(open_checkpoint(str(tmp_path / "theirs")), str(tmp_path / "a.ckpt"), {})
    assert not (tmp_path / "a.ckpt").exists()


def test_names_and_dtypes(tmp_path):
    """Names of parameters that aren't those of the tensors; every dtype, with all bits; scalars."""
    saved = state_on(tensors(), "one")
    saved.save(str(tmp_path / "step_1"))
    names, path = {"inner.embed": "embed"}, str(tmp_path / "a.ckpt")
    assert write_ckpt(open_checkpoint(str(tmp_path / "step_1")), path, names) == len(saved.tensors)
    assert {"inner.embed", "optimizer/embed"} < ms.load_checkpoint(path).keys()
    assert read_ckpt(path, str(tmp_path / "step_2"), names) == (len(saved.tensors), [])
    saved.check(str(tmp_path / "step_2"))
