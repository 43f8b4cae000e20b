"""Texts as tokens, and prompts of different lengths as one batch. Pure Python."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindformers_core.hints import install_hint

TOKENIZER, BYTES = "tokenizer.json", "bytes"


@dataclass(frozen=True)
class Tokens:
    """Texts as token ids, and back.

    Attributes:
        encode: function of a text that returns a list of ids.
        decode: function of a list of ids that returns a text.
        stops: ids after which a text ends.
    """

    encode: Callable
    decode: Callable
    stops: tuple = ()


def tokens_of(given, folder, takes_bytes, vocab_size=None, stops=()):
    """The `Tokens` of a model.

    Args:
        given: path of a Hugging Face `tokenizer.json`, or "bytes"; empty: the file in `folder`, else bytes.
        folder: of the checkpoint.
        takes_bytes: whether the model was trained with bytes of text.
        vocab_size: number of ids of the model; None: no limit.
        stops: ids after which a text ends; of a tokenizer only.

    Raises:
        FileNotFoundError: there is no such file. ModuleNotFoundError: the package `tokenizers` isn't installed.
        ValueError: the model has no tokenizer, or too few ids for bytes; a file that is no tokenizer.
    """
    path = given or os.path.join(folder, TOKENIZER)
    if given and given != BYTES and not os.path.isfile(path):
        raise FileNotFoundError(f"--tokenizer: there is no file '{path}'")
    if given != BYTES and os.path.isfile(path):
        tokenizer = load_tokenizer(path, f", or give --tokenizer {BYTES} for a model of bytes")
        return Tokens(lambda text: tokenizer.encode(text).ids, tokenizer.decode, tuple(stops))
    if not given and not takes_bytes:
        raise ValueError(
            f"no tokenizer: {folder} has no {TOKENIZER}, and the model wasn't trained with bytes of text: give "
            f"--tokenizer FILE, or --tokenizer {BYTES}"
        )
    if vocab_size is not None and vocab_size < 256:
        raise ValueError(f"--tokenizer {BYTES}: model.vocab_size {vocab_size} is too small for bytes: at least 256")
    return Tokens(lambda text: list(text.encode()), _text_of_bytes)


def load_tokenizer(path, otherwise=""):
    """The object of the package `tokenizers` of a Hugging Face `tokenizer.json`.

    Raises:
        ModuleNotFoundError: the package isn't installed; `otherwise` says what else would work.
        ValueError: a file that is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        hint = f"{install_hint('tokenizer')}{otherwise}"
        raise ModuleNotFoundError(f"{path} needs the package tokenizers: {hint}", name="tokenizers") from error
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # what the package raises
        raise ValueError(f"{path} isn't a Hugging Face tokenizer: {error}") from error


def _text_of_bytes(ids):
    """Ids beyond a byte are shown as what isn't UTF-8 is."""
    return bytes(number if number < 256 else 0xFF for number in ids).decode(errors="replace")


def encode_prompts(texts, tokens, count, vocab_size, longest):
    """The ids of every text, a list of lists.

    Args:
        texts: the prompts.
        count: number of tokens that will be generated for each.
        vocab_size, longest: number of ids and of positions of the model; None: no limit.

    Raises:
        ValueError: no prompt, an empty or too long one, one that isn't UTF-8, or an id outside of the model's
            vocabulary.
    """
    if not texts:
        raise ValueError("no prompt: give --prompt TEXT, or --prompts FILE with one on every line")
    for number, text in enumerate(texts):
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # as Python reads bytes that aren't UTF-8
            raise ValueError(f"prompt {number} isn't UTF-8: {text!r}")
    prompts = [tokens.encode(text) for text in texts]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if vocab_size is not None and max(prompt) >= vocab_size:
            raise ValueError(f"prompt {number} has token {max(prompt)}, not below model.vocab_size {vocab_size}")
        if longest is not None and len(prompt) + count > longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, and {count} more are {len(prompt) + count}, but "
                f"model.max_position_embeddings is {longest}: give a shorter prompt, or fewer --tokens"
            )
    return prompts


def padded(prompts, length):
    """Prompts as rows that end in the same slot: ids (batch, length), and the first slot of each (batch,), int32."""
    ids, starts = np.zeros((len(prompts), length), np.int32), []
    for row, prompt in zip(ids, prompts, strict=True):
        starts.append(length - len(prompt))
        row[starts[-1] :] = prompt
    return ids, np.array(starts, np.int32)
