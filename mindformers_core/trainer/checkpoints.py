"""Saving the state of a job, and taking it up again on any mesh."""

import os
from dataclasses import replace

import mindspore as ms

from mindformers_core.checkpoint.adapters import export, parameter_name
from mindformers_core.checkpoint.checkpointer import Checkpointer
from mindformers_core.checkpoint.folders import find_checkpoint, newest_checkpoint, step_folder
from mindformers_core.checkpoint.hugging_face import (
    check_config,
    config_document,
    ignored_tensors,
    lack_of_heads,
    tensor_map,
)
from mindformers_core.checkpoint.index import CONFIG, encode_json
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.mindspore_files import read_ckpt, write_ckpt
from mindformers_core.checkpoint.save import SaveError
from mindformers_core.checkpoint.tensors import load_parameters, model_parts, parts_of, ranks_of
from mindformers_core.hints import first_of
from mindformers_core.models.registry import MODELS
from mindformers_core.optimizers.average import PREFIX
from mindformers_core.recipe.loader import recipe_to_dict
from mindformers_core.scopes import errors_at

_NO_CHANGE = ("training.output_dir", "training.resume")  # keys that say nothing about the run


def going_on(recipe):
    """The recipe that goes on in its run folder, if `training.resume` says so and it has a checkpoint; else itself."""
    folder = newest_checkpoint(recipe.training.output_dir)
    if recipe.training.resume is None or folder is None:
        return recipe
    return taking_up(recipe, folder)


def taking_up(recipe, path):
    """The recipe that loads all that a checkpoint at `path` has."""
    section = replace(recipe.checkpoint, load_path=path, no_load_optim=False, load_average=False)
    return replace(recipe, checkpoint=section)


def open_source(recipe):
    """The `Checkpoint` of `checkpoint.load_path`, None without one.

    Raises:
        FileNotFoundError: there is none, or a file is missing. ValueError: a damaged one, or of another model.
    """
    if not recipe.checkpoint.load_path:
        return None
    with errors_at("checkpoint.load_path: ", kinds=(OSError, ValueError)):
        checkpoint = open_checkpoint(find_checkpoint(recipe.checkpoint.load_path))
        if checkpoint.config is not None:
            where = os.path.join(checkpoint.folder, CONFIG)
            check_config(recipe.spec, recipe.model_name, recipe.model, checkpoint.config, where)
        _check_adapters(recipe.adapters, checkpoint)
    return _with_average(checkpoint) if recipe.checkpoint.load_average else checkpoint


def _with_average(checkpoint):
    """A `Checkpoint` with the moving averages of weights in the place of these, and no state."""
    averages = {key: ("optimizer", PREFIX + parameter_name(*key)) for key in checkpoint.tensors}
    found = {key: average for key, average in averages.items() if average in checkpoint.tensors}
    if not found:
        raise ValueError(
            f"checkpoint.load_average: {checkpoint.folder} has no moving average of weights: it is saved where "
            "training.average_decay is given"
        )
    tensors, pieces = (
        {key: of_key for key, of_key in each.items() if key[0] != "optimizer"}
        | {key: each[average] for key, average in found.items()}
        for each in (checkpoint.tensors, checkpoint.pieces)
    )
    return replace(checkpoint, tensors=tensors, pieces=pieces, state=None)


def _check_adapters(section, checkpoint):
    """Raise `ValueError` where the adapters of a `Checkpoint` aren't those of a recipe's section."""
    found = checkpoint.adapters
    own = {"rank": section.rank, "alpha": section.rank if section.alpha is None else section.alpha}
    for key, theirs in {"rank": found["r"], "alpha": found["lora_alpha"]}.items() if found else ():
        if own[key] != theirs:
            raise ValueError(f"{checkpoint.folder} has adapters with {key} {theirs}: take adapters.{key}={theirs}")


def resume(job, checkpoint):
    """Give `job` the tensors of a `Checkpoint`, and its state, unless weights only are taken; returns the `LoadReport`.

    Raises:
        ValueError: on all ranks: tensors that differ from the model's, a damaged file, another seed or length of
            sequences, or no step is left.
    """
    recipe, checkpointer, job.loaded_config = job.recipe, job.checkpointer, checkpoint.config
    state = checkpointer.state_of(checkpoint)
    state = None if recipe.checkpoint.no_load_optim else state
    if state:
        if recipe.training.seed != state["seed"]:
            raise ValueError(
                f"training.seed: {recipe.training.seed}, but the run of {checkpoint.folder} has {state['seed']}, and "
                "its draws go on: take that, or checkpoint.no_load_optim=true, which begins anew"
            )
        goes_on = recipe.train_dataset.on_change == "go_on"
        with errors_at(f"train_dataset: {checkpoint.folder}: "):
            job.dataset = job.dataset.resumed(state.get("data", {"facts": {}}), state["consumed"], goes_on)
    parts = checkpointer.parts(bool(state), checkpoint)
    report = fill(checkpoint, parts, recipe, job.mesh, job.rank, converts=not state)
    if state:
        job.step, job.consumed = job.checkpointer.restore(state), state["consumed"]
        job.compared = state.get("compared")
        job.skipped, job.skipped_in_a_row = (state.get(name, 0) for name in ("skipped", "skipped_in_a_row"))
        if job.loss_scale and state["loss_scale"]:
            job.loss_scale.restore(state["loss_scale"])
        job.placement.restore(state.get("placement"))
    if job.rank == 0:
        what = f"all, of step {job.step}; sample {job.consumed} of the data is next" if state else "weights only"
        print(f"loaded {checkpoint.folder}: {what}{_changes(recipe, checkpoint)}")
    if recipe.training.resume and job.step == recipe.training.steps:
        if job.rank == 0:
            print(f"this run has all its {job.step} steps: it is complete")
    elif job.step >= recipe.training.steps:
        raise ValueError(
            f"training.steps: {recipe.training.steps}, but {checkpoint.folder} already has {job.step} steps"
        )
    return report


def fill(checkpoint, parts, recipe, mesh, rank, converts=True):
    """Fill Parameters, a dict, `Part` -> Parameter, with the tensors of a `Checkpoint`: the `LoadReport` of this rank.

    All ranks of `mesh` call this.

    Raises:
        ValueError: on all ranks: tensors that differ from the model's, a damaged file. OSError: one can't be read.
    """
    names = [name for group, name in checkpoint.tensors if group == "model"]
    ignored = ignored_tensors(recipe.spec, names, recipe.model)
    behind = _changes(recipe, checkpoint, ("model",)) + lack_of_heads(recipe.spec, recipe.model, names)
    with errors_at("checkpoint.load_path: ", behind, (OSError, ValueError)):
        return load_parameters(checkpoint, parts, ranks_of(mesh, rank), converts, ignored)


def fill_weights(checkpoint, cells, recipe, mesh, rank):
    """Fill the weights of a rank's stages, and their adapters, with those of a `Checkpoint`, as `fill`."""
    parts = model_parts(cells.values(), rank, tensor_map(recipe.spec, recipe.model))
    fill(checkpoint, parts_of(checkpoint, parts), recipe, mesh, rank)


def checkpointer_of(recipe, mesh, cells, optimizer):
    """The `Checkpointer` of a job; `mesh` has the axes `MESH_AXES`."""
    section = recipe.checkpoint
    keep, is_async = (section.keep_last, section.keep_every), section.enable_save and section.async_save
    given = recipe.training.output_dir, list(cells.values()), optimizer, mesh, *keep, is_async
    return Checkpointer(*given, tensor_map(recipe.spec, recipe.model))


def reserve_memory(job):
    """Allocate the copy of the state for `checkpoint.async_save`, before the first step; all ranks call this.

    Raises:
        SaveError: on all ranks: no memory, and `checkpoint.on_error` says to end.
    """
    try:
        job.checkpointer.reserve()
    except OSError as error:
        go_on_or_end(job, error)


def contents_of(job):
    """`(state, documents)` of a job, as of `Checkpointer.begin_save`."""
    recipe = job.recipe
    config = config_document(recipe.spec, recipe.model_name, recipe.model, job.loaded_config)
    state = {
        "consumed": job.consumed,
        "seed": recipe.training.seed,
        "data": job.dataset.state(),
        "loss_scale": job.loss_scale and job.loss_scale.state(),
        "compared": job.compared,
        "skipped": job.skipped,
        "skipped_in_a_row": job.skipped_in_a_row,
        "placement": job.placement.state(),
        "recipe": recipe_to_dict(recipe),
    }
    return state, {CONFIG: encode_json(config, indent=1)}


def save_job(job, settles=False):
    """Save the state of a job into its run folder, and remove old checkpoints; all ranks call this.

    Args:
        settles: whether to wait until it is written, also with `checkpoint.async_save`, as after the last step.

    Returns:
        Its folder, which is still being written where it isn't settled; None where it isn't saved, and the job goes on.

    Raises:
        SaveError: on all ranks; with `checkpoint.async_save` also that of the checkpoint before this one.
        FloatingPointError: on all ranks: a weight or moment isn't finite; nothing is saved, and nothing removed.
    """
    recipe, checkpointer = job.recipe, job.checkpointer
    settles = settles or job.step == recipe.training.steps
    try:
        is_free = checkpointer.settle(waits=settles or recipe.checkpoint.when_busy == "wait")
    except OSError as error:  # of the checkpoint before this one
        go_on_or_end(job, error)
        is_free = True
    if not is_free:
        if job.rank == 0:
            print(
                f"warning: the checkpoint {step_folder(checkpointer.folder, job.step)} is skipped, since "
                f"{checkpointer.newest} is still being written, as checkpoint.when_busy: skip says"
            )
        return None
    try:
        folder = checkpointer.begin_save(job.step, *contents_of(job))
        if settles:
            checkpointer.settle()
    except OSError as error:
        go_on_or_end(job, error)
        return None
    return folder


def convert(source, target, recipe=None):
    """Convert a checkpoint into a file of MindSpore's, `*.ckpt`, or such a file into a checkpoint: a line about it.
    Between two folders: weights alone, merged with adapters, see `export`.

    Args:
        source: a `.ckpt` file; or as of `find_checkpoint`.
        target: a new folder; or a new `.ckpt` file.
        recipe: its `checkpoint.export_dtype` is that of a new folder; or of the model of a `.ckpt` file: a checkpoint
            gets its `config.json`, and only its parameters, under their names in files.

    Raises:
        ValueError: neither is a `.ckpt` file, a target that is there, damage; a tensor or a `config.json` that differs
            from the model's.
        OSError: a file can't be read or written.
    """
    if os.path.exists(target):
        raise ValueError(f"'{target}' exists already")
    if not (source.endswith(".ckpt") or target.endswith(".ckpt")):
        formats = [spec.hugging_face for spec in MODELS.values() if spec.hugging_face]
        kept = [pattern for each in formats for pattern in each.kept]
        return export(source, target, recipe.checkpoint.export_dtype if recipe else "source", kept)
    if source.endswith(".ckpt") == target.endswith(".ckpt"):
        raise ValueError(f"one of '{source}' and '{target}' must be a folder")
    names, parts, config = {}, None, None
    if recipe is not None:
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model)
        parts = model_parts([net], 0, tensor_map(recipe.spec, recipe.model))
        paths = {id(parameter): path for path, parameter in net.parameters_and_names()}
        names = {paths[id(parameter)]: part.name for part, parameter in parts.items()}
        parts = list(parts)
        if found := [part.name for part in parts if part.view is not None]:
            raise ValueError(
                f"{recipe.model_name} has tensors that are no parameters in files, as {first_of(found)}, which a .ckpt "
                "file can't hold: keep the folder"
            )

        def config(found, where):
            if found is not None:
                check_config(recipe.spec, recipe.model_name, recipe.model, found, where)
            return config_document(recipe.spec, recipe.model_name, recipe.model, found)

    if target.endswith(".ckpt"):
        checkpoint = open_checkpoint(find_checkpoint(source))
        if checkpoint.adapters:
            raise ValueError(f"{checkpoint.folder} has adapters alone: convert it to a folder first, which merges them")
        if config is not None:
            config(checkpoint.config, os.path.join(checkpoint.folder, CONFIG))
        return f"{target}: {write_ckpt(checkpoint, target, names)} tensors"
    count, left = read_ckpt(source, os.path.normpath(target), names, parts, config)
    others = f"; {len(left)} that the model doesn't have are left out: {first_of(left)}" if left else ""
    return f"{target}: {count} tensors{others}"


def go_on_or_end(job, error):
    """After an error of saving: a warning, or a `SaveError`, as `checkpoint.on_error` says."""
    if job.recipe.checkpoint.on_error == "end":
        raise SaveError(str(error)) from error
    if job.rank == 0:
        print(f"warning: {error}; training goes on, as checkpoint.on_error: go_on says")


def _changes(
    recipe, checkpoint, sections=("model", "training", "optimizer", "lr_scheduler", "train_dataset", "precision")
):
    """A clause about the keys of a recipe that a `Checkpoint` was saved with other values of; or ""."""
    saved = checkpoint.state["recipe"] if checkpoint.state else {"model": checkpoint.config or {}}
    pairs = {f"{section}.{key}": (value, saved.get(section, {}).get(key, value))
             for section in sections for key, value in recipe_to_dict(recipe)[section].items()}  # fmt: skip
    changed = [
        f"{key} {new!r}, not {old!r}" for key, (new, old) in pairs.items() if new != old and key not in _NO_CHANGE
    ]
    return f"; other than there: {first_of(changed)}" if changed else ""
