"""Copies of plans in which calls that shared a `CellPlan` differ. Pure Python.

`annotate` gives chosen instructions a policy for their saved tensors. `partition` splits a program into functions that
are compiled one by one, where one compiled function can't do it: where Cells run again in the backward pass, or weights
are gathered and freed call by call. Such calls become functions of their own. The instructions between two of them
become one more, a *part* of the Cell that contains them; so there are as few compiled functions as possible. They take
their weights as arguments, so that equal Cells share a function.
"""

from dataclasses import replace
from functools import cache

from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, CellPlan, Redistribution, by_call, called_cells, joined_path


def annotate(plan, choice):
    """A copy of a plan in which chosen instructions have a `Keeper`; calls with equal choices still share a plan.

    Args:
        plan: the `CellPlan` of a whole program.
        choice: key of an instruction (see `Instruction`) -> its `Keeper`.

    Returns:
        A `CellPlan`; `plan` itself where nothing is chosen.
    """

    @cache
    def visit(plan, choice):
        entries, keepers = list(plan.instructions), {}
        for index, below in by_call(choice).items():
            if () in below:
                keepers[entries[index]] = below[()]
            else:
                entries[index] = replace(entries[index], plan=visit(entries[index].plan, frozenset(below.items())))
        return replace(plan, instructions=tuple(entries), keepers=keepers)

    return visit(plan, frozenset(choice.items())) if choice else plan


def calls_of(plan, path, cells):
    """Keys of the calls of some Cells in the program of the Cell at `path`; all paths are from the root of the tree."""
    return [key for key, inner in called_cells(plan) if joined_path(path, inner) in cells]


def calls_alone(plan, again, units):
    """Key of a call -> `"again"`, `"once"`, or `"in place"`: which calls of a partitioned program are functions.

    Args:
        plan: the `CellPlan` of a whole program.
        again: keys of calls (see `called_cells`) that run again in the backward pass; `()` is the root's. A call that
            contains units is replaced by these, whose weights can't be in memory together.
        units: keys of calls whose weights are gathered before the call and freed after it. The weights of one that
            contains calls which run again stay in place there.
    """
    found = {}
    for index, call in enumerate(plan.instructions):
        # MindSpore can't differentiate a compiled function without results
        if call.plan is None or not call.produced:
            continue
        inner_again, inner_units = _below(again, index), _below(units, index)
        held = inner_units - {()}
        if () in inner_again and not held:
            found[index,] = "again"
        elif inner_again or held:
            found |= {(index, *key): how for key, how in calls_alone(call.plan, inner_again, held).items()}
            found |= {(index,): "in place"} if () in inner_units else {}
        elif () in inner_units:
            found[index,] = "once"
    return found


def _below(keys, index):
    """The keys below the call at an index; the key of the whole program stands for all calls in it."""
    return {key[1:] for key in keys if key and key[0] == index} | ({()} & set(keys))


def partition(plan, again, units):
    """A copy of a plan whose functions run in PyNative, around calls of functions that are compiled one by one.

    Args:
        plan, again, units: as of `calls_alone`. If there are units, nothing else is compiled.
    """

    @cache
    def compiled(plan, how):
        return replace(unshared(plan, takes_weights=True), compiled=how)

    @cache
    def visit(plan, alone, in_place):
        entries = list(plan.instructions)
        for index, below in by_call(alone).items():
            how = below.pop((), None)
            if how in ("again", "once"):
                inner = compiled(entries[index].plan, how)
            else:
                inner = visit(entries[index].plan, frozenset(below.items()), in_place or how == "in place")
            entries[index] = replace(entries[index], plan=inner)
        return replace(plan, instructions=tuple(_Parts(plan, entries).entries if in_place else entries))

    return visit(plan, frozenset(calls_alone(plan, again, units).items()), not units)


def unshared(plan, **changes):
    """A copy of a plan in which every call has a `CellPlan` of its own, and so every Cell a function.

    Args:
        changes: fields to replace in each of these `CellPlan`s.
    """
    instructions = [
        entry if entry.plan is None else replace(entry, plan=unshared(entry.plan, **changes))
        for entry in plan.instructions
    ]
    return replace(plan, instructions=tuple(instructions), **changes)


class _Parts:
    """Groups the instructions of one plan into parts.

    Attributes:
        entries: the instructions of the partitioned plan.
    """

    def __init__(self, plan, entries):
        self.plan, self.entries, self._run, self._count = plan, [], [], 0
        self.held = {use.value.id for use in (*plan.graph.parameters, *plan.graph.constants)}
        for place, (mine, entry) in enumerate(zip(plan.instructions, entries, strict=True)):
            if mine is not entry:
                self._end_run(entries[place:])
                self.entries.append(entry)
            elif self._comes_before(entry):
                self.entries.append(entry)
            else:
                self._run.append(entry)
        self._end_run([])

    def _comes_before(self, entry):
        """Whether an instruction stays outside parts, and before them: redistributions of weights, through which
        deferred gradients flow back, those without code, and constants, since every result of a compiled function
        requires a gradient."""
        if entry.produced and all(value.constant for value, _ in entry.produced):
            return True
        if not isinstance(entry, Redistribution):
            return False
        made = _tensors(pair for each in self._run for pair in each.produced)
        return entry.value.id in self.held or not entry.steps and (entry.value.id, entry.source) not in made

    def _end_run(self, later):
        """Make one call of the collected instructions, except a single operator, which is as fast in PyNative."""
        run, self._run = self._run, []
        if sum(not isinstance(entry, Redistribution) for entry in run) > 1 or any(
            isinstance(entry, CallPlan) for entry in run
        ):
            self._count += 1
            self.entries.append(self._part(run, later))
        else:
            self.entries += run

    def _part(self, run, later):
        """The call of a function that carries out a run of instructions; `later`: the instructions after them."""
        plan, graph = self.plan, self.plan.graph
        made, taken = _tensors(pair for entry in run for pair in entry.produced), _consumed(run)
        # in the order of consumption: MindSpore adds the gradients of several consumers in this order
        outputs = [tensor for tensor in _consumed(later) | _tensors(plan.returned) if tensor in made]
        values = tuple(made[tensor] for tensor in outputs)
        lifted = tuple(
            (value, tensor[1])
            for tensor, value in taken.items()
            if tensor not in made and not (value.id in self.held and tensor[1] == plan.layouts[value.id])
        )
        used = {number for number, layout in taken}
        part = replace(
            graph, class_name=f"{graph.class_name}Part{self._count}", arguments={}, free_variables=(), result=values,
            nodes=tuple(entry.node for entry in run if not isinstance(entry, Redistribution)),
            parameters=tuple(use for use in graph.parameters if use.value.id in used),
            constants=tuple(use for use in graph.constants if use.value.id in used),
        )  # fmt: skip
        layouts = tuple(layout for _, layout in outputs)
        inner = CellPlan(part, plan.mesh, plan.layouts, tuple(run), layouts, lifted, plan.gradients)
        inner = replace(unshared(inner, takes_weights=True), compiled="once")
        return CallPlan(CallNode("", (), {}, values, part, ""), (), layouts, inner, lifted)


def _tensors(pairs):
    """Pairs (Value, Layout) -> (number of the Value, Layout) -> the Value."""
    return {(value.id, layout): value for value, layout in pairs}


def _consumed(entries):
    """The tensors that instructions take, also those that calls lift."""
    pairs = ([*entry.consumed, *getattr(entry, "lifted", ())] for entry in entries)
    return _tensors(pair for found in pairs for pair in found)
