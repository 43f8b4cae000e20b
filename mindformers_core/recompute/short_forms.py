"""What a section of a recipe would be in place of a bare value that is none of its forms. Pure Python."""

from mindformers_core.recompute.layers import are_layers

__all__ = ["written_recompute", "written_swap"]

_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), "true, without quotes"),
    **dict.fromkeys(("false", "no", "off", "none"), "false, without quotes"),
}


def written_recompute(given):
    """What to write for section `recompute`; nothing where that can't be told."""
    word = given.strip().lower() if isinstance(given, str) else None
    if word in _WORDS:
        return _WORDS[word]
    if word in ("full", "all", "*"):
        return "{full: true}"
    if isinstance(given, float) and 0 < given <= 1:
        return f"{{budget: {given:g}}}"
    layers = _layers(given)
    return f"{{full: {layers}}}" if layers else ""


def written_swap(given):
    """What to write for section `swap`; nothing where that can't be told."""
    word = given.strip().lower() if isinstance(given, str) else None
    if word in _WORDS:
        return _WORDS[word]
    layers = "true" if word in ("all", "*") else _layers(given)
    return f"{{layer_swap: [{{layers: {layers}}}]}}" if layers else ""


def _layers(given):
    """Numbers of layers in any form, or one alone, as they are written in YAML; nothing for anything else."""
    given = [given] if type(given) is int else given
    if not are_layers(given):
        return ""
    quoted = isinstance(given, str) and ("," in given or given.strip().isdigit())  # else YAML reads something else
    return repr(given) if quoted or not isinstance(given, str) else given
