"""Data of a fine-tuning: prompts with answers, of which only the answers are learned. See docs/fine_tuning.md."""

import json

import numpy as np

IGNORED, END, PADDING = -100, 2, 0  # a label that doesn't count; ids of Llama's end, and of what nobody attends to


class Answers:
    """Samples of `{"prompt": …, "answer": …}` lines, whose tokens here are bytes.

    Args:
        path: of the file of lines.
        length: tokens of a sample; longer ones are cut.
        seed: of the order, which is another one in each epoch.
    """

    def __init__(self, path, length, seed):
        with open(path, encoding="utf-8") as file:
            self.pairs = [(each["prompt"].encode(), each["answer"].encode()) for each in map(json.loads, file)]
        self.length, self.seed = length, seed

    def batch(self, first, count):
        """Ids and labels, both (count, length), of samples `first` to `first + count - 1` of an endless stream."""
        rows = [self.sample(number) for number in range(first, first + count)]
        return tuple(np.array(column, np.int32) for column in zip(*rows))

    def sample(self, number):
        """Ids, and labels: of each position the next token if it is of the answer."""
        epoch, place = divmod(number, len(self.pairs))
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.pairs))
        prompt, answer = self.pairs[order[place]]
        tokens = [*prompt, *answer, END][: self.length + 1]
        labels = [IGNORED] * (len(prompt) - 1) + tokens[len(prompt) :]
        rest = self.length - len(labels)
        return tokens[:-1] + [PADDING] * rest, labels + [IGNORED] * rest


def open_answers(section, config, seed):
    """The dataset of a recipe: `train_dataset.factory` names this function."""
    return Answers(section.options["path"], section.seq_length, seed)
