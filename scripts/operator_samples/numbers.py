"""Numbers and gradients of a sample on simulated ranks, against one card."""

__all__ = ["compare"]


def compare(sample):
    """Not yet."""
    return ""
