"""Writes the figures into the comments of the large recipes: what their dry runs say of memory.

python docs/make_configs.py
"""

import re
from pathlib import Path

from mindformers_core.commands.dry_run import dry_run
from mindformers_core.recipe.loader import load_recipe

__all__ = ["CONFIGS", "LARGE", "with_figures"]

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
LARGE = ("llama3_8b", "llama3_8b_128k", "llama3_70b", "qwen3_30b_a3b", "deepseek_v3")
FIGURES = re.compile(r"^bytes on each rank.*?^  together[^\n]*\n.*?^( +recompute: [^\n]*\n)", re.M | re.S)


def with_figures(recipe, text):
    """The text of a recipe, with those of its dry run's `text` in the place of the comment before the first section."""
    found, (ranks,) = FIGURES.search(text), re.findall(r"^mesh .*: (\d+) ranks$", text, re.M)
    bytes_on_a_rank = found[0].partition("activations of one")[0].splitlines()[1:]
    lines = [
        f"What it says of each of {ranks} ranks, bytes (made by docs/make_configs.py):",
        *bytes_on_a_rank,
        f"  {found[1].strip()}",
    ]
    comment = "".join(f"# {line.rstrip()}\n" for line in lines)
    head, blank, sections = recipe.partition("\n\n")
    return head.partition("\n# What it says of")[0] + "\n" + comment.rstrip() + blank + sections


if __name__ == "__main__":
    for name in LARGE:
        path = CONFIGS / f"{name}.yaml"
        figures = dry_run(load_recipe(str(path)))
        path.write_text(with_figures(path.read_text(encoding="utf-8"), figures), encoding="utf-8")
