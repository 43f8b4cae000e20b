"""Trains on token ids of which one, in the third step, is none of the model's: only rank 1 reads it, in its thread."""

import os
import sys

import numpy as np

from mindformers_core.commands.command_line import main
from mindformers_core.data.order import shuffled

LENGTH, ROWS, SEED, SAMPLE = 16, 40, 42, 5  # the second sample of step 3
RECIPE = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "llama_tiny_cpu.yaml")
OPTIONS = (
    "parallelism.tensor_parallel=1", "training.local_batch_size=1", "training.global_batch_size=2",
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.intermediate_size=64",
    f"train_dataset.seq_length={LENGTH}", f"training.seed={SEED}", "training.output_dir=run",
    "train_dataset.data_path=[tokens.npy]", "monitor.plot=false",
)  # fmt: skip

ids = np.zeros(ROWS * LENGTH + 1, np.uint16)
ids[int(shuffled(SAMPLE, ROWS, SEED, 0)) * LENGTH + 3] = 999
own = f"tokens_{os.getpid()}.npy"
np.save(own, ids)
os.replace(own, "tokens.npy")  # of all processes the same
sys.exit(main(["train", "--config", RECIPE, *OPTIONS]))
