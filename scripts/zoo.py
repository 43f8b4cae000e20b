"""Verify the models of other libraries, made small: mindone.transformers, mindcv, MindSpore Transformers 1.3.

    PYTHONPATH=<checkout>:<folder with the packages> python scripts/zoo.py mindone mindcv --mesh 2 2 --out zoo.jsonl

Each model is built from small numbers, differentiated on one card, and then compared by `verify()` on a mesh, the batch
cut over `dp`, and with a second axis the weights of dense layers over `tp`. Each has a process of its own, a limit of
time and of memory. What can't be built or doesn't run on one card is counted apart. Nothing of this is a test.
"""

import argparse
import inspect
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor

from mindformers_core import DeviceMesh, explain, shard, verify
from mindformers_core.capture.traced import CaptureError
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.program.structure import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parent))
from zoo_kernels import cpu_kernels  # noqa: E402
from zoo_models import LIBRARIES  # noqa: E402

ROWS = r"o_proj|out_proj|down_proj|wo|fc2|c_proj|w2|dense_4h_to_h|output\.dense|lin2"  # whose inputs are cut over tp
LIMITS = {"seconds": 240, "one card": 60, "bytes": 2 << 30}  # of a model's process; seconds of CPU time
MODES = ("verified", "rounding", "eagerly", "planned", "failed", "too large", "not built", "not on one card")
RAN, RIGHT = MODES[:6], MODES[:3]  # on one card; without a fault


def _fill(net):
    """Give the Parameters numbers that are small and not equal."""
    draw = np.random.default_rng(1)
    for parameter in net.get_parameters():
        if parameter.is_floating_point():
            kept = parameter.asnumpy() if parameter.ndim < 2 else 0
            numbers = kept + draw.standard_normal(parameter.shape) * 0.1
            parameter.set_data(Tensor(np.abs(numbers) if "variance" in parameter.name else numbers, parameter.dtype))


def plan_for(net, given, with_tp):
    """The batch cut over `dp`, and with a second axis the weights of dense layers over `tp`."""
    args, kwargs = given
    names = list(inspect.signature(net.construct).parameters)
    named = dict(zip(names, args)) | kwargs
    plan = {"": {"input": {name: layout("dp") for name, value in named.items() if isinstance(value, Tensor)}}}
    for path, cell in net.cells_and_names():
        weight = cell._params.get("weight")
        if with_tp and path and weight is not None and type(cell).__name__ in ("Dense", "Linear"):
            dim = 1 if re.search(rf"({ROWS})$", path) else 0
            if weight.shape[dim] % 2 == 0:
                plan[path] = {"weight": {"weight": layout("tp", None) if dim == 0 else layout(None, "tp")}}
    return plan


def one_card(net, args, kwargs):
    """Forward and gradient on one card."""
    weights = net.trainable_params()

    def loss(*args, **kwargs):
        results = tree_leaves(net(*args, **kwargs), Tensor)
        return sum(each.astype(ms.float32).mean() for each in results if each.is_floating_point())

    return ms.value_and_grad(loss, None, weights)(*args, **kwargs)[0].asnumpy()


def first_line(error):
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def planned(net, mesh, plan, args, kwargs):
    """Capture, propagate and generate the program of rank 0; nothing is computed."""
    with rank_of(mesh.size, 0):
        batch = mesh.size_of("dp") if hasattr(mesh, "size_of") else mesh.shape[0]
        parts = tree_map(lambda x: x[: len(x) // batch] if isinstance(x, Tensor) else x, (args, kwargs))
        explain(shard(net, mesh, plan=plan), *parts[0], **parts[1])


def attempt(library, make, mesh, write, only_plan=False):
    """Try one model in this process; `write` takes (verdict, text)."""
    ms.set_seed(0)
    try:
        net, args, kwargs = make()
        net.set_train(library != "mindone")  # where dropouts draw, also with probability 0
        _fill(net)
    except Exception as error:
        return write("not built", first_line(error))
    ms.runtime.launch_blocking()
    start = time.process_time()
    try:
        value = one_card(net, args, kwargs)
        assert np.isfinite(value), "a result that isn't finite"
    except Exception as error:
        return write("not on one card", first_line(error))
    if time.process_time() - start > LIMITS["one card"]:
        return write("not on one card", "too long")
    write("too large", f"more than {LIMITS['seconds']} s of CPU time, or {LIMITS['bytes'] >> 30} GiB")
    eager = []
    try:
        plan = plan_for(net, (args, kwargs), len(mesh) > 1)
        mesh = DeviceMesh(mesh, ("dp", "tp")[: len(mesh)])
        if only_plan:
            planned(net, mesh, plan, args, kwargs)
            return write("planned", "")
        while True:
            try:
                check = verify(net, mesh, *args, plan=plan, **kwargs)
                break
            except CaptureError as error:
                found = re.match(r"in (?:Cell '([^']+)'|the root Cell)", str(error))
                if "Mark the Cell" not in str(error) or not found or (found[1] or "") in eager:
                    raise
                eager.append(found[1] or "")  # as a user does who follows the message
                plan[eager[-1]] = plan.get(eager[-1], {}) | {"eager": True}
    except Exception as error:
        if os.environ.get("ZOO_TRACEBACK"):
            import traceback

            traceback.print_exc()
        return write("failed", first_line(error))
    report = check.report()
    verdict = "failed" if check.faults else "eagerly" if eager else "verified"
    if "rounding" in report.partition("\n")[0]:
        verdict = "rounding"
    return write(verdict, report if check.faults else report.partition("\n")[2])


def in_process(library, make, mesh, only_plan):
    """`(verdict, text)` of a model, tried in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            with cpu_kernels():
                attempt(
                    library, make, mesh, lambda *said: os.write(write, (json.dumps(said) + "\n").encode()), only_plan
                )
        finally:
            os._exit(0)
    os.close(write)
    process = psutil.Process(child)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        try:
            is_over = sum(process.cpu_times()[:2]) > LIMITS["seconds"] or process.memory_info().rss > LIMITS["bytes"]
        except psutil.NoSuchProcess:
            continue
        if is_over:
            process.kill()
        time.sleep(0.2)
    with os.fdopen(read) as said:
        lines = said.readlines()
    if not lines:
        return "not on one card", "too long or too large, or killed"
    return tuple(json.loads(lines[-1]))


def table(rows):
    """How many models of a library have which verdict, and the failures by their texts."""
    counts = Counter((row["library"], tuple(row["mesh"]), row["verdict"]) for row in rows)
    lines = []
    for library, mesh in sorted({key[:2] for key in counts}):
        each = [f"{counts[library, mesh, mode]} {mode}" for mode in MODES if counts[library, mesh, mode]]
        ran, right = (sum(counts[library, mesh, mode] for mode in modes) for modes in (RAN, RIGHT))
        lines.append(f"{library} on {' x '.join(map(str, mesh))}: {right} of {ran} verified; {', '.join(each)}")
    for row in sorted(rows, key=lambda row: row["verdict"]):
        if row["verdict"] in ("failed", "rounding", "too large"):
            lines.append(f"{row['library']:8} {row['model']:24} {row['verdict']:9} {row['text'][:300]}")
    return "\n".join(lines)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", choices=LIBRARIES)
    parser.add_argument("--mesh", nargs="+", type=int, default=[2])
    parser.add_argument("--only", default="", help="a regular expression for the names of models")
    parser.add_argument("--again", nargs="+", default=[], help="files of results: leaves out what was verified there")
    parser.add_argument("--table", action="store_true", help="print the last verdicts of --again as a table")
    parser.add_argument("--out", help="a file to which the results are added")
    parser.add_argument("--plan", action="store_true", help="only plan rank 0's program: nothing is compared")
    given = parser.parse_args()
    seen = [json.loads(line) for file in given.again for line in Path(file).read_text().splitlines()]
    if given.table:
        last = {(row["library"], row["model"], *row["mesh"]): row for row in seen if row["library"] in given.libraries}
        return print(table(last.values()))
    rows, verified = [], {(row["library"], row["model"]) for row in seen if row["verdict"] in RIGHT}
    for library in given.libraries:
        for model, make in LIBRARIES[library]().items():
            if not re.search(given.only, model) or (library, model) in verified:
                continue
            start = time.time()
            verdict, text = in_process(library, make, tuple(given.mesh), given.plan)
            row = {"library": library, "model": model, "mesh": given.mesh, "verdict": verdict, "text": text}
            rows.append(row)
            print(f"{library} {model}: {verdict} {time.time() - start:.0f} s {text[:200]!r}", flush=True)
            if given.out:
                with open(given.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
