"""From the data of a plan's file to the plan: the other half of `saved.py`. Pure Python.

The graph must be the one that the plan was made for, every layout must fit its tensor, and every move must consist of
steps that there are; the plan as a whole is then checked like one that was searched (see `checking.py`).
"""

from dataclasses import replace

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.layout import Layout
from mindformers_core.program.aliases import outer_index, parameter_index
from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, CellPlan, Move, OperatorPlan
from mindformers_core.program.structure import shown, tree_leaves
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.redistribution.steps import Step
from mindformers_core.redistribution.transitions import SearchSpace, transitions

__all__ = ["graph_lines", "restored"]


def restored(path, frames, graph, mesh):
    """The `CellPlan` of the root.

    Args:
        path: what errors call the file.
        frames: the data of its frames, the root's first.
        graph: the root's `CellGraph`.
        mesh: the mesh.

    Raises:
        ValueError: see `load_plan`.
    """
    return _Frames(path, frames, graph, mesh).frame(0, graph)


def graph_lines(graph):
    """What a graph's key is made of, as lines that a person can compare, save the contents of called Cells."""
    lines = [f"{graph.class_name}, {'training' if graph.training else 'evaluation'}"]
    for name, structure in graph.arguments.items():
        values = ", ".join(value.described for value in tree_leaves(structure))
        lines.append(f"argument {name} = {shown(structure)}" + (f" ({values})" if values else ""))
    for use in graph.parameters:
        frozen = "" if use.trainable else ", not trained"
        lines.append(f"parameter {use.value.described} = {use.local or f'<{use.path}>'}{frozen}")
    lines += [f"constant {constant.value.described} = {constant.digest[:16]}" for constant in graph.constants]
    lines += [f"outer {use.value.described}" for use in graph.outer]
    for node in graph.nodes:
        primitive = None if isinstance(node, CallNode) else node.primitive
        attributes = f" with {shown(primitive.attributes)}" if primitive and primitive.attributes else ""
        lines.append(str(node).removesuffix(f"  # {node.source}") + attributes)
    return [*lines, f"return {shown(graph.result)}"]


class _Frames:
    """Builds the frames of one file, each once.

    Attributes:
        calls: number of every call -> its graph; a frame that several calls share has that of the call it names.
        built: place of a frame in the file -> its `CellPlan`.
        indices: `UseIndex`es of what a graph takes from elsewhere, itself or further down.
    """

    def __init__(self, path, frames, graph, mesh):
        self.path = path
        self.frames = frames
        self.calls = {call.call: call for call in graph.calls()}
        self.mesh = mesh
        self.built = {}
        self.indices = {"parameters": parameter_index(), "outer": outer_index()}

    def frame(self, place, graph):
        """The `CellPlan` at this place in the file, for a call with this graph."""
        self._check_graph(place, graph)
        if place not in self.built:
            where = f"{self.path}, Cell '{graph.path}'"
            try:
                data = self.frames[place]
                named = self._with_taken(self.calls[data["call"]], data)
                self.built[place] = _Frame(self, named, where).build(data)
            except (KeyError, IndexError) as error:
                raise ValueError(f"{where}: an entry is missing or malformed: {error!r}") from error
        return self.built[place]

    def _with_taken(self, graph, data):
        """A graph with the parameters and outer values that it takes for Cells further down."""
        for part, entries in data["taken_for_others"].items():
            uses = self.indices[part].uses(graph)
            found = [(uses[name if part == "parameters" else tuple(name)], int(n)) for n, name in entries.items()]
            added = tuple(replace(use, value=replace(use.value, id=number)) for use, number in found)
            graph = replace(graph, **{part: (*getattr(graph, part), *added)}) if added else graph
        return graph

    def _check_graph(self, place, graph):
        """Raise `ValueError`, with what differs, where the saved frame was made for another graph than this one."""
        data = self.frames[place]
        if graph.key == data["structure"]:
            return
        head = f"{self.path} is the plan of another model, or for other inputs: Cell '{graph.path}'"
        old_lines, new_lines = data["graph"], graph_lines(graph)
        for old, new in zip(old_lines, new_lines):
            if old != new:
                raise ValueError(f"{head} has '{new}' where the plan has '{old}': plan anew")
        if len(old_lines) != len(new_lines):
            raise ValueError(
                f"{head} has {len(new_lines)} lines in its graph, the plan has {len(old_lines)}: plan anew"
            )
        for entry in data["instructions"]:
            if entry.get("frame") is not None:
                self._check_graph(entry["frame"], graph.nodes[entry["node"]].graph)
        raise ValueError(
            f"{head} differs from the plan's in contents of constants or of a Cell with a bprop: plan anew"
        )


class _Frame:
    """Builds one frame.

    Attributes:
        values: number -> Value of the graph.
    """

    def __init__(self, frames, graph, where):
        self.frames = frames
        self.graph = graph
        self.where = where
        self.values = _values_of(graph)

    def build(self, data):
        """The `CellPlan`."""
        layouts = {int(n): self._layout(self.values[int(n)], entry) for n, entry in data["layouts"].items()}
        return CellPlan(
            graph=self.graph,
            mesh=self.frames.mesh,
            layouts=layouts,
            instructions=tuple(map(self._instruction, data["instructions"])),
            results=self._layouts(tree_leaves(self.graph.result), data["results"], "the result"),
            lifted=self._lifted(data),
            gradients=frozenset(data["gradients"]),
        )

    def _instruction(self, data):
        if "move" in data:
            return self._move(data)
        node = self.graph.nodes[data["node"]]
        inputs = self._layouts(tree_leaves((node.args, node.kwargs)), data["inputs"], str(node))
        outputs = self._layouts(tree_leaves(node.outputs), data["outputs"], str(node))
        if isinstance(node, CallNode):
            lifted = self._lifted(data)
            frame = None if data["frame"] is None else self.frames.frame(data["frame"], node.graph)
            return CallPlan(node, inputs, outputs, frame, lifted)
        signature = operator_signature(node)
        cuts = {factor: tuple(axes) for factor, axes in data["axes_of"].items()}
        algorithm = data.get("algorithm"), tuple(data.get("cut_axes", ()))
        return OperatorPlan(node, signature, inputs, outputs, cuts, *algorithm)

    def _move(self, data):
        value = self.values[data["move"]]
        source, target = self._layout(value, data["from"]), self._layout(value, data["to"])
        itemsize = data.get("itemsize", ITEM_BYTES[value.dtype])
        steps = self._steps(value, source, target, itemsize, data["by"])
        return Move(value, source, target, steps, data["reason"], data["gradient"])

    def _steps(self, value, source, target, itemsize, saved):
        """The `Step`s of a move, each one that can be taken from the layout that it starts from."""
        if not saved and source == target:
            return ()
        space = SearchSpace(source, target, value.shape, itemsize)
        state, steps = space.state(source), []
        for data in saved:
            wanted = (data["step"], tuple(data["axes"]), data.get("dim"), data.get("to_dim"), data.get("op"))
            after = self._layout(value, data["to"]) if "to" in data else None
            reached = (
                s
                for *what, s in transitions(space, *state)
                if tuple(what) == wanted and after in (None, space.layout(*s))
            )
            before, state = space.layout(*state), next(reached, None)
            if state is None:
                raise ValueError(f"{self.where}: {value.described} in layout {before} can't take the step {data}")
            steps.append(Step(*wanted, before, space.layout(*state), before.local_shape(value.shape), itemsize))
        return tuple(steps)

    def _lifted(self, data):
        return tuple((self.values[n], self._layout(self.values[n], entry)) for n, entry in data["lifted"])

    def _layouts(self, values, entries, what):
        if len(values) != len(entries):
            raise ValueError(f"{self.where}: {what} has {len(values)} tensors, the plan {len(entries)} layouts")
        return tuple(map(self._layout, values, entries))

    def _layout(self, value, entry):
        """The `Layout` of a Value from its data; it must fit."""
        marks = entry if isinstance(entry, dict) else {"dims": entry}
        dims = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in marks["dims"]]
        try:
            layout = Layout.on(self.frames.mesh, dims, marks.get("partial", {}), marks.get("varying", ()))
            layout.local_shape(value.shape, value.described)
        except ValueError as error:
            raise ValueError(f"{self.where}: {value.described} in layout {entry}: {error}") from None
        return layout


def _values_of(graph):
    """Number -> Value of all that is in a graph."""
    used = [use.value for use in (*graph.parameters, *graph.constants, *graph.outer)]
    made = tree_leaves([node.outputs for node in graph.nodes])
    return {value.id: value for value in (*tree_leaves(graph.arguments), *used, *made)}
