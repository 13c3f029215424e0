"""`python -m mlx_dspark.train`."""

from .command import main

main()
