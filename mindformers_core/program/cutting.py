"""A plan cut into functions that are compiled each by itself, where a pass can't be one compiled function. Pure Python.

So it is where Cells run again in the backward pass, and where weights come and go with calls. These calls are functions
of their own, and what is between two of them is one more, a *part* of the Cell that it stands in: as few compiled
functions as can be. They take their weights as arguments, so that Cells that are alike share them.
"""

from dataclasses import replace

from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, CellPlan, Move, called_cells, joined_path
from mindformers_core.program.structure import tree_leaves

__all__ = ["calls_alone", "calls_of", "cut", "unshared"]


def calls_of(frame, path, cells):
    """Keys of the calls of some Cells in the program of the Cell at `path`; all paths are from the root of the tree."""
    found = called_cells(frame)
    return [key for key, inner in found if joined_path(path, inner) in cells]


def calls_alone(frame, again, units):
    """Key of a call -> `"again"`, `"once"`, or `"in place"`: how calls stand alone in a program that is cut.

    Args:
        frame: the `CellPlan` of a whole program.
        again: keys of calls (see `called_cells`) that run again in the backward pass; `()` is the root's. One that
            holds units stands for these, which can't be in place together.
        units: keys of calls whose weights come and go with them. Those that hold calls which run again are gone into:
            their weights are in place there.
    """
    found = {}
    for index, call in enumerate(frame.instructions):
        # MindSpore can't differentiate a compiled function without results
        if not _is_call(call) or call.frame is None or not tree_leaves(call.node.outputs):
            continue
        inner_again, inner_units = _below(again, index), _below(units, index)
        held = inner_units - {()}
        if () in inner_again and not held:
            found[index,] = "again"
        elif inner_again or held:
            found |= {(index, *key): how for key, how in calls_alone(call.frame, inner_again, held).items()}
            found |= {(index,): "in place"} if () in inner_units else {}
        elif () in inner_units:
            found[index,] = "once"
    return found


def _below(keys, index):
    """What keys say of the call at an index; the key of the whole says the same of all its calls."""
    return {key[1:] for key in keys if key and key[0] == index} | ({()} & set(keys))


def cut(frame, again, units):
    """A copy of a plan whose functions run in PyNative, around calls of those that are compiled by themselves.

    Args:
        frame, again, units: as of `calls_alone`. If there are units, nothing beside them is compiled.
    """
    return _Cutting().cut(frame, frozenset(calls_alone(frame, again, units).items()), not units)


def unshared(frame, **changes):
    """A copy of a plan in which every call has a `CellPlan` of its own, and so every Cell a function.

    Args:
        frame: the plan.
        changes: fields of all of these `CellPlan`s that are to be others.
    """
    instructions = [
        replace(entry, frame=unshared(entry.frame, **changes)) if isinstance(entry, CallPlan) and entry.frame else entry
        for entry in frame.instructions
    ]
    return replace(frame, instructions=tuple(instructions), **changes)


class _Cutting:
    """Cuts plans; calls that are alike share one still."""

    def __init__(self):
        self.known, self.alone = {}, {}

    def cut(self, frame, alone, in_place):
        """The copy of one `CellPlan`; keys begin with its calls. `in_place`: whether its weights are."""
        key = id(frame), alone, in_place
        if key not in self.known:
            below = {}
            for (index, *inner), how in alone:
                below.setdefault(index, {})[tuple(inner)] = how
            entries = list(frame.instructions)
            for index, inner in below.items():
                entries[index] = self._called(entries[index], inner, in_place)
            if in_place:
                entries = _Parts(frame, entries).entries
            self.known[key] = replace(frame, instructions=tuple(entries))
        return self.known[key]

    def _called(self, call, alone, in_place):
        how = alone.pop((), None)
        if how in ("again", "once"):
            return replace(call, frame=self._compiled(call.frame, how))
        return replace(call, frame=self.cut(call.frame, frozenset(alone.items()), in_place or how == "in place"))

    def _compiled(self, frame, how):
        key = id(frame), how
        if key not in self.alone:
            self.alone[key] = replace(unshared(frame, takes_weights=True), compiled=how)
        return self.alone[key]


class _Parts:
    """Makes parts of one plan's instructions.

    Attributes:
        entries: the instructions of the cut plan.
    """

    def __init__(self, frame, entries):
        self.frame, self.entries, self._run, self._count = frame, [], [], 0
        self.held = {use.value.id for use in (*frame.graph.parameters, *frame.graph.constants)}
        last = _forms(tree_leaves(frame.graph.result), frame.results)
        taken = [_taken(entry) for entry in entries] + [last]
        for place, (mine, entry) in enumerate(zip(frame.instructions, entries, strict=True)):
            if mine is not entry:
                self._end_run(taken[place:])
                self.entries.append(entry)
            elif self._comes_before(entry):
                self.entries.append(entry)
            else:
                self._run.append(entry)
        self._end_run(taken[-1:])

    def _comes_before(self, entry):
        """Whether it stays out of parts, and before them: moves of weights, which deferred gradients go back through,
        what is no code, and what only constants are behind, since all that a compiled function gives asks for
        gradients."""
        values = _made(entry).values()
        if values and all(value.constant for value in values):
            return True
        if not isinstance(entry, Move):
            return False
        made = _union(map(_made, self._run))
        return entry.value.id in self.held or not entry.steps and (entry.value.id, entry.source) not in made

    def _end_run(self, later):
        """What has gathered becomes one call, but for a single operator, which is as quick in PyNative."""
        run, self._run = self._run, []
        if sum(not isinstance(entry, Move) for entry in run) > 1 or any(_is_call(entry) for entry in run):
            self._count += 1
            self.entries.append(self._part(run, _union(later)))
        else:
            self.entries += run

    def _part(self, run, later):
        """The call of a function that carries out some instructions; `later`: the forms that are taken afterwards."""
        frame, graph = self.frame, self.frame.graph
        made, taken = _union(map(_made, run)), _union(map(_taken, run))
        # in the order in which they are taken: in it MindSpore adds gradients of what is behind them in the whole, too
        outputs = [form for form in later if form in made]
        values = tuple(made[form] for form in outputs)
        lifted = [
            (value, form[1])
            for form, value in taken.items()
            if form not in made and not (value.id in self.held and form[1] == frame.layouts[value.id])
        ]
        used = {number for number, layout in taken}
        part = replace(
            graph, class_name=f"{graph.class_name}Part{self._count}", arguments={}, outer=(), result=values,
            nodes=tuple(entry.node for entry in run if not isinstance(entry, Move)),
            parameters=tuple(use for use in graph.parameters if use.value.id in used),
            constants=tuple(use for use in graph.constants if use.value.id in used),
        )  # fmt: skip
        layouts = tuple(layout for _, layout in outputs)
        inner = CellPlan(part, frame.mesh, frame.layouts, tuple(run), layouts, tuple(lifted), frame.gradients)
        inner = replace(unshared(inner, takes_weights=True), compiled="once")
        return CallPlan(CallNode("", (), {}, values, part, ""), (), layouts, inner, tuple(lifted))


def _is_call(entry):
    return isinstance(entry, CallPlan)


def _taken(entry):
    """The forms of tensors that an instruction takes: (number of the Value, Layout) -> the Value."""
    if isinstance(entry, Move):
        return _forms([entry.value], [entry.source])
    found = _forms(tree_leaves((entry.node.args, entry.node.kwargs)), entry.inputs)
    return found | _forms(*zip(*entry.lifted)) if _is_call(entry) and entry.lifted else found


def _made(entry):
    """The forms that an instruction makes."""
    if isinstance(entry, Move):
        return _forms([entry.value], [entry.target])
    return _forms(tree_leaves(entry.node.outputs), entry.outputs)


def _forms(values, layouts):
    return {(value.id, layout): value for value, layout in zip(values, layouts, strict=True)}


def _union(dicts):
    found = {}
    for entry in dicts:
        found |= entry
    return found
