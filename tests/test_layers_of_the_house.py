"""The floors of the design: what may import what, and how long a file and a function may be."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mindformers_core"
PURE_FLOORS = (  # each imports only from those before it, and never MindSpore
    "hints",
    "scopes",
    "grouping",
    "dtypes",
    "splitmix",
    "mesh",
    "lazy_exports",
    "files",
    "ranges",
    "placement",
    "layout",
    "redistribution",
    "operators",
    "program",
    "propagation",
    "analysis",
    "explaining",
    "hangs",
    "pipeline.tables",
    "pipeline.schedules",
)
SIBLINGS = ("recompute", "zero", "pipeline")  # none imports another
FLOORS = (
    *PURE_FLOORS,
    "communication",
    "dtensor",
    "capture",
    "generation",
    "sharding",
    "tensor_parallel",
    "models",
    "passes",
    "optimizers",
    *SIBLINGS,
    "verification",
    "diff",
    "checkpoint",
    "serving",
    "trainer",
)
# beyond the order of the floors: (who, what it never imports)
NEVER = {(one, other) for one in SIBLINGS for other in SIBLINGS if one != other} | {
    ("recompute", "generation"),
    ("models", "capture"),
    ("models", "generation"),
    ("models", "sharding"),
}
FRAMEWORKS = {"mindspore", "torch", "jax", "tensorflow"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60
MAX_FOLDER_FILES = 20
MAX_PUBLIC_METHODS = 15
MAX_MARKDOWN_COLUMNS = 120
CONTAINERS = {"dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
# Filled while modules are imported (decorators), and by users that register an operator of their own; never by a call.
REGISTRIES = {"mindformers_core.operators.registry"}
# Objects that live as long as the process, of classes of ours whose objects can change; each must say why it has to be.
PROCESS_WIDE = {
    ("mindformers_core.communication.world", "_PROCESS"),  # MindSpore's own communication is one for a process, too
    # operators without state, which compiled source has to find under a name
    ("mindformers_core.sharding.compiling", "choose_program"),
    ("mindformers_core.sharding.whole_tensors", "check_whole"),
}


def module_name(path):
    """Dotted name of a source file below the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


MODULES = {module_name(path): path for path in sources(PACKAGE)}
ALL_SOURCES = sources(PACKAGE, "tests", "scripts", "benchmarks", "examples")
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def floor(module):
    """The floor that `module` is on, the longest of FLOORS that its name begins with; `None` for the package's own."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOORS), None)


def is_pure(module):
    """Whether a module must do without MindSpore: one of a pure floor, or one that says so."""
    return floor(module) in PURE_FLOORS or (
        module in MODULES and "Pure Python" in (ast.get_docstring(parse(MODULES[module])) or "")
    )


def imports(path, module):
    """Pairs (imported module, line) of a file, wherever in it they stand; relative ones made absolute."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner if inner in MODULES else source), node.lineno


def imported_modules():
    """`{module: {(imported module of this package, line)}}`."""
    return {
        module: {(name, line) for name, line in imports(path, module) if name.split(".")[0] == PACKAGE}
        for module, path in MODULES.items()
    }


def test_every_folder_is_a_floor():
    names = {module.split(".")[1] for module in MODULES if "." in module} - {"__main__"}
    strangers = sorted(names - {name.split(".")[0] for name in FLOORS})
    assert not strangers, f"not on the list of floors: {strangers}; say where they stand in FLOORS and in the README"


def imports_between_floors():
    """`(module, line, imported module)` of imports that leave a floor."""
    for module, names in imported_modules().items():
        if floor(module) is not None:
            for name, line in names:
                if floor(name) != floor(module):
                    yield module, line, name


def test_imports_go_one_way():
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for module, line, name in imports_between_floors()
        if floor(name) is None
        or FLOORS.index(floor(name)) > FLOORS.index(floor(module))
        or (floor(module), floor(name)) in NEVER
    ]
    assert not wrong, "a module imports only from floors before its own:\n" + "\n".join(wrong)


def test_pure_modules_import_only_pure_modules():
    wrong = []
    for module, path in MODULES.items():
        if not is_pure(module):
            continue
        for name, line in imports(path, module):
            ours = name.split(".")[0] == PACKAGE
            if name.split(".")[0] in FRAMEWORKS or (ours and not is_pure(name)):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_circles():
    graph = {module: {name for name, _ in names if name in MODULES} for module, names in imported_modules().items()}
    # A package that imports its own parts, which import each other by name, is no circle through the package.
    finished = set()

    def visit(module, trail):
        if module in trail:
            pytest.fail("a circle of imports: " + " -> ".join([*trail[trail.index(module) :], module]))
        if module not in finished:
            for name in sorted(graph[module]):
                visit(name, [*trail, module])
            finished.add(module)

    for module in sorted(graph):
        visit(module, [])


def run_without_mindspore(code):
    """Run `code` in a process of its own where importing MindSpore fails."""
    blocked = f"import sys; sys.modules['mindspore'] = None\n{code}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def test_pure_modules_run_without_mindspore():
    modules = [module for module in MODULES if is_pure(module)]
    assert {"mindformers_core.mesh", "mindformers_core.pipeline.tables.step"} <= set(modules)
    done = run_without_mindspore("\n".join(f"import {module}" for module in modules))
    assert done.returncode == 0, done.stderr


def test_front_door_needs_no_mindspore():
    done = run_without_mindspore(
        "import mindformers_core as core\n"
        "assert core.init_device_mesh((2,), ('dp',)).size == 2\n"
        "assert core.Layout is core.layout.Layout and 'DTensor' in dir(core)\n"
        "try:\n    core.DTenser\n"
        "except AttributeError as error:\n    assert \"did you mean 'DTensor'\" in str(error), error\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists():
    code = "import mindformers_core as core\nfor name in core.__all__: getattr(core, name)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_folders_are_small():
    folders = Counter(path.parent.relative_to(ROOT) for path in MODULES.values())
    large = {str(folder): count for folder, count in folders.items() if count > MAX_FOLDER_FILES}
    assert not large, f"at most {MAX_FOLDER_FILES} files a folder"


@pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines; {MAX_FILE_LINES} at most: it has more than one reason to change"
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} (line {node.lineno}) has {length} lines"
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
            assert len(methods) <= MAX_PUBLIC_METHODS, f"{node.name} has {len(methods)} public methods"


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_markdown_are_short(path):
    """Code blocks and tables are exempt: neither can be wrapped."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if len(line) > MAX_MARKDOWN_COLUMNS and not line.startswith("|")]
    assert not lines, f"at most {MAX_MARKDOWN_COLUMNS} columns"


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
            for node in ast.walk(tree)
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
    for node in ast.walk(tree):
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
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not is_frozen(node)
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


def test_the_tree_of_a_cell_is_asked_for():
    """`tree_of(cell)`, not the attribute that it is kept in."""
    keepers = {"sharded_cells.py", "sharded_tree.py", "parameter_storage.py", "capture.py", Path(__file__).name}
    wrong = [path for path in ALL_SOURCES if path.name not in keepers and '"_sharding"' in path.read_text("utf-8")]
    assert not wrong
