"""What the Cells of one sharded tree share: who they are, what is declared for them, and their programs."""

import logging
from collections import OrderedDict
from contextlib import contextmanager
from inspect import getsourcefile, getsourcelines, signature
from weakref import WeakValueDictionary

from mindformers_core.communication import world
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.program.activation_policy import ActivationPolicy
from mindformers_core.program.passed_weights import weights_of_call
from mindformers_core.program.plan import called_graphs, joined_path
from mindformers_core.program.structure import tree_map
from mindformers_core.sharding.boundary import Boundary
from mindformers_core.sharding.compiling import register_cell
from mindformers_core.sharding.first_inputs import compare_inputs
from mindformers_core.sharding.parameter_storage import ParameterStorage
from mindformers_core.sharding.program import arriving_tensors, describe, make_program, signature_key
from mindformers_core.sharding.recordings import no_gradient_left_waiting
from mindformers_core.sharding.sharded_cells import EagerCell, GeneratedCell, located, sharded_class

__all__ = ["MOST_PROGRAMS", "ShardedTree"]

MOST_PROGRAMS = 64  # of one Cell that is called from outside; the one that was used longest ago makes room
_LOG = logging.getLogger("mindformers_core")


class ShardedTree:
    """The shared state of a sharded tree.

    Attributes:
        mesh, declarations: as `shard` was given them; declarations by Cell path.
        cells, classes: path -> Cell, and its own class.
        parameter_layouts: path -> Layout.
        boundaries: path -> what the eager engine does at the boundary of a Cell.
        programs: signature -> `Program`, the one used last at the end.
        function_names: of all generated functions so far: a Cell may get several as methods.
        running: name of the program that a call from outside has begun, or None.
        views: the DTensors of parameters while the eager engine runs, or None.
        storage: the `ParameterStorage`: where the parameters are while nothing is computed.
        training: the flags of all Cells, or None where they have to be read again.
        deferred_gradients: the `DeferredGradients` whose matmuls leave the gradients of weights for later, or None.
        deferring: whether calls do that now: they have programs of their own.
        activations: the `ActivationPolicy`: what becomes of activations between forward and backward pass.
        compiling: None; while programs are asked for that are compiled as a whole, (); where they are compiled part by
            part, paths of the Cells that run again, and of those that are units.
        compiled_cells: what calls such functions of a running program (`CompiledCells`), or None.
        versions: how often something was set in a Cell that programs depend on, or one became eager.
        takes_full_batch: whether plain tensors that the root is called with are whole, not this rank's parts.
        check_inputs: whether ranks compare the root's inputs before its first call with a signature.
        compared: the signatures that were called, and compared if they are.
    """

    def __init__(self, root, mesh, declarations, takes_full_batch, check_inputs):
        self.mesh, self.declarations, self.takes_full_batch = mesh, declarations, takes_full_batch
        self.parameter_layouts = {path: parameter.layout for path, parameter in root.parameters_and_names()}
        self.check_inputs = check_inputs and mesh.size > 1 and world().backend != "fake"
        self.compared = set()
        self.cells = dict(root.cells_and_names())
        self.classes = {path: type(cell) for path, cell in self.cells.items()}
        self.boundaries = {path: self._boundary(path, cell) for path, cell in self.cells.items()}
        self.programs = OrderedDict()
        self.function_names = set()
        self.versions = 0
        self.running = self.views = self.training = self.deferred_gradients = None
        self.deferring = False
        self.storage, self.activations, self.compiling = ParameterStorage(), ActivationPolicy(), None
        self.compiled_cells = None
        self._eager = set()
        self._as_it_is = _with_own_gradient(self.classes)
        self._methods = {path: {} for path in self.cells}
        self._kinds = WeakValueDictionary()  # what `sharded_class` is given -> the class, which alike Cells share
        for path, cell in self.cells.items():
            if cell._recompute_cell is not None and not hasattr(cell._recompute_cell, "wrap_cell"):
                raise ValueError(
                    f"{self.label(path)} has recompute(use_reentrant=False), which keeps the method that it had before "
                    "shard(): call recompute() after shard()"
                )
            cell.__dict__["sharded_cell_number"] = register_cell(self, path)
            cell.__dict__["_sharding"] = self, path
            self._set_class(path)

    def _boundary(self, path, cell):
        names = tuple(signature(type(cell).construct).parameters)[1:]
        if "program" in names:
            raise ValueError(f"{self.label(path)}: construct has an argument 'program', which shard() needs: rename it")
        axes = {axis for parameter in cell.get_parameters() for dim in parameter.layout.dims for axis in dim}
        what = self.label(path), self.mesh, names, self.declarations.get(path), frozenset(axes)
        return Boundary(*what, is_root=path == "", takes_parts=path == "" and not self.takes_full_batch)

    def _set_class(self, path):
        """Give a Cell the class that it needs now."""
        if path in self._as_it_is:
            return
        mixin = EagerCell if path in self._eager else GeneratedCell
        programs = () if mixin is EagerCell else tuple(self._methods[path].items())
        cell = self.cells[path]
        kind = mixin, self.classes[path], programs
        cell.__class__ = self._kinds.get(kind) or self._kinds.setdefault(kind, sharded_class(*kind))
        wrapped = getattr(cell._recompute_cell, "wrap_cell", None)
        if wrapped is not None:
            wrapped.function = cell.construct  # `recompute()` keeps the method that there was when it was called

    def label(self, path):
        """How errors call a Cell."""
        kind = self.classes[path].__name__
        return f"Cell '{path}' ({kind})" if path else f"the root Cell ({kind})"

    def why_not_compiled(self, path):
        """The error of a Cell that runs eagerly, in a graph."""
        construct = self.classes[path].construct
        return (
            f"{self.label(path)} runs operator by operator (eager), which @ms.jit can't compile: its construct is in "
            f"{getsourcefile(construct)}:{getsourcelines(construct)[1]}. Run the step in PyNative (recipe: "
            "context.mode: 1), or restructure construct so that it needs no tensor's values, and don't mark it eager"
        )

    def mark_eager(self, path):
        """A Cell and all around it run eagerly from now on."""
        parts = path.split(".")
        for end in range(len(parts) + 1):
            above = ".".join(parts[:end])
            if above in self.cells:
                self._eager.add(above)
                self._set_class(above)
        self.versions += 1

    def check_cells(self):
        """Raise an error where Cells have come or gone since `shard()`."""
        now = dict(self.cells[""].cells_and_names())
        changed = [path for path in {**now, **self.cells} if now.get(path) is not self.cells.get(path)]
        changed = [path for path in changed if "._" not in f".{path}"]  # of MindSpore's own, as recompute() adds
        if changed:
            raise ValueError(f"Cell '{changed[0]}' has come, gone or changed since shard(): build the model before")

    @contextmanager
    def as_written(self):
        """While open, the Cells have their own classes, as the user wrote them."""
        for path, cell in self.cells.items():
            cell.__class__ = self.classes[path]
            del cell.__dict__["_sharding"]
        try:
            yield
        finally:
            for path, cell in self.cells.items():
                cell.__dict__["_sharding"] = self, path
                self._set_class(path)

    @staticmethod
    def below(path, entries):
        """The entries of a dict by path that are at or below `path`, by their paths from there."""
        if not path:
            return entries
        inner = {name.removeprefix(f"{path}."): entry for name, entry in entries.items() if name.startswith(f"{path}.")}
        return inner | ({"": entries[path]} if path in entries else {})

    def enter(self, path, call, args, kwargs):
        """A call from outside, in PyNative: local tensors in, DTensors out."""
        with no_gradient_left_waiting(self.cells[path]):
            return self._entered(path, call, args, kwargs)

    def _entered(self, path, call, args, kwargs):
        if path == "":
            args, kwargs = self.storage.cast_inputs(args, kwargs)
        program = self.program(path, args, kwargs)
        if path == "" and program.signature not in self.compared:
            self.compare_inputs(program.signature, args, kwargs, program.communicates)
        args, kwargs = tree_map(_local, (args, kwargs))
        if self.cells[path]._recompute_cell is not None:
            kwargs["program"] = program.name  # the backward pass calls it again, as it was called
        before, self.running = self.running, program.name
        try:
            with self.storage.call_scope(), self.activations.calling():
                result = program.wrapped(call(*args, **kwargs))
            return self.storage.cast_outputs(result) if path == "" else result
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise located(error, self.label(path)) from error.__cause__
        finally:
            self.running = before

    def compare_inputs(self, signature, args, kwargs, communicates=True):
        """Compare what the root is called with among the ranks, once for a signature: see `compare_inputs`."""
        if signature in self.compared:
            return
        self.compared.add(signature)
        if not self.check_inputs or not communicates:
            return
        arriving = arriving_tensors(self, "", args, kwargs)
        inputs = [(name, _local(leaf)) for name, leaf, _ in arriving]
        placements = [{axis: layout.placement(axis) for axis in self.mesh.axis_names} for _, _, layout in arriving]
        compare_inputs(self.label(""), self.mesh, inputs, placements)

    @contextmanager
    def running_eagerly(self):
        """While open, a call from outside runs operator by operator."""
        self.views = {}
        try:
            with self.storage.call_scope():
                yield
        finally:
            self.views = None

    def program(self, path, args, kwargs, saved_plan=None):
        """The `Program` of a call of the Cell at `path`; made if need be, or if it is to follow a saved plan."""
        program = None if saved_plan else self.known_program(path, args, kwargs)
        if program is None:
            key = self.key(path, args, kwargs)
            program = self.programs[key] = make_program(self, path, args, kwargs, key, saved_plan)
            self._attach(program)
            self._make_room()
        return program

    def known_program(self, path, args, kwargs):
        """The `Program` of a call, or None."""
        key = self.key(path, args, kwargs)
        program = self.programs.get(key)
        if program is not None:
            self.programs.move_to_end(key)
        return program

    def key(self, path, args, kwargs):
        """What a program of a call is found by."""
        try:
            kind = self.deferring, self.compiling if self.activations.marks else self.compiling or None
            return path, kind, self._flags(), signature_key(args), signature_key(kwargs)
        except TypeError as error:
            raise TypeError(f"{self.label(path)}: {error}") from None

    @contextmanager
    def for_compiled(self, compiling=(), compiled_cells=None):
        """While open, the programs that are asked for are those of compiled functions; arguments as the attributes."""
        before = self.compiling, self.compiled_cells
        self.compiling, self.compiled_cells = compiling, compiled_cells
        try:
            yield
        finally:
            self.compiling, self.compiled_cells = before

    def _flags(self):
        if self.training is None:
            self.training = tuple(cell.training for cell in self.cells.values())
        return self.training

    def state(self):
        """What compiled functions depend on besides the arguments: the Cells' flags, and what was set in them."""
        return self.deferring, self._flags(), self.versions

    def missing_program(self, path, args, kwargs):
        """The error of a call in a graph that there is no program for."""
        shapes = []
        tree_map(lambda leaf: shapes.append(describe(leaf)) if hasattr(leaf, "shape") else None, (args, kwargs))
        shown = ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in shapes)
        before = "prepare(cell, *inputs), or a call with such inputs in PyNative"
        if self.activations.marks:
            before = "prepare(cell, *inputs, compiled=True)"
        return (
            f"{self.label(path)} is sharded and has no program yet for inputs ({shown}), this rank's parts; it has "
            f"{len(self.programs)} for others. Compile with mindformers_core.jit in the place of mindspore.jit, which "
            f"makes it, or make it before: {before}"
        )

    def _attach(self, program):
        """Give every Cell that the program calls its function, and what the function finds nowhere else."""
        names = program.source.functions
        for path, frame, graph in _calls(program):
            self._methods[path][names[frame]] = program.functions[names[frame]]
            for read in graph.parameters:
                self.storage.on_read(self._parameter(program.path, read.path), path)
            for attribute, kind, index in program.source.borrowed.get(frame, ()):
                self.cells[path].__dict__[attribute] = self._elsewhere(program.path, frame, graph, kind, index)
        if self.deferring:
            self.deferred_gradients.attach(program)
        for path in {path for path, _, _ in _calls(program)}:
            self._set_class(path)

    def _elsewhere(self, prefix, frame, graph, kind, index):
        """A parameter or Cell that a graph uses, and that isn't below its own Cell."""
        if kind == "parameter":
            return self._parameter(prefix, graph.parameters[index].path)
        return self.cells[joined_path(prefix, list(called_graphs(frame, graph))[index][1].path)]

    def running_call(self, path, function):
        """`(Program, CellPlan, CellGraph)` of a call of the Cell at `path`, its function of that name, that is on."""
        (program,) = [each for each in self.programs.values() if each.name == self.running]
        names = program.source.functions
        return next((program, *call[1:]) for call in _calls(program) if (call[0], names[call[1]]) == (path, function))

    def weights_of_call(self, program, frame, graph):
        """The weights that such a call passes, as a list."""
        return weights_of_call(frame, graph, lambda inner: self._parameter(program.path, inner))

    def _parameter(self, prefix, path):
        owner, _, name = joined_path(prefix, path).rpartition(".")
        return self.cells[owner]._params[name]

    def forget_programs(self):
        """Make all programs anew when they are next asked for."""
        self.versions += 1
        if self.programs and self.views is None:  # what an eager Cell notes while it runs is its own
            self.programs.clear()
            for path, methods in self._methods.items():
                methods.clear()
                self._set_class(path)

    def _make_room(self):
        """Forget the program that was used longest ago where there are too many."""
        (*_, last) = self.programs.values()
        alike = [key for key, program in self.programs.items() if program.path == last.path]
        if len(alike) <= MOST_PROGRAMS:
            return
        old = self.programs.pop(alike[0])
        _LOG.warning(
            "%s has had more than %d programs, and forgets that for %s: pad inputs to fewer different shapes",
            self.label(old.path), MOST_PROGRAMS, ", ".join(value.described for value in old.inputs),
        )  # fmt: skip
        for path, frame, _ in _calls(old):
            self._methods[path].pop(old.source.functions[frame], None)
            self._set_class(path)


def _with_own_gradient(classes):
    """Paths of the Cells that define a `bprop`, and of those below: they run as they are, on whole tensors."""
    own = [path for path, kind in classes.items() if path and hasattr(kind, "bprop")]
    return {path for path in classes if any(path == other or path.startswith(f"{other}.") for other in own)}


def _local(leaf):
    return leaf._local if type(leaf) is DTensor else leaf


def _calls(program):
    """`(path, CellPlan, CellGraph)` of every call in a program; of shared plans, each call's own graph."""

    def visit(path, frame, graph):
        yield path, frame, graph
        for call, inner in called_graphs(frame, graph):
            if call.frame is not None:
                yield from visit(joined_path(program.path, inner.path), call.frame, inner)

    return visit(program.path, program.generated, program.graph)
