"""Tests demand equal bits between forwards of one row and of many, which mlx's own BLAS gives."""

import os

os.environ["MLX_DSPARK_BLAS"] = "none"  # before mlx_dspark is imported
