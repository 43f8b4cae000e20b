"""The shared state of a sharded tree: its Cells, their declarations, and the generated programs of their calls."""

import logging
from collections import OrderedDict
from contextlib import contextmanager
from weakref import WeakValueDictionary

from mindspore import nn

from mindformers_core.capture.python_state import CURES
from mindformers_core.communication import process_state, world
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.mindspore_private import leave_dtypes, recompute_cell_of
from mindformers_core.program.activation_policy import ActivationPolicy
from mindformers_core.program.graph import class_label
from mindformers_core.program.passed_weights import weight_paths
from mindformers_core.program.plan import called_graphs, joined_path, parameter_path
from mindformers_core.program.structure import tree_key, tree_map
from mindformers_core.scopes import errors_at, replaced
from mindformers_core.sharding.boundary import Boundary, bind_arguments, describe
from mindformers_core.sharding.compiling import register_cell
from mindformers_core.sharding.declare import parameter_at
from mindformers_core.sharding.first_inputs import compare_inputs
from mindformers_core.sharding.parameter_storage import ParameterStorage
from mindformers_core.sharding.program import make_program
from mindformers_core.sharding.recordings import no_gradient_left_waiting
from mindformers_core.sharding.replicas import check_replicas
from mindformers_core.sharding.sharded_cells import EagerCell, GeneratedCell, located, sharded_class
from mindformers_core.sharding.whole_tensors import note_owner

MOST_PROGRAMS = 64  # of one Cell that is called from outside; beyond that the least recently used one is dropped
MOST_VALUES = 8  # of something in Python in successive calls
MOST_OWN_VALUES = 3  # of what construct itself changes
_LOG = logging.getLogger("mindformers_core")


class ShardedTree:
    """The shared state of a sharded tree.

    Attributes:
        mesh, declarations: the arguments of `shard`; declarations by Cell path.
        cells, classes: path -> Cell, and the class of the user.
        parameter_layouts: path -> Layout.
        boundaries: path -> the `Boundary` at which the eager engine redistributes arguments and results.
        programs: name -> `Program`, least recently used first. Those of one signature were captured with other values
            of what their `PythonState`s tell.
        function_names: names of all generated functions: a Cell may get several of them as methods.
        eager: paths of the Cells that run operator by operator.
        running: name of the program of the current call from outside, or None.
        prepared: the `Program` of the next call from outside, of the root, which its caller has asked for; or None.
        views: the DTensors of parameters while the eager engine runs, or None.
        storage: the `ParameterStorage`: where parameters are between computations.
        training: the flags of all Cells, or None where they have to be read again.
        deferred_gradients: the `DeferredGradients` that collect split weight gradients, or None.
        deferring: whether calls split the weight gradients off; such calls have programs of their own.
        activations: the `ActivationPolicy`: which activations are saved, recomputed or swapped.
        compiling: None for programs of PyNative; () for programs that are compiled as a whole; for programs that are
            compiled part by part the paths of the recomputed Cells, and those of the units.
        compiled_cells: the `CompiledCells` that call the compiled parts of a running program, or None.
        arriving: name of an argument of the root -> the layout in which plain tensors come, where it isn't the declared
            one; None: plain tensors are global, not this rank's parts.
        kept: the `KeptPrograms` of a job, or None.
        check_inputs: whether ranks compare the root's inputs before its first call with a signature.
    """

    def __init__(self, root, mesh, declarations, arriving, check_inputs, device_model):
        self.mesh, self.declarations, self.arriving = mesh, declarations, arriving
        self.device_model = device_model
        self.check_inputs = check_inputs and mesh.size > 1 and world().backend != "fake"
        self.programs, self.function_names, self.eager = OrderedDict(), set(), set()
        self._news = {}  # signature -> (what is new at each call, number of such calls in a row)
        self._runs = {}  # signature -> number of calls since the last of these
        self.running = self.prepared = self.views = self.training = self.deferred_gradients = None
        self.compiling = self.compiled_cells = self.kept = None
        self.deferring = False
        self.storage, self.activations = ParameterStorage(), ActivationPolicy()
        self._versions = 0  # number of changes that invalidate programs: Cells, Cells marked as eager
        self._compared = set()  # signatures of the calls whose inputs were compared among ranks
        self._sharded_classes = WeakValueDictionary()  # arguments of `sharded_class` -> the class
        self._enter_cells(root)

    def _enter_cells(self, root):
        """Enter the Cells that there are, of the classes of the user."""
        self.cells = dict(root.cells_and_names())
        self.classes = {path: type(cell) for path, cell in self.cells.items()}
        self.parameter_layouts = {path: parameter.layout for path, parameter in root.parameters_and_names()}
        self.boundaries = {path: Boundary(self, path) for path in self.cells}
        # Cells with a `bprop` of their own, and all below, run unchanged, on global tensors
        own = tuple(f"{path}." for path, kind in self.classes.items() if path and hasattr(kind, "bprop"))
        self._unchanged = {path for path in self.classes if f"{path}.".startswith(own)}
        self._methods = {path: {} for path in self.cells}
        for path, cell in self.cells.items():
            if recompute_cell_of(cell) is not None and not hasattr(recompute_cell_of(cell), "wrap_cell"):
                raise ValueError(
                    f"{self.label(path)} has recompute(use_reentrant=False), which keeps the method that it had before "
                    "shard(): call recompute() after shard()"
                )
            cell.__dict__["sharded_cell_number"] = register_cell(self, path)
            cell.__dict__["_sharding"] = self, path
            self._set_class(path)
        note_owner(self)

    def check_new(self, path, cell):
        """Raise `ValueError` for a Cell that comes after `shard()` with Parameters that have no layout."""
        stray = [name for name, parameter in nn.Cell.parameters_and_names(cell) if not hasattr(parameter, "layout")]
        if stray:
            raise ValueError(
                f"{class_label(path, type(cell).__name__)} has come since shard(), and its parameter '{stray[0]}' has "
                "no layout: build the model before shard(); Cells without Parameters may come and go"
            )

    def follow_cells(self):
        """Enter Cells that have come, gone or moved since `shard()`.

        Raises:
            ValueError: one has Parameters without a layout, or the tree is under `hsdp()`, `recompute()` or `swap()`.
        """
        root = self.cells[""]
        found = dict(root.cells_and_names())
        changed = [path for path in {**found, **self.cells} if found.get(path) is not self.cells.get(path)]
        changed = [path for path in changed if "._" not in f".{path}"]  # of MindSpore's own, as recompute() adds
        if not changed:
            return
        for path in filter(found.__contains__, changed):
            self.check_new(path, found[path])
        if type(self.storage) is not ParameterStorage or self.activations.is_active:
            raise ValueError(
                f"Cell '{changed[0]}' has come, gone or changed since shard(), and {self.label('')} is under hsdp(), "
                "recompute() or swap(): build the model before"
            )
        self.forget_programs()
        places = {id(cell): path for path, cell in found.items()}
        stays = {path: places[id(cell)] for path, cell in self.cells.items() if id(cell) in places}
        self.declarations = {stays[path]: each for path, each in self.declarations.items() if path in stays}
        self.eager = {stays[path] for path in self.eager if path in stays}
        with self.as_written():
            self._enter_cells(root)

    def _set_class(self, path):
        """Give a Cell the class for its mode and its programs."""
        if path in self._unchanged:
            return
        is_eager = path in self.eager
        programs = () if is_eager else tuple(self._methods[path].items())
        cell = self.cells[path]
        kind = EagerCell if is_eager else GeneratedCell, self.classes[path], programs
        cell.__class__ = self._sharded_classes.get(kind) or self._sharded_classes.setdefault(kind, sharded_class(*kind))
        if not is_eager:
            leave_dtypes(cell)  # for compilers; see `GeneratedCell`
        wrapped = getattr(recompute_cell_of(cell), "wrap_cell", None)
        if wrapped is not None:
            wrapped.function = cell.construct  # `recompute()` keeps the method that there was when it was called

    def label(self, path):
        """The name of a Cell in error messages."""
        return class_label(path, self.classes[path].__name__)

    def mark_eager(self, path):
        """Run a Cell and all Cells around it eagerly."""
        for above in self.cells:
            if above in ("", path) or path.startswith(f"{above}."):
                self.eager.add(above)
                self._set_class(above)
        self._versions += 1

    @contextmanager
    def as_written(self):
        """While open, the Cells have the classes of the user."""
        for path, cell in self.cells.items():
            cell.__class__ = self.classes[path]
            del cell.__dict__["_sharding"]
        try:
            yield
        finally:
            for path, cell in self.cells.items():
                cell.__dict__["_sharding"] = self, path
                self._set_class(path)

    def enter(self, path, call, args, kwargs):
        """A call from outside, in PyNative: local tensors in, DTensors out."""
        with no_gradient_left_waiting(self.cells[path]):
            if path == "":
                args, kwargs = self.storage.cast_inputs(args, kwargs)
            program = self.prepared or self.program(path, args, kwargs)
            if path == "":
                self.compare_inputs(program.signature, args, kwargs, program)
            args, kwargs = tree_map(_local, (args, kwargs))
            if recompute_cell_of(self.cells[path]) is not None:
                kwargs["program"] = program.name  # the backward pass repeats the call with the same arguments
            try:
                with replaced(self, running=program.name), self.storage.call_scope(), self.activations.calling():
                    result = program.wrapped(call(*args, **kwargs))
                    self.finish_run(program)
                return self.storage.cast_outputs(result) if path == "" else result
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                raise located(error, self.label(path)) from error.__cause__

    def compare_inputs(self, signature, args, kwargs, program=None):
        """Compare the root's inputs among the ranks, once for a signature, unless the program has no collectives; and,
        the first time, what its Parameters are."""
        if signature in self._compared:
            return
        self._compared.add(signature)
        if self.check_inputs and (program is None or program.communicates):
            _, arriving = bind_arguments(self, "", args, kwargs)
            placements = [{axis: layout.placement(axis) for axis in self.mesh.axis_names} for _, _, layout in arriving]
            inputs = [(name, _local(leaf)) for name, leaf, _ in arriving]
            compare_inputs(self.label(""), self.mesh, inputs, placements)
            if len(self._compared) == 1 and self.storage.settings is None:  # hsdp's are in use
                check_replicas(self.cells[""])

    def program(self, path, args, kwargs, saved_plan=None):
        """The `Program` of a call of the Cell at `path`; generated where there is none, or for a saved plan."""
        program = None if saved_plan else self.known_program(path, args, kwargs)
        if program is None:
            key = self.key(path, args, kwargs)
            if not saved_plan:
                self._check_changes(key)
            program = make_program(self, path, args, kwargs, key, saved_plan)
            self.programs[program.name] = program
            self._attach(program)
            self._drop_oldest(path)
        return program

    def known_program(self, path, args, kwargs):
        """The `Program` of a call, or None."""
        for program in self._alike(self.key(path, args, kwargs)):
            if program.state.changed() is None:
                self.programs.move_to_end(program.name)
                return program
        return None

    def _alike(self, key):
        """The programs of a signature, the last used one first."""
        return (program for program in reversed(self.programs.values()) if program.signature == key)

    def finish_run(self, program):
        """Set what a call leaves in attributes, and count the call for `_check_changes`."""
        program.state.replay()
        self._runs[program.signature] = self._runs.get(program.signature, 0) + 1

    def _check_changes(self, key):
        """Raise an error where something in Python has had another value at each of the last calls like this one."""
        last = next(self._alike(key), None)
        if last is None:
            return
        read, then, now = last.state.changed()
        (known, count), runs = self._news.get(key, (None, 0)), self._runs.pop(key, 0)
        count = count + 1 if known == read and runs < 2 else 1
        self._news[key] = read, count
        if count >= (MOST_OWN_VALUES if read.name in [name for _, name, _ in last.state.writes] else MOST_VALUES):
            path = next((path for path, cell in self.cells.items() if cell is read.cell), key[0])
            raise ValueError(
                f"in {self.label(path)}, {read.source}: {read.what} has another value at every call, before {then!r}, "
                f"now {now!r}, and a program has it written in: {CURES}"
            )

    def key(self, path, args, kwargs):
        """The key in `programs` of a call."""
        mode = self.deferring, self.compiling if self.activations.is_active else self.compiling or None
        mode += (process_state().observer.instruments,)
        with errors_at(f"{self.label(path)}: "):
            return path, mode, self._flags(), tree_key(args, describe), tree_key(kwargs, describe)

    def for_compiled(self, compiling=(), compiled_cells=None):
        """While open, programs are those of compiled functions; the arguments are the attributes of these names."""
        return replaced(self, compiling=compiling, compiled_cells=compiled_cells)

    def _flags(self):
        if self.training is None:
            self.training = tuple(cell.training for cell in self.cells.values())
        return self.training

    def state(self):
        """All that compiled functions depend on besides their arguments."""
        return self.deferring, self._flags(), self._versions

    def _attach(self, program):
        """Give every Cell that the program calls its function, and the parameters and Cells from elsewhere."""
        calls, names = program.calls(), program.source.functions
        for path, plan, graph in calls:
            self._methods[path][names[plan]] = program.functions[names[plan]]
            for use in graph.parameters:
                self.storage.on_read(parameter_at(joined_path(program.path, use.path), self.cells), path)
            for attribute, kind, index in program.source.borrowed.get(plan, ()):
                if kind == "parameter":
                    where = parameter_path(plan, graph, index)
                    borrowed = parameter_at(joined_path(program.path, where), self.cells)
                else:
                    _, called = list(called_graphs(plan, graph))[index]
                    borrowed = self.cells[joined_path(program.path, called.path)]
                self.cells[path].__dict__[attribute] = borrowed
        if self.deferring:
            self.deferred_gradients.attach(program)
        for path in {path for path, _, _ in calls}:
            self._set_class(path)

    def running_call(self, path, function):
        """A call of the running program.

        Args:
            path: of the called Cell.
            function: name of the generated function.

        Returns:
            `(CellPlan, list of the weights that the call passes)`.
        """
        program = self.programs[self.running]
        names = program.source.functions
        calls = (call[1:] for call in program.calls() if (call[0], names[call[1]]) == (path, function))
        plan, graph = next(calls)
        paths = [joined_path(program.path, inner) for inner in weight_paths(plan, graph)]
        return plan, [parameter_at(path, self.cells) for path in paths]

    def forget_programs(self):
        """Drop all programs."""
        self._versions += 1
        if self.programs and self.views is None:  # an eager Cell may set attributes while it runs
            self.programs.clear()
            for path, methods in self._methods.items():
                methods.clear()
                self._set_class(path)

    def _drop_oldest(self, path):
        """Drop the least recently used program of a Cell that has too many."""
        of_cell = [name for name, program in self.programs.items() if program.path == path]
        if len(of_cell) <= MOST_PROGRAMS:
            return
        old = self.programs.pop(of_cell[0])
        _LOG.warning(
            "%s has had more than %d programs, and forgets that for %s: pad inputs to fewer different shapes",
            self.label(path), MOST_PROGRAMS, ", ".join(value.described for value in old.inputs),
        )  # fmt: skip
        for called, plan, _ in old.calls():
            self._methods[called].pop(old.source.functions[plan], None)
            self._set_class(called)


def _local(leaf):
    return leaf._local if type(leaf) is DTensor else leaf
