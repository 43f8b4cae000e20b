"""Files as tokens: Megatron's, rows, text and conversations by a tokenizer; what is wrong with them."""

import json
import shutil
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from support.launch import ROOT
from support.streams import CountedRow
from test_training_loop import ONE_RANK

from mindformers_core.batches import BatchPlan
from mindformers_core.commands.command_line import main
from mindformers_core.data.mixture import Mixture
from mindformers_core.data.reading import local_batch
from mindformers_core.data.sources import open_tokens
from mindformers_core.data.streams import Sequences, Stream
from mindformers_core.data.tokenizing import Tokenizer
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

DOCUMENTS = [[5, 6, 7], [8, 9, 10], [20, 21]]
GOLDEN = ROOT / "tests" / "golden"  # megatron_tiny was written by megatron-core 0.16.1


def json_lines(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def documents(source):
    return [each.tolist() for each in np.split(np.asarray(source.ids), list(source.starts)[1:])]


def test_megatrons_files(tmp_path):
    source = open_tokens([str(GOLDEN / "megatron_tiny.bin")], str(tmp_path))
    assert documents(source) == DOCUMENTS and isinstance(source.ids, np.memmap)
    with pytest.raises(IndexError):
        source.starts[3]
    shutil.copy(GOLDEN / "megatron_tiny.bin", tmp_path / "more.bin")
    index = (GOLDEN / "megatron_tiny.idx").read_bytes()
    marks = np.frombuffer(index[26:34], "<u8") + 1  # one more document, which is empty
    (tmp_path / "more.idx").write_bytes(index[:26] + marks.tobytes() + index[34:] + index[-8:])
    assert documents(open_tokens([str(tmp_path / "more.bin")], str(tmp_path))) == [*DOCUMENTS, []]


def test_rows_of_json_lines(tmp_path):
    rows = [{"input_ids": each} for each in DOCUMENTS]
    source = open_tokens([json_lines(tmp_path, *rows, {"input_ids": []})], str(tmp_path / "cache"))
    assert documents(source) == DOCUMENTS and source.labels is None
    masked = open_tokens(
        [json_lines(tmp_path, *rows, {"input_ids": [1, 2], "labels": [-100, 2]})], str(tmp_path / "cache")
    )
    assert masked.labels.tolist() == [True] * 8 + [False, True], "another file is another entry of the cache"


def test_rows_of_mindrecord(tmp_path):
    from mindspore.mindrecord import FileWriter

    for count, paths in ((1, [""]), (2, ["0", "1", "*"])):
        writer = FileWriter(str(tmp_path / f"rows_{count}.mindrecord"), count)
        writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "tokens")
        writer.write_raw_data([{"input_ids": np.array(each, np.int32)} for each in DOCUMENTS])
        writer.commit()
        for path in paths:
            source = open_tokens([str(tmp_path / f"rows_{count}.mindrecord{path}")], str(tmp_path / "cache"))
            assert documents(source) == DOCUMENTS
    assert documents(open_tokens([str(tmp_path / "rows_*.mindrecord*")], str(tmp_path / "cache"))) == DOCUMENTS * 2


def test_rows_of_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS}), tmp_path / "rows.parquet")
    assert documents(open_tokens([str(tmp_path / "rows.parquet")], str(tmp_path / "cache"))) == DOCUMENTS


def words(folder):
    """A tokenizer of words, with a chat template, in a folder."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    known = ["<s>", "</s>", "user", "assistant", ":", "hello", "fine", "thanks", "[UNK]"]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(known)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }}{% if m.role == 'assistant' %} "
        "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %} assistant :{% endif %}"
    )
    settings = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(str(folder))


def test_conversations_predict_what_the_assistant_says(tmp_path):
    tokenizer = words(tmp_path / "words")
    turns = [("user", "hello"), ("assistant", "fine thanks"), ("user", "thanks"), ("assistant", "hello")]
    path = json_lines(
        tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns]}, {"text": "hello"}
    )
    source = open_tokens([path], str(tmp_path / "cache"), tokenizer)
    assert documents(source) == [[0, 2, 4, 5, 3, 4, 6, 7, 1, 2, 4, 7, 3, 4, 5, 1], [5, 1]]
    assert np.flatnonzero(source.labels).tolist() == [6, 7, 8, 14, 15, 16, 17]
    _, labels, _ = Sequences(source, 20, 9, packs=True)[0]
    assert labels[labels != -100].tolist() == [6, 7, 1, 5, 1, 1]
    tokenizer._template = tokenizer._template.replace("assistant :{% endif %}", "assistant : <think> none {% endif %}")
    messages = [{"role": role, "content": text} for role, text in turns]
    assert np.flatnonzero(tokenizer.conversation(messages)[1]).tolist() == [6, 7, 8, 14, 15], "an answer without it"


def long_sources(folder, draw):
    """Tokens of a `.npy` file, of Megatron's with documents, and of rows with labels in the cache."""
    lengths = draw.integers(1, 400, 20)
    ids = draw.integers(0, 97, lengths.sum()).astype(np.uint16)
    np.save(folder / "ids.npy", ids)
    (folder / "ids.bin").write_bytes(ids.tobytes())
    places = np.cumsum([0, *lengths[:-1]])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    numbers = lengths.astype("<i4"), 2 * places.astype("<i8"), np.arange(len(lengths) + 1)
    (folder / "ids.idx").write_bytes(header + b"".join(each.tobytes() for each in numbers))
    rows = [each.tolist() for each in np.split(ids, places[1:])]
    path = json_lines(folder, *({"input_ids": row, "labels": [-100, *row[1:]]} for row in rows))
    return [open_tokens([str(each)], str(folder / "cache")) for each in (folder / "ids.npy", folder / "ids.bin", path)]


ENTRIES = ("cp", "tp"), ("tp", "cp"), ("cp",), (), (2, "tp")  # the last one is strided


@pytest.mark.parametrize("packs", [False, True])
def test_a_rank_reads_its_part_of_sequences(packs, tmp_path):
    """Whatever the layouts of the arrays; where they are alike, no more tokens than it needs."""
    draw, mesh, read, length = np.random.default_rng(0), DeviceMesh((2, 2, 2), ("dp", "cp", "tp")), [], 256
    sources = [
        Sequences(replace(source, ids=CountedRow(source.ids, read)), length, 97, packs)
        for source in long_sources(tmp_path, draw)
    ]
    stream, plan = Stream(tuple(sources), Mixture((2, 1, 1)), 3), BatchPlan(12, 2, 3)

    def arrays(rank, entries):
        read.clear()
        return local_batch(plan, [Layout.on(mesh, (("dp",), entry)) for entry in entries], rank, {}, stream, 7)

    chosen = [(number,) * 3 for number in range(5)] + [draw.integers(0, 5, 3) for _ in range(5)]
    for entries in ([ENTRIES[number] for number in numbers][: 2 + packs] for numbers in chosen):
        for rank in range(8):
            alone, own = arrays(rank, [()] * len(entries)), arrays(rank, entries)
            for whole, part, entry in zip(alone, own, entries, strict=True):
                (runs,) = Layout.on(mesh, (entry,)).local_runs((length,), rank)
                np.testing.assert_array_equal(part, np.concatenate([whole[..., run] for run in runs], -1))
            if len(set(entries)) == 1 and entry != ENTRIES[-1]:
                assert 0.5 <= sum(read) / own[0].size <= 1.05


def test_a_source_of_a_trillion_tokens(tmp_path):
    """A sparse file. The sample where a run resumes is read, and the ends of the file; nothing that it skips."""
    path, count = tmp_path / "large.npy", 10**12
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (count,)})
        file.truncate(file.tell() + 2 * count)
    tracemalloc.start()
    source = open_tokens([str(path)], str(tmp_path))
    source = replace(source, ids=CountedRow(source.ids, read := []))
    for packs in (False, True):
        stream = Stream((Sequences(source, 4096, 9, packs),), Mixture((1,)), 3)
        read.clear()
        stream = stream.resumed(json.loads(json.dumps(stream.state())), 10**9)
        assert sum(read) == 2 * 2 * 2**16, "of a checksum, when saved and when resumed"
        read.clear()
        assert stream.batch(10**9, 2)[0].shape == (2, 4096) and len(stream.sources[0]) > 2 * 10**8
        assert 0.9 <= sum(read) / (2 * 4096) <= 1.05
        assert stream.begun(10**9, 10**9 + 2) == "" and 4 < stream.epochs(10**9)[0] < 5
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()


def test_other_data_at_a_resume_are_an_error(tmp_path):
    def stream(rows, weights=(1,), labels=None, **others):
        rows = [{"input_ids": each, "labels": [labels] * len(each) if labels else None} for each in rows]
        source = open_tokens([json_lines(tmp_path, *rows)], str(tmp_path / "cache"))
        sources = tuple(Sequences(source, 2, 99, **others) for _ in weights)
        return Stream(sources, Mixture(weights), 3)

    before = stream(DOCUMENTS)
    state = json.loads(json.dumps(before.state()))
    assert before.resumed(state, 5) == before
    for other, said in (
        (stream(DOCUMENTS[::-1]), "source 0: checksum is"),
        (stream(DOCUMENTS, packs=True), "source 0: packs is True, was False"),
        (stream(DOCUMENTS, labels=-100), "source 0: checksum of labels is"),
        (stream(DOCUMENTS, (2, 1)), r"weights is \[2, 1\], was \[1\]"),
    ):
        with pytest.raises(ValueError, match=f"the data aren't those of the run that goes on: .*{said}"):
            other.resumed(state, 5)
    mixed = stream(DOCUMENTS, (1, 1)).resumed(state, 5, goes_on=True)
    assert mixed.mixture.counts(5) == (5, 0) and mixed.mixture.counts(9) == (7, 2)
    again = stream(DOCUMENTS, (1, 1)).resumed(json.loads(json.dumps(mixed.state())), 9)
    np.testing.assert_array_equal(again.batch(9, 4)[0], mixed.batch(9, 4)[0])


def test_the_data_of_a_recipe_are_described(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 99)
    other = json_lines(tmp_path, *({"input_ids": each} for each in DOCUMENTS * 50))
    options = [
        f"train_dataset.cache_dir={tmp_path / 'cache'}",
        "train_dataset.seq_length=32",
        "train_dataset.packing=documents",
    ]
    sources = f"train_dataset.sources=[{{data_path: {tmp_path / 'a.txt'}, weight: 3}}, {{data_path: {other}}}]"
    assert main(["data", "--config", ONE_RANK, *options, sources]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        f"{tmp_path}/a.txt: 991 tokens (uint8) in 1 documents: 32 sequences of 32 with 1.0 documents"
    )
    assert (
        "400 tokens (int32) in 150 documents: 13 sequences of 32 with" in lines[2]
        and "25.0% of the samples" in lines[2]
    )
    numbers = lines[lines.index("sample 0: int32 [32], int32 [32], int32 [32]") + 1]
    assert all(word.isdigit() for word in numbers.split()), "not all of them are bytes of text"
    for source in ("weight: 1", f"data_path: {other}, factory: 'a:b'"):
        assert main(["data", "--config", ONE_RANK, *options, f"train_dataset.sources=[{{{source}}}]"]) == 2
        assert "train_dataset.sources[0]: give one of data_path and factory" in capsys.readouterr().err
