"""Training a draft: losses, anchors, features, trainer. `python -m mlx_dspark.train` is the command.

What is computed follows DeepSeek's code (and the paper, section 3), number by number; `tests/test_train_golden.py`
holds it to that.
"""
