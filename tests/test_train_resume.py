"""A run that is killed at any moment continues with the same trace; full disks and damaged files lose little."""

import csv
import errno
import signal
import subprocess
import time

import pytest
from helpers import start_training, training_files

from mlx_dspark.store import replace_file

SETTINGS = """
batch = 1
steps = 8
valid_every = 4
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return training_files(tmp_path_factory.mktemp("train"), SETTINGS)


def start(files, out, *more):
    """A run with the faster BLAS."""
    return start_training(files, out, *more, environment={"MLX_DSPARK_BLAS": "auto"})


def train(files, out, *more):
    """A run to its end: return code, stdout, stderr."""
    with start(files, out, *more) as process:
        try:
            stdout, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def killed(files, out, step, *more):
    """Start a run and kill it without warning as soon as its curve shows `step`."""
    with start(files, out, *more) as process:
        until = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < until:
            if any(row["step"] == str(step) for row in trace(out)):
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"


def trace(out, name="curve.csv"):
    """The rows of a curve without the seconds."""
    path = out / name
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def straight(files, tmp_path_factory):
    """A run that nobody disturbs."""
    out = tmp_path_factory.mktemp("straight") / "draft"
    done = train(files, out)
    assert done.returncode == 0, done.stderr
    return out


def test_a_killed_run_continues_with_the_same_trace(files, straight, tmp_path):
    out = tmp_path / "draft"
    killed(files, out, 3)
    killed(files, out, 5, "--resume")
    done = train(files, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert trace(out) == trace(straight) and len(trace(out)) == 8
    assert trace(out, "valid.csv") == trace(straight, "valid.csv") and len(trace(out, "valid.csv")) == 3
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_a_run_is_not_overwritten_and_not_continued_with_other_settings(files, straight):
    again = train(files, straight)
    assert (again.returncode, again.stdout) == (1, "") and "--resume continues it" in again.stderr
    other = train(files, straight, "--resume", "--lr", "0.1")
    assert other.returncode == 1 and "was trained with lr 0.0006, now it is 0.1" in other.stderr
    for done in (again, other):
        assert len(done.stderr.splitlines()) == 1


def test_nothing_to_resume(files, tmp_path):
    done = train(files, tmp_path / "none", "--resume")
    assert done.returncode == 1 and "leave --resume out" in done.stderr


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "state"
    replace_file(path, lambda file: file.write(b"old"))

    def full(file):
        file.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(path, full)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["state"]
