"""Pieces of kernel text that several kernels share.

Letters as everywhere: B requests, V vocabulary, R rank. A threadgroup has SIMDS SIMD-groups of 32 lanes.
"""

from __future__ import annotations

SIMDS = 8
THREADS = 32 * SIMDS

# A row is read in chunks of sixteen bytes. FORMAT: 0 float32, 1 float16, 2 bfloat16, 8 or 4 bits.
ROWS = """
template <int FORMAT> DS_FN void ds_unpack(uint word, thread float* out) {
    if (FORMAT == 0) { out[0] = ds_float(word); }
    if (FORMAT == 1) { out[0] = ds_half(word & 0xffffu); out[1] = ds_half(word >> 16); }
    if (FORMAT == 2) { out[0] = ds_bfloat(word & 0xffffu); out[1] = ds_bfloat(word >> 16); }
    if (FORMAT == 8) { for (uint k = 0; k < 4; ++k) out[k] = float((word >> (8 * k)) & 0xffu); }
    if (FORMAT == 4) { for (uint k = 0; k < 8; ++k) out[k] = float((word >> (4 * k)) & 0xfu); }
}

// Numbers of one chunk; codes of a quantised table are not scaled yet.
template <int FORMAT, int PACK> DS_FN void ds_chunk(uint4 words, thread float* out) {
    const int step = PACK / 4;
    ds_unpack<FORMAT>(words.x, out);
    ds_unpack<FORMAT>(words.y, out + step);
    ds_unpack<FORMAT>(words.z, out + 2 * step);
    ds_unpack<FORMAT>(words.w, out + 3 * step);
}

// Chunk `at` of row `row`: the row's numbers there are scale * out + bias.
template <int FORMAT, int PACK, int GROUP, int WIDTH, class W, class S>
DS_FN void ds_piece(W weights, S scales, S biases, uint row, uint at, thread float* out, thread float* affine) {
    ds_chunk<FORMAT, PACK>(reinterpret_cast<const DS_GLOBAL uint4*>(weights)[row * (WIDTH / PACK) + at], out);
    if (FORMAT >= 4) {
        const uint group = row * (WIDTH / GROUP) + at * PACK / GROUP;
        affine[0] = static_cast<float>(scales[group]);
        affine[1] = static_cast<float>(biases[group]);
    }
}

// What a piece adds to the dot product of its row with x, whose own sum over the piece is `sum`.
template <int FORMAT, int PACK>
DS_FN float ds_term(thread const float* piece, thread const float* affine, thread const float* x, float sum) {
    float dot = 0.0f;
    for (int k = 0; k < PACK; ++k) dot += piece[k] * x[k];
    return FORMAT < 4 ? dot : affine[0] * dot + affine[1] * sum;
}

// One number of a row.
template <int FORMAT, int PACK, int GROUP, int WIDTH, class W, class S>
DS_FN float ds_number(W weights, S scales, S biases, uint row, uint column) {
    float piece[PACK], affine[2];
    ds_piece<FORMAT, PACK, GROUP, WIDTH>(weights, scales, biases, row, column / PACK, piece, affine);
    return FORMAT < 4 ? piece[column % PACK] : affine[0] * piece[column % PACK] + affine[1];
}
"""

# The order of candidates: the larger value, then the lower index. NONE loses against every other.
BEST = """
#define DS_NONE 0xffffffffu
DS_FN bool ds_better(float value, uint index, float than, uint other) {
    return value > than || (value == than && index < other);
}
"""

SIGMOID = """
DS_FN float ds_sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
"""

# Gumbel noise with the bits of mx.random.gumbel(shape=(V,), key=key).
NOISE = """
DS_FN uint ds_rotate(uint x, uint r) { return (x << r) | (x >> (32 - r)); }

// Threefry-2x32 with 20 rounds (Salmon et al. 2011), the generator behind mx.random.
DS_FN void ds_threefry(uint k0, uint k1, thread uint* x0, thread uint* x1) {
    const uint keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
    const uint turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    uint a = *x0 + k0, b = *x1 + k1;
    for (uint i = 0; i < 5; ++i) {
        for (uint j = 0; j < 4; ++j) {
            a += b;
            b = ds_rotate(b, turns[4 * (i & 1u) + j]) ^ a;
        }
        a += keys[(i + 1) % 3];
        b += keys[(i + 2) % 3] + i + 1;
    }
    *x0 = a;
    *x1 = b;
}

// MLX fills an array of `size` words in two halves: one counter pair gives word i and word i + half. The middle
// word of an odd size has a counter of its own.
DS_FN float ds_gumbel(uint k0, uint k1, uint at, uint size) {
    const uint half_size = size / 2, odd = size & 1u;
    const bool middle = odd != 0 && at == half_size, second = at >= half_size && !middle;
    uint x0 = second ? at - half_size - odd : at;
    uint x1 = middle ? 0 : second ? at : at + half_size + odd;
    ds_threefry(k0, k1, &x0, &x1);
    float u = static_cast<float>(second ? x1 : x0) / 4294967295.0f;
    u = u < 0.99999994f ? u : 0.99999994f;
    return -precise::log(-precise::log(u));
}
"""


def fold(row: str, token: str, source: str = "part") -> str:
    """Set `token` to the best of a row's NPART partial maxima, and `folded` to its value.

    All threads of the threadgroup take part. Every threadgroup of the next slot does this for itself, so
    that no launch is needed in between. source: the buffers are `part_value` and `part_index` [rows, NPART].
    """
    return f"""
    {{
        float mine = -INFINITY;
        uint at = DS_NONE;
        for (uint k = tid; k < NPART; k += {THREADS}) {{
            const float v = {source}_value[({row}) * NPART + k];
            const uint i = {source}_index[({row}) * NPART + k];
            if (ds_better(v, i, mine, at)) {{ mine = v; at = i; }}
        }}
        {best_of_group("mine", "at", "fold")}
        threadgroup_barrier(mem_flags::mem_threadgroup);
        {best_of_simds("value", "index", "fold")}
        threadgroup_barrier(mem_flags::mem_threadgroup);  // before anybody folds the next row into the same place
        {token} = index == DS_NONE ? 0 : index;
        folded = value;
    }}"""


FOLD_STORAGE = f"""
    threadgroup float fold_value[{SIMDS}];
    threadgroup uint fold_index[{SIMDS}];
    float folded = 0.0f;"""

PLACE = """
    const uint tid = thread_position_in_threadgroup.x;
    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint group = threadgroup_position_in_grid.x;"""


def best_of_group(value: str, index: str, shared: str, at: str = "0") -> str:
    """Reduce to one candidate a SIMD-group and leave it in threadgroup memory; a barrier must follow."""
    return f"""{simd_best(value, index)}
        if (lane == 0) {{
            {shared}_value[{at} * {SIMDS} + simd] = {value};
            {shared}_index[{at} * {SIMDS} + simd] = {index};
        }}"""


def best_of_simds(value: str, index: str, shared: str, at: str = "0") -> str:
    """Set value and index to the best that `best_of_group` left, after the barrier."""
    return f"""
        float {value} = {shared}_value[{at} * {SIMDS}];
        uint {index} = {shared}_index[{at} * {SIMDS}];
        for (uint k = 1; k < {SIMDS}; ++k)
            if (ds_better({shared}_value[{at} * {SIMDS} + k], {shared}_index[{at} * {SIMDS} + k], {value}, {index})) {{
                {value} = {shared}_value[{at} * {SIMDS} + k];
                {index} = {shared}_index[{at} * {SIMDS} + k];
            }}"""


def simd_best(value: str, index: str) -> str:
    """Spread the best candidate of a SIMD-group to all its lanes."""
    return f"""
        for (uint d = 16; d > 0; d >>= 1) {{
            const float other_value = simd_shuffle_xor({value}, d);
            const uint other_index = simd_shuffle_xor({index}, d);
            if (ds_better(other_value, other_index, {value}, {index})) {{
                {value} = other_value;
                {index} = other_index;
            }}
        }}"""
