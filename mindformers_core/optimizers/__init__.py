"""Optimizers of a recipe by name: AdamW, SGD, Lamb, LARS, Muon; groups of parameters with rates of their own."""
