"""Distributed algorithms: operators, draws and redistributions on the parts of tensors, differentiable."""
