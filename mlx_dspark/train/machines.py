"""The processes that train together, through mx.distributed. One alone works the same and sends nothing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_map

from ..commands import one_line

Tree = TypeVar("Tree")


class Machines:
    """All processes of a run, as seen by one of them. `mlx.launch` starts them; without it there is one."""

    def __init__(self) -> None:
        self._group = mx.distributed.init()
        self.count, self._rank = self._group.size(), self._group.rank()

    @property
    def first(self) -> bool:
        """The one that writes the files and talks to the user."""
        return self._rank == 0

    @property
    def part(self) -> slice:
        """This process's sequences of a batch that all of them know."""
        return slice(self._rank, None, self.count)

    def sum(self, tree: Tree) -> Tree:
        """The sum of everybody's arrays. Raises ValueError when another process is gone."""
        if self.count == 1:
            return tree
        total = tree_map(lambda x: mx.distributed.all_sum(x, group=self._group), tree)
        try:
            mx.eval(total)
        except RuntimeError as error:
            raise ValueError(f"machine {self._rank + 1} of {self.count} lost the others ({one_line(error)}): see what "
                             "they say, and continue with --resume") from error
        return total

    def from_first(self, tree: Tree) -> Tree:
        """The first process's arrays. The others give arrays of the same shapes."""
        return self.sum(tree if self.first else tree_map(mx.zeros_like, tree))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless all processes hold the same facts."""
        if self.count == 1:
            return
        mine = zlib.crc32(json.dumps(facts, sort_keys=True).encode()) >> 1  # fits int32
        everybody = mx.distributed.all_gather(mx.array([mine], dtype=mx.int32), group=self._group)
        if any(other != mine for other in everybody.tolist()):
            raise ValueError(f"machine {self._rank + 1} of {self.count} does not train the same: give all of them the "
                             "same target, data and settings")
