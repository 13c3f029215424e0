"""A weight matrix as the kernels read it: dense or quantised, in pieces of sixteen bytes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

# FORMAT in the kernels' text: dense ones count up from 0, quantised ones are their bits.
_DENSE = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
_PACK = {0: 4, 1: 8, 2: 8, 8: 16, 4: 32}  # numbers in sixteen bytes


@dataclass(frozen=True)
class Table:
    """Rows [rows, width] of a linear layer or an embedding.

    weight: dense, or MLX's packed codes in uint32 [rows, width * bits / 32]. scales, biases: those of
    affine quantisation [rows, width / group], None when dense.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group: int = 1

    @classmethod
    def of(cls, layer: nn.Module) -> Table:
        """The table of nn.Linear, nn.Embedding or their affine-quantised forms."""
        if "scales" not in layer:
            return cls(layer.weight)
        if getattr(layer, "mode", "affine") != "affine":
            raise ValueError(f"quantisation mode {layer.mode!r} is unknown to the kernels: only affine is built")
        return cls(layer.weight, layer.scales, layer.biases, layer.bits, layer.group_size)

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1] * 32 // self.bits if self.bits else self.weight.shape[1]

    @property
    def format(self) -> int | None:
        """FORMAT of the kernels' text, None if they cannot read it."""
        found = self.bits if self.bits else _DENSE.get(self.weight.dtype)
        return found if found in _PACK else None

    @property
    def pack(self) -> int:
        """Numbers in sixteen bytes: the piece that one lane loads at once."""
        return _PACK[self.format]

    @property
    def arrays(self) -> list[mx.array]:
        """Weight, scales and biases as a kernel takes them; a dense table's last two are never read."""
        nothing = mx.zeros((1,), dtype=mx.float32)
        return [self.weight, nothing, nothing] if self.scales is None else [self.weight, self.scales, self.biases]

    @property
    def nbytes(self) -> int:
        """Bytes of one pass over all rows."""
        extra = 0 if self.scales is None else self.scales.nbytes + self.biases.nbytes
        return self.weight.nbytes + extra

    def problem(self) -> str | None:
        """Why the kernels cannot read this table; None if they can."""
        if self.format is None:
            kind = f"{self.bits} bits" if self.bits else str(self.weight.dtype)
            return f"no kernel reads weights of {kind}"
        if self.width % self.pack:
            return f"rows of {self.width} numbers are not a multiple of {self.pack}"
        if self.bits and self.group % self.pack:
            return f"groups of {self.group} are not a multiple of {self.pack}"
        return None

    def columns(self, start: int, stop: int) -> Table:
        """The table of some of the columns; one whose groups would be cut is expanded."""
        if not self.bits:
            return Table(self.weight[:, start:stop])
        if start % self.group or stop % self.group:
            return Table(self.take(mx.arange(self.rows))[:, start:stop])
        packed, groups = 32 // self.bits, self.group
        return Table(self.weight[:, start // packed : stop // packed], self.scales[:, start // groups : stop // groups],
                     self.biases[:, start // groups : stop // groups], self.bits, groups)

    def take(self, tokens: mx.array) -> mx.array:
        """Rows of tokens [...] in float32 -> [..., width]."""
        rows = self.weight[tokens]
        if self.bits:
            rows = mx.dequantize(rows, self.scales[tokens], self.biases[tokens], self.group, self.bits)
        return rows.astype(mx.float32)

    def times(self, x: mx.array) -> mx.array:
        """x [..., width] times the transposed table -> [..., rows], in float32 where MLX keeps it."""
        if self.bits:
            return mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group, bits=self.bits)
        return x.astype(self.weight.dtype) @ self.weight.T
