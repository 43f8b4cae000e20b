"""Verification of plans: the programs of all ranks in one process, compared with one card, tensor by tensor."""
