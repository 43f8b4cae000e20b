"""Documents name what is there: paths, links, and commands whose recipes fit the ranks that they start."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from support.documents import code_blocks
from support.launch import ROOT

from mindformers_core import explain
from mindformers_core.communication import shutdown
from mindformers_core.data.datasets import dataset_of
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import batch_plan, mesh_shape
from mindformers_core.sharding.plan_passes import PASSES

# docs/errors.md is left out: it names wrong paths on purpose, and has a test of its own
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
DOCUMENTS += [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "errors.md"]
WITH_COMMANDS = [*DOCUMENTS, *sorted((ROOT / "scripts").glob("*.sh")), *sorted((ROOT / "configs").glob("*.yaml"))]

PATH = re.compile(r"(?<![\w./-])(?:scripts|configs|tests|docs|benchmarks|examples|mindformers_core)/[\w./*-]*[\w/*]")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
LAUNCH = re.compile(r'_launch\.sh (?:\\\n\s*)?"-m mindformers_core train (--config [^"]+)"(?: \\?\s*(\d+))?')
TRAIN = re.compile(r"python -m mindformers_core train (--config [^\n]+)")


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_and_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    missing = [path for path in PATH.findall(text) if not list(ROOT.glob(path.rstrip("/")))]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    assert not missing


def test_the_house_in_the_readme_is_the_house():
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    there = {path.name for path in (ROOT / "mindformers_core").iterdir() if not path.name.startswith("_")}
    assert named == there


def test_stations_and_passes_of_contributing_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    read = {file: (ROOT / "mindformers_core" / file).read_text(encoding="utf-8") for file, _ in named}
    missing = [each for each in named if not re.search(rf"^(def|class) {each[1]}\b", read[each[0]], re.MULTILINE)]
    assert len(named) > 20 and not missing
    places = [text.find(f"{number}. {each.__doc__.rstrip('.')} (") for number, each in enumerate(PASSES, 1)]
    assert -1 not in places and places == sorted(places)


def commands():
    """All training commands: `(file, arguments of train, number of ranks or None for a dry run)`."""
    for path in WITH_COMMANDS:
        text = path.read_text(encoding="utf-8")
        yield from ((name_of(path), words, int(ranks or 8)) for words, ranks in LAUNCH.findall(text))
        for words in TRAIN.findall(text):
            yield name_of(path), words, None if "--dry-run" in words else 1


COMMANDS = sorted(set(commands()), key=str)


def test_all_kinds_of_commands_are_found():
    assert {ranks for _, _, ranks in COMMANDS} == {None, 1, 4, 8, 16}


@pytest.mark.parametrize(("where", "words", "ranks"), COMMANDS)
def test_a_command_names_a_recipe_that_fits_its_ranks(where, words, ranks, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    _, recipe, *overrides = shlex.split(words.replace("--dry-run", ""), comments=True)
    recipe = load_recipe(str(ROOT / recipe), overrides)
    _, dp, _, _ = mesh_shape(recipe, ranks)
    batch_plan(recipe, dp)


def test_the_readme_shows_what_explain_says(tmp_path):
    """Of its example, as one of its four ranks; the first lines are left out."""
    example, *_ = code_blocks(ROOT / "README.md", "python")
    declared = example[: example.index("step = ")].replace("distributed()", 'distributed("fake", world_size=4)')
    file = tmp_path / "mlp.py"
    file.write_text(declared)
    names = {"__name__": "mlp"}
    shutdown()
    try:
        exec(compile(declared, file, "exec"), names)
        said = explain(names["net"], names["x"])
    finally:
        shutdown()
    (shown,) = [block for block in code_blocks(ROOT / "README.md", "text") if "all_reduce" in block]
    assert said.endswith(shown.rstrip())


def test_the_readmes_tokens_are_what_the_large_recipes_read(tmp_path, monkeypatch):
    """With a tokenizer of our own: a token is a character."""
    tokenizer = SimpleNamespace(from_pretrained=lambda name: lambda text: {"input_ids": [ord(one) for one in text]})
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizer))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "text.txt").write_text("parallel " * 1000)
    (snippet,) = [block for block in code_blocks(ROOT / "README.md", "python") if "llama3_tokens" in block]
    exec(snippet, {})
    for name in ("llama3_8b", "llama3_8b_128k", "llama3_70b"):
        recipe = load_recipe(str(ROOT / "configs" / f"{name}.yaml"))
        tokens = dataset_of(recipe).sources[0].source.ids
        assert bytes(tokens[:9].astype("uint8")) == b"parallel "
