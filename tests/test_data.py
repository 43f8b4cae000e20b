"""Data: the same sequences whatever the topology, shuffled by seed, resumable; text files, folders, errors."""

import os
from unittest.mock import patch

import numpy as np
import pytest
from support.streams import token_stream

from mindformers_core.data.datasets import open_dataset
from mindformers_core.data.sources import text_files
from mindformers_core.models import LlamaConfig
from mindformers_core.recipe.sections import TrainDataset


def stream(section, vocab_size=256):
    return open_dataset(section, LlamaConfig(vocab_size=vocab_size), 0, {})


def opened(section, vocab_size=256):
    """The `Tokens` of a section with one source."""
    return stream(section, vocab_size).sources[0].source


def make_dataset(count=101, seq_length=4, seed=1):
    return token_stream(np.arange(count) % 250, seq_length, seed)


def section(tmp_path, *paths, **others):
    return TrainDataset(data_path=tuple(map(str, paths)), cache_dir=str(tmp_path / "cache"), **others)


def test_every_epoch_has_all_sequences_in_another_order():
    dataset = make_dataset()
    assert len(dataset.sources[0]) == 25
    first, second = dataset.batch(0, 25)[0], dataset.batch(25, 25)[0]
    whole = {tuple(range(start, start + 4)) for start in range(0, 100, 4)}
    assert {tuple(row) for row in first} == {tuple(row) for row in second} == whole
    assert (first != second).any()
    assert (first != make_dataset(seed=2).batch(0, 25)[0]).any()
    np.testing.assert_array_equal(first, make_dataset().batch(0, 25)[0])


def test_batch_over_the_end_of_an_epoch_is_the_stream():
    dataset = make_dataset()
    np.testing.assert_array_equal(dataset.batch(20, 10)[0][5:], dataset.batch(25, 5)[0])


def test_labels_are_the_next_tokens():
    inputs, labels = make_dataset().batch(3, 5)
    assert inputs.dtype == labels.dtype == np.int32
    np.testing.assert_array_equal(labels, (inputs + 1) % 250)


def test_too_few_tokens_are_an_error():
    with pytest.raises(ValueError, match="5 tokens are too few .* train_dataset.seq_length=4"):
        make_dataset(count=5, seq_length=5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(-3, "token -3 at place 41 is negative"), (100, "token 100 at place 41 is not below model.vocab_size 100")],
)
def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(tmp_path, wrong, message):
    tokens = np.arange(60, dtype=np.int32) % 100
    tokens[41] = wrong
    np.save(tmp_path / "tokens.npy", tokens)
    dataset = stream(section(tmp_path, tmp_path / "tokens.npy", seq_length=4), 100)
    for row in range(10):
        dataset.sources[0][row]
    with pytest.raises(ValueError, match=".*tokens.npy: " + message):
        dataset.sources[0][10]


def test_text_becomes_bytes_in_one_mapped_file(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_bytes(b"world")
    (tmp_path / "text" / "a.txt").write_bytes(b"hello")
    chosen = section(tmp_path, tmp_path / "text", seq_length=3)
    tokens = opened(chosen).ids
    assert isinstance(tokens, np.memmap)
    assert bytes(tokens) == b"hello\0world\0"
    short = section(tmp_path, tmp_path / "text", seq_length=3, max_bytes=8)
    assert bytes(opened(short).ids) == b"hello\0wo"
    (tmp_path / "text" / "c.txt").symlink_to(tmp_path / "text" / "a.txt")
    full = section(tmp_path, tmp_path / "text", seq_length=3, max_bytes=12)
    with patch("builtins.open", wraps=open) as calls:
        assert bytes(opened(full).ids) == b"hello\0world\0"
    assert not [call for call in calls.call_args_list if str(call.args[0]).endswith("c.txt")], "beyond the limit"
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".unfinished")]


def test_changed_text_is_read_anew(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"first text")
    assert bytes(opened(section(tmp_path, path, seq_length=3)).ids) == b"first text\0"
    path.write_bytes(b"other text")  # of the same size
    os.utime(path, ns=(0, 0))
    assert bytes(opened(section(tmp_path, path, seq_length=3)).ids) == b"other text\0"


def test_broken_off_cache_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            opened(section(tmp_path, path, seq_length=3))
    assert bytes(opened(section(tmp_path, path, seq_length=3)).ids) == b"some text\0"


def test_standard_library_is_the_default_in_a_fixed_order():
    files = text_files(())
    assert len(files) > 100 and files == text_files(())
    assert all(name.endswith(".py") and "site-packages" not in name for name in files)


def test_token_file_is_mapped(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    dataset = stream(section(tmp_path, tmp_path / "tokens.npy", seq_length=10), 1000)
    assert isinstance(dataset.sources[0].source.ids, np.memmap) and len(dataset.sources[0]) == 99
