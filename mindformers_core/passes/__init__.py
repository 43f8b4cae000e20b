"""Forward and backward of a Cell: gradients, compiled Cells, flat calls, weight gradients apart."""
