"""What the documents show, for tests: fenced code blocks."""

import re

__all__ = ["code_blocks"]


def code_blocks(path, language):
    """The fenced blocks of a Markdown file in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
