"""Samples as functions of an index: orders of epochs, mixtures, packed documents, one batch ahead."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mindspore.dataset import NumpySlicesDataset
from support.streams import Counted

from mindformers_core.batches import BatchPlan
from mindformers_core.data.datasets import OwnDataset, Samples, given_dataset
from mindformers_core.data.mixture import Mixture
from mindformers_core.data.order import shuffled
from mindformers_core.data.packing import packed_row, packed_rows
from mindformers_core.data.reading import local_batch
from mindformers_core.data.sources import Tokens
from mindformers_core.data.streams import Ahead, Sequences, Stream
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM

LENGTHS = {  # of documents
    "short": lambda draw, count: draw.integers(1, 200, count),
    "lognormal": lambda draw, count: np.maximum(1, draw.lognormal(5, 1.3, count).astype(int)),
    "two kinds": lambda draw, count: np.where(draw.random(count) < 0.5, 3, draw.integers(400, 1400, count)),
    "one token": lambda draw, count: np.ones(count, int),
    "long": lambda draw, count: draw.integers(2000, 6000, count // 10),
}


def documents(lengths, seed=0, largest=97):
    """`Tokens` of documents of these lengths."""
    ids = np.random.default_rng(seed).integers(0, largest, sum(lengths)).astype(np.uint16)
    return Tokens(ids, np.cumsum([0, *lengths[:-1]]), "some.npy")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 4097, 65536])
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(count):
    orders = [shuffled(np.arange(count), count, seed, epoch) for seed, epoch in ((7, 0), (7, 1), (8, 0))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(count))
        assert shuffled(count // 2, count, 7, 0) == orders[0][count // 2]
    if count > 100:
        for one, other in ((orders[0], np.arange(count)), (orders[0], orders[1]), (orders[0], orders[2])):
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
        assert abs(np.corrcoef(orders[0][1:], orders[0][:-1])[0, 1]) < 0.1


def test_orders_stay_as_they_are():
    """A checkpoint's position means the same samples with any version of NumPy, and of this package."""
    assert shuffled(np.arange(6), 1000, 7, 0).tolist() == [221, 572, 506, 75, 619, 708]
    assert int(shuffled(10**9, 10**12, 3, 4)) == 320924901760


@pytest.mark.parametrize("seed", range(12))
def test_a_mixture_is_exact_after_any_number_of_samples(seed):
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 9))
    weights = tuple(draw.integers(1, (5, 50, 1000, 12000)[seed % 4], count).tolist())
    mixture, end = Mixture(weights), 10**6 if seed == 3 else 10**5
    sources, numbers = mixture.places(0, end)
    for source, weight in enumerate(weights):
        is_own = sources == source
        share = np.arange(1, end + 1) * weight / sum(weights)
        assert np.abs(np.cumsum(is_own) - share).max() <= 1
        np.testing.assert_array_equal(numbers[is_own], np.arange(is_own.sum()))
    first = int(draw.integers(0, end - 9))
    assert [each.tolist() for each in mixture.places(first, 9)] == [
        sources[first:][:9].tolist(),
        numbers[first:][:9].tolist(),
    ]
    assert mixture.counts(first) == tuple(np.bincount(sources[:first], minlength=count).tolist())


def test_a_mixture_goes_on_with_another_source():
    before = Mixture((3, 1))
    after = before.changed((3, 1, 4), 10)
    assert after.counts(10) == (*before.counts(10), 0)
    sources, numbers = after.places(10, 80)
    for source, start in enumerate((*before.counts(10), 0)):
        own = numbers[sources == source]
        np.testing.assert_array_equal(own, np.arange(start, start + len(own)))
    assert after.counts(90) == (before.counts(10)[0] + 30, before.counts(10)[1] + 10, 40)
    fewer = after.changed((1, 1), 90)  # the last source goes, and another one may come in its place
    assert fewer.counts(92) == tuple(count + 1 for count in after.counts(90)[:2])
    assert fewer.changed((1, 1, 1), 92).counts(92) == (*fewer.counts(92), 0)


class Slow:
    """Samples of a user's that tell whether two threads ask for one at once."""

    def __init__(self, *shapes):
        self.shapes, self.inside, self.most = shapes, 0, 0

    def __len__(self):
        return 6

    def __getitem__(self, row):
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.002)
        self.inside -= 1
        return tuple(np.zeros(shape, np.int32) for shape in self.shapes[row % len(self.shapes)])

    def batch(self, first, count):
        return tuple(np.stack([each]) for each in self[first])


def test_datasets_of_users():
    """One thread at a time asks them; samples have arrays alike, and there are some."""
    streams = Stream((Samples(Slow([2]), "a:b"),), Mixture((1,)), 0), OwnDataset(Slow([2]), "a:b")
    for dataset in streams:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(dataset.batch, range(12), [1] * 12))
        source = dataset.source if isinstance(dataset, OwnDataset) else dataset.sources[0].source
        assert source.most == 1
    for shapes in ([2], [3]), ([2], [2, 2]):
        said = r"sample 0 .of source 0. has the arrays int32 \[.*\], sample [1-5] .* int32 \["
        with pytest.raises(ValueError, match=said):
            Stream((Samples(Slow(*shapes), "a:b"),), Mixture((1,)), 0).batch(0, 6)
    rows = [(np.full(2, row),) for row in range(5)]
    stream = given_dataset(rows, "mine", 3, {})
    assert sorted(stream.batch(0, 5)[0][:, 0]) == [0, 1, 2, 3, 4] and given_dataset(stream, "mine", 0, {}) is stream
    in_order = given_dataset(NumpySlicesDataset(np.arange(5), shuffle=False), "mine", 3, {})
    assert [in_order.batch(*each)[0].tolist() for each in ((3, 4), (1, 2))] == [[3, 4, 0, 1], [1, 2]]
    with pytest.raises(TypeError, match="mine: 5 has neither len.. and an index, nor a method batch"):
        given_dataset(5, "mine", 0, {})


class Cropped:
    """Images and labels that are read by their part; the slices that were asked for."""

    def __init__(self, images):
        self.images, self.asked, self.gives = images, [], lambda sample: sample

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return self.images[row], np.float32(row)

    def part(self, row, slices):
        self.asked.append(slices)
        return self.gives((self.images[row][slices[0]], np.float32(row)))


def test_a_part_of_an_image_is_read_alone(tmp_path):
    """Of mapped files, and by a method of the user's object; of other objects whole images are read."""
    np.save(tmp_path / "images.npy", np.random.default_rng(0).standard_normal((6, 2, 8, 12)).astype(np.float32))
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r").view(Counted)
    cropped = Cropped(np.asarray(mapped))
    given = cropped, [(image, np.float32(row)) for row, image in enumerate(mapped)]
    mesh, plan = DeviceMesh((2, 2), ("h", "w")), BatchPlan(5, 1, 3)
    layouts = [Layout.on(mesh, dims) for dims in (((), (), ("h",), ("w",)), ((),))]
    for rank, rows, columns in ((1, slice(0, 4), slice(6, 12)), (2, slice(4, 8), slice(0, 6))):
        for dataset in (given_dataset(each, "mine", 3, {}) for each in given):
            whole = dataset.batch(0, 5)[0]
            mapped.copied.clear()
            images, labels = local_batch(plan, layouts, rank, {}, dataset)
            np.testing.assert_array_equal(images.reshape(6, 2, 4, 6)[:5], whole[..., rows, columns])
            assert labels.shape == (2, 3)
        assert mapped.copied == [4 * 2 * 4 * 6] * 5
        assert cropped.asked[-5:] == [((slice(0, 2), rows, columns), ())] * 5
    cropped.gives = lambda sample: (sample[0][:, 1:], sample[1])
    with pytest.raises(
        ValueError, match=r"mine: part\(\d, …\) should return arrays of shapes \[\(2, 4, 6\), \(\)\], not"
    ):
        local_batch(plan, layouts, 0, {}, given_dataset(cropped, "mine", 3, {}))
    ragged = [(np.zeros((2, 8, 12)), np.zeros(())), (np.zeros((2, 7, 12)), np.zeros(()))]
    with pytest.raises(ValueError, match=r"mine: sample 1: tensor of shape \(3, 2, 7, 12\): dim 2 has size 7, which"):
        local_batch(plan, layouts, 0, {}, given_dataset(ragged, "mine", 3, {}))


def test_weights_without_a_short_pattern_are_an_error():
    with pytest.raises(ValueError, match="weights 99991, 100003: .* their sum is 199,994, at most 100,000"):
        Mixture((99991, 100003))


@pytest.mark.parametrize("name", LENGTHS)
def test_packed_sequences_have_every_token_once(name):
    lengths = LENGTHS[name](np.random.default_rng(1), 600).tolist()
    total, starts, room = sum(lengths), np.cumsum([0, *lengths[:-1]]), 1024
    rows = [packed_row(row, total, starts, room) for row in range(packed_rows(total, room))]
    seen, cuts = np.zeros(total, int), -len(lengths)
    for row in rows:
        assert 0 < sum(piece.length for piece in row) <= room
        for piece in row:
            seen[piece.first : piece.first + piece.length] += 1
            end = total if piece.first >= starts[-1] else starts[np.searchsorted(starts, piece.first, "right")]
            assert piece.goes_on == (piece.first + piece.length < end) and piece.first + piece.length <= end
            cuts += 1
    assert (seen == 1).all()
    if total > 10_000:
        assert 1 - total / (len(rows) * room) < 0.02
        needed = sum(-(-length // room) - 1 for length in lengths)
        assert cuts - needed <= len(lengths) / 10 + len(rows) / 8, "more documents are cut than have to be"


def test_labels_of_packed_documents_are_their_own_next_tokens():
    lengths = [1, 5, 30, 2, 9, 1, 17]
    source = documents(lengths)
    found, sequences = 0, Sequences(source, 12, 97, packs=True)
    for row in range(len(sequences)):
        ids, labels, positions = sequences[row]
        assert ids.shape == labels.shape == positions.shape == (12,)
        for place in range(12):
            follows = place < 11 and positions[place + 1] == positions[place] + 1
            assert not follows or labels[place] in (ids[place + 1], -100)
        found += (labels != -100).sum()
    assert found == sum(lengths) - len(lengths)


def test_masked_tokens_are_no_labels():
    source = documents([8, 8])
    masks = np.array([False, True] * 8)
    for packs in (False, True):
        arrays = Sequences(Tokens(source.ids, source.starts, "x", masks), 8, 97, packs)[0]
        assert ((arrays[1] != -100) <= np.array([True, False] * 4)).all() and (arrays[1] != -100).any()


def test_a_packed_sequence_has_the_loss_and_gradients_of_its_documents():
    import mindspore as ms

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    net = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, num_hidden_layers=2, max_position_embeddings=64, **sizes), loss="sum"
    )

    def passes(*arrays):
        given = [ms.Tensor(array[None]) for array in arrays]
        loss, gradients = ms.value_and_grad(lambda *inputs: net(*inputs)[0], None, net.trainable_params())(*given)
        return [each.asnumpy() for each in (loss, *gradients)]

    source, room = documents([5, 1, 7, 1, 9, 4]), 32
    packed = passes(*Sequences(source, room, 97, packs=True)[0])
    alone = [np.asarray(each, np.int32) for each in np.split(source.ids, source.starts[1:])]
    each = [passes(ids, np.append(ids[1:], -100).astype(np.int32)) for ids in alone]
    for one, parts in zip(packed, zip(*each), strict=True):
        np.testing.assert_allclose(one, sum(parts), rtol=0, atol=1e-6 * max(1, np.abs(one).max()))


def test_a_stream_has_every_sample_once_an_epoch():
    sources = tuple(Sequences(documents([40] * 5, seed), 9, 97) for seed in range(2))
    stream = Stream(sources, Mixture((2, 1)), 5)
    numbers = stream.mixture.places(0, 99)
    for source, each in enumerate(sources):
        rows = stream.rows(source, numbers[1][numbers[0] == source])
        for epoch in range(len(rows) // len(each)):
            assert sorted(rows[epoch * len(each) :][: len(each)].tolist()) == list(range(len(each)))
        assert rows[: len(each)].tolist() != rows[len(each) :][: len(each)].tolist(), "another order in each epoch"
    np.testing.assert_array_equal(stream.batch(7, 20)[0][3:], stream.batch(10, 17)[0])
    assert stream.epochs(66)[0] == 44 / len(sources[0])


def test_the_next_batch_is_read_in_a_thread():
    threads = {}

    def read(position):
        threads[position] = threading.current_thread().name
        if position == 4:
            raise OSError("gone")
        return position

    ahead = Ahead(read)
    assert [ahead.get(place, place + 1) for place in range(3)] == [0, 1, 2]
    assert ahead.get(7, 8) == 7 and ahead.get(3, 4) == 3, "not the one that was read ahead"
    with pytest.raises(OSError, match="gone"):
        ahead.get(4, 5)
    assert ahead.get(5, None) == 5 and 6 not in threads  # after the last step of a job
    ahead.close()
    assert threads[0] == "MainThread" and threads[2].startswith("data")
