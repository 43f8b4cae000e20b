"""In the place of MindSpore, for launches of ranks without it: its launcher only."""
