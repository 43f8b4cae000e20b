"""What the documents show, for tests: fenced code blocks, rows of tables."""

import re

__all__ = ["code_blocks", "table_rows"]


def code_blocks(path, language):
    """The fenced blocks of a Markdown file in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def table_rows(path):
    """`(heading above, cells)` for every row of the tables of a Markdown file; tables' own heads are among them."""
    heading, rows = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = line.lstrip("# ") if re.match("#+ ", line) else heading
        if re.match(r"\| (?!-)", line):
            rows.append((heading, tuple(cell.strip() for cell in re.split(r" \|(?= |$)", line[1:])[:-1])))
    return rows
