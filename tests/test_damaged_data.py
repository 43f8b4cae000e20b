"""What is wrong with data is one line that names file and place: files, what users' objects give, and a dead reader."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.launch import ROOT
from test_data import opened, section, stream

from mindformers_core.data import sources
from mindformers_core.data.datasets import given_dataset
from mindformers_core.data.streams import Ahead
from mindformers_core.recipe.sections import Source
from mindformers_core.scopes import origin_of

GOLDEN = ROOT / "tests" / "golden"  # of megatron_tiny: documents of 3, 3 and 2 tokens, in sequences of 3, 1, 2 and 2


def npy(array, edit=bytes):
    """A function that leaves an array in a folder, an `.npy` file of edited bytes: returns `(path, file to blame)`."""

    def make(folder):
        np.save(folder / "a.npy", array)
        (folder / "a.npy").write_bytes(edit((folder / "a.npy").read_bytes()))
        return folder / "a.npy", "a.npy"

    return make


def plain(name, data):
    def make(folder):
        (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        return folder / name, name

    return make


def row(given):
    return plain("a.jsonl", b'{"input_ids": [1]}\n' + json.dumps(given).encode())


def unreadable(name):
    """A file whose first byte can't be read."""

    def make(folder):
        (folder / name).symlink_to("/proc/self/mem")
        return folder / name, name

    return make


def megatron(changed, edit, blamed=None):
    """Megatron's files, one of which, `bin` or `idx`, is edited."""

    def make(folder):
        for kind in ("bin", "idx"):
            shutil.copy(GOLDEN / f"megatron_tiny.{kind}", folder / f"a.{kind}")
        data = edit((folder / f"a.{changed}").read_bytes())
        (folder / f"a.{changed}").write_bytes(data) if data is not None else (folder / f"a.{changed}").unlink()
        return folder / "a.bin", f"a.{blamed or changed}"

    return make


def at(place, number):
    """Bytes with another whole number of 8 bytes at a place."""
    return lambda data: data[:place] + int(number).to_bytes(8, "little", signed=True) + data[place + 8 :]


def parquet(edit):
    def make(folder):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.table({"input_ids": [[*range(50)]] * 200}), folder / "a.parquet"
        )
        (folder / "a.parquet").write_bytes(edit((folder / "a.parquet").read_bytes()))
        return folder / "a.parquet", "a.parquet"

    return make


IDS = np.arange(40, dtype=np.uint16)
FILES = {  # name -> (a function that makes the data in a folder, what is said behind the file's path)
    "missing": (lambda folder: (folder / "a.txt", "a.txt"), "there is no file or folder 'FILE'"),
    "missing ids": (lambda folder: (folder / "a.npy", "a.npy"), "there is no file or folder 'FILE'"),
    "no files of a pattern": (lambda folder: (folder / "*.npy", "[*].npy"), "there is no file or folder 'FILE'"),
    "an empty folder": (lambda folder: ((folder / "a").mkdir() or folder / "a", "a"), "holds no text files: give"),
    "empty text": (plain("a.txt", b""), "1 tokens are too few for one sequence of train_dataset.seq_length 4"),
    "no text": (plain("a.gz", b"\x1f\x8b\x08\0\0"), "is no text, it has zero bytes: docs/data.md says what can be"),
    "unreadable text": (unreadable("a.txt"), r"can't be read: .*Input/output error"),
    "empty ids": (npy(IDS, lambda _: b""), "can't be read as .npy: No data left in file"),
    "no ids": (npy(IDS, lambda _: b"tokens" * 99), "can't be read as .npy: "),
    "cut ids": (npy(IDS, lambda data: data[:150]), "can't be read as .npy: mmap length is greater"),
    "cut header of ids": (npy(IDS, lambda data: data[:50]), "can't be read as .npy: EOF: reading array header"),
    "grown ids": (npy(IDS, lambda data: data + b"\0\0"), "has 210 bytes, not 208 of 40 ids"),
    "objects": (npy(np.array([{}], object)), "can't be read as .npy: .*Python objects"),
    "numbers of two dims": (npy(np.zeros((3, 4))), r"holds float64 of shape \(3, 4\), not one row of token ids"),
    "unreadable ids": (unreadable("a.npy"), "can't be read as .npy: .*Input/output error"),
    "no token": (npy(IDS[:0]), "0 tokens are too few .*: give more text$"),
    "fewer tokens than a sequence": (npy(IDS[:4]), "4 tokens are too few .*: give more text, or .*seq_length=3"),
    "an id beyond the vocabulary": (npy(np.append(IDS, 256)), "token 256 at place 40 is not below .*vocab_size 256"),
    "a negative id": (npy(np.append(IDS.astype(np.int32), -3)), "token -3 at place 40 is negative: token ids start"),
    "empty rows": (plain("a.jsonl", b""), "all documents are empty"),
    "rows without tokens": (plain("a.jsonl", {"input_ids": []}), "all documents are empty"),
    "rows of one token": (plain("a.jsonl", {"input_ids": [1]}), "1 tokens are too few .*: give more text$"),
    "a row that breaks off": (plain("a.jsonl", b'{"input_ids": [1]}\n{"in'), "line 2 isn't JSON: Untermin"),
    "rows of another encoding": (plain("a.jsonl", b'{"text": "\xff"}'), "can't be read as JSON lines: 'utf-8' codec"),
    "unreadable rows": (unreadable("a.jsonl"), "can't be read as JSON lines: .*Input/output error"),
    "unknown fields": (row({"ids": [1]}), "row 1 has ids, but none of input_ids, messages, text"),
    "a list": (row([1]), "row 1 has list, but none of"),
    "fractions": (row({"input_ids": [1.5]}), r"row 1: input_ids of float64 \[1\] should be whole numbers in a row"),
    "lists in a list": (row({"input_ids": [[1], [2, 3]]}), "row 1: setting an array element with a sequence"),
    "nothing": (row({"input_ids": None}), r"row 1: input_ids of object \[\] should be whole numbers in a row"),
    "other labels": (row({"input_ids": [1, 2], "labels": [2, 1]}), "row 1: labels should be those of input_ids, or"),
    "a large id": (row({"input_ids": [1, 2**32 + 5]}), r"row 1: input_ids from 1 to 4294967301: .* 0 to 2\*\*31 - 1"),
    "text without a tokenizer": (row({"text": "a"}), "row 1 has text, which needs a tokenizer: .*tokenizer=FOLDER"),
    "no index": (megatron("idx", lambda _: None, "bin"), "there is no .*/a.idx beside it"),
    "an index of others": (megatron("idx", lambda _: b"MMIDIDX"), "is no index of Megatron's: it doesn't begin"),
    "a cut index": (megatron("idx", lambda data: data[:-1]), "has 113 bytes, not the 114 of 4 sequences"),
    "an index of nothing": (megatron("idx", at(18, 0)), "has 114 bytes, not the 66 of 0 sequences"),
    "an unknown dtype": (megatron("idx", lambda data: data.replace(b"\x08", b"\x06", 1)), "has .* dtype code 6"),
    "a cut bin": (megatron("bin", lambda data: data[:-2]), "has 14 bytes, not the 16 that .*a.idx speaks of"),
    "a grown bin": (megatron("bin", lambda data: data + b"\0\0"), "has 18 bytes, not the 16 that .*a.idx speaks"),
    "a mark beyond the end": (megatron("idx", at(90, 99)), "is damaged: document 1 begins at sequence 99 of 4"),
    "a negative mark": (megatron("idx", at(90, -1)), "is damaged: document 1 begins at sequence -1 of 4"),
    "a first mark": (megatron("idx", at(82, 1)), "is damaged: document 0 begins at sequence 1 of 4"),
    "another place": (megatron("idx", at(58, 10**9)), "is damaged: document 1 begins at sequence 1 of 4"),
    "another length": (megatron("idx", at(34, 2**32 + 2)), "is damaged: document 1 begins at sequence 1 of 4"),
    "no Parquet": (parquet(lambda data: b"PAR1"), "can't be read as Parquet: "),
    "cut Parquet": (parquet(lambda data: data[:300]), "can't be read as Parquet: "),
    "damaged Parquet": (parquet(lambda data: data[:20] + bytes(100) + data[120:]), "can't be read as Parquet: "),
    "no MindRecord": (plain("a.mindrecord", b"tokens" * 99), "can't be read as MindRecord: "),
    "empty MindRecord": (plain("a.mindrecord", b""), "can't be read as MindRecord: "),
}  # fmt: skip


def read_all(folder, path, **others):
    data = stream(section(folder, path, seq_length=4, **others))
    return [data.batch(row, 1) for row in range(len(data.sources[0]))]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_data(name, tmp_path):
    """Nothing is left in the cache but locks."""
    make, said = FILES[name]
    path, blamed = make(tmp_path)
    said = (said if "FILE" in said else f"FILE:? {said}").replace("FILE", f"{tmp_path}/{blamed}")
    with pytest.raises((ValueError, OSError), match=said) as found:
        read_all(tmp_path, path, packing="documents" if "begins at sequence" in said else "none")
    assert origin_of(found.value) == "raise" and "\n" not in str(found.value)
    cache = tmp_path / "cache"
    assert "too few" in said or not cache.exists() or all(each.suffix == ".lock" for each in cache.iterdir())


def test_files_that_don_t_go_together(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "b.npy", IDS)
    (tmp_path / "c.npy").write_bytes((tmp_path / "b.npy").read_bytes())
    with pytest.raises(
        ValueError, match=r"a.txt, .*b.npy.*: files of several kinds \(.npy, text\): give each a source"
    ):
        read_all(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="b.npy stands alone, not beside .*c.npy: give each a source of its own"):
        read_all(tmp_path, tmp_path / "*.npy")
    given = section(
        tmp_path, sources=(Source((str(tmp_path / "b.npy"),)), Source((str(tmp_path / "no"),))), seq_length=4
    )
    with pytest.raises(FileNotFoundError, match=r"^train_dataset.sources\[1\].data_path: there is no file .*/no'"):
        stream(given)


@pytest.mark.parametrize("kind", ["npy", "bin", "idx", "txt"])
def test_a_file_that_is_cut_off_while_it_is_used(kind, tmp_path):
    """A line, where the system would kill the process. A file that is removed or replaced stays as it was."""
    for each in ("bin", "idx"):
        shutil.copy(GOLDEN / f"megatron_tiny.{each}", tmp_path / f"a.{each}")
    np.save(tmp_path / "a.npy", IDS)
    (tmp_path / "a.txt").write_text("some text")
    path = tmp_path / f"a.{kind}"
    given = path.with_suffix(".bin") if kind == "idx" else path
    data = stream(section(tmp_path, given, seq_length=4, packing="documents"))
    before = data.batch(0, 1)
    path = next((tmp_path / "cache").glob("*/ids")) if kind == "txt" else path
    path.rename(tmp_path / "moved")
    path.write_bytes(b"")
    np.testing.assert_array_equal(data.batch(0, 1), before)
    os.truncate(tmp_path / "moved", 4)
    with pytest.raises(ValueError, match=f"^{path} has been cut off while it was in use: 4 bytes are left of "):
        data.batch(0, 1)


class Own:
    """Samples of a user's; sample 5 is something else."""

    def __init__(self, fifth):
        self.fifth = fifth

    def __len__(self):
        return 9

    def __getitem__(self, row):
        if row == 5 and callable(self.fifth):
            self.fifth()
        ids = np.full(4, row, np.int32)
        labels = np.full(4, -100, np.int32)
        return (ids, labels) if row != 5 else tuple(map(np.array, self.fifth))


class OwnBatches:
    """The same as an endless stream."""

    def __init__(self, fifth):
        self.samples = Own(fifth)

    def batch(self, first, count):
        return tuple(map(np.stack, zip(*(self.samples[row % 9] for row in range(first, first + count)))))


LIMITS = {0: (256, 0), 1: (256, -100)}  # see `id_limits`
OWN = {  # what sample 5 is -> what is said behind its name
    "an id beyond the vocabulary": (
        ([1, 2, 300, 4], [0] * 4),
        "token 300 in array 0, but model.vocab_size is 256",
    ),
    "a negative id": (([1, 2, -100, 4], [0] * 4), "token -100 in array 0, but model.vocab_size is 256"),
    "a label beyond it": (
        ([0] * 4, [1, 256, 3, 4]),
        "token 256 in array 1, but model.vocab_size is 256",
    ),
    "its own error": (lambda: [][0], "list index out of range"),
    "a file": (lambda: os.stat("nowhere/file"), r".*No such file or directory: 'nowhere/file'"),
    "the end of a thread": (lambda: sys.exit(0), "0"),
}


@pytest.mark.parametrize("kind", [Own, OwnBatches])
@pytest.mark.parametrize("name", OWN)
def test_what_an_object_of_a_user_gives_is_named(name, kind):
    """By the thread that reads ahead, where the step that needs it begins."""
    fifth, said = OWN[name]
    data = given_dataset(kind(fifth), "mine:open", 0, LIMITS)
    place = 5 if kind is OwnBatches else data.rows(0, np.arange(9)).tolist().index(5)
    ahead = Ahead(lambda place: data.batch(place, 1))
    for number in range(place):
        ahead.get(number, number + 1)
    number = "samples 5 to 5" if kind is OwnBatches and callable(fifth) else "sample 5"
    with pytest.raises((ValueError, OSError), match=f"^mine:open: {number}:? {said}"):
        ahead.get(place, place + 1)
    ahead.close()


def test_two_processes_that_want_the_same_cache(tmp_path, monkeypatch):
    """One writes it, the other waits; so does one for a process that is killed while it has the lock."""
    (tmp_path / "a.txt").write_text("some text of a file")
    given, write, begun, goes_on = section(tmp_path, tmp_path / "a.txt", seq_length=4), sources._write, [], []
    may_write, results = threading.Event(), []

    def slowly(*arguments):
        begun.append(threading.current_thread())
        assert may_write.wait(20)
        return write(*arguments)

    monkeypatch.setattr(sources, "_write", slowly)
    monkeypatch.setattr(fcntl, "flock", lambda *lock, take=fcntl.flock: goes_on.append(take(*lock)))
    threads = [threading.Thread(target=lambda: results.append(bytes(opened(given).ids))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not begun:
        threading.Event().wait(0.001)
    assert len(goes_on) == 1
    may_write.set()
    for thread in threads:
        thread.join()
    assert results == [b"some text of a file\0"] * 2 and len(begun) == 1
    folder = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    shutil.rmtree(folder)
    (tmp_path / f"{folder}.unfinished").mkdir()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('has it', flush=True); input()"
    given_lock = [sys.executable, "-SI", "-c", code, f"{folder}.lock"]
    with subprocess.Popen(given_lock, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "has it\n"
        waiting = threading.Thread(target=lambda: results.append(bytes(opened(given).ids)))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive() and len(begun) == 1
        holder.send_signal(signal.SIGKILL)
    waiting.join()
    assert results[2] == results[0] and not folder.with_suffix(".unfinished").exists()
    (folder / "starts").write_bytes(b"")  # as after a power failure
    with pytest.raises(ValueError, match=f"{folder} can't be read, so remove it: cannot mmap an empty"):
        opened(given)


@pytest.mark.ranks("damaged_data.py", 2)
def test_a_reader_that_dies_on_one_rank_ends_all(launches):
    """In its thread, while the other rank goes on to the next step, and waits there."""
    launched = launches["damaged_data.py"].result()
    assert launched.exit_code in (2, 75), launched.tail(1)
    said = r"tokens.npy: token 999 at place \d+ is not below model.vocab_size 256"
    for rank in range(2):
        assert "Traceback" not in launched.logs[rank], launched.tail(rank)
    assert re.search(f"^error: {said}$", launched.logs[1], re.MULTILINE), launched.tail(1)
    assert re.search(f"rank 1 has failed with ValueError: {said}", launched.logs[0]), launched.tail(0)
