"""Several processes: the same losses as one, one writer, and no training on different data."""

import csv
import json
import shutil
import socket

import mlx.core as mx
import numpy as np
import pytest
from helpers import start_training, training_files

from mlx_dspark.commands import Notes
from mlx_dspark.train.command import make_run
from mlx_dspark.train.config import read_config
from mlx_dspark.train.trainer import Trainer

SETTINGS = """
batch = 4
steps = 4
valid_every = 0
lr = 3e-3
"""

pytestmark = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="mlx has no ring backend here")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return training_files(tmp_path_factory.mktemp("machines"), SETTINGS, ("data", "other"))


def ring(files, outs, datas=("data", "data"), more=()):
    """Two processes as `mlx.launch` starts them: (return code, stdout, stderr) of each."""
    ports = []
    for _ in outs:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    hosts = files / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    started = [start_training(files, out, *more, data=data,
                              environment={"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)})
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
    run = make_run(str(files / "target"), None, (files / "data.jsonl",), read_config(files / "train.toml", {}), Notes())
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
