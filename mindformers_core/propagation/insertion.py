"""The places of redistributions: from the `Decision` for a call to its `CellPlan`. Pure Python.

A tensor is redistributed in the call that produces it, right before the first consumer. A tensor from outside is
redistributed by the caller if the callee and those below require no layout but targets of redistributions, all on a
path through one of them, which is then passed; so the projections of one input share its redistribution. Further
layouts, and those of parameters, are made in the closest common caller of all consumers, and passed as `lifted`.
"""

from dataclasses import replace

from mindformers_core.program.plan import CallPlan, CellPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.decide import TRAINED, CallDecision
from mindformers_core.redistribution import plan_redistribution


def insert_redistributions(run, decision, passed, lifted=()):
    """The `CellPlan` of a call.

    Args:
        run: the `Propagation`, which makes the plans of child calls.
        decision: the `Decision` for this call.
        passed: number of every argument's Value -> layout in which the caller passes the tensor.
        lifted: pairs (key, layout) of the tensors that the caller passes additionally.
    """
    return _Insertion(run, decision, passed, lifted).plan()


class _Insertion:
    """One call during the insertion of redistributions."""

    def __init__(self, run, decision, passed, lifted):
        self.run = run
        self.decision = decision
        self.first = {key: passed.get(key, required.first) for key, required in decision.required.items()}
        uses, constants = decision.graph.uses, [use.value.id for use in decision.graph.constants]
        # key -> layouts; empty for a tensor without any so far
        self.available = {key: {self.first[key]} for key in (*passed, *uses.parameters, *constants)}
        self.available |= {key: set() for key in uses.free_variables}
        for key, layout in lifted:
            self.first[key] = self.first[key] if self.available[key] else layout
            self.available[key].add(layout)
        self.lifted = lifted
        self.values, self.added = self._values(), {"parameters": [], "free_variables": []}
        self.instructions = []
        self.made_here = self._made_here()

    def plan(self):
        graph = self.decision.graph
        lifted = tuple((self._value(key), layout) for key, layout in self.lifted)
        *steps, results = self.decision.used
        for entry, used in zip(self.decision.entries, steps, strict=True):
            for key, layout in used:
                self._ensure(key, layout)
            self.instructions.append(self._call(entry) if isinstance(entry, CallDecision) else entry)
            for value in entry.node.made:
                self.available[value.id] = {self.first[value.id]}
        for key, layout in results:
            self._ensure(key, layout)
        added = {part: (*getattr(graph, part), *uses) for part, uses in self.added.items() if uses}
        graph = replace(graph, **added) if added else graph
        known = {value.id: key for key, value in self.values.items()}
        return CellPlan(
            graph,
            self.run.mesh,
            {number: self.first[key] for number, key in known.items()},
            tuple(self.instructions),
            tuple(layout for _, layout in results),
            lifted,
            frozenset(number for number, key in known.items() if self.decision.flows[key] == TRAINED),
            device_model=self.run.device_model,
            price=self.decision.price,
            kept=tuple(tuple(sorted(axes)) for axes in (self.run.batch_axes, self.run.weight_axes)),
        )

    def _values(self):
        """Key -> Value of this graph."""
        graph = self.decision.graph
        found = [use.value for use in (*graph.constants, *graph.parameters, *graph.free_variables)]
        found += tree_leaves(graph.arguments) + tree_leaves([node.outputs for node in graph.nodes])
        return {graph.names.get(value.id, value.id): value for value in found}

    def _value(self, key):
        """The Value of a tensor; a parameter or free variable that only callees use becomes one of this graph."""
        value = self.values.get(key)
        if value is None:
            part = "free_variables" if isinstance(key, tuple) else "parameters"
            use = getattr(self.decision.graph.uses, part)[key]
            number = 1 + max((known.id for known in self.values.values()), default=-1)
            value = self.values[key] = replace(use.value, id=number)
            self.added[part].append(replace(use, value=value))
        return value

    def _ensure(self, key, layout):
        """Redistribute a tensor to this layout, unless it is available."""
        if layout in self.available[key]:
            return
        source, reason = self.decision.required[key].moves[layout]
        self._ensure(key, source)
        value = self._value(key)
        steps = plan_redistribution(source, layout, value.shape, value.dtype, self.run.device_model).steps
        gradient = self.decision.flows[key] == TRAINED
        self.instructions.append(Redistribution(value, source, layout, steps, reason, gradient))
        self.available[key].add(layout)

    def _made_here(self):
        """Key -> the layouts that this call makes unless they are available: for itself, or for several callees."""
        certain, counts = {}, {}
        for key, layout in (pair for used in self.decision.used for pair in used):
            certain.setdefault(key, set()).add(layout)
        for call in self.decision.entries:
            if not isinstance(call, CallDecision) or call.decision is None:
                continue
            for inner, outer in call.keys.items():
                needs = call.decision.required[inner]
                entry = needs.first if isinstance(inner, str) else needs.entry()
                certain.setdefault(outer, set()).add(entry)
                for layout in needs.needed():
                    here = self.decision.required[outer].moves.get(layout)
                    same_way = here is not None and here[0] == needs.moves[layout][0]
                    counts[outer, layout] = counts.get((outer, layout), 0) + (1 if same_way else 2)
        for (key, layout), count in counts.items():
            if count > 1:
                certain[key].add(layout)
        ways = {key: [self.decision.required[key].way(layout) for layout in found] for key, found in certain.items()}
        return {key: {layout for way in found for layout in way} for key, found in ways.items()}

    def _call(self, entry):
        """The `CallPlan` of a call, after redistribution of its inputs."""
        node = entry.node
        if entry.decision is None:
            inputs = tuple(self.run.replicated(value) for value in node.taken)
            return CallPlan(node, inputs, entry.outputs, None)
        passed, lifted = {}, []
        for inner, outer in entry.keys.items():
            needs = entry.decision.required[inner]
            wanted = needs.entries({needs.first, *self.made_here.get(outer, ()), *self.available[outer]})
            if isinstance(inner, int):
                # an argument that the callee doesn't use in an available layout
                passed[inner] = next((at for at in (needs.entry(), *wanted) if at in wanted), self.first[outer])
                lifted += [(inner, layout) for layout in wanted if layout != passed[inner]]
            else:
                stored = needs.first if isinstance(inner, str) else None
                lifted += [(inner, layout) for layout in wanted if layout != stored]
            for layout in wanted:
                self._ensure(outer, layout)
        plan = self.run.place(entry.decision, passed, tuple(lifted))
        layouts = {entry.keys[inner]: layout for inner, layout in passed.items()}
        keys = {value.id: key for key, value in self.values.items()}
        inputs = tuple(layouts[keys.get(value.id, value.id)] for value in node.taken)
        pairs = tuple((self._value(entry.keys[inner]), layout) for inner, layout in lifted)
        return CallPlan(node, inputs, entry.outputs, plan, pairs)
