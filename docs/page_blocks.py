"""Parts of a page that a script writes: what follows a line `<!-- name -->`, a fenced block or a table."""

import re

__all__ = ["fenced", "filled"]


def fenced(language, text):
    """A fenced block of Markdown."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def filled(page, blocks):
    """The page's text with every one of `blocks`, name -> Markdown, in the place of the one that has its name.

    Raises:
        ValueError: the page has no such block, or several.
    """
    for name, contents in blocks.items():
        pattern = rf"^<!-- {re.escape(name)} -->\n(?:```.*?^```\n|(?:\|[^\n]*\n)+)"
        whole = f"<!-- {name} -->\n{contents}"
        page, count = re.subn(pattern, lambda _, whole=whole: whole, page, flags=re.DOTALL | re.MULTILINE)
        if count != 1:
            raise ValueError(f"the page has {count} blocks '{name}'")
    return page
