"""A launcher that starts, watches and ends processes as msrun does, with a scheduler that only sleeps."""

import argparse
import os
import subprocess
import sys
import time


def main():
    """Start all; the exit code is 1 where a worker has failed."""
    parser = argparse.ArgumentParser()
    for name in ("worker_num", "local_worker_num", "node_rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--log_dir")
    args, command = parser.parse_known_args()
    command = command[command.index("python3") :]
    first = args.node_rank * args.local_worker_num
    with open(os.path.join(args.log_dir, "scheduler.log"), "w") as log:
        scheduler = subprocess.Popen(["sleep", "600"], stderr=log, env={**os.environ, "MS_ROLE": "MS_SCHED"})
    workers = []
    for rank in range(first, first + args.local_worker_num):
        told = {"MS_ROLE": "MS_WORKER", "RANK_ID": rank, "MS_WORKER_NUM": args.worker_num}
        told = {name: str(value) for name, value in (told | {"MS_LOCAL_NUM": args.local_worker_num}).items()}
        with open(os.path.join(args.log_dir, f"worker_{rank}.log"), "w") as log:
            workers.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | told))
    running, failed = list(workers), None
    while running and failed is None:
        time.sleep(0.1)
        failed = next((worker for worker in running if worker.poll()), None)
        running = [worker for worker in running if worker.returncode is None]
    if failed is not None:
        print(f"Worker process {failed.pid} exit with exception. Error code: {failed.returncode}", flush=True)
    for process in (*running, scheduler):
        process.kill()
        process.wait()
    sys.exit(failed is not None)


if __name__ == "__main__":
    main()
