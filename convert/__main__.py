"""`python -m mlx_dspark.convert`."""

from .command import main

main()
