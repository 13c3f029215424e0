"""A run that is killed at any moment continues with the same trace; full disks and damaged files lose little."""

import csv
import errno
import signal
import subprocess
import time

import pytest
from click.testing import CliRunner
from helpers import refused, start_training, training_arguments, training_files

from mlx_dspark.store import replace_file
from mlx_dspark.train.command import command

SETTINGS = """
batch = 1
steps = 40
valid_every = 20
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
    killed(files, out, 13)
    killed(files, out, 25, "--resume")
    done = train(files, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert trace(out) == trace(straight) and len(trace(out)) == 40
    assert trace(out, "valid.csv") == trace(straight, "valid.csv") and len(trace(out, "valid.csv")) == 3
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_a_run_is_not_overwritten_and_not_continued_with_other_settings(files, straight):
    arguments = training_arguments(files, straight)
    refused(CliRunner().invoke(command, arguments), "--resume continues it")
    refused(CliRunner().invoke(command, [*arguments, "--resume", "--lr", "0.1"]),
            "was trained with lr 0.0006, now it is 0.1")


def test_nothing_to_resume(files, tmp_path):
    refused(CliRunner().invoke(command, [*training_arguments(files, tmp_path / "none"), "--resume"]),
            "leave --resume out")


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
