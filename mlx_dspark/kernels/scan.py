"""The pass over W2 that every transition op is made of, and how it is cut up.

    threadgroup    256 rows of W2 at a time, STEPS times; its best row is one of NPART partial maxima
    SIMD-group     32 consecutive rows: base logits are read, and corrected ones written, side by side
    LANES lanes    one row at a time, LANES rows in turn; each lane loads sixteen bytes of the row at once
                   (eight lanes read 128 bytes, a cache line); then each lane keeps one row's total

W2 is read once for up to TILE requests, whose latents wait in registers. Sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from .table import Table
from .text import BEST, FOLD_STORAGE, NOISE, PLACE, ROWS, SIGMOID, SIMDS, THREADS, best_of_group, best_of_simds, fold

MOST_PARTS = THREADS  # partial maxima of a slot: the next fold reads one per thread
MOST_REQUESTS = 4  # requests that share one pass over W2: their latents are held in registers
W1 = ("w1", "w1_scales", "w1_biases")
W2 = ("w2", "w2_scales", "w2_biases")
HEADER = ROWS + BEST + NOISE + SIGMOID


@dataclass(frozen=True)
class Geometry:
    """How `rows` of a table are spread over the device: all constants of the kernel text that follow from shapes."""

    rows: int
    lanes: int
    steps: int
    parts: int
    tile: int
    requests: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.parts * THREADS, -(-self.requests // self.tile), 1

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return THREADS, 1, 1


def geometry(table: Table, rows: int, requests: int, tile: int = MOST_REQUESTS) -> Geometry:
    """The cut for the first `rows` of a table and a number of requests; at most `tile` share a pass."""
    chunks = table.width // table.pack
    lanes = next(lanes for lanes in (8, 4, 2, 1) if chunks % lanes == 0)
    steps = -(-rows // (THREADS * MOST_PARTS))
    parts = -(-rows // (THREADS * steps))
    return Geometry(rows, lanes, steps, parts, min(requests, tile), requests)


def constants(table: Table, cut: Geometry, columns: int, slots: int) -> tuple[tuple[str, int], ...]:
    """Template constants of a scan. columns: those of a base row, which may be longer than `rows`."""
    return (
        ("V", cut.rows), ("COLUMNS", columns), ("SLOTS", slots), ("B", cut.requests), ("TILE", cut.tile),
        ("WIDTH", table.width), ("FORMAT", table.format), ("PACK", table.pack), ("GROUP", table.group),
        ("LANES", cut.lanes), ("STEPS", cut.steps), ("PARTS", cut.parts),
    )


def first_table(w1: Table) -> tuple[tuple[str, int], ...]:
    """Template constants of W1."""
    return ("W1_FORMAT", w1.format), ("W1_PACK", w1.pack), ("W1_GROUP", w1.group)


STAGE_LATENT = f"""
    for (uint k = tid; k < TILE * WIDTH; k += {THREADS}) {{
        const uint request = first + k / WIDTH < B ? first + k / WIDTH : B - 1;
        shared_latent[k] = latent[request * WIDTH + k % WIDTH];
    }}"""

# The first thing every threadgroup of a vanilla slot does: the token before it, and that token's row of W1.
STAGE_TOKEN = f"""
    {FOLD_STORAGE}
    for (uint b = 0; b < TILE; ++b) {{
        const uint request = first + b < B ? first + b : B - 1;
        uint previous = 0;
        {fold("request", "previous")}
        if (group == 0 && tid == 0 && first + b < B) token[request] = int(previous);
        for (uint k = tid; k < WIDTH; k += {THREADS})
            shared_latent[b * WIDTH + k] =
                ds_number<W1_FORMAT, W1_PACK, W1_GROUP, WIDTH>(w1, w1_scales, w1_biases, previous, k);
    }}"""

ARGMAX = """
                const float value = total;"""

# The corrected logits are kept for the accept test, and the noise makes the argmax a draw from their softmax.
SAMPLE = """
                if (first + b < B) corrected[request * V + row] = total;
                const uint at_key = (request * SLOTS + at_slot) * 2;
                const float value = total * scale[0] + ds_gumbel(keys[at_key], keys[at_key + 1], row, V);"""


def scan(stage: str, value: str, vocabulary: str = "row") -> str:
    """Kernel text: the best of base + W2 latent over all rows, one partial maximum per threadgroup.

    stage: text that fills `shared_latent` [TILE, WIDTH]. value: text that makes `value`, what is
    compared, from the corrected logit `total` of `row`. vocabulary: the row of W2 and the column of base
    that position `row` stands for. Base logits are [B, SLOTS, COLUMNS]; slot[0]
    says which slot this launch is for.
    """
    return f"""{PLACE}
    const uint first = threadgroup_position_in_grid.y * TILE;
    const uint at_slot = slot[0];
    threadgroup float shared_latent[TILE * WIDTH];
    threadgroup float best_value[TILE * {SIMDS}];
    threadgroup uint best_index[TILE * {SIMDS}];
    {stage}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const uint part = lane % LANES;  // which piece of a row, and then which row
    const uint pieces = WIDTH / PACK / LANES;
    float x[TILE][WIDTH / LANES];
    float sums[TILE][WIDTH / PACK / LANES];  // a quantised group's bias multiplies the sum of x
    for (uint b = 0; b < TILE; ++b) {{
        for (uint p = 0; p < pieces; ++p) {{
            sums[b][p] = 0.0f;
            for (uint k = 0; k < PACK; ++k) {{
                x[b][p * PACK + k] = shared_latent[b * WIDTH + (p * LANES + part) * PACK + k];
                sums[b][p] += x[b][p * PACK + k];
            }}
        }}
    }}
    float best[TILE];
    uint at[TILE];
    for (uint b = 0; b < TILE; ++b) {{ best[b] = -INFINITY; at[b] = DS_NONE; }}

    for (uint step = 0; step < STEPS; ++step) {{
        const uint row0 = ((group * STEPS + step) * {SIMDS} + simd) * 32;
        float mine[TILE];
        for (uint turn = 0; turn < LANES; ++turn) {{
            uint row = row0 + lane / LANES * LANES + turn;
            row = row < V ? row : V - 1;  // no lane may leave: the sums below need all of them
            row = {vocabulary};
            float sum[TILE];
            for (uint b = 0; b < TILE; ++b) sum[b] = 0.0f;
            for (uint p = 0; p < pieces; ++p) {{
                float piece[PACK], affine[2];
                ds_piece<FORMAT, PACK, GROUP, WIDTH>(w2, w2_scales, w2_biases, row, p * LANES + part, piece, affine);
                for (uint b = 0; b < TILE; ++b)
                    sum[b] += ds_term<FORMAT, PACK>(piece, affine, x[b] + p * PACK, sums[b][p]);
            }}
            for (uint b = 0; b < TILE; ++b) {{
                for (uint d = LANES / 2; d > 0; d >>= 1) sum[b] += simd_shuffle_xor(sum[b], d);
                if (turn == part) mine[b] = sum[b];
            }}
        }}
        uint row = row0 + lane;
        const bool inside = row < V;
        row = inside ? row : V - 1;
        row = {vocabulary};
        for (uint b = 0; b < TILE; ++b) {{
            const uint request = first + b < B ? first + b : B - 1;
            if (inside) {{
                const float total = static_cast<float>(base[(request * SLOTS + at_slot) * COLUMNS + row]) + mine[b];
                {value}
                if (ds_better(value, row, best[b], at[b])) {{ best[b] = value; at[b] = row; }}
            }}
        }}
    }}

    for (uint b = 0; b < TILE; ++b) {{
        {best_of_group("best[b]", "at[b]", "best", "b")}
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < TILE && first + tid < B) {{
        {best_of_simds("value", "index", "best", "tid")}
        out_value[(first + tid) * PARTS + group] = value;
        out_index[(first + tid) * PARTS + group] = index;
    }}
"""


def last_fold(fold_text: str) -> str:
    """Kernel text: one threadgroup per request folds the partial maxima of the last slot."""
    return f"""{PLACE}
    {FOLD_STORAGE}
    uint best = 0;
    {fold_text}
    if (tid == 0) {{ token[group] = int(best); value[group] = folded; }}
"""
