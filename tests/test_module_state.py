"""No module keeps objects that change: what a process remembers is asked of `process_state()`."""

import ast

from test_layers_of_the_house import MODULES, ROOT, nodes_of, parse

CONTAINERS = {"dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
# Filled while modules are imported (decorators), and by users that register an operator of their own; never by a call.
REGISTRIES = {"mindformers_core.operators.registry"}
# Objects that live as long as the process, of classes of ours whose objects can change; each must say why it has to be.
PROCESS_WIDE = {
    ("mindformers_core.communication.world", "_PROCESS"),  # MindSpore's own communication is one for a process, too
    # operators without state, which compiled source has to find under a name
    ("mindformers_core.sharding.compiling", "choose_program"),
    ("mindformers_core.algorithms.compiled", "in_graph"),
    ("mindformers_core.sharding.whole_tensors", "check_whole"),
}


def is_empty_container(value):
    """Whether an expression makes a container that can only be meant to be filled later."""
    if isinstance(value, (ast.List, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    empty = not value.args or all(isinstance(argument, ast.Name) for argument in value.args)
    return name in CONTAINERS and empty and not value.keywords


def test_no_module_level_state():
    wrong = []
    for module, path in MODULES.items():
        tree = parse(path)
        for node in tree.body:
            container = isinstance(node, (ast.Assign, ast.AnnAssign)) and is_empty_container(node.value)
            exports = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
            if container and not exports and module not in REGISTRIES:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {module}: an empty container to be filled later")
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno} {module}: global {', '.join(node.names)}"
            for node in nodes_of(tree)
            if isinstance(node, ast.Global)
        ]
    assert not wrong, "\n".join(wrong)


def is_frozen(node):
    """Whether a class's objects can't change: a frozen dataclass, a named tuple, or an enumeration."""
    frozen = any(
        isinstance(decorator, ast.Call)
        and any(keyword.arg == "frozen" and getattr(keyword.value, "value", False) for keyword in decorator.keywords)
        for decorator in node.decorator_list
    )
    return frozen or any(ast.unparse(base).split(".")[-1] in ("NamedTuple", "Enum", "IntEnum") for base in node.bases)


def executed_calls(node):
    """Calls that run when the statement does: not those in the bodies of functions and lambdas."""
    if isinstance(node, ast.Call):
        yield node
    children = [] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) else [node]
    for child in children:
        for inner in ast.iter_child_nodes(child):
            yield from executed_calls(inner)


def mutable_objects(tree, mutable):
    """`(line, name, class)` of the objects of `mutable` classes that a module or a class body keeps when imported."""
    for node in nodes_of(tree):
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
        for statement in body:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
                continue
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            for call in executed_calls(statement.value):
                made = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                if made in mutable:
                    yield statement.lineno, ast.unparse(target), made


def mutable_classes(trees):
    """Names of the classes whose objects can change."""
    return {
        node.name for tree in trees for node in nodes_of(tree) if isinstance(node, ast.ClassDef) and not is_frozen(node)
    }


def test_no_module_level_objects_that_change():
    mutable = mutable_classes(parse(path) for path in MODULES.values())
    found = {
        (module, name): f"{path.relative_to(ROOT)}:{line} {module}: {name} is a {made}, whose objects can change"
        for module, path in MODULES.items()
        for line, name, made in mutable_objects(parse(path), mutable)
    }
    wrong = [text for place, text in found.items() if place not in PROCESS_WIDE]
    assert not wrong, "\n".join(wrong)
    assert set(found) >= PROCESS_WIDE, f"no longer there: {PROCESS_WIDE - set(found)}"


def test_objects_that_change_are_seen():
    tree = ast.parse(
        "@dataclass(frozen=True)\nclass Cost: pass\n"
        "class State:\n    count = 0\n    inner = Other()\n"
        "class Other: pass\n"
        "CPU = Cost()\nSTATE: State = State()\nTABLE = {'dropout': parts.State().draw, 'later': lambda: State()}\n"
        "def make():\n    state = State()\n    return state\n"
    )
    seen = sorted(name for _, name, _ in mutable_objects(tree, mutable_classes([tree])))
    assert seen == ["STATE", "TABLE", "inner"]
