"""Every kernel against its reference: on the CPU by the emulator, and on the devices that are there.

MLX_DSPARK_TEST_KERNELS names one executor (metal, cuda or a mode of the emulator): the tests run on it alone, and
it is an error if it is missing. Without it, what is here is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import kernel_checks as checks
import mlx.core as mx
import numpy as np
import pytest
from emulator import available_modes, lint, nvcc_compile
from kernel_checks import MODES, Case

from mlx_dspark.kernels import accept, argmax, sample, topk, walk
from mlx_dspark.kernels.launch import Execute, Kernel, Launch
from mlx_dspark.kernels.pick import BACKENDS
from mlx_dspark.kernels.table import Table
from mlx_dspark.kernels.traffic import slot_traffic
from mlx_dspark.kernels.walk import Chain

VARIABLE = "MLX_DSPARK_TEST_KERNELS"
emulated = pytest.mark.skipif(bool(available_modes()["run"]), reason=available_modes()["run"])
ALL = (*MODES, *BACKENDS)


def missing(name: str) -> str:
    """Why an executor cannot be used here, "" if it can."""
    if name in MODES:
        return available_modes()[MODES[name].sanitize or "run"]
    there = mx.metal.is_available() if name == "metal" else mx.cuda.is_available()
    return "" if there else f"mlx has no {name} device here: these tests have not run on one"


def on_device(name: str) -> Execute:
    """Runs kernels on the GPU while the CPU is in force."""

    def execute(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        mx.eval(*inputs)
        with mx.stream(mx.gpu):
            outputs = BACKENDS[name](kernel, inputs, launch)
            mx.eval(*outputs)
        return outputs

    return execute


def chosen(names: Iterable[str]) -> list[str]:
    """Those of the executors that tests run on."""
    if wanted := os.environ.get(VARIABLE):
        if wanted not in ALL:
            raise ValueError(f"{VARIABLE} is {wanted!r}: give one of {', '.join(ALL)}")
        return [wanted]
    return [name for name in names if not missing(name)]


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Execute:
    """What runs the kernels of a test."""
    name = request.param
    if missing(name):
        pytest.fail(f"{VARIABLE}={name}: {missing(name)}")
    return MODES[name] if name in MODES else on_device(name)


everywhere = pytest.mark.parametrize("executor", chosen(ALL), indirect=True)


def spread(table: dict[str, Callable[..., None]]) -> Callable:
    """Each check in one mode of the emulator, in turn, and on every device."""
    pairs = [(check, executor, f"{name}-{executor}") for number, (name, check) in enumerate(table.items())
             for executor in chosen([list(MODES)[number % len(MODES)], *BACKENDS])]
    return pytest.mark.parametrize(("check", "executor"), [pytest.param(c, e, id=i) for c, e, i in pairs],
                                   indirect=["executor"])


@pytest.mark.parametrize("name", ALL)
def test_an_executor_is_here(name):
    if missing(name):
        assert name != os.environ.get(VARIABLE), missing(name)
        pytest.skip(missing(name))


# --- the ops against their references -------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in checks.core().items()])
def test_an_op(check, executor):
    check(executor)


@spread(checks.wide())
def test_data_and_shapes(check, executor):
    check(executor)


@pytest.mark.parametrize("executor", chosen(["metal-forward", *BACKENDS]), indirect=True)
def test_a_large_vocabulary(executor):
    checks.large()(executor)


# --- the references -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "group"), checks.FORMATS)
def test_the_reference_of_argmax_by_hand(weights, group):
    """Quantised rows are unpacked by hand here: code * scale + bias, codes from the lowest bits up."""
    case = Case(weights=weights, group=group, rank=128, vocab=50, requests=3)
    table, latent, base = checks.make_table(case, 50, "w2"), checks.make_latent(case), checks.make_base(case)[:, 0]
    if case.bits:
        words, count = np.array(table.weight), 32 // case.bits
        codes = np.stack([words >> np.uint32(case.bits * k) & (2**case.bits - 1) for k in range(count)], axis=-1)
        spread_out = [np.repeat(np.array(part), group, axis=-1) for part in (table.scales, table.biases)]
        rows = codes.reshape(50, -1) * spread_out[0] + spread_out[1]
    else:
        rows = np.array(table.weight.astype(mx.float32))
    assert np.array_equal(rows, np.array(checks.dense(table)))
    corrected = np.array(base) + np.array(latent) @ rows.T
    token, value = argmax.reference(base, latent, table)
    assert token.tolist() == corrected.argmax(axis=-1).tolist() and value.tolist() == corrected.max(axis=-1).tolist()


def test_a_draw_has_the_distribution_of_the_softmax():
    logits, count = mx.array([[1.0, -2.0, 0.0, 3.0, -mx.inf]]), 20_000
    tokens = sample.draw(mx.broadcast_to(logits, (count, 5)), mx.random.split(mx.random.key(0), count), mx.array([0.5]))
    found = np.bincount(np.array(tokens), minlength=5) / count
    expected = np.array(mx.softmax(logits[0] * 0.5))
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected / count)).all()


@pytest.mark.parametrize("k", [1, 3, 20, 60])
def test_the_reference_of_topk_by_brute_force(k):
    """The best candidate is the best of the candidates, and wherever it is certified, of all tokens."""
    case = Case(vocab=60, rank=8, requests=24, slots=1, k=k)
    base, w1, w2 = checks.spread_base(case), checks.make_table(case, 60, "w1"), checks.make_table(case, 60, "w2")
    previous = mx.arange(24)
    found = topk.candidates(base, k)
    token, value, sure = topk.reference(base[:, 0], w1.take(previous), w2, found.tokens[:, 0], found.floor[:, 0],
                                        checks.exact_bound(Chain(w1, w2))[previous])
    totals = np.array(base[:, 0]) + np.array(w1.take(previous)) @ np.array(checks.dense(w2)).T
    for row, candidates in enumerate(np.sort(np.array(found.tokens[:, 0]), axis=-1)):
        assert len(set(candidates.tolist())) == k and found.floor[row, 0] == np.sort(np.array(base[row, 0]))[-k]
        best = candidates[totals[row, candidates].argmax()]
        assert (token[row].item(), value[row].item()) == (best, totals[row, best])
        assert not sure[row].item() or best == totals[row].argmax()
    assert (sure.sum().item() > 0) == (k > 1) and (sure.sum().item() < 24) == (k < 60)


@pytest.mark.parametrize(("weights", "group"), [("float32", 64), ("bfloat16", 64), ("8", 32), ("4", 32)])
def test_no_bias_is_above_its_bound(weights, group):
    case = Case(vocab=300, rank=32, weights=weights, group=group, data="typical")
    markov, _ = checks.make_markov(case)
    chain = markov.chain()
    bound = np.array(topk.bounds(chain.w1, chain.w2, chunk=128), np.float64)
    first, second = (np.array(checks.dense(table), np.float64) for table in (chain.w1, chain.w2))
    exact = (first @ second.T).max(axis=-1)
    assert bound.shape == (300,) and (bound >= exact).all() and (bound <= exact + 1e-3).all()
    summed = np.array(chain.w2.times(checks.dense(chain.w1)).astype(mx.float32).max(axis=-1))
    if weights != "bfloat16":  # whose product is rounded to bfloat16
        assert (bound >= summed).all()


class Exact:
    """Every outcome of the accept test of a tiny block, with its probability: drafts, run and next token."""

    def __init__(self, p: np.ndarray, q: np.ndarray):
        self.p, self.q, self.outcomes = p, q, {}
        self._walk((), 1.0)

    def _walk(self, kept: tuple[int, ...], chance: float) -> None:
        row = len(kept)
        if row == len(self.q):
            self._add(kept, chance * self.p[row])
            return
        left = np.maximum(self.p[row] - self.q[row], 0)
        for token, drawn in enumerate(self.q[row]):
            passes = min(1.0, self.p[row][token] / drawn)
            self._walk((*kept, token), chance * drawn * passes)
            self._add(kept, chance * drawn * (1 - passes) * left / left.sum())

    def _add(self, kept: tuple[int, ...], chances: np.ndarray) -> None:
        for token, chance in enumerate(chances):
            self.outcomes[*kept, token] = self.outcomes.get((*kept, token), 0.0) + chance


def tiny_block(count: int) -> tuple[np.ndarray, np.ndarray, tuple[mx.array, ...]]:
    """p [3, 3] and q [2, 3] of two drafts, and the same block `count` times with drafts drawn from q."""
    logits = mx.array([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    log_p, log_q = (checks.log_softmax(x, 1.0) for x in (logits, mx.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])))
    drafting, judging, after = mx.random.split(mx.random.key(8), 3)
    drafts = mx.random.categorical(log_q, shape=(count, 2), key=drafting).astype(mx.int32)

    def repeated(x: mx.array) -> mx.array:
        return mx.broadcast_to(x, (count, *x.shape))

    return np.array(mx.exp(log_p)), np.array(mx.exp(log_q)), (
        drafts, repeated(log_q), repeated(logits), mx.random.uniform(shape=(count, 2), key=judging),
        mx.random.split(after, count))


@pytest.mark.parametrize("limit", [None, 0, 1, 2])
def test_the_accept_rule_has_the_probabilities_of_an_enumeration(limit):
    """Also where only so many drafts were verified: the token behind them is drawn from p."""
    count = 40_000
    p, q, (drafts, log_q, logits, uniforms, keys) = tiny_block(count)
    limits = None if limit is None else mx.full((count,), limit, dtype=mx.int32)
    accepted, tokens = accept.sampled_reference(drafts, log_q, checks.log_softmax(logits, 1.0), uniforms, keys, limits)
    seen: dict[tuple[int, ...], int] = {}
    for run, row in zip(accepted.tolist(), tokens.tolist()):
        seen[tuple(row[: run + 1])] = seen.get(tuple(row[: run + 1]), 0) + 1
    exact = Exact(p, q[:limit]).outcomes
    assert sum(exact.values()) == pytest.approx(1) and seen.keys() <= {key for key, chance in exact.items() if chance}
    for outcome, chance in exact.items():
        assert abs(seen.get(outcome, 0) - count * chance) <= 4 * np.sqrt(count * chance) + 1e-9, outcome
    first = np.array([sum(chance for key, chance in exact.items() if key[0] == token) for token in range(3)])
    assert np.allclose(first, p[0])  # the first token of the round has the target's distribution


@everywhere
def test_the_accept_kernels_make_the_same_choices(executor):
    """Sixty draws of the enumerated block: the kernels take every way that the rule can go."""
    _, _, (drafts, log_q, logits, uniforms, keys) = tiny_block(60)
    for limits in (None, mx.arange(60, dtype=mx.int32) % 3):
        expected = accept.sampled_reference(drafts, log_q, checks.log_softmax(logits, 1.0), uniforms, keys, limits)
        assert set(expected[0].tolist()) == {0, 1, 2}
        found = accept.run_sampled(executor, drafts, log_q, logits, mx.array([1.0]), uniforms, keys, limits)
        for mine, theirs, what in zip(found, expected, ("accepted", "tokens")):
            checks.equal(what, mine, theirs)


# --- the walk by candidates on the host -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 8, 500])
def test_the_certified_walk_is_the_full_walk(k):
    case = Case(vocab=400, rank=16, slots=6, k=k)
    markov, _ = checks.make_markov(case)
    chain = markov.chain()
    certified = topk.CertifiedWalk(chain.w1, chain.w2, checks.exact_bound(chain), k=k)
    flags = []
    for start in range(4):
        base, anchor = checks.spread_base(replace(case, group=start)), mx.array([start])
        tokens = certified(base, None, anchor)
        checks.equal("tokens", tokens, mx.argmax(checks.after(markov, base, None, anchor, tokens), axis=-1))
        chosen = topk.candidates(base, k)
        flags += checks.reference_flags(case, chain, base, anchor, chosen, checks.exact_bound(chain))[1][0].tolist()
    assert (certified.slots, certified.certified) == (24, sum(flags)) and certified.share == sum(flags) / 24


def test_a_certified_walk_that_does_not_pay_gives_up(monkeypatch):
    monkeypatch.setattr(topk, "TRIED", 6)
    case = Case(vocab=400, rank=16, slots=6)
    markov, _ = checks.make_markov(case)
    chain = markov.chain()
    walker = topk.CertifiedWalk(chain.w1, chain.w2, mx.full((400,), mx.inf), least=0.5)  # nothing is ever certified
    assert walker.share is None and walker.pays
    for _ in range(3):
        tokens = walker(checks.spread_base(case), None, mx.array([1]))
        full = checks.after(markov, checks.spread_base(case), None, mx.array([1]), tokens)
        checks.equal("tokens", tokens, mx.argmax(full, axis=-1))
    assert not walker.pays and walker.slots == 6 and walker.share == 0


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "problem"), [
    (Table(mx.zeros((4, 8), dtype=mx.float16)), None),
    (Table(mx.zeros((4, 6), dtype=mx.float32)), "rows of 6 numbers are not a multiple of 4"),
    (Table(mx.zeros((4, 12), dtype=mx.bfloat16)), "rows of 12 numbers are not a multiple of 8"),
    (Table(mx.zeros((4, 8), dtype=mx.int32)), "no kernel reads weights of mlx.core.int32"),
    (Table(mx.zeros((4, 6), dtype=mx.uint32), *[mx.zeros((4, 1))] * 2, bits=6, group=32),
     "no kernel reads weights of 6 bits"),
    (Table(mx.zeros((4, 8), dtype=mx.uint32), *[mx.zeros((4, 4))] * 2, bits=4, group=16),
     "groups of 16 are not a multiple of 32"),
], ids=str)  # fmt: skip
def test_a_table_says_what_is_wrong_with_it(table, problem):
    assert table.problem() == problem


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 128), (32, 96)])
def test_columns_of_a_quantised_table(group, start, stop):
    case = Case(weights="8", group=group, rank=128)
    table = checks.make_table(case, 9, "w")
    part = table.columns(start, stop)
    assert part.bits == (0 if start % group else 8)
    checks.equal("columns", checks.dense(part), checks.dense(table)[:, start:stop])


@pytest.mark.parametrize(("mix", "at", "problem"), [
    (Table(mx.zeros((36, 132))), 96, None),
    (Table(mx.zeros((36, 130))), 94, "rows of 130 numbers are not a multiple of 4"),
    (Table(mx.zeros((36, 128), dtype=mx.bfloat16)), 92,
     "columns of the projection from 92 on do not begin at a multiple of 8"),
], ids=str)
def test_a_chain_says_what_is_wrong_with_it(mix, at, problem):
    first, second = Table(mx.zeros((9, 36))), Table(mx.zeros((9, 36)))
    assert Chain(first, second, gates=1, mix=mix, at=at).problem() == problem


# --- all kernels at Qwen3's size: Metal's rules, registers, bytes ---------------------------------------------------

QWEN3 = Case(vocab=151_936, rank=256, weights="bfloat16", base="bfloat16", slots=2)


def launches(case: Case) -> dict[str, tuple[Kernel, Sequence[mx.array], Launch]]:
    """One launch of each kernel at a shape, by its name; nothing is run, all arrays are empty promises."""
    seen: dict[str, tuple[Kernel, Sequence[mx.array], Launch]] = {}

    def record(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        seen[kernel.name] = (kernel, inputs, launch)
        return [mx.zeros(shape, dtype=dtype) for shape, dtype in zip(launch.shapes, launch.dtypes)]

    def table(rows: int, width: int) -> Table:
        if not case.bits:
            return Table(mx.zeros((rows, width), dtype=getattr(mx, case.weights)))
        parts = [mx.zeros((rows, width // case.group), dtype=mx.bfloat16)] * 2
        return Table(mx.zeros((rows, width * case.bits // 32), dtype=mx.uint32), *parts, case.bits, case.group)

    requests, slots, vocab, rank = case.requests, case.slots, case.vocab, case.rank
    w1, w2 = table(vocab, rank), table(vocab, rank)
    base = mx.zeros((requests, slots, vocab), dtype=getattr(mx, case.base))
    logits, log_q = mx.zeros((requests, slots + 1, vocab), dtype=base.dtype), mx.zeros((requests, slots, vocab))
    anchor, keys = mx.zeros((requests,), dtype=mx.int32), mx.zeros((requests, slots, 2), dtype=mx.uint32)
    scale, uniforms, drafts = mx.array([1.0]), mx.zeros((requests, slots)), mx.zeros((requests, slots), dtype=mx.int32)
    latent, projected = mx.zeros((requests, rank)), mx.zeros((requests, slots, 3 * rank))
    argmax.run(record, base[:, 0], latent, w2)
    sample.run(record, base[:, 0], latent, w2, keys[:, 0], scale)
    walk.run_greedy(record, Chain(w1, w2), base, None, anchor)
    walk.run_sampled(record, Chain(w1, w2), base, None, anchor, keys, scale)
    for gates, width in ((1, 1024 + rank), (3, 1024 + 2 * rank)):
        chain = Chain(w1, w2, gates, table(gates * rank, width), at=1024 if gates == 1 else 0)
        walk.run_greedy(record, chain, base, projected[..., : gates * rank], anchor)
    topk.run_walk(record, w1, w2, mx.zeros((vocab,)), base, anchor, topk.Candidates(
        mx.zeros((requests, slots, 256), dtype=mx.int32), mx.zeros((requests, slots))))
    accept.run_greedy(record, drafts, logits)
    accept.run_sampled(record, drafts, log_q, logits, scale, uniforms, keys[:, 0])
    return seen


MODULES = (argmax, sample, walk, topk, accept)
KERNELS = sorted(value.name for module in MODULES for value in vars(module).values() if isinstance(value, Kernel))
SHAPES = {
    "bfloat16": QWEN3,
    "8bit": replace(QWEN3, weights="8"),
    "4bit": replace(QWEN3, weights="4"),
    "float32-four-requests": replace(QWEN3, weights="float32", base="float32", requests=4),
    "bfloat16-four-requests": replace(QWEN3, requests=4),
}
COMPILED = [*(("bfloat16", name) for name in sorted(set(KERNELS))),
            *((shape, "walk_sample") for shape in SHAPES if shape != "bfloat16"), ("4bit", "latent_rnn")]


def test_every_kernel_is_among_them():
    assert set(KERNELS) == set(launches(QWEN3))


@emulated
@pytest.mark.parametrize("shape", ["bfloat16", "4bit"])
@pytest.mark.parametrize("name", sorted(set(KERNELS)))
def test_no_kernel_breaks_a_rule_of_metal(name, shape):
    assert lint(*launches(SHAPES[shape])[name]) == []


@pytest.fixture(scope="module", autouse=True)
def compiling(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future]]:
    """What each kernel takes of an NVIDIA GPU. The compiler runs beside the tests before those that ask for it."""
    asked = [item for item in request.session.items if item.name.startswith("test_no_kernel_spills")]
    with ThreadPoolExecutor(2) as pool:
        yield {} if available_modes()["nvcc"] or not asked else {
            key: pool.submit(nvcc_compile, *launches(SHAPES[key[0]])[key[1]]) for key in COMPILED}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("shape", "name"), COMPILED)
def test_no_kernel_spills_registers(compiling, shape, name):
    if available_modes()["nvcc"]:
        pytest.skip(available_modes()["nvcc"])
    found = compiling[shape, name].result()
    assert (found.spill_stores, found.spill_loads, found.stack) == (0, 0, 0)
    assert found.registers * 256 <= 65_536  # a threadgroup fits on a multiprocessor


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("weights", ["bfloat16", "8", "4"])
def test_a_slot_moves_hardly_more_than_it_must(weights, sampled):
    chain = launched_chain(replace(QWEN3, weights=weights))
    assert 1 < slot_traffic(chain, 151_936, mx.bfloat16, sampled=sampled).ratio <= 1.05


def launched_chain(case: Case) -> Chain:
    _, inputs, launch = launches(case)["walk_argmax"]
    names = walk.GREEDY_SLOT.inputs
    by_name = dict(zip(names, inputs))
    found = [[by_name[name + part] for part in ("", "_scales", "_biases")] for name in ("w1", "w2")]
    return Chain(*(Table(*arrays, case.bits, case.group) if case.bits else Table(arrays[0]) for arrays in found))


# What is put into the text of a slot so that every thread counts the bytes it asks for.
COUNTED = [
    ("ds_piece<FORMAT, PACK, GROUP, WIDTH>(w2,", "asked += 16;\nds_piece<FORMAT, PACK, GROUP, WIDTH>(w2,"),
    ("const float v = part_value[", "asked += 8;\nconst float v = part_value["),
    ("shared_latent[b * WIDTH + k] =", "asked += 16 / W1_PACK, shared_latent[b * WIDTH + k] ="),
    ("const float total = static_cast<float>(base[", "asked += sizeof(base[0]);\n"
     "const float total = static_cast<float>(base["),
    ("out_value[(first + tid)", "asked += 8;\nout_value[(first + tid)"),
    ("if (first + b < B) corrected[", "if (first + b < B) asked += 4;\nif (first + b < B) corrected["),
]


@emulated
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("weights", "requests"), [("float32", 1), ("bfloat16", 3), ("bfloat16", 5)])
def test_the_bytes_are_those_that_the_kernel_asks_for(weights, requests, sampled):
    case = Case(vocab=700, rank=32, weights=weights, requests=requests, slots=2, base="float16")
    counted = [0]

    def count(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        if kernel.name == "fold":
            return MODES["metal-forward"](kernel, inputs, launch)
        source = kernel.source
        for old, new in COUNTED:
            assert old in source or "corrected" in old
            source = source.replace(old, new)
        place = "(thread_position_in_grid.y * PARTS + group) * 256 + tid"
        source = f"uint asked = 0;\n{source}\nbytes[{place}] = asked;"
        threads = launch.grid[0] * launch.grid[1]
        *outputs, asked = MODES["metal-forward"](
            replace(kernel, source=source, outputs=(*kernel.outputs, "bytes")), inputs,
            replace(launch, shapes=(*launch.shapes, (threads,)), dtypes=(*launch.dtypes, mx.uint32)))
        counted[0] = asked.sum().item()  # of the last slot: the first one folds the anchor alone
        return outputs

    chain = checks.make_markov(case)[0].chain()
    base, _, anchor = checks.block(case, checks.make_markov(case)[1])
    if sampled:
        walk.run_sampled(count, chain, base, None, anchor, checks.make_keys(case), checks.scale_of(case))
    else:
        walk.run_greedy(count, chain, base, None, anchor)
    assert slot_traffic(chain, 700, mx.float16, requests, sampled).kernel == counted[0]
