"""Recomputation of single operators in PyNative: saved tensors are replaced by handles that run the operator again.

Generated programs call each selected operator through `Recomputed`. `saved_tensors_hooks` receives every tensor that
the gradient of an operator will read. A result of a selected call is not saved: autograd saves a handle instead, which
runs the call again when the backward pass reads it. Inputs of the call are saved in the same way, so a chain of
selected calls is recomputed from its last saved tensor (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
2016), each call at most once.

A tensor is identified by an attribute that MindSpore carries along to the hook. Three kinds of references keep a handle
alive: the variable of the tensor, autograd nodes that saved it, and calls that take it as input.
"""

from contextlib import contextmanager
from weakref import ref

from mindspore import Parameter, Tensor
from mindspore.graph.api import saved_tensors_hooks

from mindformers_core import mindspore_private as private
from mindformers_core.communication.world import process_state
from mindformers_core.program.structure import tree_map
from mindformers_core.scopes import entered

_KEY = "mindformers_core"


@contextmanager
def keeping():
    """Context in which the producing call of a tensor decides how autograd saves it. PyNative."""
    with entered(process_state().memo(__name__), "session", Session()), saved_tensors_hooks(_pack, _unpack):
        yield


class Session:
    """One forward pass.

    Attributes:
        running: what autograd has saved while calls were open, perhaps results of theirs: lists of `_Saved`, that of
            the innermost call last; None where no call is open.
        made: position of a result in autograd's graph -> a weak reference to its `Handle`.
        offloaded: weak references to the entries that were copied to the host, in the order of the copies.
    """

    def __init__(self):
        self.running, self.made, self.offloaded = [None], {}, []


def session():
    """The open `Session`, or None."""
    return process_state().memo(__name__).get("session")


def _pack(tensor):
    """The object that autograd saves in place of a tensor."""
    handle = handle_of(tensor) or _handle_of_copied(tensor)
    if handle is not None:
        return _Saved(handle)
    unsettled = session().running[-1]
    if unsettled is None or private.grad_node(tensor) is None:
        return tensor
    saved = _Saved(None, tensor)  # perhaps a result of the open call, not yet identified
    unsettled.append(saved)
    return saved


def _unpack(saved):
    return saved.read() if isinstance(saved, _Saved) else saved


def _handle_of_copied(tensor):
    """The `Handle` of the view whose contiguous copy an operator has just made, or None."""
    node = private.grad_node(tensor)
    if node is None or node.name() != "Contiguous":
        return None
    made_by, index = node.next_functions[0]
    if made_by is None:
        return None
    handle = session().made.get((str(made_by), index))  # the text of a node is unique
    return None if handle is None else handle()


def handle_of(tensor):
    """The `Handle` of a tensor that a `Keeper` produced, or None."""
    reference = private.get_user_data(tensor, _KEY)
    return None if reference is None else reference()


class Handle:
    """One result of a call that runs again when the backward pass reads it; other kinds of results override all.

    Args:
        call: the `Recomputation`.
        index: index of the result.
    """

    def __init__(self, call, index):
        self.call, self.index = call, index

    def expect(self):
        """Register one future reader."""
        self.call.expected += 1

    def read(self):
        """Return the value and release one reader."""
        return self.call.value(self.index)

    def release(self):
        """Release one reader without reading."""
        self.call.release()


class _Saved:
    """The object that autograd saves: a handle, or a tensor while its call is open or if the call didn't produce it."""

    def __init__(self, handle, tensor=None):
        self.handle, self.tensor = None, tensor
        self.is_read = False
        if handle is not None:
            self.settle(handle)

    def settle(self, handle):
        """Replace the tensor by a handle."""
        self.handle, self.tensor = handle, None
        handle.expect()

    def read(self):
        """Return the tensor."""
        if self.handle is None:
            return self.tensor
        if self.is_read:  # a second backward pass
            self.handle.expect()
        self.is_read = True
        return self.handle.read()

    def __del__(self):
        if self.handle is not None and not self.is_read:
            self.handle.release()


class Recomputed:
    """Wraps a function of tensors; the backward pass recomputes its results."""

    def __call__(self, function, *inputs):
        return kept(function, inputs, Recomputation)


def kept(function, inputs, kind):
    """Call a function of tensors; the backward pass restores its results.

    Args:
        function: function that returns a tensor, or a tuple or list of tensors.
        inputs: its arguments: tensors, and pytrees of tensors.
        kind: function of these two that returns an object with the method `handles`, such as `Recomputation`.
    """
    now = session()
    if now is None or not private.pynative_executor.grad_flag():
        return function(*inputs)
    call, unsettled = kind(function, inputs), []
    now.running.append(unsettled)
    try:
        result = function(*inputs)
    finally:
        now.running.pop()
    tensors = list(result) if isinstance(result, (tuple, list)) else [result]
    for handle, tensor in zip(call.handles(tensors), tensors):
        if isinstance(tensor, Parameter):  # returned unchanged: it outlives the session, and so would a handle
            continue
        tensor.kept_by = handle
        private.set_user_data(tensor, _KEY, ref(handle))
        node, index = str(private.grad_node(tensor)), private.output_index(tensor)
        now.made[node, index] = ref(handle)
        for saved in [each for each in unsettled if each.handle is None]:  # results that the call itself saved
            if private.output_index(saved.tensor) == index and str(private.grad_node(saved.tensor)) == node:
                saved.settle(handle)
    return result


class Recomputation:
    """A call that runs again when the backward pass reads one of its results.

    Args:
        function, inputs: function and arguments of the call.

    Attributes:
        expected: number of future readers; the last one frees the results.
    """

    def __init__(self, function, inputs):
        self.function, self.expected = function, 0
        self.inputs = tree_map(_as_input, inputs)
        self._results, self._is_over = None, False

    def handles(self, tensors):
        """A `Handle` for every result; the results are not stored."""
        return [Handle(self, index) for index in range(len(tensors))]

    def value(self, index):
        """Return one result and release one reader."""
        if self._results is None:
            self._run()
        result = self._results[index]
        self.release()
        return result

    def release(self):
        """Release one reader."""
        self.expected -= 1
        if self.expected <= 0:
            self._results = None

    def _run(self):
        if self._is_over:  # a second backward pass
            tree_map(lambda leaf: leaf.expect() if isinstance(leaf, Handle) else None, self.inputs)
        self._is_over = True
        inputs = tree_map(lambda leaf: leaf.read() if isinstance(leaf, Handle) else leaf, self.inputs)
        with private.no_grad():
            result = self.function(*inputs)
        many = isinstance(result, (tuple, list))
        self._results = [tensor.contiguous() for tensor in (result if many else (result,))]

    def __del__(self):
        if not self._is_over:
            tree_map(lambda leaf: leaf.release() if isinstance(leaf, Handle) else None, self.inputs)


def _as_input(leaf):
    """The object that a call stores for an input."""
    handle = handle_of(leaf) if isinstance(leaf, Tensor) else None
    if handle is None:
        return leaf
    handle.expect()
    return handle
