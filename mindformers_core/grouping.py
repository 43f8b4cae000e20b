"""Things by their keys. Pure Python."""


def grouped(pairs):
    """Key -> list of all that is paired with it, of `(key, anything)`: keys and entries in the order of the pairs."""
    found = {}
    for key, entry in pairs:
        found.setdefault(key, []).append(entry)
    return found
