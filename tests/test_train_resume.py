"""A run that is killed at any moment continues with the same trace; full disks and damaged files lose little."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mlx_dspark

ROOT = Path(mlx_dspark.__file__).parent.parent
SETTINGS = """
layers = 1
rank = 8
gamma = 3
taps = [1, 3]
anchors = 4
max_length = 32
batch = 1
accumulate = 2
steps = 8
save_every = 2
valid_every = 4
valid_rows = 2
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data and settings for the small target."""
    folder = tmp_path_factory.mktemp("train")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"ids": rng.integers(2, 4000, 40).tolist()}) for _ in range(30)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    (folder / "train.toml").write_text(SETTINGS)
    return folder


def arguments(files, out, *more):
    return [sys.executable, "-m", "mlx_dspark.train", "--data", str(files / "data.jsonl"), "--config",
            str(files / "train.toml"), "--out", str(out), *more]


def environment():
    """The faster BLAS, on one thread: sums are in the same order every time."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "MLX_DSPARK_BLAS": "auto"}


def train(files, out, *more):
    return subprocess.run(arguments(files, out, *more), env=environment(), capture_output=True, text=True, timeout=120)


def killed(files, out, step, *more):
    """Start a run and kill it without warning as soon as its curve shows `step`."""
    process = subprocess.Popen(arguments(files, out, *more), env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
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
    from mlx_dspark.train.folder import replace_file

    path = tmp_path / "state"
    replace_file(path, lambda file: file.write(b"old"))

    def full(file):
        file.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(path, full)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["state"]
