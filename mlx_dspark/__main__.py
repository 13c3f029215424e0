"""`python -m mlx_dspark` is the command group."""

from .cli import main

main(prog_name="mlx_dspark")
