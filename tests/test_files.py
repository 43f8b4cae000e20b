"""Files appear whole, or not at all."""

import os
import signal
import subprocess
import sys

import pytest

from mindformers_core.files import lock_folder, write_whole


def test_a_file_is_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_whole(path, "first")
    write_whole(str(path), b"second")
    assert path.read_bytes() == b"second"
    with pytest.raises(TypeError):
        write_whole(path, 3)
    monkeypatch.chdir(tmp_path)
    write_whole("b.txt", "here")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"a.txt": "second", "b.txt": "here"}


@pytest.mark.parametrize("given", ["nowhere/deep/a.svg", "nowhere/", "file/a.svg"])
def test_a_folder_that_there_is_not(tmp_path, given):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"' can't be written: there is no folder '.*': make it") as caught:
        write_whole(f"{tmp_path}/{given}", "")
    assert "unfinished" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="can't be written: it is a folder: give the path of a file in it"):
        write_whole(tmp_path, "")
    assert not any(tmp_path.iterdir())


def test_a_folder_is_one_process_alone(tmp_path):
    """As long as that lives: a killed one leaves a lock that says nothing."""
    code = "import sys; from mindformers_core.files import lock_folder; held = lock_folder(sys.argv[1]); input(1)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.read(1) == "1"
    with pytest.raises(BlockingIOError, match=rf"another run has this folder, and goes on \(process {holder.pid} on "):
        lock_folder(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with lock_folder(tmp_path), pytest.raises(BlockingIOError, match=rf"process {os.getpid()} on "):
        lock_folder(tmp_path)
    lock_folder(tmp_path).close()
