"""What happens before mlx is imported: BLAS, a missing backend, the compute dtype."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_dspark import backend

ROOT = Path(__file__).resolve().parent.parent
FACTS = """
import json, mlx_dspark
from mlx_dspark.backend import machine, preload_blas
blas = preload_blas()
print(json.dumps([blas.path, blas.reason, blas.missing, blas.problem, machine()["blas"]]))
"""


def python(*args: str, blas: str | None, path: Path | None = None) -> subprocess.CompletedProcess:
    """Run Python in the repository with MLX_DSPARK_BLAS set (None: unset) and `path` ahead of all packages."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLX_DSPARK_")}
    env["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in (path, ROOT) if folder)
    if blas is not None:
        env["MLX_DSPARK_BLAS"] = blas
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def facts(before: str = "", blas: str | None = None) -> dict:
    done = python("-c", before + FACTS, blas=blas)
    assert done.returncode == 0, done.stderr
    return dict(zip(("path", "reason", "missing", "problem", "machine"), json.loads(done.stdout), strict=True))


def installed_openblas() -> str | None:
    folders = map(Path, backend._LIBRARY_FOLDERS)
    return next((str(file) for folder in folders for file in sorted(folder.glob("libopenblas*.so*"))), None)


needs_openblas = pytest.mark.skipif(
    sys.platform != "linux" or installed_openblas() is None or backend._has_cuda_backend(),
    reason="no OpenBLAS installed, or mlx brings its own BLAS",
)


def one_error_line(done: subprocess.CompletedProcess) -> str:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), done.stderr
    return lines[0]


def test_none_keeps_mlx_own_blas():
    found = facts(blas="none")
    assert (found["path"], found["missing"], found["problem"]) == (None, False, None)
    assert found["machine"] == "mlx (MLX_DSPARK_BLAS=none)"


@needs_openblas
@pytest.mark.parametrize("blas", [None, "auto"])
def test_auto_finds_openblas(blas):
    found = facts(blas=blas)
    assert "openblas" in found["path"] and found["machine"] == found["path"]
    assert found["problem"] is None


@needs_openblas
def test_a_path_is_loaded():
    path = installed_openblas()
    found = facts(blas=path)
    assert found["path"] == found["machine"] == path


@needs_openblas
@pytest.mark.parametrize("blas", ["auto", "path"])
def test_mlx_imported_first_is_reported(blas):
    found = facts("import mlx.core\n", installed_openblas() if blas == "path" else blas)
    assert (found["path"], found["problem"]) == (None, None)
    assert found["reason"] == "mlx was imported before mlx_dspark" and found["reason"] in found["machine"]


def test_no_openblas_is_a_hint_not_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "_LIBRARY_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(backend, "_has_cuda_backend", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setenv("MLX_DSPARK_BLAS", "auto")
    found = backend.preload_blas.__wrapped__()
    assert (found.path, found.missing, found.problem) == (None, True, None)
    assert "apt-get install libopenblas" in backend.BLAS_HINT


@pytest.mark.parametrize("platform, cuda", [("darwin", False), ("linux", True)], ids=["macos", "cuda"])
def test_auto_leaves_other_backends_alone(monkeypatch, platform, cuda):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(backend, "_has_cuda_backend", lambda: cuda)
    monkeypatch.setenv("MLX_DSPARK_BLAS", "auto")
    found = backend.preload_blas.__wrapped__()
    assert (found.path, found.missing) == (None, False)


def test_a_bad_path_is_one_line(tmp_path):
    bad = tmp_path / "libnothing.so"
    line = one_error_line(python("-m", "mlx_dspark.generate", "hi", blas=str(bad)))
    assert f"MLX_DSPARK_BLAS={bad}" in line and "auto, none or a library's path" in line


def test_a_bad_path_does_not_stop_the_help(tmp_path):
    assert python("-m", "mlx_dspark", "-h", blas=str(tmp_path / "libnothing.so")).returncode == 0


@pytest.fixture
def no_backend(tmp_path) -> Path:
    """A folder whose `mlx` cannot start, as a base install on Linux."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file\\nmore')\n")
    return tmp_path


@pytest.mark.parametrize("args", [["mlx_dspark.generate", "hi"], ["mlx_dspark", "generate", "hi"]], ids=" ".join)
def test_a_base_install_without_a_backend_is_one_line(no_backend, args):
    line = one_error_line(python("-m", *args, blas="none", path=no_backend))
    assert "mlx[cpu]" in line and "mlx[cuda13]" in line and "libmlx.so" in line


def test_without_a_backend_the_library_says_so_too(no_backend):
    done = python("-c", "import mlx_dspark\nmlx_dspark.load", blas="none", path=no_backend)
    assert done.returncode == 1 and "pip install 'mlx[cpu]'" in done.stderr.splitlines()[-1]


def test_without_a_backend_the_help_still_answers(no_backend):
    done = python("-m", "mlx_dspark.generate", "--help", blas="none", path=no_backend)
    assert done.returncode == 0 and "--max-tokens" in done.stdout


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_dtype_is_taken(name):
    assert str(backend.compute_dtype(name)) == f"mlx.core.{name}"


@pytest.mark.parametrize("cpu, dtype", [(True, "mlx.core.float32"), (False, "None")], ids=["cpu", "gpu"])
def test_auto_is_float32_on_the_cpu_and_the_checkpoints_own_elsewhere(monkeypatch, cpu, dtype):
    monkeypatch.setattr(backend, "on_cpu", lambda: cpu)
    assert str(backend.compute_dtype("auto")) == dtype


@pytest.mark.parametrize("name", ["", "int8", "Float32", "load"])
def test_an_unknown_dtype_is_refused(name):
    with pytest.raises(ValueError, match=f"dtype is '{name}': give auto, float32, bfloat16 or float16"):
        backend.compute_dtype(name)


def test_machine_names_what_numbers_depend_on():
    facts = backend.machine()
    assert {"chip", "device", "os", "python", "mlx", "mlx_lm", "blas"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
