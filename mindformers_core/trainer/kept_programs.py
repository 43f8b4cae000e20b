"""The programs of a job in its run folder, from which the same job, started again, takes them."""

import hashlib
import os
from functools import cache, partial
from pathlib import Path

import mindspore as ms

from mindformers_core.generation.saved import load_source, save_source
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.graph import OperatorNode
from mindformers_core.propagation.saved import save_plan

PROGRAMS = "programs"  # in the run folder
_PACKAGE = Path(__file__).parents[1]


class KeptPrograms:
    """The plans and generated modules of a rank: what is in its folder isn't made again.

    A file's name is a hash of all that its contents follow from: the captured graph, with global shapes and source
    lines, mesh, layouts, declarations, device model, activations; MindSpore's version, the code of this package and of
    operators' rules. So what a rank reads is what it would make, whatever other ranks do, and nothing is out of date.
    Captures are made at each start: they tell which program it is. Rank 0 tells what was taken.
    """

    def __init__(self, folder, rank):
        self._folder = os.path.join(folder, PROGRAMS, f"rank_{rank}")
        self._tells = rank == 0 and os.path.isdir(self._folder)
        self._keys, self._new, self._taken = {}, {}, []
        self._hash_of = cache(lambda file: hashlib.sha256(Path(file).read_bytes()).hexdigest())

    def plan(self, facts, given, device_model, load, make):
        """The `CellPlan` of a captured call: that of a file, or `make()`.

        `facts`: all that it follows from but code, the same text in every process. `given`: the first arguments of
        `propagate`, as of `load`, which is `load_plan` with the others.
        """
        graph, *_ = given
        self._keys[graph] = key = _hash((facts, ms.__version__, self._code(graph)))

        def loaded(file):
            if (plan := load(file, *given)).device_model != device_model:
                raise ValueError(f"{file} is damaged: it has another device model")
            return plan

        return self._of_file(f"plan_{key}.json", loaded, make, save_plan)

    def source(self, graph, plan, facts, make):
        """The `ModuleSource` of a plan, that of the captured `graph` after passes: that of a file, or `make()`.

        `facts`: all that it depends on besides, the same text in every process.
        """
        if graph not in self._keys:  # the plan is a caller's
            return make()
        places, passed = {}, []
        for path, each in plan.walk():
            keepers = [(index, each.keepers.get(entry)) for index, entry in enumerate(each.instructions)]
            passed.append((path, places.setdefault(each, len(places)), keepers))
        key = _hash((self._keys[graph], facts, passed))
        return self._of_file(f"source_{key}.pickle", partial(load_source, plan=plan), make, save_source)

    def write(self):
        """Write what is new, once the run folder is there; tell what was taken, once."""
        if self._tells and self._taken:
            anew = f", {self._taken.count(False)} made anew: none fits" if False in self._taken else ""
            print(f"plans and generated modules: {sum(self._taken)} taken from {self._folder}{anew}", flush=True)
            self._tells = False
        try:
            for path, write in self._new.items():
                os.makedirs(self._folder, exist_ok=True)
                write(path)
        except OSError as error:
            print(f"warning: {error}: programs aren't kept, and a restart makes them anew", flush=True)
        self._new.clear()

    def _of_file(self, name, load, make, save):
        path, found = os.path.join(self._folder, name), None
        try:
            found = load(path) if os.path.exists(path) else None
        except (OSError, ValueError) as error:
            print(f"warning: {error}: it is made anew", flush=True)
        self._taken.append(found is not None)
        if found is None:
            found = make()
            self._new[path] = partial(save, found)
        return found

    def _code(self, graph):
        """Hashes of the files of this package, and of the rules of a graph's operators."""
        names = {node.operator for call in graph.calls() for node in call.nodes if isinstance(node, OperatorNode)}
        codes = [getattr(fact, "__code__", None) for name in names for fact in vars(facts_of(name)).values()]
        files = {*(code.co_filename for code in codes if code), *map(str, _PACKAGE.rglob("*.py"))}
        return [self._hash_of(file) for file in sorted(files)]


def _hash(facts):
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
