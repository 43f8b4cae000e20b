"""What PyNative keeps of an operator for the backward pass: a way to compute it again instead of its results.

Generated programs call the operators that were chosen through `Recomputed`. While a program runs, `saved_tensors_hooks`
shows us every tensor that an operator's gradient is going to need. A result of such a call is not kept: in its place
goes a handle that runs the call again, when the backward pass asks for it. What the call needs is kept in the same way,
so that a chain of such calls is run again from the last tensor that was kept (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016), each at most once.

A tensor is known by what MindSpore lets us attach to it, which goes along to where it is saved. Only the variable that
holds the tensor, those that have saved it, and calls that need it keep a handle alive.
"""

from contextlib import contextmanager
from weakref import ref

from mindspore import Parameter, Tensor
from mindspore.graph.api import _no_grad, _pynative_executor, saved_tensors_hooks

from mindformers_core.communication.world import process_state
from mindformers_core.program.structure import tree_map

__all__ = ["Handle", "Recomputation", "Recomputed", "handle_of", "keeping", "kept", "session"]

_KEY = "mindformers_core"
_STATE = process_state().memo(__name__)  # "session": the one that is going on


@contextmanager
def keeping():
    """While open, tensors that autograd saves are kept as the calls that make them say. PyNative."""
    before = _STATE.get("session")
    _STATE["session"] = Session()
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _STATE["session"] = before


class Session:
    """One forward pass.

    Attributes:
        running: calls that are going on, the innermost last.
        made: place of a result in autograd's graph -> a weak reference to its `Handle`.
        offloaded: weak references to what was copied to the host, in the order in which it was.
    """

    def __init__(self):
        self.running, self.made, self.offloaded = [_Outside()], {}, []


def session():
    """The `Session` that is going on, or None."""
    return _STATE.get("session")


class _Outside:
    """No call is going on: what is saved is kept as it is."""

    unsettled = None


def _pack(tensor):
    """What autograd keeps instead of a tensor."""
    handle = handle_of(tensor) or _handle_of_copied(tensor)
    if handle is not None:
        return _Saved(handle)
    unsettled = session().running[-1].unsettled
    if unsettled is None or tensor._grad_node is None:
        return tensor
    saved = _Saved(None, tensor)  # perhaps a result of the call that is going on, which isn't known yet
    unsettled.append(saved)
    return saved


def _unpack(saved):
    return saved.read() if isinstance(saved, _Saved) else saved


def _handle_of_copied(tensor):
    """The `Handle` of the view that an operator has just made a contiguous copy of, or None."""
    node = tensor._grad_node
    if node is None or node.name() != "Contiguous":
        return None
    made_by, index = node.next_functions[0]
    if made_by is None:
        return None
    handle = session().made.get((str(made_by), index))  # the text has a number that no other node has
    return None if handle is None else handle()


def handle_of(tensor):
    """The `Handle` of a tensor that a `Keeper` has made, or None."""
    mark = tensor._get_user_data(_KEY)
    return None if mark is None else mark()


class Handle:
    """One result of a call, which can be had again.

    Args:
        call: gives its results by `value(index)`.
        index: which of them.
    """

    def __init__(self, call, index):
        self.call, self.index = call, index

    def expect(self):
        """Somebody is going to ask for the value."""
        self.call.expect(self.index)

    def read(self):
        """The value, as somebody who was expected asks for it."""
        return self.call.value(self.index)

    def forgo(self):
        """Somebody who was expected doesn't ask."""
        self.call.forgone(self.index)


class _Saved:
    """What autograd keeps: a handle, or, until a call is settled and for what isn't a result of it, a tensor."""

    def __init__(self, handle, tensor=None):
        self.handle, self.tensor = None, tensor
        self.is_read = False
        if handle is not None:
            self.settle(handle)

    def settle(self, handle):
        """It is what the handle gives."""
        self.handle, self.tensor = handle, None
        handle.expect()

    def read(self):
        """The tensor."""
        if self.handle is None:
            return self.tensor
        if self.is_read:  # a second backward pass
            self.handle.expect()
        self.is_read = True
        return self.handle.read()

    def __del__(self):
        if self.handle is not None and not self.is_read:
            self.handle.forgo()


class Recomputed:
    """Calls a function of tensors whose results are computed again when the backward pass needs them."""

    def __call__(self, function, *inputs):
        return kept(function, inputs, Recomputation)


def kept(function, inputs, kind):
    """Call a function of tensors; its results are kept for the backward pass in another way.

    Args:
        function: gives a tensor, or a tuple or list of tensors.
        inputs: what it is called with: tensors, and structures of them.
        kind: the class of what gives its results again, such as `Recomputation`.
    """
    now = session()
    if now is None or not _pynative_executor.grad_flag():
        return function(*inputs)
    call = kind(function, inputs)
    now.running.append(call)
    try:
        result = function(*inputs)
    finally:
        now.running.pop()
    return _settled(call, result)


def _settled(call, result):
    """The results of a call, each known by a handle from now on, and what the call itself has saved of them."""
    many = isinstance(result, (tuple, list))
    tensors = list(result) if many else [result]
    call.settle(tensors)
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Parameter):  # given back as it is: it stays anyway, and a mark would, too
            continue
        handle = Handle(call, index)
        tensor.kept_by = handle
        tensor._set_user_data(_KEY, ref(handle))
        node = str(tensor._grad_node)
        session().made[node, tensor._output_index] = ref(handle)
        for saved in call.unsettled:
            if saved.tensor._output_index == tensor._output_index and str(saved.tensor._grad_node) == node:
                saved.settle(handle)
        call.unsettled = [saved for saved in call.unsettled if saved.handle is None]
    call.unsettled = []
    return type(result)(tensors) if many else tensors[0]


class Recomputation:
    """A call that is made again when its results are needed.

    Args:
        function, inputs: of the call.

    Attributes:
        expected: how many are still going to ask for a result; after the last one the results are freed.
        unsettled: what autograd has saved while the call was going on.
    """

    def __init__(self, function, inputs):
        self.function, self.expected, self.unsettled = function, 0, []
        self.inputs = tree_map(_as_input, inputs)
        self._results, self._is_over = None, False

    def settle(self, tensors):
        """The results are there; they aren't needed."""

    def expect(self, index):
        """Somebody is going to ask for a result."""
        self.expected += 1

    def value(self, index):
        """One of its results, as somebody who was expected asks for it."""
        if self._results is None:
            self._run()
        result = self._results[index]
        self.forgone(index)
        return result

    def forgone(self, index):
        """Somebody who was expected has asked, or doesn't."""
        self.expected -= 1
        if self.expected <= 0:
            self._results = None

    def _run(self):
        if self._is_over:  # a second backward pass
            tree_map(lambda leaf: leaf.expect() if isinstance(leaf, Handle) else None, self.inputs)
        self._is_over = True
        inputs = tree_map(lambda leaf: leaf.read() if isinstance(leaf, Handle) else leaf, self.inputs)
        with _no_grad():
            result = self.function(*inputs)
        many = isinstance(result, (tuple, list))
        self._results = [tensor.contiguous() for tensor in (result if many else (result,))]

    def __del__(self):
        if not self._is_over:
            tree_map(lambda leaf: leaf.forgo() if isinstance(leaf, Handle) else None, self.inputs)


def _as_input(leaf):
    """What a call keeps of an input."""
    handle = handle_of(leaf) if isinstance(leaf, Tensor) else None
    if handle is None:
        return leaf
    handle.expect()
    return handle
