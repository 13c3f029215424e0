"""Several processes: the same losses as one, one writer, and no training on different data."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_dspark
from mlx_dspark.commands import Notes
from mlx_dspark.train.command import make_run
from mlx_dspark.train.config import read_config
from mlx_dspark.train.trainer import Trainer

ROOT = Path(mlx_dspark.__file__).parent.parent
SETTINGS = """
layers = 1
rank = 8
gamma = 3
taps = [1, 3]
anchors = 4
max_length = 32
batch = 4
accumulate = 2
steps = 4
save_every = 2
valid_every = 0
valid_rows = 2
lr = 3e-3
"""

pytestmark = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="mlx has no ring backend here")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data and settings for the small target."""
    folder, rng = tmp_path_factory.mktemp("machines"), np.random.default_rng(0)
    for name in ("data", "other"):
        lines = [json.dumps({"ids": rng.integers(2, 4000, rng.integers(20, 40)).tolist()}) for _ in range(30)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "train.toml").write_text(SETTINGS)
    return folder


def start(files, out, data="data", environment=(), more=()):
    command = [sys.executable, "-m", "mlx_dspark.train", "--data", str(files / f"{data}.jsonl"), "--config",
               str(files / "train.toml"), "--out", str(out), *more]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1",
                                          **dict(environment)},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ring(files, outs, datas=("data", "data"), more=()):
    """Two processes as `mlx.launch` starts them: (return code, stdout, stderr) of each."""
    ports = []
    for _ in outs:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    hosts = files / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    started = [start(files, out, data, {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}, more)
               for rank, (out, data) in enumerate(zip(outs, datas))]
    try:
        return [(process.wait(100), *process.communicate()) for process in started]
    finally:
        for process in started:
            process.kill()


def losses(out):
    with (out / "curve.csv").open(newline="") as file:
        return [[float(row[name]) for name in ("loss", "ce", "tau", "norm", "tokens")] for row in csv.DictReader(file)]


def test_two_processes_are_one_with_the_whole_batch(files, tmp_path):
    """Two take up a run of one at step 2. The second has nothing of it: it gets the state from the first."""
    run = make_run(None, None, (files / "data.jsonl",), read_config(files / "train.toml", {}), Notes())
    trainer = Trainer(run, tmp_path / "one", False)
    for report in trainer.reports():
        if report.step == 1:
            trainer.save()
            shutil.copytree(tmp_path / "one", tmp_path / "two")
    both = ring(files, [tmp_path / "two", tmp_path / "none"], more=["--resume"])
    assert [code for code, _, _ in both] == [0, 0], both
    assert "4 steps" in both[0][1] and both[1][1] == "" and not (tmp_path / "none").exists()
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), 1e-4)


def test_machines_with_different_data_are_refused(files, tmp_path):
    both = ring(files, [tmp_path / "one", tmp_path / "two"], ("data", "other"))
    for code, _, problem in both:
        assert code == 1 and "does not train the same: give all of them the same" in problem
    assert not (tmp_path / "one").exists()
