"""The draft's K/V of committed positions, grown in place."""

from __future__ import annotations

import mlx.core as mx


class ContextCache:
    """One layer's context K/V. Rows of the current block lie behind it and are overwritten next round.

    The K/V of a position never change once written (they are a function of the target's taps alone),
    so a crop after a block costs nothing: `length` simply does not count the block.
    """

    step = 256

    def __init__(self) -> None:
        self.length = 0
        self._keys: mx.array | None = None  # [B, H_kv, capacity, head_dim]
        self._values: mx.array | None = None

    def write(self, keys: mx.array, values: mx.array, keep: int, behind: int = 0) -> tuple[mx.array, mx.array]:
        """Write rows behind the context, count the first `keep` of them as context.

        keys, values: [B, H_kv, T, head_dim]. behind: draft rows already written there, which stay in
        sight. Returns views of all rows [B, H_kv, length + behind + T, head_dim].
        """
        start = self.length + behind
        end = start + keys.shape[2]
        self._reserve(end, start, keys, values)
        self._keys[..., start:end, :] = keys
        self._values[..., start:end, :] = values
        self.length += keep
        return self._keys[..., :end, :], self._values[..., :end, :]

    def rows(self) -> tuple[mx.array, mx.array]:
        """The context rows alone [B, H_kv, length, head_dim]."""
        return self._keys[..., : self.length, :], self._values[..., : self.length, :]

    def prefix(self, length: int) -> ContextCache:
        """A cache of the first `length` rows; both may grow, neither sees the other."""
        cut = ContextCache()
        cut.length = length
        if length:  # a slice is an array of its own: writing into one copies first
            cut._keys, cut._values = self._keys[..., :length, :], self._values[..., :length, :]
        return cut

    def compact(self, length: int) -> ContextCache:
        """`prefix` of at most `length` rows in memory of their own size, once its `arrays` are evaluated."""
        cut = self.prefix(min(length, self.length))
        if cut.length:
            cut._keys, cut._values = mx.contiguous(cut._keys), mx.contiguous(cut._values)
        return cut

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that keys and values take, room to grow included."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated to have the context in memory."""
        return [] if self._keys is None else [self._keys, self._values]

    def _reserve(self, end: int, used: int, keys: mx.array, values: mx.array) -> None:
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if end <= capacity:
            return
        # Growth by a quarter keeps the total copying linear in the context's length.
        capacity = -(-max(end, capacity + capacity // 4) // self.step) * self.step
        self._keys = _grown(self._keys, used, capacity, keys)
        self._values = _grown(self._values, used, capacity, values)


def _grown(old: mx.array | None, length: int, capacity: int, like: mx.array) -> mx.array:
    heads, _, width = like.shape[1:]
    kept = 0 if old is None else length
    room = mx.zeros((like.shape[0], heads, capacity - kept, width), dtype=like.dtype)
    return room if old is None else mx.concatenate([old[..., :kept, :], room], axis=2)
