"""Tests demand equal bits between forwards of one row and of many, which mlx's own BLAS on the CPU gives."""

import atexit
import os
import shutil
import tempfile

os.environ["MLX_DSPARK_BLAS"] = "none"  # before mlx_dspark is imported
os.environ["MLX_DSPARK_NO_PROFILE"] = "1"  # nothing is measured unless a test asks for it
os.environ["MLX_DSPARK_CACHE"] = tempfile.mkdtemp(prefix="mlx_dspark_tests_")  # nor read from the user's cache
atexit.register(shutil.rmtree, os.environ["MLX_DSPARK_CACHE"], ignore_errors=True)

import mlx.core as mx  # noqa: E402
import pytest  # noqa: E402

mx.set_default_device(mx.cpu)  # before mlx_lm is imported: its stream binds to the device then


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """A cache folder of the test's own, and nothing known of the small pair's costs."""
    from helpers import embedded_pair

    from mlx_dspark import scheduling, store

    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(scheduling.NO_PROFILE_VARIABLE, raising=False)
    embedded_pair().target.__dict__.pop("memories", None)
    return tmp_path / "cache"
