"""Checkpoints that belong to no mesh: global tensors in safetensors files, written and read by boxes."""
