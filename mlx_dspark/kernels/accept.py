"""accept: the accepted run of a block and the token after it, on the device.

The reference is the accept rule of the whole package (Leviathan et al. 2023; paper, section 2); the
kernels do the same with the vocabulary spread over many threadgroups: a plain argmax or softmax gives
each row one threadgroup only, and a block has few rows.

    greedy     partial maxima of every row | one threadgroup a request: tokens, accepted run
    sampled    partial softmax sums of every row | accept tests | partial Gumbel maxima of the row after
               the run, for max(p - q, 0) and for p | one threadgroup a request: tokens
"""

from __future__ import annotations

import mlx.core as mx

from .argmax import best, numbers
from .launch import Execute, Kernel, Launch
from .sample import noise
from .scan import HEADER
from .text import FOLD_STORAGE, PLACE, SIMDS, THREADS, best_of_group, best_of_simds, fold

RESIDUAL_FLOOR = 1e-8  # below this mass a residual is rounding noise: p and q are equal
MOST_PARTS = 64  # threadgroups per row: a block of eight rows still fills a large GPU


def greedy_reference(
    drafts: mx.array, logits: mx.array, limits: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Accept while the draft is the target's argmax: drafts [B, N], logits [B, N + 1, V].

    limits: how many drafts of each request were verified, int32 [B]; None for all. Rows behind may hold anything.
    Returns accepted int32 [B] and the argmax of every row, int32 [B, N + 1].
    """
    tokens = best(logits)
    return leading_run(_within(drafts == tokens[:, :-1], limits)), tokens


def sampled_reference(
    drafts: mx.array, log_q: mx.array | None, log_p: mx.array, uniforms: mx.array, keys: mx.array,
    limits: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Rejection sampling: drafts [B, N] drawn from log_q [B, N, V] (None: they were the only choice).

    log_p [B, N + 1, V]; uniforms [B, N] for the accept tests; keys [B, 2] for the token after the run.
    limits: how many drafts of each request were verified, int32 [B]; None for all. Whoever accepts so many draws
    the next token from p, as behind the last draft.
    Returns accepted int32 [B] and tokens int32 [B, N + 1], meaningless after the run's next token.
    """
    slots = drafts.shape[1]
    p_x = mx.exp(at_tokens(log_p[:, :slots], drafts))  # [B, N]
    q_x = mx.ones_like(p_x) if log_q is None else mx.exp(at_tokens(log_q, drafts))
    accepted = leading_run(_within(accept_mask(p_x, q_x, uniforms), limits))
    p_row = mx.exp(at_rows(log_p, accepted))  # [B, V]: one row a request, the others are never exponentiated
    weights = next_weights(p_row, _q_row(drafts, log_q, accepted, p_row, limits))
    following = mx.argmax(mx.log(weights) + noise(keys, weights.shape[-1]), axis=-1).astype(mx.int32)  # [B]
    padded = mx.concatenate([drafts.astype(mx.int32), following[:, None]], axis=1)
    return accepted, mx.where(mx.arange(slots + 1) < accepted[:, None], padded, following[:, None])


def accept_mask(p_x: mx.array, q_x: mx.array, uniforms: mx.array) -> mx.array:
    """Which drafts pass u < p(x) / q(x), each on its own: bool [B, N].

    p_x, q_x: both probabilities of each draft; uniforms in [0, 1); all [B, N]. The product form needs no
    guard against a small q (DeepSeek's code divides by max(q, 1e-8), which is not exact below that).
    """
    return uniforms * q_x < p_x


def next_weights(p_row: mx.array, q_row: mx.array) -> mx.array:
    """Unnormalised weights [B, V] of the token after the accepted run, from its row of p and of q.

    max(p - q, 0) where a draft was rejected; p itself for the bonus row, where q is 0, and where p equals q.
    """
    residual = mx.maximum(p_row - q_row, 0)
    return mx.where(residual.sum(axis=-1, keepdims=True) > RESIDUAL_FLOOR, residual, p_row)


def at_tokens(values: mx.array, tokens: mx.array) -> mx.array:
    """values [B, N, V] at tokens [B, N] -> [B, N]."""
    return mx.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def at_rows(values: mx.array, rows: mx.array) -> mx.array:
    """values [B, N, V] at one row each, rows [B] -> [B, V]."""
    return mx.take_along_axis(values, rows[:, None, None].astype(mx.int32), axis=1)[:, 0]


def _within(passed: mx.array, limits: mx.array | None) -> mx.array:
    """Nothing passes [B, N] that was not verified."""
    return passed if limits is None else passed & (mx.arange(passed.shape[1]) < limits[:, None])


def _q_row(
    drafts: mx.array, log_q: mx.array | None, accepted: mx.array, p_row: mx.array, limits: mx.array | None
) -> mx.array:
    """q of the row after the run [B, V]: 0 for the bonus row, which has no verified draft."""
    slots = drafts.shape[1]
    if slots == 0:
        return mx.zeros_like(p_row)
    rejected = mx.minimum(accepted, slots - 1)
    if log_q is None:
        token = mx.take_along_axis(drafts, rejected[:, None], axis=1)  # [B, 1]
        q_row = (mx.arange(p_row.shape[-1]) == token).astype(mx.float32)
    else:
        q_row = mx.exp(at_rows(log_q, rejected))
    return mx.where((accepted < (slots if limits is None else limits))[:, None], q_row, 0)


def leading_run(passed: mx.array) -> mx.array:
    """Length of the leading run of True [B, N] -> int32 [B]."""
    return mx.cumprod(passed.astype(mx.int32), axis=1).sum(axis=1).astype(mx.int32)


def run_greedy(
    execute: Execute, drafts: mx.array, logits: mx.array, limits: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """`greedy_reference` in two launches."""
    requests, rows, size = logits.shape
    cut = _cut(size)
    shape = (requests, rows, cut["PARTS"])
    parts = execute(MAXIMA, [logits], Launch(
        (*cut.items(),), (cut["PARTS"] * THREADS, requests * rows, 1), (THREADS, 1, 1), (shape, shape),
        (mx.float32, mx.uint32)))
    accepted, tokens = execute(GREEDY, [*parts, _drafts(drafts), _limits(limits, drafts), numbers(rows)], Launch(
        (("NPART", cut["PARTS"]),), (requests * THREADS, 1, 1), (THREADS, 1, 1),
        ((requests,), (requests, rows)), (mx.int32, mx.int32)))
    return accepted, tokens


def run_sampled(
    execute: Execute, drafts: mx.array, log_q: mx.array, logits: mx.array, scale: mx.array,
    uniforms: mx.array, keys: mx.array, limits: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """`sampled_reference` for log_p = log_softmax(logits * scale), scale [1], in four launches."""
    requests, rows, size = logits.shape
    cut = _cut(size)
    parts, wide = cut["PARTS"], (THREADS, 1, 1)
    one, per_part = (requests * THREADS, 1, 1), (requests, parts)
    sums = execute(SUMS, [logits, scale], Launch(
        (*cut.items(),), (parts * THREADS, requests * rows, 1), wide, ((requests, rows, parts),) * 2,
        (mx.float32, mx.float32)))
    most, drafts, uniforms, length = _limits(limits, drafts), _drafts(drafts), _padded(uniforms), numbers(rows)
    template = (("NPART", parts), ("V", size))
    accepted, normaliser = execute(
        TESTS, [*sums, logits, scale, _padded(log_q), drafts, uniforms, most, length], Launch(
            template, one, wide, ((requests,), (requests, 2)), (mx.int32, mx.float32)))
    candidates = execute(AFTER, [logits, scale, _padded(log_q), accepted, normaliser, keys, most, length], Launch(
        (*cut.items(),), (parts * THREADS, requests, 1), wide, (per_part,) * 5,
        (mx.float32, mx.uint32, mx.float32, mx.uint32, mx.float32)))
    tokens, = execute(FINISH, [*candidates, accepted, drafts, length], Launch(
        (("NPART", parts),), one, wide, ((requests, rows),), (mx.int32,)))
    return accepted, tokens


def _cut(size: int) -> dict[str, int]:
    """How one row of `size` logits is spread over threadgroups."""
    steps = -(-size // (THREADS * MOST_PARTS))
    return {"V": size, "STEPS": steps, "PARTS": -(-size // (THREADS * steps))}


def _drafts(drafts: mx.array) -> mx.array:
    return _padded(drafts.astype(mx.int32))


def _limits(limits: mx.array | None, drafts: mx.array) -> mx.array:
    return mx.full(drafts.shape[:1], drafts.shape[1], dtype=mx.int32) if limits is None else limits


def _padded(array: mx.array) -> mx.array:
    """A kernel takes no empty array: without drafts it gets one row that it never reads."""
    return array if array.shape[1] else mx.zeros((array.shape[0], 1, *array.shape[2:]), dtype=array.dtype)


# A row of logits is cut into PARTS tiles of STEPS * THREADS; grid.y counts rows.
MAXIMA = Kernel("accept_maxima", ("logits",), ("part_value", "part_index"), f"""{PLACE}
    const uint row = threadgroup_position_in_grid.y;
    threadgroup float best_value[{SIMDS}];
    threadgroup uint best_index[{SIMDS}];
    float mine = -INFINITY;
    uint at = DS_NONE;
    for (uint step = 0; step < STEPS; ++step) {{
        const uint v = (group * STEPS + step) * {THREADS} + tid;
        if (v < V) {{
            const float logit = static_cast<float>(logits[row * V + v]);
            if (ds_better(logit, v, mine, at)) {{ mine = logit; at = v; }}
        }}
    }}
    {best_of_group("mine", "at", "best")}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {{
        {best_of_simds("value", "index", "best")}
        part_value[row * PARTS + group] = value;
        part_index[row * PARTS + group] = index;
    }}
""", HEADER)

GREEDY = Kernel(
    "accept_greedy", ("part_value", "part_index", "drafts", "limits", "rows"), ("accepted", "tokens"), f"""{PLACE}
    const uint ROWS = rows[0];  // not a template constant: each block length would be compiled
    {FOLD_STORAGE}
    uint run = 0;
    bool running = true;
    for (uint row = 0; row < ROWS; ++row) {{
        uint best = 0;
        {fold("group * ROWS + row", "best")}
        if (tid == 0) {{
            tokens[group * ROWS + row] = int(best);
            if (row < uint(limits[group])) {{
                running = running && drafts[group * (ROWS - 1) + row] == int(best);
                run += running ? 1 : 0;
            }}
        }}
    }}
    if (tid == 0) accepted[group] = int(run);
""", HEADER)

# A softmax needs the maximum and the sum of exponentials; both are carried together, and joined pair by pair. The
# difference to the maximum is scaled, never the logit itself: at a low temperature that would lose its last digits.
SUM = """
DS_FN void ds_join(thread float* top, thread float* sum, float other_top, float other_sum, float scale) {
    if (other_top == -INFINITY) return;
    const float to = *top > other_top ? *top : other_top;
    const float mine = *top == -INFINITY ? 0.0f : *sum * precise::exp((*top - to) * scale);
    *sum = mine + other_sum * precise::exp((other_top - to) * scale);
    *top = to;
}
"""

JOIN_GROUP = f"""
        for (uint d = 16; d > 0; d >>= 1) {{
            const float other_top = simd_shuffle_xor(top, d), other_sum = simd_shuffle_xor(sum, d);
            ds_join(&top, &sum, other_top, other_sum, scale[0]);
        }}
        if (lane == 0) {{ tops[simd] = top; sums[simd] = sum; }}
        threadgroup_barrier(mem_flags::mem_threadgroup);
        top = tops[0];
        sum = sums[0];
        for (uint k = 1; k < {SIMDS}; ++k) ds_join(&top, &sum, tops[k], sums[k], scale[0]);"""

JOIN_STORAGE = f"""
    threadgroup float tops[{SIMDS}];
    threadgroup float sums[{SIMDS}];"""

SUMS = Kernel("accept_sums", ("logits", "scale"), ("part_top", "part_sum"), f"""{PLACE}
    const uint row = threadgroup_position_in_grid.y;
    {JOIN_STORAGE}
    float top = -INFINITY, sum = 0.0f;
    for (uint step = 0; step < STEPS; ++step) {{
        const uint v = (group * STEPS + step) * {THREADS} + tid;
        if (v < V) ds_join(&top, &sum, static_cast<float>(logits[row * V + v]), 1.0f, scale[0]);
    }}
    {JOIN_GROUP}
    if (tid == 0) {{ part_top[row * PARTS + group] = top; part_sum[row * PARTS + group] = sum; }}
""", HEADER + SUM)

TESTS = Kernel(
    "accept_tests", ("part_top", "part_sum", "logits", "scale", "log_q", "drafts", "uniforms", "limits", "rows"),
    ("accepted", "normaliser"), f"""{PLACE}
    const uint ROWS = rows[0];
    {JOIN_STORAGE}
    uint run = 0;
    bool running = true;
    for (uint row = 0; running && row < ROWS; ++row) {{
        float top = -INFINITY, sum = 0.0f;
        for (uint k = tid; k < NPART; k += {THREADS}) {{
            const uint at = (group * ROWS + row) * NPART + k;
            ds_join(&top, &sum, part_top[at], part_sum[at], scale[0]);
        }}
        {JOIN_GROUP}
        threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next row writes to the same place
        const float log_sum = precise::log(sum);
        if (tid == 0) {{  // what stays is that of the row after the run
            normaliser[group * 2] = top;
            normaliser[group * 2 + 1] = log_sum;
        }}
        running = row < uint(limits[group]);
        if (running) {{
            const uint draft = group * (ROWS - 1) + row;
            const uint token = uint(drafts[draft]);
            const float logit = static_cast<float>(logits[(group * ROWS + row) * V + token]);
            const float p = precise::exp((logit - top) * scale[0] - log_sum);
            running = uniforms[draft] * precise::exp(log_q[draft * V + token]) < p;
            run += running ? 1 : 0;
        }}
    }}
    if (tid == 0) accepted[group] = int(run);
""", HEADER + SUM)

AFTER = Kernel(
    "accept_after", ("logits", "scale", "log_q", "accepted", "normaliser", "keys", "limits", "rows"),
    ("part_value", "part_index", "plain_value", "plain_index", "part_mass"), f"""{PLACE}
    const uint ROWS = rows[0];
    const uint request = threadgroup_position_in_grid.y;
    threadgroup float best_value[{SIMDS}];
    threadgroup uint best_index[{SIMDS}];
    threadgroup float other_value[{SIMDS}];
    threadgroup uint other_index[{SIMDS}];
    threadgroup float masses[{SIMDS}];
    const uint row = uint(accepted[request]);
    const bool drafted = row < uint(limits[request]);
    float value = -INFINITY, plain = -INFINITY, mass = 0.0f;
    uint at = DS_NONE, plain_at = DS_NONE;
    for (uint step = 0; step < STEPS; ++step) {{
        const uint v = (group * STEPS + step) * {THREADS} + tid;
        if (v < V) {{
            const float logit = static_cast<float>(logits[(request * ROWS + row) * V + v]);
            const float log_p = (logit - normaliser[request * 2]) * scale[0] - normaliser[request * 2 + 1];
            const float q = drafted ? precise::exp(log_q[(request * (ROWS - 1) + row) * V + v]) : 0.0f;
            const float left = precise::exp(log_p) - q;
            const float gumbel = ds_gumbel(keys[request * 2], keys[request * 2 + 1], v, V);
            if (left > 0.0f) {{
                mass += left;
                const float score = precise::log(left) + gumbel;
                if (ds_better(score, v, value, at)) {{ value = score; at = v; }}
            }}
            if (ds_better(log_p + gumbel, v, plain, plain_at)) {{ plain = log_p + gumbel; plain_at = v; }}
        }}
    }}
    {best_of_group("value", "at", "best")}
    {best_of_group("plain", "plain_at", "other")}
    for (uint d = 16; d > 0; d >>= 1) mass += simd_shuffle_xor(mass, d);
    if (lane == 0) masses[simd] = mass;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {{
        {best_of_simds("first", "first_at", "best")}
        {best_of_simds("second", "second_at", "other")}
        float total = 0.0f;
        for (uint k = 0; k < {SIMDS}; ++k) total += masses[k];
        const uint part = request * PARTS + group;
        part_value[part] = first;
        part_index[part] = first_at;
        plain_value[part] = second;
        plain_index[part] = second_at;
        part_mass[part] = total;
    }}
""", HEADER)

FINISH = Kernel(
    "accept_finish",
    ("part_value", "part_index", "plain_value", "plain_index", "part_mass", "accepted", "drafts", "rows"), ("tokens",),
    f"""{PLACE}
    const uint ROWS = rows[0];
    {FOLD_STORAGE}
    uint residual = 0, plain = 0;
    {fold("group", "residual")}
    {fold("group", "plain", "plain")}
    float mass = 0.0f;
    for (uint k = 0; k < NPART; ++k) mass += part_mass[group * NPART + k];
    const uint following = mass > {RESIDUAL_FLOOR:.0e}f ? residual : plain;
    const uint run = uint(accepted[group]);
    for (uint row = tid; row < ROWS; row += {THREADS})
        tokens[group * ROWS + row] = row < run ? drafts[group * (ROWS - 1) + row] : int(following);
""", HEADER)
