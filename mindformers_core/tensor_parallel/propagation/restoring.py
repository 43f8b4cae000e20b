"""From the data of a plan's file to the plan: the other half of `saved.py`. Pure Python.

Little in a file is taken on trust: the graph must be the one that the plan was made for, every layout must fit its
tensor, what an instruction takes must be at hand, an operator's dims must be cut alike, calls must fit the Cells that
they call, and every move must lead where it says by steps that there are. What isn't checked is where an operator's
tensors are partial or varying.
"""

from dataclasses import replace

from mindformers_core.layout import Layout
from mindformers_core.redistribution.moves import moves
from mindformers_core.redistribution.planner import ITEM_SIZES
from mindformers_core.redistribution.space import SearchSpace
from mindformers_core.redistribution.steps import Step
from mindformers_core.tensor_parallel.capturing.graph import CallNode
from mindformers_core.tensor_parallel.capturing.structure import shown, values_in
from mindformers_core.tensor_parallel.propagation.aliases import match_arguments, outer_index, parameter_index
from mindformers_core.tensor_parallel.propagation.operators import operator_signature
from mindformers_core.tensor_parallel.propagation.plan import CallPlan, FramePlan, Move, OperatorPlan

__all__ = ["graph_lines", "restored"]


def restored(path, frames, graph, mesh):
    """The `FramePlan` of the root.

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
        values = ", ".join(value.described for value in values_in(structure))
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
        built: place of a frame in the file -> its `FramePlan`.
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
        """The `FramePlan` at this place in the file, for a call with this graph."""
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
        at_hand: `(number, layout)` of every tensor at hand so far.
    """

    def __init__(self, frames, graph, where):
        self.frames = frames
        self.graph = graph
        self.where = where
        self.values = _values_of(graph)
        self.at_hand = set()

    def build(self, data):
        """The `FramePlan`."""
        made = {value.id for node in self.graph.nodes for value in values_in(node.outputs)}
        layouts = {int(n): self._layout(self.values[int(n)], entry) for n, entry in data["layouts"].items()}
        lifted = tuple((self.values[n], self._layout(self.values[n], entry)) for n, entry in data["lifted"])
        self.at_hand |= {(number, layout) for number, layout in layouts.items() if number not in made}
        self.at_hand |= {(value.id, layout) for value, layout in lifted}
        return FramePlan(
            graph=self.graph,
            mesh=self.frames.mesh,
            layouts=layouts,
            instructions=tuple(map(self._instruction, data["instructions"])),
            results=self._taken(values_in(self.graph.result), data["results"], "the result"),
            lifted=lifted,
            gradients=frozenset(data["gradients"]),
        )

    def _instruction(self, data):
        if "move" in data:
            return self._move(data)
        node = self.graph.nodes[data["node"]]
        inputs = self._taken(values_in((node.args, node.kwargs)), data["inputs"], str(node))
        made = self._paired(values_in(node.outputs), data["outputs"], str(node))
        self.at_hand |= {(value.id, layout) for value, layout in made}
        outputs = tuple(layout for _, layout in made)
        if isinstance(node, CallNode):
            lifted = self._paired(
                [self.values[n] for n, _ in data["lifted"]], [e for _, e in data["lifted"]], str(node)
            )
            frame = None if data["frame"] is None else self.frames.frame(data["frame"], node.graph)
            call = CallPlan(node, inputs, outputs, frame, lifted)
            self._check_call(call)
            return call
        signature = operator_signature(node)
        cuts = {factor: tuple(axes) for factor, axes in data["axes_of"].items()}
        self._check_cuts(str(node), cuts, (*signature.inputs, *signature.outputs), (*inputs, *outputs))
        algorithm = data.get("algorithm"), tuple(data.get("cut_axes", ()))
        return OperatorPlan(node, signature, inputs, outputs, cuts, *algorithm)

    def _check_cuts(self, what, cuts, mappings, layouts):
        """Raise `ValueError` where a dim isn't cut as the operator's factors are."""
        for mapping, layout in zip(mappings, layouts, strict=True):
            dims = tuple(tuple(axis for factor in factors for axis in cuts.get(factor, ())) for factors in mapping)
            if dims != layout.dims:
                needed = layout.replace(dims=dims)
                raise ValueError(
                    f"{self.where}: {what} has a tensor in layout {layout}, but with {cuts} it is {needed}"
                )

    def _check_call(self, call):
        """Raise `ValueError` where a called Cell doesn't get what it is planned for, or gives something else."""
        if call.frame is None:
            return
        layouts = dict(zip(values_in((call.node.args, call.node.kwargs)), call.inputs))
        pairs = [(layouts[o], call.frame.layouts[i.id]) for i, o in match_arguments(call.node).items()]
        pairs += zip((layout for _, layout in call.lifted), (layout for _, layout in call.frame.lifted), strict=True)
        for given, planned in (*pairs, *zip(call.outputs, call.frame.results, strict=True)):
            if given != planned:
                raise ValueError(f"{self.where}: {call.node} has a tensor in layout {given}, the Cell in {planned}")

    def _move(self, data):
        value = self.values[data["move"]]
        (source,) = self._taken([value], [data["from"]], f"the move of {value.described}")
        target = self._layout(value, data["to"])
        itemsize = data.get("itemsize", ITEM_SIZES[value.dtype])
        steps = self._steps(value, source, target, itemsize, data["by"])
        self.at_hand.add((value.id, target))
        return Move(value, source, target, steps, data["reason"], data["gradient"])

    def _steps(self, value, source, target, itemsize, saved):
        """The `Step`s of a move, each one that can be taken from the layout that it starts from."""
        if not saved and source == target:
            return ()
        space = SearchSpace(source, target, value.shape, itemsize)
        state, steps = space.state(source), []
        for data in saved:
            told = (data["step"], tuple(data["axes"]), data.get("dim"), data.get("to_dim"), data.get("op"))
            after = self._layout(value, data["to"]) if "to" in data else None
            reached = (
                s for *what, s in moves(space, *state) if tuple(what) == told and after in (None, space.layout(*s))
            )
            before, state = space.layout(*state), next(reached, None)
            if state is None:
                raise ValueError(f"{self.where}: {value.described} in layout {before} can't take the step {data}")
            steps.append(Step(*told, before, space.layout(*state), before.local_shape(value.shape), itemsize))
        if space.layout(*state) != target:
            arrived = space.layout(*state)
            raise ValueError(
                f"{self.where}: the steps of {value.described} lead from {source} to {arrived}, not {target}"
            )
        return tuple(steps)

    def _taken(self, values, entries, what):
        """The layouts in which tensors are taken; each must be at hand."""
        pairs = self._paired(values, entries, what)
        for value, layout in pairs:
            if (value.id, layout) not in self.at_hand:
                known = ", ".join(str(other) for number, other in self.at_hand if number == value.id) or "none"
                raise ValueError(
                    f"{self.where}: {what} takes {value.described} in layout {layout}, which isn't at hand; it is in "
                    f"{known}"
                )
        return tuple(layout for _, layout in pairs)

    def _paired(self, values, entries, what):
        if len(values) != len(entries):
            raise ValueError(f"{self.where}: {what} has {len(values)} tensors, the plan {len(entries)} layouts")
        return tuple((value, self._layout(value, entry)) for value, entry in zip(values, entries))

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
    made = values_in([node.outputs for node in graph.nodes])
    return {value.id: value for value in (*values_in(graph.arguments), *used, *made)}
