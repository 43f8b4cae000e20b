"""Values by their keys. Pure Python."""


def grouped(pairs):
    """A dict, key -> list of its values, of pairs (key, value): in the order of first appearance."""
    found = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
