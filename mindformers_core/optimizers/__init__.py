"""Optimizers: AdamW with compiled updates, and Lamb, whose norms are those of whole weights."""
