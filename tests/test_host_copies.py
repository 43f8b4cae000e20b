"""Copies beside the computation: in which stream they run, and who waits for whom. Streams here take notes only."""

from contextlib import contextmanager
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support.recomputed_models import equal, llama, sharded, steps_of, without

from mindformers_core.recompute import host_copies, swap
from mindformers_core.recompute.host_copies import to_device, to_host

pytestmark = pytest.mark.usefixtures("one_rank")


class Event:
    """One that has come as soon as somebody says so."""

    def __init__(self, number):
        self.number, self.has_come = number, False

    def query(self):
        return self.has_come


class Stream:
    """Notes down what it is asked for."""

    def __init__(self, name, device):
        self.name, self._device = name, device

    def wait_stream(self, other):
        self._device.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._device.notes.append(f"{self.name} waits for event {event.number}")

    def record_event(self):
        self._device.events.append(Event(len(self._device.events)))
        self._device.notes.append(f"{self.name} records event {self._device.events[-1].number}")
        return self._device.events[-1]


class Device:
    """A device with streams, as far as copies go, in the place of the CPU."""

    def __init__(self, monkeypatch, way):
        self.notes, self.events = [], []
        self.current = Stream("compute", self)
        monkeypatch.setattr(Tensor, "device", f"{way}:0")
        monkeypatch.setattr(ms.runtime, "Stream", lambda: Stream("copy", self))
        monkeypatch.setattr(ms.runtime, "StreamCtx", self.within)
        monkeypatch.setattr(ms.runtime, "current_stream", lambda: self.current)
        monkeypatch.setitem(host_copies._WAYS, way, self.moved)
        self.state = {}
        monkeypatch.setattr(host_copies, "process_state", lambda: SimpleNamespace(memo=lambda _: self.state))

    @contextmanager
    def within(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def moved(self, tensor, device):
        assert tensor.is_contiguous()
        self.notes.append(f"{self.current.name} moves to {device}")
        return host_copies._copied(tensor)


@pytest.mark.parametrize("way", ["Ascend", "GPU"])
def test_copies_run_in_a_stream_of_their_own(monkeypatch, way):
    device = Device(monkeypatch, way)
    tensor = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    host = to_host(tensor.T)
    assert device.notes == ["copy waits for compute", "copy moves to CPU", "copy records event 0"]
    device.notes.clear()
    arriving = to_device(host, f"{way}:0")
    assert device.notes == [f"copy moves to {way}", "copy records event 1"]
    np.testing.assert_array_equal(arriving.use().asnumpy(), tensor.asnumpy().T)
    assert device.notes[2:] == ["compute waits for event 1"]
    assert [event.number for event, _ in device.state["leaving"]] == [0]  # it is still being read
    device.events[0].has_come = True
    to_device(host, f"{way}:0")
    assert device.state["leaving"] == []


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_swapped_model_on_such_a_device(monkeypatch, prefetch):
    """The same bits; what comes back is waited for, after as many copies ahead as were asked for have begun."""
    expected, net = without(llama), swap(sharded(llama), layer_swap=[{"layers": True, "backward_prefetch": prefetch}])
    device = Device(monkeypatch, "Ascend")
    assert equal(steps_of(net, llama)[0], expected)
    there, back = (device.notes.count(f"copy moves to {place}") for place in ("CPU", "Ascend"))
    assert there == back > 20
    arrived = set()
    for before, note in zip(device.notes, device.notes[1:]):
        arrived |= {note.replace("copy records", "compute waits for")} if before == "copy moves to Ascend" else set()
        assert not note.startswith("compute waits") or note in arrived
    first, second = [place for place, note in enumerate(device.notes) if note.startswith("compute waits")][:2]
    assert device.notes[:first].count("copy moves to Ascend") == 1
    assert device.notes[first:second].count("copy moves to Ascend") == prefetch
