"""The training job of a recipe: its Cells, one step, the loop, records and checkpoints."""
