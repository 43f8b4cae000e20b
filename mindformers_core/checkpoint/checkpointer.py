"""`Checkpointer`: the state of a training loop, saved in a run folder and loaded on any mesh."""

import os
import time
import zlib

import mindspore as ms
import numpy as np
from mindspore import nn

from mindformers_core.checkpoint.adapters import adapter_config
from mindformers_core.checkpoint.background import BackgroundSave
from mindformers_core.checkpoint.between_meshes import move_parts
from mindformers_core.checkpoint.folders import find_checkpoint, newest_checkpoint, prune, step_folder
from mindformers_core.checkpoint.index import ADAPTER_CONFIG, FORMAT, STATE, encode_json
from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.parts import on_all_ranks
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.tensors import (
    has_adapters,
    load_parameters,
    model_parts,
    optimizer_parts,
    parts_of,
    ranks_of,
    states_alike,
)
from mindformers_core.communication import world
from mindformers_core.communication.messages import MISSING, unlike
from mindformers_core.grouping import grouped
from mindformers_core.hints import first_of
from mindformers_core.mesh import DeviceMesh
from mindformers_core.zero.loss_scale import is_finite

_OWN = ("format", "step", "random_state")
_PATIENCE = 60  # seconds


class Checkpointer:
    """Saves and loads weights, the state of an optimizer, MindSpore's generator, and a dict of the loop's own.

    A checkpoint belongs to no mesh: another number of ranks, other layouts and other stages load it. All ranks call the
    methods alike, with a common file system.

    >>> with Checkpointer("output/run", net, optimizer, keep_last=2) as checkpointer:
    ...     for step in range(checkpointer.load() + 1, 101):
    ...         ...
    ...         if step % 10 == 0:
    ...             checkpointer.save(step, {"samples": samples})

    Learning rates belong to the code, and aren't saved. At the end of the block the last checkpoint is whole; after an
    error the block waits for it up to a minute.

    Args:
        folder: of the run; checkpoints are `folder/checkpoint/step_N`.
        cells: the model, or a list of this rank's stages of a pipeline; after `shard()` and `hsdp()`, where these are
            used. Parameters of one path in several Cells are one tensor.
        optimizer: a `GroupedOptimizer`, or another Cell with the attribute `parameters`, as MindSpore's optimizers have
            it: its other Parameters are its state, see `optimizer_parts`. Default: None.
        mesh: the `DeviceMesh` of all these ranks. Default: all of the world.
        keep_last, keep_every: numbers of `prune`: checkpoints that stay. Default: all.
        async_save: whether `save` returns when the state is copied, while a process writes it. Default: False.
        tensor_map: which tensors of files a parameter lies in, see `tensor_map.py`. Default: one that is called by its
            path.

    Attributes:
        state: the dict of the loop's own in the loaded checkpoint; {} before.
        folder: as given; newest: that of the last checkpoint that was asked for, None before.
        seconds: a dict: "save_seconds" that the last `begin_save` took; with `async_save` "write_seconds" from there
            until this rank's part of the checkpoint before that was written.
        base: that of the weights beneath adapters, which checkpoints name and don't have; None: drawn from the seed.
    """

    def __init__(
        self, folder, cells, optimizer=None, mesh=None, keep_last=0, keep_every=0, async_save=False,
        tensor_map=(),
    ):  # fmt: skip
        self.folder, self.newest, self.base, self.state, self.seconds = folder, None, None, {}, {}
        self._tensor_map, self._optimizer = tensor_map, optimizer
        self._cells = [cells] if isinstance(cells, nn.Cell) else list(cells)
        here, self._keep, self._plan, self._parts = world(), (keep_last, keep_every), None, None
        self._ranks = ranks_of(DeviceMesh((here.size,), ("rank",)) if mesh is None else mesh, here.rank)
        self._background = BackgroundSave(self._ranks) if async_save else None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.settle() if kind is None else self.await_writer()
        finally:
            self.close()

    def parts(self, with_optimizer=True, checkpoint=None):
        """The `Part`s of this rank's tensors, a dict, `Part` -> Parameter: to save, or those of a `Checkpoint`."""
        given = self._ranks.rank, self._tensor_map
        found = parts_of(checkpoint, model_parts(self._cells, *given))
        return found | (self._optimizer_parts(*given) if with_optimizer else {})

    def arrange(self, tensor_map):
        """Take another tensor map: Parameters that have other parts of tensors in it get their values, bit for bit.

        All ranks of the world call this.
        """
        sides = [self._all_parts(each) for each in (self._tensor_map, tensor_map)]
        self._tensor_map = tensor_map
        before, after = (grouped((id(each), part.key) for part, each in side.items()) for side in sides)
        held, wanted = ({part: each for part, each in side.items() if before[id(each)] != after[id(each)]}
                        for side in sides)  # fmt: skip
        move_parts(held, wanted, self._ranks)

    def _all_parts(self, tensor_map):
        given = self._ranks.rank, tensor_map
        return model_parts(self._cells, *given) | self._optimizer_parts(*given)

    def _optimizer_parts(self, *given):
        return {} if self._optimizer is None else optimizer_parts(self._optimizer, *given)

    def save(self, step, state=None):
        """Save the state after a step, and remove checkpoints that needn't stay.

        Args:
            step: its number.
            state: a dict that JSON can hold, of rank 0, which `load` gives back. Default: {}.

        Returns:
            The folder of the checkpoint; with `async_save` it is whole when the next `save` or `settle` returns.

        Raises:
            FloatingPointError: on all ranks: a tensor isn't finite; nothing is saved.
            ValueError: a key of `state` that a checkpoint has itself; on all ranks: a state of the optimizer that ranks
                should have alike and don't; see `optimizer_parts`, too.
            SaveError: on all ranks: no space, no permission, …; with `async_save` also of the checkpoint before.
        """
        self.settle()
        folder = self.begin_save(step, state or {})
        self.await_copies()
        return folder

    def begin_save(self, step, state, documents=None):
        """As `save`, after `settle`; with `async_save` the optimizer's state may still be copied: see `await_copies`.

        `documents`: path in the folder -> bytes of further files.
        """
        started, before = time.perf_counter(), {} if self._background is None else self._background.seconds
        parts, documents = self.contents(step, state, documents)
        self.newest = folder = step_folder(self.folder, step)
        arguments = folder, list(parts), lambda part: part.of(parts[part].asnumpy()), documents
        if self._background is not None:
            self._background.start(*arguments, self._keep)
        else:
            self._plan, is_first = save(*arguments, self._ranks, self._plan), self._ranks.rank == 0
            on_all_ranks(self._ranks, lambda: prune(folder, *self._keep) if is_first else None)
        self.seconds = {"save_seconds": time.perf_counter() - started, **before}
        return folder

    def contents(self, step, state, documents=None):
        """What a checkpoint has: `parts()`, and documents, path -> bytes; arguments and errors as of `begin_save`."""
        parts = self.parts()
        if reserved := [name for name in state if name in _OWN]:
            raise ValueError(f"save(state=…) has the key '{reserved[0]}', which a checkpoint has itself: rename it")
        self._check(parts, step)
        own = {"format": FORMAT, "step": step, "random_state": ms.get_rng_state().asnumpy().tolist()}
        return parts, (documents or {}) | {STATE: encode_json(own | state, indent=1)} | self._adapter_documents(parts)

    def _adapter_documents(self, parts):
        own = {part.name: parameter.adapter for part, parameter in parts.items() if part.group == "adapter"}
        found = {name: how for each in self._ranks.gather(own).values() for name, how in each.items()}
        how = next(iter(found.values()), None)
        return {} if how is None else {ADAPTER_CONFIG: encode_json(adapter_config(found, *how, self.base), indent=1)}

    def _check(self, parts, step):
        """Raise an error, on all ranks, for tensors that can't be saved; make the plan anew where there are others."""
        odd = [part.name for part in parts if "float" in part.dtype and not is_finite(parts[part])]
        alike = {} if self._optimizer is None else states_alike(self._optimizer)
        sums = {name: zlib.crc32(value) for name, value in alike.items()}
        gathered = self._ranks.gather((odd, sums, self._parts != list(parts)))
        if found := sorted({name for names, _, _ in gathered.values() for name in names}):
            raise FloatingPointError(f"{first_of(found)}: not finite after step {step}, which is not saved")
        for name, holders in unlike({rank: own for rank, (_, own, _) in gathered.items()}).items():
            ranks = [having[0] for value, having in holders.items() if value != MISSING]
            if len(ranks) > 1:
                raise ValueError(
                    f"the optimizer's '{name}' differs on ranks {ranks[0]} and {ranks[1]}: a state that isn't alike on "
                    "all ranks is called like the parameter that it lies with, as '….weight'"
                )
        if any(is_new for _, _, is_new in gathered.values()):
            self._plan, self._parts = None, list(parts)
            if self._background is not None:
                self._background.close()

    def load(self, path=None, weights_only=False):
        """Load a checkpoint: the number of its step, 0 where only weights are loaded, or there is none.

        Args:
            path: a run folder, of which the newest complete checkpoint is taken, a checkpoint, or a folder of Hugging
                Face's. Default: `folder`, which needn't have one.
            weights_only: whether the optimizer, the generator and `state` stay as they are.

        Raises:
            FileNotFoundError: there is none at `path`. ValueError: on all ranks: tensors that differ from those here; a
                damaged file. OSError: one can't be read.
        """
        find = newest_checkpoint if path is None else find_checkpoint
        found = on_all_ranks(self._ranks, lambda: find(path or self.folder) if self._ranks.rank == 0 else None)
        folder = next(filter(None, found.values()), None)
        if folder is None:
            return 0
        checkpoint = open_checkpoint(folder)
        state = None if weights_only else self.state_of(checkpoint)
        parts = self.parts(state is not None, checkpoint)
        load_parameters(checkpoint, parts, self._ranks, converts=state is None)
        return self.restore(state) if state is not None else 0

    def state_of(self, checkpoint):
        """The state of a `Checkpoint` to load, None where it has none, or is that of the weights beneath adapters."""
        is_base = checkpoint.adapters is None and has_adapters(self.parts(False, checkpoint))
        self.base = os.path.abspath(checkpoint.folder) if is_base else checkpoint.base
        return None if is_base else checkpoint.state

    def restore(self, state):
        """Take the generator and `state` of a checkpoint; returns the number of its step."""
        ms.set_rng_state(ms.Tensor(np.array(state["random_state"], np.uint8)))
        self.state = {name: value for name, value in state.items() if name not in _OWN}
        return state["step"]

    def reserve(self):
        """With `async_save`, allocate the copy of the state ahead of the first `save`."""
        if self._background is not None:
            self._parts = list(self.parts())
            self._background.reserve(self._parts)

    def settle(self, waits=True):
        """Whether no checkpoint is being written any more; `waits` for that.

        Raises:
            SaveError: on all ranks: the last checkpoint couldn't be written; its folder is removed.
        """
        return self._background is None or self._background.settle(waits)

    def await_copies(self):
        """Wait until the state is copied; with `async_save` before it changes."""
        if self._background is not None:
            self._background.await_copies()

    def await_writer(self):
        """Wait up to a minute for what this rank is writing: where other ranks may not call `settle`."""
        if self._background is not None:
            self._background.await_writer(_PATIENCE)

    def close(self):
        """End what is being written, incomplete; call `settle` before for the last checkpoint."""
        if self._background is not None:
            self._background.close()
