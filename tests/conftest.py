"""Tests demand equal bits between forwards of one row and of many, which mlx's own BLAS on the CPU gives."""

import os

os.environ["MLX_DSPARK_BLAS"] = "none"  # before mlx_dspark is imported

import mlx.core as mx  # noqa: E402

mx.set_default_device(mx.cpu)  # before mlx_lm is imported: its stream binds to the device then
