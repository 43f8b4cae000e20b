"""How errors call the parts of a model. Pure Python."""

__all__ = ["cell_label", "class_label"]


def cell_label(path, cell):
    """How errors call a Cell."""
    return class_label(path, type(cell).__name__)


def class_label(path, class_name):
    """How errors call a Cell of this class."""
    return f"Cell '{path}' ({class_name})" if path else f"the root Cell ({class_name})"
