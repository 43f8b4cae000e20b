"""The floors of the design: what may import what, and how long a file and a function may be."""

import ast
import gc
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
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
    "supervised",
    "ranges",
    "components",
    "placement",
    "layout",
    "padding",
    "batches",
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
    "mindspore_private",
    "communication",
    "algorithms",
    "lowering",
    "dtensor",
    "capture",
    "generation",
    "sharding",
    "tensor_parallel",
    "ops",
    "models",
    "passes",
    "optimizers",
    *SIBLINGS,
    "verification",
    "diff",
    "checkpoint",
    "serving",
    "recipe",
    "data",
    "trainer",
    "commands",
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
# public names that errors of `sharding` tell users to call
ADVICE = {("sharding", "zero"), ("sharding", "tensor_parallel")}


def module_name(path):
    """Dotted name of a source file below the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def parse(path):
    gc.disable()  # it would look through all trees again and again
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.enable()


@cache
def nodes_of(tree):
    """All nodes of a module, which several questions are asked of."""
    return [*ast.walk(tree)]


def statements(node):
    """All statements below a node; in expressions there are none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from statements(child)


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
    for node in statements(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner if inner in MODULES else source), node.lineno


@cache
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


def test_plans_are_made_and_changed_in_one_file():
    """What passes call is called by nobody else, but by a pass itself and where a plan of other sizes is asked for."""
    changing = r"program\.partition|propagation\.(?:propagate|saved|resized)"
    lines = rf"from {PACKAGE}\.(?:{changing}) import ([^(\n]+|\([^)]+)"
    names = r"\b(annotate|partition|unshared|propagate|load_plan|resized)\b"
    users = {
        (module.removeprefix(f"{PACKAGE}."), name)
        for module, path in MODULES.items()
        for imported in re.findall(lines, path.read_text(encoding="utf-8"))
        for name in re.findall(names, imported)
    }
    assert {module for module, _ in users} == {"sharding.plan_passes", "recompute.policy", "commands.shrinking"}, users


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


def upward_strings(module, tree, names):
    """`(line, name)` of the modules of higher floors that strings name; `names`: text -> module."""
    own = FLOORS.index(floor(module))
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in re.findall(r"\w+(?:[./]\w+)+", node.value):
                ends = [found.end() for found in re.finditer(r"\w+", word)]
                other = next((names[word[:end]] for end in reversed(ends) if word[:end] in names), None)
                advised = (floor(module), other and floor(other)) in ADVICE
                if other and not advised and FLOORS.index(floor(other)) > own:
                    yield node.lineno, other


def test_no_string_names_a_higher_floor():
    dotted = {module: module for module in MODULES if floor(module)}
    short = {module.partition(".")[2]: module for module in dotted if module.count(".") > 1}
    names = dotted | short | {f"{name.replace('.', '/')}.py": module for name, module in short.items()}
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} names {other}"
        for module in dotted
        for line, other in upward_strings(module, parse(MODULES[module]), names)
    ]
    assert not wrong, "what a lower floor needs of a higher one is registered there by name:\n" + "\n".join(wrong)
    for text in ("mindformers_core.lowering.corrected.mish", "see `lowering.corrected`", "lowering/corrected.py"):
        tree = ast.parse(f"def rule():\n    return {text!r}")
        assert list(upward_strings("mindformers_core.operators.rules.fused", tree, names)) == [
            (2, "mindformers_core.lowering.corrected")
        ]
        assert not list(upward_strings("mindformers_core.capture.capture", tree, names))


def test_folders_are_small():
    folders = Counter(path.parent.relative_to(ROOT) for path in MODULES.values())
    large = {str(folder): count for folder, count in folders.items() if count > MAX_FOLDER_FILES}
    assert not large, f"at most {MAX_FOLDER_FILES} files a folder"


def too_long(path):
    """What of a file is longer than it may be, a line for each."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines; {MAX_FILE_LINES} at most: it has more than one reason to change"
    for node in statements(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; {MAX_FUNCTION_LINES} at most"
        elif isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
            if len(methods) > MAX_PUBLIC_METHODS:
                yield f"{path}:{node.lineno}: {node.name} has {len(methods)} public methods"


def test_files_and_functions_are_short():
    """One test: 800 of them would take as long as they run."""
    wrong = [line for path in ALL_SOURCES for line in too_long(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_markdown_are_short(path):
    """Code blocks and tables are exempt: neither can be wrapped."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if len(line) > MAX_MARKDOWN_COLUMNS and not line.startswith("|")]
    assert not lines, f"at most {MAX_MARKDOWN_COLUMNS} columns"


def test_the_tree_of_a_cell_is_asked_for():
    """`tree_of(cell)`, not the attribute that it is kept in."""
    keepers = {"sharded_cells.py", "sharded_tree.py", "parameter_storage.py", "capture.py", Path(__file__).name}
    wrong = [path for path in ALL_SOURCES if path.name not in keepers and '"_sharding"' in path.read_text("utf-8")]
    assert not wrong
