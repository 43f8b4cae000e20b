"""Point-to-point messages of a dry run: nothing is sent, so nothing can be received."""

__all__ = ["make_carrier"]


def make_carrier(limit):
    """The carrier of a dry run."""
    return Carrier()


class Carrier:
    """Takes every message; has none to give, since no other rank is there to say of what shape it would be."""

    buffered = True

    def send(self, rank, head, tensors):
        """Done: there is nobody to send to."""

    def receive(self, rank):
        """Always an error."""
        raise ConnectionError("this is a dry run (backend 'fake'), in which no other rank sends anything")

    def close(self):
        """There is nothing to close."""
