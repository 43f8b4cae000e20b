"""Texts and conversations as token ids, by a Hugging Face tokenizer."""

import hashlib
import json
import os
from functools import lru_cache

import numpy as np

from mindformers_core.hints import install_hint
from mindformers_core.serving.prompts import TOKENIZER, load_tokenizer

_FILES = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja")


class Tokenizer:
    """A folder's `tokenizer.json`, and for conversations its chat template.

    Args:
        folder: with Hugging Face's files.

    Attributes:
        key: a text that differs for other contents of the files.

    Raises:
        FileNotFoundError: no `tokenizer.json`. ValueError: it isn't one. ModuleNotFoundError: the extra `tokenizer`.
    """

    def __init__(self, folder):
        self._folder, path = folder, os.path.join(folder, _FILES[0])
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no file '{path}'")
        self._library = load_tokenizer(path)
        contents = {}
        for name in filter(lambda name: os.path.isfile(os.path.join(folder, name)), _FILES):
            with open(os.path.join(folder, name), "rb") as file:
                contents[name] = file.read()
        self.key = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:16]
        self._settings = json.loads(contents.get(_FILES[1], b"{}"))
        self._template = contents[_FILES[2]].decode() if _FILES[2] in contents else self._settings.get("chat_template")

    def text(self, text):
        """The ids of a document, with the tokenizer's own special tokens, and its end of text, if it has one."""
        ids, end = self._library.encode(text).ids, self._special("eos_token")
        end = None if end is None else self._library.token_to_id(end)
        return np.array(ids if end is None or ids[-1:] == [end] else [*ids, end], np.int32)

    def conversation(self, messages):
        """The ids of a conversation by the chat template, and of each whether an assistant's turn has it.

        Args:
            messages: a list of dicts with `role` and `content`.

        Raises:
            ValueError: no template; one that doesn't put turns after each other.
        """
        text, said = "", []
        for number, message in enumerate(messages):
            is_own = message["role"] == "assistant"
            whole = self._render(messages[: number + 1], False)
            # a prompt may go on in another way than the turn that it asks for, as with an empty block of thoughts
            prompt = self._render(messages[:number], True) if is_own and number else text
            begin = len(os.path.commonprefix([prompt, whole]))
            if not whole.startswith(text) or begin < len(text):
                raise ValueError(f"the chat template of {self._folder} changes earlier turns at message {number}")
            said += [(begin, len(whole))] * is_own
            text = whole
        encoded = self._library.encode(text, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoded.offsets])
        labels = np.zeros(len(begins), bool)
        for begin, end in said:
            labels |= (begins >= begin) & (begins < end)
        return np.array(encoded.ids, np.int32), labels

    def _render(self, messages, prompts):
        """The text of messages, with the beginning of an assistant's turn where it `prompts`."""
        if not self._template:
            raise ValueError(f"{self._folder} has no chat template, which conversations need")
        special = {name: self._special(name) or "" for name in ("bos_token", "eos_token")}
        return _compiled(self._template).render(messages=messages, add_generation_prompt=prompts, **special)

    def _special(self, name):
        """The text of a special token, which files have alone or as an entry `content`."""
        token = self._settings.get(name)
        return token.get("content") if isinstance(token, dict) else token


@lru_cache(maxsize=8)
def _compiled(template):
    """A chat template that many conversations are rendered by."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        text = f"conversations need jinja2: {install_hint('tokenizer')}"
        raise ModuleNotFoundError(text, name="jinja2") from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(text):
    raise ValueError(text)
