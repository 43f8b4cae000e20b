"""Fixtures that several test files share."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import mindspore as ms
import pytest
from support.launch import run_cases, run_ranks
from support.timings import (  # noqa: F401 (hooks of pytest)
    CASE,
    pytest_addoption,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_terminal_summary,
    remember_launches,
)

from mindformers_core.communication import init_distributed, shutdown

ms.set_context(runtime_num_threads=0, inter_op_parallel_num=1)  # threads that poll would take cores from launches
ms.runtime.launch_blocking()  # as init_distributed() does on CPU: without it PyNative takes seven times as long there


@pytest.fixture
def rank_0_of_4():
    """A world of 4 ranks in which nothing is sent."""
    shutdown()
    init_distributed("fake", world_size=4)
    yield
    shutdown()


@pytest.fixture
def one_rank():
    """A world of this process alone."""
    shutdown()
    init_distributed()
    yield
    shutdown()


def script_of(item):
    """The script and number of ranks of `@pytest.mark.ranks("dead_rank.py", 6)`, or ()."""
    marker = item.get_closest_marker("ranks")
    return marker.args if marker else ()


def pytest_ignore_collect(collection_path, config):
    """Where only tests that start ranks, or only long ones, are asked for, a file without any isn't imported."""
    asked, *_ = config.getoption("markexpr").split() or [""]
    is_asked = asked in ("ranks", "long") and collection_path.name.startswith("test_")
    return True if is_asked and f"mark.{asked}" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items):
    """Tests that look at launches come last."""
    items.sort(key=lambda item: item.path.name == "test_ranks.py" or bool(script_of(item)) or does_wait(item))


def does_wait(item):
    """Whether a test has `@pytest.mark.waits`."""
    return item.get_closest_marker("waits") is not None


def seconds_of(test, /, **arguments):
    """Run a test. Returns how long it took."""
    start = time.monotonic()
    test(**arguments)
    return time.monotonic() - start


@pytest.fixture(scope="module", autouse=True)
def little_for_the_garbage_collector():
    """MindSpore keeps what it compiles, pytest all tests: full collections, and the search of `shard()` for optimizers
    among all objects, would take longer from file to file, up to half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def launches(request, tmp_path_factory):
    """Launches that the selected tests look at, as futures: they begin before the first test, and run beside them all.

    By world size those of its selected cases: that of two ranks beside those of more, which come one after the other.
    By name the scripts of tests with `@pytest.mark.ranks(script, world_size)`, beside these: ranks die in them, so that
    others wait. By the test's own id those with `@pytest.mark.waits`, one after the other, too.
    """
    cases, scripts, waiting, stop = {}, {}, {}, threading.Event()
    for item in request.session.items:
        if does_wait(item):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            waiting[item.nodeid] = item.obj, params | {"tmp_path": tmp_path_factory.mktemp("waiting")}
        if item.originalname == "test_case" and item.path.name == "test_ranks.py":
            cases.setdefault(item.callspec.params["world_size"], []).append(item.callspec.params["case"])
        elif script_of(item):
            script, world_size = script_of(item)
            scripts[script] = world_size
    with ExitStack() as stack:
        of_two, of_more, beside, waits = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(4))
        pools = {size: of_two if size == 2 else of_more for size in sorted(cases)}
        futures = {size: pool.submit(run_cases, size, cases[size], stop=stop) for size, pool in pools.items()}
        for script, world_size in scripts.items():
            futures[script] = beside.submit(run_ranks, world_size, f"tests/ranks/{script}", timeout=150, stop=stop)
        for name, (test, arguments) in waiting.items():
            futures[name] = waits.submit(seconds_of, test, **arguments)
        yield futures
        done = {size: futures[size].result() for size in cases if futures[size].done()}
        remember_launches(request.config, done)
        stop.set()  # pytest was interrupted, or ends at the first failure
        for future in futures.values():
            future.cancel()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that `waits` has run beside others, with a `tmp_path` of its own: what it came to."""
    if does_wait(pyfuncitem):
        seconds = pyfuncitem.funcargs["launches"][pyfuncitem.nodeid].result()
        pyfuncitem.user_properties.append((CASE, (seconds, 0.0)))
        return True
    return None
