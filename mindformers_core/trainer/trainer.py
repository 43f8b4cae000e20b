"""`Trainer`: the training job of a recipe on this process's part of the mesh, step by step."""

import atexit
import math
import os
import time
from contextlib import ExitStack
from dataclasses import astuple
from weakref import ref

import mindspore as ms

from mindformers_core.checkpoint.folders import set_aside, step_folder
from mindformers_core.checkpoint.parts import on_all_ranks
from mindformers_core.checkpoint.tensors import ranks_of
from mindformers_core.communication import process_state, world
from mindformers_core.communication.messages import check_equal
from mindformers_core.data.datasets import dataset_of, given_dataset, id_limits
from mindformers_core.data.reading import batch_reader
from mindformers_core.data.streams import Ahead
from mindformers_core.diff.recorder import perturb
from mindformers_core.hints import first_of
from mindformers_core.optimizers.settings import Placed, placed_lines
from mindformers_core.recipe.checks import recipe_device_model
from mindformers_core.recipe.learning_rate import learning_rate
from mindformers_core.recipe.loader import evaluated, load_recipe, recipe_to_yaml
from mindformers_core.recipe.sections import batch_plan
from mindformers_core.scopes import errors_at
from mindformers_core.sharding.replicas import check_replicas
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.supervised import step_counter
from mindformers_core.trainer import records
from mindformers_core.trainer.cells import build_cells, check_patterns, loss_scale_of, placed_of
from mindformers_core.trainer.checkpoints import checkpointer_of, going_on, reserve_memory, save_job
from mindformers_core.trainer.evaluation import evaluate
from mindformers_core.trainer.joining import enter_world
from mindformers_core.trainer.kept_programs import KeptPrograms
from mindformers_core.trainer.leaving import Leaving
from mindformers_core.trainer.measuring import Pace, epochs, model_operations, peak_memory, waited
from mindformers_core.trainer.memory import JobMemory
from mindformers_core.trainer.placing import ExpertPlacement
from mindformers_core.trainer.recording import start_recording
from mindformers_core.trainer.saving import Saving
from mindformers_core.trainer.step import step_function


class Trainer:
    """The training job of a recipe on this rank; the loop over its steps belongs to the caller.

    Every rank makes one and calls the same methods. Made, its programs are generated and its checkpoint is loaded.

    >>> trainer = Trainer("configs/llama_tiny_cpu_1p.yaml", "training.steps=100")
    >>> for row in trainer.steps():
    ...     if row["loss"] < 2.5:  # the same number on all ranks
    ...         trainer.save()
    ...         break

    Args:
        recipe: a `Recipe`, or the path of a YAML file.
        overrides: with a path, texts `section.key=value`.
        mesh: the `DeviceMesh` of all ranks of the job, with the axes `MESH_AXES`. Default: this process joins the ranks
            that were launched, which have to have the recipe's number.
        dataset: an object as a factory of `dataset_of` returns. Default: the recipe's.

    Attributes:
        recipe, mesh, dataset, rank: as given, and this rank's number.
        cells: number of a stage -> its Cell, see `build_cells`; without a pipeline of stage 0, the whole model.
        optimizer, checkpointer, loss_scale: the optimizer of this rank's parameters, the `Checkpointer`, the
            `LossScale`, or None.
        plan, placement: the `BatchPlan` of a step, and the `ExpertPlacement`.
        step, consumed: number of steps, and of sequences that they took, also before the run was resumed.
        skipped, skipped_in_a_row: number of steps that were skipped, since something wasn't finite.
        compared: the last step after which ranks had equal weights and moments where they have the same ones; or None.
        loaded_config: the contents of the `config.json` of `checkpoint.load_path`, or None.
        summary: a line about the steps of the last loop; None before it ends.

    Raises:
        ValueError, FileNotFoundError: the recipe contradicts the ranks, the data or the checkpoint; its recompute or
            swap is impossible in the model, then on all ranks of a pipeline.
        ModuleNotFoundError: an extra that the recipe needs is not installed.
    """

    def __init__(self, recipe, *overrides, mesh=None, dataset=None):
        recipe = load_recipe(recipe, overrides) if isinstance(recipe, (str, os.PathLike)) else recipe
        if mesh is None:
            records.require_extras(recipe)
        self.recipe = recipe = going_on(recipe)
        self.mesh = mesh = enter_world(recipe)[1] if mesh is None else mesh
        self.rank = world().rank
        self._memory = JobMemory(recipe, mesh, self.rank)
        self.recipe, checkpoint = self._memory.newest(recipe)
        recipe = self.recipe
        given = dataset_of(recipe) if dataset is None else dataset
        self.dataset = given_dataset(given, "Trainer(dataset=…)", recipe.data_seed, id_limits(recipe))
        self._held_out = dataset_of(evaluated(recipe)) if recipe.evaluation.interval else None
        for data in filter(None, (self.dataset, self._held_out)):
            check_equal(mesh, data.state()["facts"], "give all ranks the same data")
        self.plan = batch_plan(recipe, mesh.axis_size("dp"))
        check_patterns(recipe)
        ms.set_seed(recipe.training.seed)
        start_recording(recipe, mesh, self.plan, self.rank)
        self.cells = build_cells(recipe, mesh, self.rank)
        self._programs = KeptPrograms(recipe.training.output_dir, self.rank)
        for net in self.cells.values():
            tree_of(net).kept = self._programs
        read = batch_reader(recipe, self.plan, self.cells, self.rank, self.dataset)
        self._batches = Ahead(lambda consumed: read(self.dataset, consumed))
        ms.manual_seed(recipe.training.seed)  # after the constructors, of which stages call others
        self.loss_scale = loss_scale_of(recipe, mesh)
        self.optimizer, self.run_step, self._forward = step_function(recipe, mesh, self.cells, self.loss_scale)
        self.checkpointer = checkpointer_of(recipe, mesh, self.cells, self.optimizer)
        self.placement = ExpertPlacement(recipe, mesh, self.cells, self.checkpointer)
        self.step = self.consumed = self.skipped = self.skipped_in_a_row = 0
        self.loaded_config = self.summary = None
        self._operations = self._operations_of_step()
        self._has_folder, self._told = False, step_counter()
        self._saving = Saving(recipe.checkpoint, ranks_of(mesh, self.rank), self.checkpointer)
        self._pace, self.compared = Pace(self.rank), None
        if checkpoint is not None:
            self._memory.resume(self, checkpoint)
        if self.optimizer.average and self.step == 0:
            self.optimizer.average.begin()
        if recipe.monitor.perturb:
            perturb(self.optimizer.parameters, recipe.monitor.perturb, self.rank)

    def run(self):
        """Run all remaining steps; returns the summary line. Errors as of `steps`."""
        for _ in self.steps():
            pass
        return self.summary

    def steps(self):
        """A generator of the remaining steps: it runs one, saves what the recipe asks for, and gives its `Row`.

        What the loop puts into the row is recorded with it. A loop that ends early, by `break`, leaves the run folder
        as one that ends: records are written, the last checkpoint is whole, and another run may take the folder. A
        later loop goes on.

        Raises:
            FloatingPointError: on all ranks: the loss, or a gradient, is NaN or infinite; or, when they are to be
                saved, the weights or moments are. SaveError: a checkpoint can't be saved. OSError: the run folder can't
                be made, is another run's, or takes no more records. ValueError: ranks have other weights where they
                should have the same.
        """
        steps = self._steps()
        left = ref(steps)  # a process that ends in an error in the loop's body ends the loop, too
        atexit.register(lambda: left() and left().close())
        return steps

    def _steps(self):
        section, self.summary = self.recipe.checkpoint, None
        with ExitStack() as held:
            recorder = self._open_records(held)
            leaving = held.enter_context(Leaving(self.mesh, self.rank, section.grace))
            try:
                reserve_memory(self)
                self._memory.reserve(self)
                self._compare_replicas(is_due=True)
                while self.step < self.recipe.training.steps:
                    row = self.train_step()
                    row.update(self._memory.take_facts())
                    at_end, is_due = self.step == self.recipe.training.steps, "not_finite" in row
                    is_logged = at_end or self.step % self.recipe.monitor.log_interval == 0
                    leaves = leaving.is_due(self.step, is_logged) and not at_end
                    try:
                        if recorder.count == 0:  # the first step has generated all programs
                            records.report_activations(self.recipe, self.mesh, self.rank, self.cells)
                        if is_due:
                            raise FloatingPointError(row["not_finite"])
                        is_due = section.enable_save and (self._saving.is_due(row) or at_end or leaves)
                        self._compare_replicas(is_due=at_end or is_due and section.check_replicas)
                        if is_logged:
                            found = ranks_of(self.mesh, self.rank).gather((peak_memory(), self._pace.seconds))
                            row["memory_bytes"], row["memory_rank"] = max((found[rank][0], rank) for rank in found)
                            row.update(self._pace.told({rank: seconds for rank, (_, seconds) in found.items()}))
                        is_evaluated = self._held_out and (at_end or self.step % self.recipe.evaluation.interval == 0)
                        if is_evaluated and not leaves:  # what a job that goes on after this step doesn't repeat
                            self._evaluate_into(row)
                        if is_due:
                            recorder.add_before_save(row)
                            self._saving.add(row, save_job(self, settles=at_end or leaves))
                        if is_evaluated and leaves:
                            self._evaluate_into(row)
                        self._programs.write()
                        yield row
                    finally:
                        recorder.add(row, is_due or at_end or leaves or self._memory.is_due(self))
                    if self._memory.is_due(self):
                        self._memory.keep(self)
                    if leaves:
                        leaving.leave(self.step, self.checkpointer.newest)
            except FloatingPointError:
                self.checkpointer.await_writer()  # of the checkpoint before
                raise
            except GeneratorExit:  # the loop has ended early
                self.checkpointer.await_writer()
            finally:
                held.callback(self.checkpointer.close)
                held.callback(self._batches.close)
                recorder.flush()
            self.summary = recorder.summary(self)

    def _evaluate_into(self, row):
        row.update(self.evaluate())
        if self.optimizer.average:
            with self.optimizer.average.in_place():
                row.update((f"average_{name}", each) for name, each in self.evaluate().items())

    def save(self):
        """Save the state into the run folder; returns the folder of the checkpoint, see `save_job`."""
        if self.checkpointer.newest == step_folder(self.checkpointer.folder, self.step):
            return self.checkpointer.newest
        return save_job(self)

    def evaluate(self, dataset=None):
        """The loss, perplexity and other metrics of held-out samples: a dict, see `evaluate`.

        Args:
            dataset: an object as a factory of `dataset_of` returns. Default: the recipe's `evaluation.dataset`.
        """
        if dataset is None:
            dataset = self._held_out or dataset_of(evaluated(self.recipe))
        dataset = given_dataset(dataset, "Trainer.evaluate(dataset)", self.recipe.data_seed, id_limits(self.recipe))
        return evaluate(self.recipe, self.plan, self.rank, self.cells, self._forward, dataset)

    def train_step(self):
        """Run one optimizer step, without records; returns its `Row`.

        Where the loss or a gradient isn't finite, nothing is updated, and the row has a text about it, `not_finite`.
        """
        started, before, self._told[0] = time.perf_counter(), waited(), self.step + 1
        following, is_last = self.consumed + self.plan.samples, self.step + 1 >= self.recipe.training.steps
        batch = self._batches.get(self.consumed, None if is_last else following)
        reading = time.perf_counter() - started
        self.step, self.consumed = self.step + 1, following
        rate, scale = learning_rate(self.recipe, self.step, self.plan.samples), self.loss_scale
        value = scale.value if scale else None
        scalars = self.optimizer.scalars(self.step - self.skipped, rate)
        loss, norm, odd, told = self.run_step(tuple(map(ms.Tensor, batch)), scalars, self.checkpointer.await_copies)
        process_state().observer.end_step(self.step)
        told |= self.placement.after_step(self.step, told.pop("expert_counts", None))
        self._told[1] += 1
        precision, found = self.recipe.precision, odd or []
        is_skipped = math.isinf(norm) if odd is None else precision.skip_not_finite  # see `step_function`
        self.skipped, self.skipped_in_a_row = self.skipped + is_skipped, is_skipped * (self.skipped_in_a_row + 1)
        if is_skipped:
            odd = found if self.skipped_in_a_row > precision.skipped_steps else None
        seconds, waiting = time.perf_counter() - started, waited() - before
        self._pace.add(seconds - waiting)
        row = records.Row(
            step=self.step,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            seconds=seconds,
            data_seconds=reading,
            wait_seconds=waiting,
            tokens_per_second=self.plan.samples * self.recipe.train_dataset.seq_length / seconds,
        )
        row.update(epochs(self.dataset, self.consumed - self.plan.samples, self.consumed))
        if self._operations is not None:
            row["mfu"] = self._operations / seconds
        row.update(told)
        if scale:
            row["loss_scale"] = value
        if scale or precision.skip_not_finite:
            row["skipped"] = self.skipped
        if odd is not None:
            row["not_finite"] = self._not_finite(row["loss"], norm, odd)
        return row

    def _operations_of_step(self):
        """The operations of a step over those that all ranks could do in a second, by `context.device_model`; or None.

        All ranks call this.
        """
        device = recipe_device_model(self.recipe)
        if device is None:
            return None
        stages = ranks_of(self.mesh, self.rank).gather(model_operations(self.cells.values()))
        if None in stages.values():
            return None
        share = self.mesh.axis_size("pp") / self.mesh.size  # of the ranks, one for each stage
        operations = sum(stages.values()) * share * self.plan.samples / self.plan.rows
        return operations / (device.operations_per_second * self.mesh.size)

    def _not_finite(self, loss, norm, names):
        """What a step says that made no update, for the `names` of this rank; all ranks call this."""
        found = sorted(ranks_of(self.mesh, self.rank).gather(names).items(), reverse=True)  # the last stage first
        names = list(dict.fromkeys(name for _, own in found for name in own))
        cause = "all gradients are finite" + (", but not the sum of their squares" if math.isinf(norm) else "")
        if self.skipped_in_a_row:
            cause = f"{self.skipped_in_a_row} steps in a row are skipped, more than precision.skipped_steps"
        if names:
            cause = f"{cause}, and " if self.skipped_in_a_row else ""
            cause += f"{len(names)} weights have gradients that aren't finite, in the order of the backward pass "
            cause += first_of(names, 3)
        samples = f"samples {self.consumed - self.plan.samples} to {self.consumed - 1}"
        return (
            f"at step {self.step} ({samples}) the loss is {loss:g}, and the norm of all gradients {norm:g}: {cause}; "
            f"the weights stay as they were after step {self.step - 1}"
        )

    def _compare_replicas(self, is_due):
        """Compare what ranks have alike, where it is due or `context.check_replicas` steps are over."""
        every = self.recipe.context.check_replicas
        if (every or self.recipe.checkpoint.check_replicas) and (is_due or every and self.step % every == 0):
            with errors_at("", "" if self.compared is None else f"; they were equal after step {self.compared}"):
                check_replicas(list(self.cells.values()), self.optimizer)
            self.compared = self.step

    def _open_records(self, held):
        """Make the run folder, which rank 0 has until the stack `held` is closed; all ranks call this.

        Returns:
            The `Recorder`, which writes on rank 0 only.
        """
        found, ranks = [], ranks_of(self.mesh, self.rank)
        with records.record_errors(self.recipe.training.output_dir):
            on_all_ranks(ranks, lambda: found.extend(self._writers(held)) if self.rank == 0 else None)
        self._told[2] = 1 + self.recipe.checkpoint.enable_save  # each rank, to the supervisor of its machine
        gathered = ranks.gather({name: astuple(each) for name, each in placed_of(self.recipe, self.cells).items()})
        placed = {name: Placed(*each) for own in gathered.values() for name, each in own.items()}
        if self.rank == 0:
            print("\n".join(placed_lines(placed, self.recipe.optimizer)))
        return records.Recorder(found, self.recipe.monitor.log_interval)

    def _writers(self, held):
        recipe, folder = self.recipe, self.recipe.training.output_dir
        own, loaded = map(os.path.realpath, (folder, recipe.checkpoint.load_path))
        # from a checkpoint in its own folder, or after an earlier loop
        carries_on = self._has_folder or (self.step > 0 and os.path.commonpath([own, loaded]) == own)
        held.enter_context(records.open_run_folder(folder, recipe_to_yaml(recipe), keep=carries_on))
        self._has_folder = True
        if carries_on and (others := set_aside(folder, self.step)):
            print(f"checkpoints of later steps are now {', '.join(others)}")
        kind = "micro-batches" if self.plan.micro_batches == 1 else "pipeline runs"
        kind += f", {self.plan.empty} of whose rows are empty," if self.plan.empty else ""
        print(f"{recipe.training.steps} steps of {self.plan.runs} {kind} on ranks {self.mesh}; run folder {folder}")
        writers = [records.metrics_writer(folder, after_step=self.step)]
        writers += [records.tensorboard_writer(folder)] if recipe.monitor.tensorboard else []
        return [*writers, records.progress_writer(recipe.training.steps, recipe.monitor.log_interval)]
