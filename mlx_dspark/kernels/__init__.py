"""Kernels for what DSpark does once a slot over the whole vocabulary: transition bias, choice, accept test.

One file per op, with its reference in plain mlx, its kernel text and its launch rule:
`argmax`, `sample`, `walk`, `topk`, `accept`. `scan` is the pass over W2 that they share, `text` the
pieces of text, `launch` and `dialect` what runs them on Metal and CUDA, `pick` what decides.
"""

from .pick import REFERENCE, Choice, Kernels
from .trials import choose_kernels

__all__ = ["REFERENCE", "Choice", "Kernels", "choose_kernels"]
