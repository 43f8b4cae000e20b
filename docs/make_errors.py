"""Makes docs/errors.md: runs every case of `error_cases.yaml` and writes down what a user sees.

    python docs/make_errors.py            all cases, also those that start ranks: about three minutes on 2 cores

Everything runs in a folder that looks like a fresh clone: links to this one, no `.venv`.
"""

import io
import json
import linecache
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import yaml

__all__ = ["Case", "PAGE", "load_cases", "page", "problems", "run_cases"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
LINKS = ("mindformers_core", "configs", "scripts", "setup.py", "pyproject.toml")
COMMAND_LINE = ["python", "-m", "mindformers_core"]
TIMEOUT_SECONDS = 150
AT_A_TIME = 2  # processes with cases
PORT = "8118"  # stands in commands and on the page for a port on which somebody listens
# What a person looks for at the end of a run; tracebacks and progress before it are left out.
TELLING = re.compile(r"(error|warning|note|usage|\w+Error|\w+\.sh|python -m mindformers_core.*): ")
HEAD = """# What errors look like

Made by `python docs/make_errors.py` from real runs; `tests/test_errors_page.py` runs the quick ones again and compares.
Of a run's output the page shows the lines that tell what is wrong; where ranks fail, progress and a traceback stand
before them. A wrong recipe or command is reported on stderr, without a traceback, and ends with exit code 2.

Python snippets follow this beginning; messages call the file that it lies in `beginning.py`, and theirs `snippet.py`.
The fake backend plays rank 0 of 4 in one process, and its errors are those of a real run.

"""


@dataclass(frozen=True)
class Case:
    """One wrong input; the fields are explained in `error_cases.yaml`."""

    title: str
    names: list
    fix: str
    python: str = ""
    bash: str = ""
    runs: str = "together"
    exit_code: int = 2

    @property
    def code(self):
        """What was done."""
        return (self.python or self.bash).strip()


def main():
    """Run all cases and write the page; fails where a case isn't what its entry says."""
    prelude, sections = load_cases()
    cases = [case for entries in sections.values() for case in entries]
    results = run_cases(prelude, cases)
    wrong = [problem for case in cases for problem in problems(case, *results[case.title])]
    if wrong:
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(prelude, sections, results), encoding="utf-8")
    print(f"{len(cases)} cases: {PAGE}")


def load_cases():
    """`(prelude, {section: [Case]})`."""
    table = yaml.safe_load((ROOT / "docs" / "error_cases.yaml").read_text(encoding="utf-8"))
    return table["prelude"], {name: [Case(**entry) for entry in entries] for name, entries in table["sections"].items()}


def run_cases(prelude, cases):
    """`{title: (message, exit code)}`; a Python case has the exit code None."""
    by_kind = {kind: [case for case in cases if case.runs == kind] for kind in {case.runs: None for case in cases}}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        several = [
            pool.submit(run_together, beginning, by_kind.pop(kind))
            for kind, beginning in (("together", prelude), ("one_rank", ""))
            if kind in by_kind
        ]
        alone = {case.title: pool.submit(run_alone, case.bash) for found in by_kind.values() for case in found}
        results = {title: result for group in several for title, result in group.result().items()}
        return results | {title: result.result() for title, result in alone.items()}


def problems(case, message, exit_code):
    """What is wrong with what a run of `case` gave, as a list of texts."""
    found = [f"{case.title}: '{name}' is not in: {message}" for name in case.names if name not in message]
    if case.bash and exit_code != case.exit_code:
        found.append(f"{case.title}: exit code {exit_code}, not {case.exit_code}: {message}")
    return found


def page(prelude, sections, results):
    """The text of the page."""
    parts = [HEAD, fenced("python", prelude)]
    for name, cases in sections.items():
        parts.append(f"\n## {name}\n")
        for case in cases:
            parts.append(entry(case, results[case.title][0]))
    return "".join(parts)


def entry(case, message):
    """A case's part of the page."""
    done = fenced("python" if case.python else "bash", case.code)
    return f"\n### {case.title}\n\n{done}\n{fenced('text', message)}\n{case.fix}\n"


def fenced(language, text):
    """A Markdown code block."""
    return f"```{language}\n{text.strip()}\n```\n"


def run_together(prelude, cases):
    """Run cases one after the other in one new process; results as `run_cases`."""
    given = {"prelude": prelude, "cases": [[case.title, case.python, case.bash] for case in cases]}
    with fresh_clone() as folder:
        command = [sys.executable, Path(__file__).resolve(), "--together"]
        done = run(command, folder, input=json.dumps(given), check=True)
        results = json.loads(done.stdout.splitlines()[-1])
        return {title: (normalised(message, folder), exit_code) for title, (message, exit_code) in results.items()}


def together_process():
    """The other side of `run_together`: cases from stdin, results as the last line of stdout."""
    given = json.load(sys.stdin)
    names = {"__name__": "snippet"}
    execute("beginning.py", given["prelude"], names)
    results = {}
    for title, snippet, command in given["cases"]:
        results[title] = (snippet_message(snippet, dict(names)), None) if snippet else command_line(command)
    print("\n" + json.dumps(results))


def snippet_message(snippet, names):
    """The last lines of the traceback that a snippet ends with, or the warnings that it logs."""
    warnings, logger = io.StringIO(), logging.getLogger("mindformers_core")
    handler = logging.StreamHandler(warnings)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger.addHandler(handler)
    try:
        execute("snippet.py", snippet, names)
    except Exception as error:  # whatever a snippet raises is its result
        return "".join(traceback.format_exception_only(error)).strip()
    finally:
        logger.removeHandler(handler)
    return warnings.getvalue().strip() or "no error"


def execute(name, source, names):
    """Run Python code that lies in a file, since messages name its lines, and `ms.jit` reads it."""
    file = Path(name).resolve()
    file.write_text(source, encoding="utf-8")
    linecache.checkcache(str(file))
    exec(compile(source, file, "exec"), names)


def command_line(command):
    """`python -m mindformers_core …` without a new process; `(telling lines, exit code)`."""
    from mindformers_core.commands.command_line import main as train_or_compare

    words = shlex.split(command)
    assert words[:3] == COMMAND_LINE, command
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            exit_code = train_or_compare(words[3:])
        except SystemExit as stop:  # argparse
            exit_code = stop.code
    return telling_lines(output.getvalue()), exit_code


def run_alone(command):
    """Run a shell command; `(telling lines, exit code)`."""
    with fresh_clone() as folder, socket.socket() as taken:
        (folder / "python3.13").write_text("#!/bin/sh\necho 3.13\n")
        (folder / "python3.13").chmod(0o755)
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        done = run(["bash", "-c", command.replace(PORT, port)], folder, **streams)
        return normalised(telling_lines(done.stdout).replace(port, PORT), folder), done.returncode


@contextmanager
def fresh_clone():
    """A new folder with links to what a clone of this one has; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="errors_") as name:
        folder = Path(name).resolve()
        for link in LINKS:
            (folder / link).symlink_to(ROOT / link)
        yield folder


def run(command, folder, **options):
    """Run a command in a folder, and catch what it prints."""
    settings = {"env": environment(folder), "cwd": folder, "timeout": TIMEOUT_SECONDS}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, **settings, **options)


def environment(folder):
    """Ours, with this Python first on PATH and the package of `folder`."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    return {**os.environ, "GLOG_v": "3", "PATH": path, "PYTHONPATH": str(folder)}


def telling_lines(output):
    """The lines that say what is wrong, with those that continue them, each once; not what caused another error."""
    kept, telling = [], False
    for line in output.splitlines():
        ends = not line or line.startswith(("Traceback", "---", "["))
        telling = bool(TELLING.match(line)) or (telling and not ends)
        if line.startswith("The above exception was the direct cause"):
            kept.clear()
        if telling and line not in kept:
            kept.append(line)
    return "\n".join(kept)


def normalised(text, folder):
    """`text` without what differs from run to run and from machine to machine."""
    text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    text = re.sub(r"worker \d+ ended", "worker 0 ended", text)  # whichever the launch saw first
    return re.sub(r"\b\d+ is free", "40000 is free", text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--together"]:
        together_process()
    else:
        main()
