"""The small pair that comes with mlx_dspark, made from nothing: corpora, tokenizer, target, packing."""

import mlx_dspark  # noqa: F401  (loads OpenBLAS before anything imports mlx)
