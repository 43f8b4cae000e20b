"""The collectives of a generated program by their lines: Cell, line of the user's code, number in the plan.

The report of a hang needs them, see `hangs`.
"""

from itertools import chain, count

from mindformers_core.grouping import grouped
from mindformers_core.program.plan import Redistribution, called_graphs, joined_path


def collective_places(program, paths):
    """How a `Recorder` names the lines of a program, see `Recorder.sources`.

    Args:
        paths: id of a Cell of its tree -> path.

    Returns:
        A function of a line and the variables of its frame. The number of a redistribution is its place among all of
        the program, in the order in which they run, from 1; of a Cell that is called several times with the same
        function it is a list.
    """
    sites = _numbered(program)
    sites = {site: (place, "/".join(f"#{number}" for number in found[:3])) for site, (place, found) in sites.items()}

    def describe(line, variables):
        path = paths.get(id(variables.get("self")))
        return sites.get((path, line)) or (f"{path or 'the root Cell'}, {program.file}:{line}", "")

    return describe


def _numbered(program):
    """(Cell path, line of the module) -> (its description, the numbers of the line)."""
    sites, numbers = {}, count(1)

    def visit(path, plan, graph):
        graphs, written = dict(called_graphs(plan, graph)), program.source.sites[program.source.functions[plan]]
        lines = grouped((place, line) for line, place in written)
        for place, entry in enumerate(plan.instructions):
            for line in lines.get(place, ()):
                described = f"{path or 'the root Cell'}{_consumer(plan, place, entry)}"
                sites.setdefault((path, line), (described, []))[1].append(next(numbers))
            if entry.plan is not None:
                visit(joined_path(program.path, graphs[entry].path), entry.plan, graphs[entry])

    visit(program.path, program.generated, program.graph)
    return sites


def _consumer(plan, place, entry):
    """What a collective is for, and the line of the user's code."""
    if not isinstance(entry, Redistribution):
        reason, node = entry.node.operator, entry.node
    else:
        reason = "output" if entry.reason.kind == "output" else entry.reason
        later, moved = plan.instructions[place + 1 :], (entry.value, entry.target)
        later = [other for other in later if not isinstance(other, Redistribution)]
        consumers = (other.node for other in later if moved in (*other.consumed, *getattr(other, "lifted", ())))
        producers = (node for node in plan.graph.nodes if entry.value in node.made)
        node = next(chain(consumers, producers), None)
    source = f", {(node.source or 'unknown line').rpartition('/')[2]}" if node else ""
    return f" ({reason}){source}"
