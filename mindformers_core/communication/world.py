"""This process's place among all processes, and the one place where the communication backend is chosen.

Process-wide communication state is process-wide by nature: MindSpore initialises its own once for a process. `_PROCESS`
below is the one module-level holder of ours, for all modules of this package. A thread can have a state of its own
(`rank_of`).
"""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident

import mindspore as ms
from mindspore import communication as ms_communication, ops

from mindformers_core.hangs.report import LEFT_BEHIND
from mindformers_core.hangs.watcher import Watch
from mindformers_core.hints import nearest
from mindformers_core.program.observer import Instrumentation, Observer

BACKENDS = ("native", "cpu", "fake")
_LAUNCHERS = (  # (name, a variable that it always sets, that of the rank, that of the number of ranks)
    ("msrun", "MS_ROLE", "RANK_ID", "MS_WORKER_NUM"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE"),
)
_THIS_HOST = ("127.0.0.1", "localhost", "::1")  # an address at which a scheduler has all ranks on its own host
_AFTER_REPORT = 6  # seconds that ranks may take to report a hang
_NO_THREADS = {"runtime_num_threads": 0, "inter_op_parallel_num": 1}  # that run kernels; one that runs graphs


@dataclass(frozen=True)
class Launch:
    """Rank and number of ranks in the launcher's environment; `rank` None where the cluster assigns it (multi-node)."""

    launcher: str
    rank: int | None
    size: int


@dataclass(frozen=True)
class World:
    """All processes of a run, seen from this one.

    Attributes:
        rank: global rank of this process, from 0.
        size: number of processes.
        backend: `"native"` (HCCL, NCCL), `"cpu"` (MCCL), `"fake"` (a dry run: shapes only) or `"simulated"` (a thread
            of this process).
        device_target: `"Ascend"`, `"GPU"` or `"CPU"`.
        launcher: `"msrun"`, `"mpirun"`, `"none"` (a single process), `"fake"` or `"simulated"`.
        group: MindSpore's name for the group of all ranks; None where nothing communicates.
        ranks: the `SimulatedRanks` that this rank is one of, or None.
    """

    rank: int
    size: int
    backend: str
    device_target: str
    launcher: str
    group: str | None
    ranks: object = None


class _ProcessState:
    """State of a process: the world, the hang watcher, the open counters, the observer, and the memos of modules."""

    has_writes = False  # of all threads: whether a distributed tensor was ever changed in place

    def __init__(self):
        self._memos = {}  # owner -> its memo
        self.of_threads = {}  # number of a thread that simulates a rank -> the state of that rank
        self.forget()

    @property
    def is_simulated(self):
        """Whether this is the state of a simulated rank, a thread among those of other ranks."""
        return self.world is not None and self.world.ranks is not None

    def forget(self):
        """Reset to the state before `init_distributed()`."""
        self.world = None
        self.watch = None  # the `Watch` of a rank among several, else None
        self.counters = []  # the `count_collectives` blocks that are open
        self.device_model = None  # by which eager calls plan; None: that of the device
        self.batch_axes = frozenset()  # axes over which eager calls keep tensors cut
        self.calls = self.memo(None)  # kind of eager call -> its program, which depends on rank and device model
        # what changes programs, and what receives that which they compute
        self.instrumentation, self.observer = Instrumentation(), Observer()
        for memo in self._memos.values():
            memo.clear()

    def memo(self, owner):
        """The dict in which `owner`, such as a module's `__name__`, stores values that are valid for this world only.

        All calls return the same dict, so a module can hold a reference to it; `shutdown()` empties it.
        """
        return self._memos.setdefault(owner, {})


_PROCESS = _ProcessState()


def process_state():
    """The communication state of this process, or of this simulated rank, for modules of this package."""
    return _PROCESS.of_threads.get(get_ident(), _PROCESS) if _PROCESS.of_threads else _PROCESS


def stands_for_another():
    """Whether this thread has a communication state of its own: it is a rank of another world (`rank_of`)."""
    return process_state() is not _PROCESS


@contextmanager
def rank_of(size, rank, ranks=None, device_target=None):
    """While open, this thread is a rank of another world, with a communication state of its own.

    Args:
        size, rank: number of ranks, and this one.
        ranks: the `SimulatedRanks` of the world; None for a dry run of one rank.
        device_target: of the devices that plans are made for. Default: this process's.
    """
    backend, thread = "simulated" if ranks else "fake", get_ident()
    state, others, before = _ProcessState(), _PROCESS.of_threads, process_state()
    device_target = device_target or ms.get_context("device_target")
    state.world = World(rank, size, backend, device_target, backend, None, ranks)
    others[thread] = state
    try:
        yield state
    finally:
        state.forget()
        del others[thread]
        others |= {} if before is _PROCESS else {thread: before}


def world():
    """The `World` of this process.

    Raises:
        RuntimeError: `init_distributed()` was not called yet.
    """
    if process_state().world is None:
        raise RuntimeError("communication is not initialised: call init_distributed() first")
    return process_state().world


def checks_collectives():
    """Whether ranks compare what they communicate: `init_distributed(check_collectives=…)`, and simulated ranks."""
    watch = process_state().watch
    return process_state().is_simulated or watch is not None and watch.recorder.check


def init_distributed(backend=None, world_size=None, rank=None, timeout=60, check_collectives=None):
    """Join the other processes of this run; every process calls this once, before it computes anything.

    Reads the environment variables of `msrun` or `mpirun`; without a launcher the world is this one process. On CPU,
    MindSpore is switched to blocking launches, which make collectives several times faster and raise errors at the
    call that fails, and its thread pools get this rank's share of the cores (`_share_cores`).

    Args:
        backend: None chooses by device target; `"fake"` is a dry run of `world_size` ranks in this one process.
        world_size: number of ranks: needed for `"fake"`, otherwise checked against the launcher's.
        rank: this process's rank in a dry run (default 0); otherwise checked against the launcher's.
        timeout: the deadline in seconds: when a rank has waited so long in a collective, or for other ranks of this
            host to start (then at least 30 s), all ranks end with one report of where they are (see docs/debugging.md).
            `msrun`'s scheduler ends all ranks 6 s after a rank has given no sign of life for so long. On CPU a
            collective ends after 30 s at the latest (fixed in MindSpore), with the same report; HCCL has its own limit
            (`HCCL_EXEC_TIMEOUT`).
        check_collectives: whether a rank compares kind, shape, dtype and group of every collective with those of its
            neighbours in the group before it waits, so that a difference is an error at once. Default: on CPU.

    Returns:
        The `World`. Calling again with the same arguments returns the same one.

    Raises:
        ValueError: an unknown backend, a number of ranks that the launcher didn't start, or a timeout that isn't
            above 0.
        RuntimeError: already initialised differently, or the cluster couldn't be formed.
    """
    if backend is not None and backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"unknown backend {backend!r}: choose one of {known}, or None{nearest(backend, BACKENDS)}")
    if not timeout > 0:
        raise ValueError(f"init_distributed(timeout={timeout!r}): the deadline of collectives is above 0 seconds")
    if backend != "fake" and os.environ.get("MS_ROLE") == "MS_SCHED":
        _serve_as_scheduler(timeout)
    launch = _fake_launch(world_size, rank) if backend == "fake" else read_launch(os.environ)
    device_target = ms.get_context("device_target")
    backend = backend or ("cpu" if device_target == "CPU" else "native")
    _check_launch(launch, backend, device_target, world_size, rank)
    if process_state().world is not None:
        return _same_world(launch, backend)
    if device_target == "CPU":
        ms.runtime.launch_blocking()
    group, watch = None, None
    check = backend == "cpu" if check_collectives is None else check_collectives
    if backend != "fake" and launch.size > 1:
        if device_target == "CPU":
            _share_cores(launch.size)
        if launch.rank is not None and _address().rpartition(":")[0] in _THIS_HOST:
            watch = Watch(_job_name(), launch.rank, launch.size, timeout, check)
            watch.await_ranks(f"the launch at {_address()}")
        group = _join()
        launch = Launch(launch.launcher, ms_communication.get_rank(), ms_communication.get_group_size())
    state = process_state()
    state.world = World(launch.rank or 0, launch.size, backend, device_target, launch.launcher, group)
    if group is not None:
        state.watch = watch or Watch(_job_name(), launch.rank, launch.size, timeout, check)
        state.watch.hear_errors()
        if backend == "cpu":  # all ranks have joined the watch before the first one can leave
            ops.AllReduce(group=group)(ms.Tensor(0.0, ms.float32)).asnumpy()
    return state.world


def shutdown():
    """Leave the run: release the world, its groups and collectives, and all memos. No effect without a world."""
    state = process_state()
    if state.watch is not None:
        state.watch.close()
    if state.world is not None and state.world.group is not None:
        ms_communication.release()
    state.forget()


def read_launch(environ):
    """The `Launch` that the environment `environ` (a mapping) describes.

    Raises:
        ValueError: variables of a launcher that are incomplete or contradict each other.
    """
    if environ.get("MS_ROLE", "MS_WORKER") != "MS_WORKER":
        raise ValueError(f"MS_ROLE={environ['MS_ROLE']}: a process that computes is an MS_WORKER; start with msrun")
    for launcher, sign, rank_variable, size_variable in _LAUNCHERS:
        if sign in environ:
            known = launcher != "msrun" or rank_variable in environ
            rank = _number(environ, rank_variable, launcher) if known else None
            size = _number(environ, size_variable, launcher)
            if size < 1 or (known and rank >= size):
                raise ValueError(f"the environment of {launcher} says rank {rank} of {size}")
            return Launch(launcher, rank, size)
    return Launch("none", 0, 1)


def _number(environ, variable, launcher):
    value = environ.get(variable, "")
    if not value.isdigit():
        left = f" ({LEFT_BEHIND})" if launcher == "msrun" else ""
        raise ValueError(f"{variable}={value!r} in the environment of {launcher}: should be a whole number{left}")
    return int(value)


def _fake_launch(world_size, rank):
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"init_distributed('fake', world_size={world_size!r}): give the number of ranks, at least 1")
    rank = 0 if rank is None else rank
    if rank not in range(world_size):
        raise ValueError(f"init_distributed('fake', rank={rank!r}): a rank of {world_size} is 0 to {world_size - 1}")
    return Launch("fake", rank, world_size)


def _check_launch(launch, backend, device_target, world_size, rank):
    if world_size is not None and world_size != launch.size:
        raise ValueError(
            f"{world_size} ranks are asked for, but {launch.size} were started (launcher: {launch.launcher}): "
            f"start with msrun --worker_num={world_size} --local_worker_num={world_size} …, or ask for {launch.size}"
        )
    if rank is not None and launch.rank is not None and rank != launch.rank:
        raise ValueError(f"rank {rank} is asked for, but {launch.launcher} made this process rank {launch.rank}")
    if backend != "fake" and (backend == "cpu") != (device_target == "CPU"):
        fitting = "cpu" if device_target == "CPU" else "native"
        raise ValueError(f"backend '{backend}' can't run on device target {device_target}: use '{fitting}', or None")
    if launch.launcher == "mpirun" and backend == "cpu" and launch.size > 1:
        raise ValueError(
            "mpirun can't start CPU ranks: MindSpore's CPU collectives need its own scheduler. "
            f"Start with msrun --worker_num={launch.size} --local_worker_num={launch.size} …"
        )


def _same_world(launch, backend):
    known = process_state().world
    if (launch.size, backend) != (known.size, known.backend) or launch.rank not in (None, known.rank):
        raise RuntimeError(
            f"already initialised as rank {known.rank} of {known.size} with backend '{known.backend}', now asked to be "
            f"rank {launch.rank} of {launch.size} with '{backend}': call shutdown() first"
        )
    return known


def _job_name():
    """The name by which the ranks of this host find each other: the scheduler's address, or the launcher's process."""
    return f"{os.getuid()}.{_address() or os.getppid()}"


def _address():
    """The scheduler's address; "" where it isn't known."""
    address = [os.environ.get(variable) for variable in ("MS_SCHED_HOST", "MS_SCHED_PORT")]
    return ":".join(address) if all(address) else ""


def _serve_as_scheduler(timeout):
    """Run as msrun's scheduler, a process with the same script as the ranks; exits when all ranks have ended."""
    print(f"this process is msrun's scheduler at {_address()}, and computes nothing ({LEFT_BEHIND})", flush=True)
    _quicken_start()
    # later than the ranks' own deadline, so that they report it first
    os.environ.setdefault("MS_NODE_TIMEOUT", str(int(timeout) + _AFTER_REPORT))
    ms.set_device("CPU")
    ms_communication.init()
    sys.exit(0)


def compute_in_one_thread():
    """Have MindSpore run kernels in the calling thread, one after the other. Has to run before its threads start."""
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    ms.set_context(**_NO_THREADS)


def _share_cores(ranks):
    """Limit MindSpore's thread pools to this process's share of the cores, as if all ranks were on this host.

    By default each process has a thread for every core. Idle threads poll (`sched_yield`), and so does a caller that
    waits for them: with more threads than cores, polling takes most of the time. A rank with one core gets no such
    thread: kernels run in the calling thread. The user's `mindspore.device_context.cpu.op_tuning.threads_num()` and
    `mindspore.runtime.dispatch_threads_num()` have priority. Has to run before MindSpore starts its threads.
    """
    own, launcher = (len(os.sched_getaffinity(process)) for process in (0, os.getppid()))
    share = own if own < launcher else own // ranks  # fewer than the launcher's: msrun has bound this rank to its own
    ms.set_context(**({"runtime_num_threads": share} if share > 1 else _NO_THREADS))


def _join():
    """Initialise MindSpore's communication; returns its name for the group of all ranks."""
    _quicken_start()
    try:
        ms_communication.init()
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks couldn't find each other through the scheduler at {_address()}: is the port in use by another "
            "run, or a rank dead? The launcher's log folder has every rank's log"
        ) from error
    return ms_communication.GlobalComm.WORLD_COMM_GROUP


def _quicken_start():
    """Set the polling interval of the cluster's members to 1 to 2 s (default 3 to 5), which saves about 5 s."""
    os.environ.setdefault("MS_RETRY_INTERVAL_LOWER", "1")
    os.environ.setdefault("MS_RETRY_INTERVAL_UPPER", "2")
