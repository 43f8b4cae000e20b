"""Sample calls of MindSpore's public functions, and the measurement of what becomes of them on a mesh."""
