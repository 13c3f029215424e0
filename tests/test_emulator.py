"""The kit the kernels are tested with, tested itself: known-good kernels pass in it, planted mistakes do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest
from emulator import Emulator, Fault, available_modes, lint, nvcc_compile
from emulator.build import compiler, runner
from mlx_lm.models import gated_delta, ssm

from mlx_dspark.kernels.dialect import CUDA
from mlx_dspark.kernels.launch import Kernel, Launch

pytestmark = pytest.mark.skipif(bool(available_modes()["run"]), reason=available_modes()["run"])

ORDERS = ("forward", "reverse", "random")
EMULATORS = [
    *(Emulator(dialect, order) for dialect in ("metal", "cuda") for order in ORDERS),
    *(Emulator(dialect, sanitize=sanitize) for dialect in ("metal", "cuda") for sanitize in ("thread", "address")),
]
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# Row sums, the pattern of every kernel here: strided loads, a shuffle tree, threadgroup memory, a barrier.
SUM = Kernel("sum", ("x",), ("y",), f"""
    const uint tid = thread_position_in_threadgroup.x;
    const uint lane = thread_index_in_simdgroup;
    const uint simd = simdgroup_index_in_threadgroup;
    const uint group = threadgroup_position_in_grid.x;
    threadgroup float part[SIMDS];
    float sum = 0.0f;
    for (uint k = tid; k < N; k += 32 * SIMDS) sum += static_cast<float>(x[group * N + k]);
    for (uint d = 16; d > 0; d >>= 1) sum += simd_shuffle_xor(sum, d);
    if (lane == 0) part[simd] = sum;
    {BARRIER}
    if (tid == 0) {{
        float total = 0.0f;
        for (uint k = 0; k < SIMDS; ++k) total += part[k];
        y[group] = total;
    }}
""")
ROWS, N, SIMDS = 3, 500, 8  # 256 threads in three threadgroups; sums of integers, exact in any order


def numbers(dtype: mx.Dtype = mx.float32) -> mx.array:
    return (mx.arange(ROWS * N).reshape(ROWS, N) % 7 - 3).astype(dtype)


def sum_launch(rows: int = ROWS) -> Launch:
    threads = 32 * SIMDS
    return Launch((("N", N), ("SIMDS", SIMDS)), (rows * threads, 1, 1), (threads, 1, 1), ((rows,),), (mx.float32,))


def run_sum(emulator: Emulator, kernel: Kernel = SUM, x: mx.array | None = None) -> bool:
    """Whether the kernel's sums are right."""
    x = numbers() if x is None else x
    (y,) = emulator(kernel, [x], sum_launch(len(x)))
    return mx.array_equal(y, x.astype(mx.float32).sum(axis=-1)).item()


def edited(kernel: Kernel, *edits: tuple[str, str]) -> Kernel:
    source = kernel.source
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    return replace(kernel, source=source)


# --- known-good kernels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emulator", EMULATORS, ids=repr)
def test_a_right_kernel_passes_everywhere(emulator):
    assert run_sum(emulator)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.int32, mx.uint8])
@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_buffers_of_every_type(dialect, dtype):
    assert run_sum(Emulator(dialect), x=abs(numbers(mx.int32)).astype(dtype))


def emulated(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Callable], emulator: Emulator) -> Callable:
    """A kernel that mlx-lm makes for Metal, to be called as mlx-lm does."""

    def metal_kernel(*, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str) -> Callable:
        kernel = Kernel(name, tuple(input_names), tuple(output_names), source)

        def call(*, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
            arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
            return emulator(kernel, arrays, Launch(
                tuple(template), grid, threadgroup, tuple(map(tuple, output_shapes)), tuple(output_dtypes)))

        return call

    with monkeypatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        return make()


METAL = [e for e in EMULATORS if e.dialect == "metal"]


@pytest.mark.parametrize("emulator", METAL, ids=repr)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gated_delta_of_mlx_lm(monkeypatch, emulator, dtype):
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel",
                        emulated(monkeypatch, gated_delta._make_gated_delta_kernel, emulator))
    mx.random.seed(0)
    batch, steps, key_heads, heads, keys, values = 1, 3, 1, 2, 64, 8
    q, k = (mx.random.normal((batch, steps, key_heads, keys)).astype(dtype) * 0.1 for _ in range(2))
    v = mx.random.normal((batch, steps, heads, values)).astype(dtype)
    g, beta = (mx.random.uniform(shape=(batch, steps, heads)) for _ in range(2))
    state = mx.random.normal((batch, heads, values, keys))
    found = gated_delta.gated_delta_kernel(q, k, v, g, beta.astype(dtype), state)
    expected = gated_delta.gated_delta_ops(q, k, v, g, beta.astype(dtype), state)
    tolerance = 1e-5 if dtype == mx.float32 else 2e-2
    for a, b in zip(found, expected):
        assert mx.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=tolerance, atol=tolerance).item()


@pytest.mark.parametrize("emulator", METAL, ids=repr)
def test_ssm_of_mlx_lm(monkeypatch, emulator):
    monkeypatch.setattr(ssm, "_ssm_kernel", emulated(monkeypatch, ssm.make_ssm_kernel, emulator))
    mx.random.seed(0)
    heads, width, states = 2, 8, 64
    x, dt = mx.random.normal((1, 1, heads, width)), mx.random.normal((1, 1, heads))
    a_log, d, bias = (mx.random.normal((heads,)) for _ in range(3))
    b, c = (mx.random.normal((1, 1, 1, states)) for _ in range(2))
    state = mx.random.normal((1, heads, width, states))
    found = ssm.ssm_update_kernel(x, a_log, b, c, d, dt, bias, state, (0.0, 100.0))
    expected = ssm.ssm_attn(x, a_log, b, c, d, dt, bias, state, (0.0, 100.0))
    for a, e in zip(found, expected):
        assert mx.allclose(a, e, rtol=1e-4, atol=1e-4).item()


# --- numbers and words of the language ------------------------------------------------------------------------------

CONVERT = Kernel("convert", ("bits",), ("half_out", "bfloat_out", "wide"), """
    const uint tid = thread_position_in_threadgroup.x;
    const uint at = threadgroup_position_in_grid.x * 256 + tid;
    const uint4 words = reinterpret_cast<const DS_GLOBAL uint4*>(bits)[at / 4];
    const uint word = at % 4 == 0 ? words.x : at % 4 == 1 ? words.y : at % 4 == 2 ? words.z : words.w;
    half_out[at] = ds_half(word);
    bfloat_out[at] = ds_bfloat(word);
    wide[at] = ds_float(word << 16 | word);
""")
CONVERT_INPUT = mx.arange(1 << 16, dtype=mx.uint32)
CONVERT_LAUNCH = Launch((), (1 << 16, 1, 1), (256, 1, 1), ((1 << 16,),) * 3, (mx.float32,) * 3)


def converted(emulator: Emulator) -> bool:
    """Whether every pattern of sixteen bits is read as MLX reads it."""
    found = emulator(CONVERT, [CONVERT_INPUT], CONVERT_LAUNCH)
    short, wide = CONVERT_INPUT.astype(mx.uint16), CONVERT_INPUT << 16 | CONVERT_INPUT
    expected = [short.view(mx.float16), short.view(mx.bfloat16), wide.view(mx.float32)]
    return all(mx.array_equal(a, e.astype(mx.float32), equal_nan=True).item() for a, e in zip(found, expected))


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_conversions(dialect):
    assert converted(Emulator(dialect))


@pytest.mark.parametrize(("dtype", "word"), [(mx.float16, "half"), (mx.bfloat16, "bfloat16_t")])
def test_numbers_are_narrowed_as_mlx_does(dtype, word):
    kernel = Kernel("narrow", ("x",), ("y",), f"""
        const uint at = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x;
        y[at] = static_cast<{word}>(x[at]);
    """)
    x = mx.concatenate([mx.random.normal((1000,), key=mx.random.key(1)) * 100, mx.array([0.0, -0.0, mx.inf, -mx.inf]),
                        mx.arange(20) / 4 + 2049.0])
    (y,) = Emulator()(kernel, [x], Launch((), (1024, 1, 1), (256, 1, 1), ((1024,),), (dtype,)))
    assert mx.array_equal(y, x.astype(dtype)).item()


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_functions(dialect):
    kernel = Kernel("functions", ("x",), ("y",), """
        const uint at = thread_position_in_threadgroup.x;
        y[at] = precise::exp(x[at]);
        y[32 + at] = precise::log(precise::exp(x[at]));
        y[64 + at] = precise::tanh(x[at]);
    """)
    x = mx.linspace(-3, 3, 32)
    (y,) = Emulator(dialect)(kernel, [x], Launch((), (32, 1, 1), (32, 1, 1), ((96,),), (mx.float32,)))
    assert mx.allclose(y, mx.concatenate([mx.exp(x), x, mx.tanh(x)]), rtol=1e-6, atol=1e-6).item()


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_shuffle_down_keeps_the_lanes_at_the_end(dialect):
    kernel = Kernel("down", ("x",), ("y",), """
        const uint tid = thread_position_in_threadgroup.x;
        y[tid] = simd_shuffle_down(x[tid], DELTA);
    """)
    x = mx.arange(64, dtype=mx.uint32)
    (y,) = Emulator(dialect)(kernel, [x], Launch((("DELTA", 5),), (64, 1, 1), (64, 1, 1), ((64,),), (mx.uint32,)))
    assert y.tolist() == [i + 5 if i % 32 < 27 else i for i in range(64)]


def test_threads_know_their_place_in_three_dimensions():
    kernel = Kernel("place", ("x",), ("y",), """
        const uint3 g = thread_position_in_grid, t = thread_position_in_threadgroup, b = threadgroup_position_in_grid;
        const uint at = (g.z * 4 + g.y) * 8 + g.x;
        y[at] = t.x + 10 * t.y + 100 * b.x + 1000 * b.y + 10000 * b.z + uint(x[0]);
    """)
    launch = Launch((), (8, 4, 2), (4, 2, 1), ((2, 4, 8),), (mx.uint32,))
    (y,) = Emulator()(kernel, [mx.zeros((1,))], launch)
    assert y.tolist() == [[[i % 4 + j % 2 * 10 + i // 4 * 100 + j // 2 * 1000 + k * 10000 for i in range(8)]
                           for j in range(4)] for k in range(2)]


@pytest.mark.parametrize("dialect", ["metal", "cuda"])
def test_several_threadgroup_variables_in_one_declaration(dialect):
    kernel = edited(SUM, ("float part[SIMDS];", "float all, part[SIMDS], two[2][SIMDS * (1 + 1)], last;"), (
        "y[group] = total;", "all = total; two[1][15] = 1.0f; last = 2.0f;"))
    kernel = replace(kernel, source=kernel.source + f"{BARRIER} if (tid == 9) y[group] = all * two[1][15] * last / 2;")
    assert run_sum(Emulator(dialect), kernel) and run_sum(Emulator(dialect, sanitize="thread"), kernel)


def test_the_next_launch_sees_what_one_wrote():
    twice = Emulator(sanitize="thread")
    (y,) = twice(SUM, [numbers()], sum_launch())
    (total,) = twice(SUM, [mx.pad(y, (0, N - ROWS))[None]], sum_launch(1))
    assert total.item() == y.sum().item()


# --- planted mistakes -----------------------------------------------------------------------------------------------

PLAIN = [Emulator(order=order) for order in ORDERS]
WATCHED = [Emulator(order=order, sanitize="thread") for order in ORDERS]
FENCED = [Emulator(order=order, sanitize="address") for order in ORDERS]

# What was done to SUM -> the kind of fault, and the emulators that must each report it.
MISTAKES = {
    "no barrier": ([(BARRIER, "")], "race", WATCHED),
    "a barrier that orders nothing": ([("mem_threadgroup", "mem_none")], "race", WATCHED),
    "a barrier for the other memory": ([("mem_threadgroup", "mem_device")], "race", WATCHED),
    "the place is used again at once": (
        [("y[group] = total;", "y[group] = total;\n}\nif (lane == 0) {\npart[simd] = 0.0f;")], "race", WATCHED),
    "all threadgroups write one place": ([("y[group]", "y[0]")], "race", WATCHED),
    "a threadgroup reads what another wrote": (
        [("y[group] = total;", "y[group] = total + (group == 1 ? y[group - 1] : 0.0f);")], "race", WATCHED),
    "a barrier for some SIMD-groups": (
        [(BARRIER, f"if (simd < 2) {BARRIER}")], "divergent barrier", [*PLAIN, *WATCHED]),
    "two barriers, each for some": (
        [(BARRIER, f"if (simd < 2) {BARRIER}\nelse {BARRIER}")], "divergent barrier", [*PLAIN, *WATCHED]),
    "some return before the barrier": ([(BARRIER, f"if (simd == 3) return;\n{BARRIER}")], "divergent barrier", PLAIN),
    "a shuffle for some lanes": (
        [("sum += simd_shuffle_xor", "if (lane < 16) sum += simd_shuffle_xor")], "divergent shuffle", PLAIN),
    "a shuffle from a lane that returned": (
        [("for (uint d = 16", "if (lane == 31) return;\nfor (uint d = 16")], "inactive lane", PLAIN),
    "a shuffle from beyond the SIMD-group": ([("uint d = 16", "uint d = 32")], "inactive lane", PLAIN),
    "reads past the end": ([("k < N; k", "k <= N + 3; k")], "bounds", [*PLAIN, *WATCHED, *FENCED]),
    "reads one past the end": ([("k < N; k", "k < N + 1; k")], "bounds", [*PLAIN, *WATCHED, *FENCED]),
    "reads before the start": ([("x[group * N + k]", "x[group * N + k - 1]")], "bounds", [*WATCHED, *FENCED]),
    "reads far away": ([("x[group * N + k]", "x[group * N * 100000 + k]")], "bounds", [*PLAIN, *WATCHED, *FENCED]),
    "writes past the end": ([("y[group] =", "y[group + 1] =")], "bounds", [*PLAIN, *WATCHED, *FENCED]),
    "writes before the start": ([("y[group] =", "y[int(group) - 1] =")], "bounds", [*PLAIN, *WATCHED, *FENCED]),
    "threadgroup array too short": ([("part[SIMDS]", "part[SIMDS - 1]")], "bounds", [*PLAIN, *WATCHED, *FENCED]),
    "reads past a threadgroup array": ([("k < SIMDS; ++k", "k <= SIMDS; ++k")], "bounds", [*WATCHED, *FENCED]),
    "an array on the stack too short": (
        [("float total = 0.0f;", "float own[4];\nfor (uint k = 0; k < SIMDS; ++k) own[k] = part[k];\n"
          "float total = own[group];")], "bounds", [*WATCHED, *FENCED]),
    "writes to an input": ([("y[group] =", "const_cast<device float*>(x)[group] =")], "bounds", [*PLAIN, *WATCHED]),
    "threadgroup memory that nobody wrote": (
        [("if (lane == 0)", "if (lane == 0 && simd > 0)")], "uninitialised", WATCHED),
    "an output read before it is written": ([("y[group] =", "y[group] +=")], "uninitialised", WATCHED),
    "a load at an odd place": (
        [("float total = 0.0f;", "float total = reinterpret_cast<const device uint4*>(x + 1)->x;")],
        "misaligned", [*WATCHED, *FENCED]),
    "a shift too wide": ([("y[group] = total", "y[group] = total + (1u << (SIMDS * 4 + group))")], "undefined", FENCED),
    "a division by zero": (
        [("y[group] = total", "y[group] = total + N / int(group)")], "undefined", [*PLAIN, *WATCHED]),
    "too much threadgroup memory": ([("part[SIMDS]", "part[8193]")], "threadgroup memory", [*PLAIN, *WATCHED, *FENCED]),
    "too much threadgroup memory in all": (
        [("float part[SIMDS]", "float part[4096], more[4097]")], "threadgroup memory", [*PLAIN, *WATCHED, *FENCED]),
    "double": ([("float total", "double total")], "compile error", PLAIN),
    "the C++ library": ([("const uint tid", "std::size_t other = 0;\nconst uint tid")], "compile error", PLAIN),
    "a name that is not there": ([("float total", "flot total")], "compile error", PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    edits, kind, emulators = MISTAKES[name]
    for emulator in emulators:
        with pytest.raises(Fault) as caught:
            run_sum(emulator, edited(SUM, *edits))
        assert str(caught.value).startswith(kind), (emulator, caught.value)
        assert len(str(caught.value).splitlines()) == 1


# What was done to SUM -> the orders in which its result must be wrong.
WRONG = {
    "no barrier": ([(BARRIER, "")], ["forward", "random"]),
    "an output left out": ([("y[group] =", "if (group != 1) y[group] =")], ORDERS),
    "threadgroup memory that nobody wrote": ([("if (lane == 0)", "if (lane == 0 && simd > 0)")], ORDERS),
    "a variable without a value": ([("float total = 0.0f;", "float total;")], ORDERS),
    "shuffle tree cut short": ([("uint d = 16", "uint d = 8")], ORDERS),
    "the last threadgroup wins": ([("y[group] = total;", "y[0] = total; y[1] = total; y[2] = total;")], ORDERS),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_shows_in_the_result(name):
    edits, orders = WRONG[name]
    assert [order for order in ORDERS if not run_sum(Emulator(order=order), edited(SUM, *edits))] == list(orders)


def test_an_output_left_out_is_nan():
    kernel = edited(SUM, ("y[group] =", "if (group != 1) y[group] ="))
    (y,) = Emulator()(kernel, [numbers()], sum_launch())
    assert mx.isnan(y).tolist() == [False, True, False]


def test_a_hang_ends():
    with pytest.raises(Fault, match="^hang: "):
        run_sum(Emulator(timeout=1), edited(SUM, ("d >>= 1", "d = d")))


def test_a_fault_shows_the_line():
    with pytest.raises(Fault) as caught:
        run_sum(Emulator(order="reverse", sanitize="thread"), edited(SUM, (BARRIER, "")))
    assert str(caught.value).endswith("| for (uint k = 0; k < SIMDS; ++k) total += part[k];")


def test_a_grid_that_metal_would_cut_short_is_refused():
    with pytest.raises(ValueError, match="no multiple"):
        Emulator()(SUM, [numbers()], replace(sum_launch(), grid=(300, 1, 1)))


# --- the CUDA dialect -----------------------------------------------------------------------------------------------

# What was done to the dialect header; SUM or CONVERT must be wrong or at fault in some emulator.
CUDA_MISTAKES = {
    "xor is up": ("__shfl_xor_sync", "__shfl_up_sync"),
    "a mask of half the lanes": ("__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0x0000ffffu"),
    "lane": ("(threadIdx.x & 31u)", "(threadIdx.x & 15u)"),
    "simd": ("(threadIdx.x >> 5)", "(threadIdx.x >> 4)"),
    "thread in the grid": ("thread_position_in_threadgroup threadIdx", "thread_position_in_threadgroup blockIdx"),
    "no barrier": ("{ __syncthreads(); }", "{}"),
    "private memory": ("#define threadgroup __shared__", "#define threadgroup"),
    "half as bfloat": ("__half2float(__ushort_as_half((unsigned short)bits))", "__uint_as_float(bits << 16)"),
    "bfloat shifted less": ("__uint_as_float(bits << 16)", "__uint_as_float(bits << 8)"),
    "bits as a number": ("{ return __uint_as_float(bits); }", "{ return float(bits); }"),
}


@pytest.mark.parametrize("name", CUDA_MISTAKES)
def test_a_mistake_in_the_dialect_is_caught(name):
    old, new = CUDA_MISTAKES[name]
    assert old in CUDA
    caught = False
    for sanitize in (None, "thread"):
        emulator = Emulator("cuda", sanitize=sanitize, words=CUDA.replace(old, new))
        try:
            caught |= not (run_sum(emulator) and converted(emulator))
        except Fault:
            caught = True
    assert caught


def test_cuda_takes_faults_as_seriously():
    for edits, kind, emulator in (
        ([(BARRIER, "")], "race", Emulator("cuda", sanitize="thread")),
        ([(BARRIER, f"if (simd == 0) {BARRIER}")], "divergent barrier", Emulator("cuda")),
        ([("k < N; k", "k <= N; k")], "bounds", Emulator("cuda", sanitize="address")),
        ([("uint d = 16", "uint d = 32")], "inactive lane", Emulator("cuda")),
    ):
        with pytest.raises(Fault, match=f"^{kind}: "):
            run_sum(emulator, edited(SUM, *edits))


# --- lint and nvcc --------------------------------------------------------------------------------------------------

LINT = {
    "double": ([("float total", "double total")], "double: Metal has no double"),
    "the C++ library": ([("const uint tid", "std::size_t other = 0; const uint tid")], "Metal has no std"),
    "a pointer to nowhere": ([("float total = 0.0f;", "float total = 0.0f; float* p = &total; *p += 0.0f;")],
                             "float* p: a pointer without an address space"),
    "a cast to nowhere": ([("float total = 0.0f;", "float total = *reinterpret_cast<const float*>(x);")],
                          "const float*: a pointer without an address space"),
    "a CUDA name": ([(BARRIER, "__syncthreads();")], "a CUDA name"),
}


def test_lint_finds_nothing_in_right_kernels():
    assert lint(SUM, [numbers()], sum_launch()) == []
    assert lint(CONVERT, [CONVERT_INPUT], CONVERT_LAUNCH) == []


@pytest.mark.parametrize("name", LINT)
def test_lint_finds_what_the_cpu_lets_pass(name):
    edits, message = LINT[name]
    assert any(message in finding for finding in lint(edited(SUM, *edits), [numbers()], sum_launch()))


def test_lint_knows_helper_functions():
    right = "DS_FN float twice(thread const float* x) { return 2.0f * *x; }\n"
    wrong = right.replace("thread const", "const")
    generic = "template <class T> DS_FN void store(T* to, T value) { *to = value; }\n"
    for header, expected in ((right, 0), (wrong, 1), (generic, 1)):
        found = lint(replace(SUM, header=header), [numbers()], sum_launch())
        assert sum("without an address space" in finding for finding in found) == expected


def test_lint_knows_that_small_inputs_are_constant():
    kernel = Kernel("small", ("x",), ("y",), """
        y[0] = reinterpret_cast<const DS_GLOBAL uint4*>(x)->x;
    """)
    launch = Launch((), (1, 1, 1), (1, 1, 1), ((1,),), (mx.uint32,))
    assert any("too small" in finding for finding in lint(kernel, [mx.zeros((4,), mx.uint32)], launch))
    assert lint(kernel, [mx.zeros((8,), mx.uint32)], launch) == []


def test_lint_checks_address_spaces():
    if available_modes()["clang"]:
        pytest.skip(available_modes()["clang"])
    kernel = edited(SUM, ("float total = 0.0f;", "const threadgroup float* p = x; float total = 0 * *p;"))
    assert any("error:" in finding for finding in lint(kernel, [numbers()], sum_launch()))


def test_nvcc_tells_registers_and_spills():
    found = nvcc_compile(SUM, [numbers(mx.bfloat16)], sum_launch())
    assert 0 < found.registers < 64
    assert (found.spill_stores, found.spill_loads) == (0, 0)
    assert found.shared >= 4 * SIMDS


def test_nvcc_refuses_what_is_not_cuda():
    with pytest.raises(Fault, match="^compile error: "):
        nvcc_compile(edited(SUM, ("float total", "device float total")), [numbers()], sum_launch())


# --- the kit among other processes and machines ---------------------------------------------------------------------


def test_builds_at_the_same_time_do_not_meet(monkeypatch, tmp_path):
    program = runner(None)
    shutil.copy(program, tmp_path / program.name)
    monkeypatch.setenv("DSPARK_EMULATOR_CACHE", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: run_sum(Emulator()), range(4)))
    assert len(list(tmp_path.iterdir())) == 2  # the runner and the kernel, nothing left over


def test_processors_without_a_stack_switch_of_their_own(monkeypatch):
    monkeypatch.setenv("DSPARK_CXX", f"{compiler()} -DEMU_UCONTEXT")
    assert run_sum(Emulator())


