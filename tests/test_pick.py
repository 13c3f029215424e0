"""Which implementation runs: the trial of a kernel, its memory on disk, the override, and all of it in a whole run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from emulator import Emulator, available_modes
from helpers import embedded_pair, golden_draft, prompt_of, run, tokens_of

from mlx_dspark import bench, bench_kernels, candidates, doctor, profile, store
from mlx_dspark.generate import generate
from mlx_dspark.kernels import REFERENCE, Choice, accept, choose_kernels, pick, topk, trials
from mlx_dspark.kernels.launch import Kernel, Launch
from mlx_dspark.kernels.pick import VARIABLE, Trial, remembered
from mlx_dspark.load import load
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.structs import Sampling

emulated = pytest.mark.skipif(bool(available_modes()["run"]), reason=available_modes()["run"])


@pytest.fixture(autouse=True, scope="module")
def reference_pair():
    """The pair that all tests share is loaded before any of them changes what its kernels are."""
    assert embedded_pair().kernels.summary == {"all": "reference"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def on_metal(monkeypatch):
    """mlx seems to compute on Metal, as far as the choice of kernels can see."""
    metal = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(pick, "on_cpu", lambda: False)
    monkeypatch.setattr(pick, "mx", SimpleNamespace(metal=metal, eval=mx.eval))


class Op:
    """An op with a clock of its own: how long kernel and reference take, and what the kernel does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: float = 1.0, reference: float = 2.0,
                 problem: str | None = None, error: Exception | None = None):
        self.now, self.tried, self.seconds = 0.0, 0, {"kernel": kernel, "reference": reference}
        self.problem, self.error = problem, error
        monkeypatch.setattr(pick, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setitem(pick.BACKENDS, "metal", self.execute)

    def execute(self, kernel: Kernel | None, inputs: Sequence[mx.array], launch: Launch | None) -> list[mx.array]:
        self.tried += 1
        if self.error is not None:
            raise self.error
        return self._pass("kernel")

    def _pass(self, name: str) -> list[mx.array]:
        self.now += self.seconds[name]
        return [mx.array([1.0])]

    def trial(self, **changes) -> Trial:
        facts = {"op": "walk_greedy", "shape": "V 4", "kernel": lambda execute: execute(None, [], None),
                 "reference": lambda: self._pass("reference"), "problem": lambda outputs: self.problem}
        return Trial(**{**facts, **changes})


# --- a trial and its verdict ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (2.0, 2.0)], ids=["faster", "as fast"])
def test_a_kernel_that_is_right_and_not_slower_is_taken(monkeypatch, on_metal, seconds):
    op = Op(monkeypatch, *seconds)
    choice, execute = pick.pick(op.trial())
    assert execute == op.execute and choice == Choice(
        "walk_greedy", "V 4", "metal", "equal and not slower", False, *seconds)
    assert str(choice).startswith("walk_greedy [V 4]: metal, equal and not slower (")
    assert op.tried == 1 + 1 + pick.RUNS  # compared, warmed up, timed


def test_a_slower_kernel_is_not_taken(monkeypatch, on_metal):
    op = Op(monkeypatch, 2.001, 2.0)
    choice, execute = pick.pick(op.trial())
    assert execute is None and (choice.backend, choice.reason) == ("reference", "it is slower on metal")
    assert not choice.failed and (choice.kernel_seconds, choice.reference_seconds) == pytest.approx((2.001, 2.0))


def test_a_wrong_kernel_is_refused_with_the_reason_and_not_timed(monkeypatch, on_metal):
    op = Op(monkeypatch, problem="slot 2 took a token that is not the best")
    choice, execute = pick.pick(op.trial())
    assert execute is None and choice.failed and choice.backend == "reference" and op.tried == 1
    assert choice.reason == "it is wrong on metal: slot 2 took a token that is not the best"


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("no such function\nand more"), "no such function"), (ValueError(""), "ValueError"),
    (KeyError("x" * 500), "'" + "x" * 199),
], ids=["message", "nothing", "long"])
def test_a_kernel_that_raises_is_refused_for_this_time(monkeypatch, on_metal, own_cache, error, said):
    """Memory or a compiler may have been missing: the next process tries again."""
    op = Op(monkeypatch, error=error)
    for tried in (1, 2):
        choice, execute = pick.pick(op.trial())
        assert execute is None and choice.failed and choice.reason == f"it failed on metal: {said}"
        assert op.tried == tried and remembered() == [] and not list(own_cache.rglob("*.json"))


@pytest.mark.parametrize("where", ["check", "timing"])
def test_what_stops_a_check_is_no_verdict(monkeypatch, on_metal, where):
    """An interrupt goes on its way; an error while timing is the kernel's, and load goes on."""
    op = Op(monkeypatch, error=KeyboardInterrupt() if where == "check" else None)
    if where == "check":
        with pytest.raises(KeyboardInterrupt):
            pick.pick(op.trial())
    else:
        def timing(works, runs):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(pick, "medians", timing)
        choice, execute = pick.pick(op.trial())
        assert execute is None and choice.reason == "it failed on metal: out of memory"
    assert remembered() == []


def test_a_check_in_another_process_is_neither_awaited_nor_taken_for_a_crash(monkeypatch, on_metal, own_cache):
    op, seen = Op(monkeypatch), []
    inner = op.trial()

    def meanwhile(execute):
        seen.append(pick.pick(inner))  # what a second process reads while this one checks
        return inner.kernel(execute)

    choice, _ = pick.pick(dataclasses.replace(inner, kernel=meanwhile))
    other, execute = seen[0]
    assert execute is None and not other.failed and other.reason == "another process is checking it"
    assert choice.backend == "metal" and remembered() == [choice]


def test_a_comparison_that_raises_refuses_the_kernel(monkeypatch, on_metal):
    def problem(outputs):
        raise TypeError("outputs have another shape")

    choice, _ = pick.pick(Op(monkeypatch).trial(problem=problem))
    assert choice.failed and choice.reason == "it failed on metal: outputs have another shape"


def test_what_no_kernel_does_is_not_tried(monkeypatch, on_metal, own_cache):
    op = Op(monkeypatch)
    choice, execute = pick.pick(op.trial(unsupported="no kernel reads weights of 6 bits"))
    assert execute is None and not choice.failed and choice.reason == "no kernel reads weights of 6 bits"
    assert op.tried == 0 and not own_cache.exists()


@pytest.mark.parametrize("problem", [None, "wrong"], ids=["taken", "refused"])
def test_a_verdict_is_remembered(monkeypatch, on_metal, problem):
    op = Op(monkeypatch, problem=problem)
    first, tried = pick.pick(op.trial()), op.tried
    assert pick.pick(op.trial()) == first and op.tried == tried and remembered() == [first[0]]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '"text"', '{"op": "walk_greedy", "more": 1}', b"\xff"],
                         ids=repr)
def test_a_damaged_or_missing_verdict_is_tried_again(monkeypatch, on_metal, own_cache, content):
    op = Op(monkeypatch)
    first, tried = pick.pick(op.trial()), op.tried
    (path,) = (own_cache / "kernels").iterdir()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert remembered() == []
    assert pick.pick(op.trial()) == first and op.tried == 2 * tried and remembered() == [first[0]]


@pytest.mark.parametrize("changed", ["op", "shape", "backend", "text", "chip", "os", "mlx"])
def test_another_op_shape_text_or_machine_is_tried_anew(monkeypatch, on_metal, changed):
    op = Op(monkeypatch)
    pick.pick(op.trial())
    tried, trial, facts = op.tried, op.trial(), pick.machine()
    if changed in ("op", "shape"):
        trial = dataclasses.replace(trial, **{changed: "another"})
    elif changed == "backend":
        monkeypatch.setattr(pick, "backend", lambda: ("cuda", ""))
        monkeypatch.setitem(pick.BACKENDS, "cuda", op.execute)
    elif changed == "text":
        monkeypatch.setattr(pick, "text_hash", lambda: "another")
    else:
        monkeypatch.setattr(pick, "machine", lambda: {**facts, changed: "another"})
    pick.pick(trial)
    assert op.tried == 2 * tried and len(remembered()) == 2


def test_the_text_hash_is_that_of_the_files(monkeypatch, tmp_path):
    monkeypatch.setattr(pick, "__file__", str(tmp_path / "pick.py"))
    (tmp_path / "pick.py").write_text("a")
    (tmp_path / "walk.py").write_text("b")
    first = pick.text_hash()
    (tmp_path / "walk.txt").write_text("no part of it")
    assert pick.text_hash() == first
    (tmp_path / "walk.py").write_text("c")
    assert pick.text_hash() != first


CRASH = """
import os
from mlx_dspark.kernels import pick
pick.backend = lambda: ("metal", "")
pick.BACKENDS["metal"] = lambda kernel, inputs, launch: os._exit(9)
pick.pick(pick.Trial("walk_greedy", "V 4", lambda execute: execute(None, [], None), list, lambda outputs: None))
"""


def test_a_check_that_ends_the_process_is_not_repeated(monkeypatch, on_metal):
    done = subprocess.run([sys.executable, "-c", CRASH], cwd=Path(pick.__file__).parents[2], env=dict(os.environ))
    assert done.returncode == 9
    op = Op(monkeypatch)
    choice, execute = pick.pick(op.trial())
    assert execute is None and op.tried == 0 and choice.failed
    assert choice.reason == "its check on metal ended the process"


def test_a_folder_that_cannot_be_written_keeps_no_verdict(monkeypatch, on_metal, own_cache):
    own_cache.write_text("a file where the folder should be")
    op = Op(monkeypatch)
    assert pick.pick(op.trial())[0].backend == "metal" and pick.pick(op.trial())[0].backend == "metal"
    assert op.tried == 2 * (2 + pick.RUNS)


# --- the override ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wish", "device", "found"), [
    (None, "cpu", "reference"), ("auto", "cpu", "reference"), ("reference", "cpu", "reference"),
    ("metal", "cpu", "MLX_DSPARK_KERNELS=metal, but mlx computes on the CPU"),
    ("cuda", "cpu", "MLX_DSPARK_KERNELS=cuda, but mlx computes on the CPU"),
    (None, "metal", "metal"), ("auto", "metal", "metal"), ("metal", "metal", "metal"),
    ("reference", "metal", "reference"), ("cuda", "metal", "MLX_DSPARK_KERNELS=cuda, but mlx computes on metal"),
    (None, "cuda", "cuda"), ("cuda", "cuda", "cuda"), ("metal", "cuda", "but mlx computes on cuda: give auto"),
    ("gpu", "metal", "MLX_DSPARK_KERNELS is 'gpu': give reference, metal, cuda or auto"),
    ("", "cpu", "MLX_DSPARK_KERNELS is ''"), ("Metal", "metal", "MLX_DSPARK_KERNELS is 'Metal'"),
])
def test_the_override(monkeypatch, wish, device, found):
    metal = SimpleNamespace(is_available=lambda: device == "metal")
    monkeypatch.setattr(pick, "on_cpu", lambda: device == "cpu")
    monkeypatch.setattr(pick, "mx", SimpleNamespace(metal=metal))
    if wish is not None:
        monkeypatch.setenv(VARIABLE, wish)
    if found in ("reference", "metal", "cuda"):
        name, reason = pick.backend()
        assert name == found and reason
    else:
        with pytest.raises(ValueError, match=found):
            pick.backend()


def test_the_reference_by_wish_tries_nothing(monkeypatch, on_metal, own_cache):
    monkeypatch.setenv(VARIABLE, "reference")
    op = Op(monkeypatch)
    choice, execute = pick.pick(op.trial())
    assert execute is None and op.tried == 0 and choice.reason == "MLX_DSPARK_KERNELS=reference"
    assert not own_cache.exists()


# --- all ops of a pair ----------------------------------------------------------------------------------------------


def chosen(markov=None):
    return choose_kernels(markov, 64, 3, mx.float32, 64, mx.float32, 64)


def test_on_the_cpu_everything_is_the_reference(own_cache):
    kernels = chosen(golden_draft().sequential_head)
    assert dataclasses.replace(kernels, choices=()) == REFERENCE and kernels.summary == {"all": "reference"}
    assert kernels.notes == [] and not own_cache.exists()
    assert kernels.accept_greedy is accept.greedy_reference


def small_head(head="vanilla", kind="float32", group=64):
    return bench_kernels.make_head(bench_kernels.Shape(64, 32, 3, 64), head, kind, group)


def test_kernels_that_fail_are_noted_and_the_reference_runs(monkeypatch, on_metal):
    Op(monkeypatch, error=RuntimeError("the compiler gave up"))
    kernels = chosen(small_head())
    assert dataclasses.replace(kernels, choices=()) == REFERENCE
    assert set(kernels.summary.values()) == {"reference"} and len(kernels.notes) == 4
    shape = "V 64, R 32, N 3, vanilla (W1 float32, W2 float32), float32"
    assert kernels.notes[0].startswith(
        f"kernel walk_greedy [{shape}]: reference, it failed on metal: the compiler gave up")


@emulated
@pytest.mark.parametrize(("head", "kind", "group", "name"), [
    ("vanilla", "bfloat16", 64, "vanilla (W1 bfloat16, W2 bfloat16)"),
    ("gated", "8", 32, "gated (W1 8 bits/32 float32, W2 8 bits/32 float32, columns 64 on 8 bits/32 float32)"),
    ("rnn", "float16", 64, "rnn (W1 float16, W2 float16, columns 0 on float16)"),
])
def test_the_trials_pass_the_kernels(monkeypatch, on_metal, head, kind, group, name):
    monkeypatch.setattr(pick, "medians", lambda works, runs: {"kernel": 1.0, "reference": 2.0})
    monkeypatch.setitem(pick.BACKENDS, "metal", Emulator())
    kernels = chosen(small_head(head, kind, group))
    assert kernels.notes == [] and set(kernels.summary.values()) == {"metal"}
    assert [choice.op for choice in kernels.choices] == [
        "walk_greedy", "walk_sampled", "accept_greedy", "accept_sampled"]
    assert kernels.choices[0].shape == f"V 64, R 32, N 3, {name}, float32"
    assert None not in (kernels.walk_greedy, kernels.walk_sampled, kernels.accept_sampled)


def liar(name: str, output: int):
    """An executor that spoils one output of one kernel."""

    def execute(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        outputs = Emulator()(kernel, inputs, launch)
        if kernel.name == name:
            outputs[output] = mx.zeros_like(outputs[output])
        return outputs

    return execute


@emulated
@pytest.mark.parametrize(("kernel", "output", "op", "problem"), [
    ("walk_argmax", 2, "walk_greedy", "slot 1 took a token that is not the best"),
    ("walk_sample", 2, "walk_sampled", "slot 1 took a token that is not the best"),
    ("walk_sample", 3, "walk_sampled", "corrected logits differ from the reference"),
    ("accept_greedy", 1, "accept_greedy", "accepted run or tokens differ from the reference"),
    ("accept_finish", 0, "accept_sampled", "accepted run or tokens differ from the reference"),
    ("accept_tests", 0, "accept_sampled", "accepted run or tokens differ from the reference"),
])
def test_the_trials_find_a_wrong_kernel(monkeypatch, on_metal, kernel, output, op, problem):
    monkeypatch.setattr(pick, "medians", lambda works, runs: {"kernel": 1.0, "reference": 2.0})
    monkeypatch.setitem(pick.BACKENDS, "metal", liar(kernel, output))
    kernels = chosen(small_head())
    assert {choice.op: choice.failed for choice in kernels.choices if choice.failed} == {op: True}
    assert next(choice.reason for choice in kernels.choices if choice.failed) == f"it is wrong on metal: {problem}"


def test_numbers_that_are_not_numbers_are_wrong():
    trial = trials.walk_trials(small_head(), 64, 3, mx.float32, 64)[1]
    tokens, corrected = trial.reference()
    assert trial.problem([tokens, corrected]) is None
    assert trial.problem([tokens, corrected * mx.nan]) == "corrected logits differ from the reference"


def test_doctor_lists_the_verdicts(monkeypatch, on_metal):
    op = Op(monkeypatch, problem="wrong")
    choice, _ = pick.pick(op.trial())
    monkeypatch.setattr(pick, "on_cpu", lambda: True)
    document = json.loads(CliRunner().invoke(doctor.command, ["--json"]).output)["kernels"]
    assert document == {"in_force": "reference", "reason": "mlx computes on the CPU",
                        "choices": [dataclasses.asdict(choice)]}
    lines = CliRunner().invoke(doctor.command, []).output.splitlines()
    assert "kernels: reference (mlx computes on the CPU); 1 stored verdicts" in lines
    assert "  walk_greedy [V 4]: reference, it is wrong on metal: wrong" in lines


# --- a whole run ----------------------------------------------------------------------------------------------------


class Counting(Emulator):
    """An emulator that counts what it ran."""

    def __init__(self):
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __call__(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        self.ran[kernel.name] += 1
        return super().__call__(kernel, inputs, launch)


@pytest.fixture
def with_kernels(monkeypatch, on_metal):
    """The embedded pair, its kernels run by an emulator, and that emulator."""
    executor = Counting()
    monkeypatch.setattr(pick, "medians", lambda works, runs: {"kernel": 1.0, "reference": 2.0})
    monkeypatch.setitem(pick.BACKENDS, "metal", executor)
    pair = load()
    executor.ran.clear()
    return pair, executor


@emulated
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_embedded_pair_writes_the_same_with_kernels(with_kernels, sampling):
    pair, executor = with_kernels
    assert pair.facts["kernels"] == dict.fromkeys(
        ("walk_greedy", "walk_sampled", "accept_greedy", "accept_sampled"), "metal") and not pair.notes
    prompt = prompt_of("embedded", 24)
    mine = run(pair, prompt, 10, sampling=sampling)
    theirs = run(embedded_pair(), prompt, 10, sampling=sampling)
    assert tokens_of(mine) == tokens_of(theirs)
    assert [landed.accepted for landed in mine] == [landed.accepted for landed in theirs]
    rounds = sum(landed.rows > 1 for landed in mine)
    slots = sum(max(0, landed.rows - 1) for landed in mine)
    walked, judged = (("walk_argmax", "accept_maxima") if sampling.greedy else ("walk_sample", "accept_sums"))
    assert executor.ran[walked] == slots and executor.ran[judged] >= rounds > 0
    assert not executor.ran.keys() & ({"walk_sample", "accept_sums"} if sampling.greedy else {"walk_argmax"})


def test_a_pair_loads_and_writes_though_its_kernels_fail(monkeypatch, on_metal):
    Op(monkeypatch, error=RuntimeError("the compiler gave up"))
    pair, prompt = load(), prompt_of("embedded", 24)
    assert len(pair.notes) == 4 and all("it failed on metal: the compiler gave up" in note for note in pair.notes)
    assert tokens_of(run(pair, prompt, 8)) == tokens_of(run(embedded_pair(), prompt, 8))


@emulated
def test_processors_and_filters_keep_the_reference(with_kernels):
    """A kernel knows the temperature alone: what needs more is done without it."""
    pair, executor = with_kernels
    sampling = Sampling(temperature=0.8, seed=3, top_p=0.9)
    prompt = prompt_of("embedded", 24)
    assert tokens_of(run(pair, prompt, 8, sampling=sampling)) == tokens_of(
        run(embedded_pair(), prompt, 8, sampling=sampling))
    assert not executor.ran


# --- the walk by candidates -----------------------------------------------------------------------------------------


@pytest.fixture
def cheap(monkeypatch):
    """Candidates seem to cost a tenth of the full walk, and the bounds a second."""
    monkeypatch.setattr(candidates, "_cost", lambda draft, chain: 0.1)
    monkeypatch.setattr(candidates, "_seconds", lambda chain: 1.0)


def test_bounds_are_stored_and_found(cheap):
    draft, said = golden_draft(), []
    assert candidates.find_walk(draft) is None
    message, path = candidates.prepare(draft, said.append), candidates.bounds_path(draft)
    assert message == (
        f"the walk by candidates costs 0.10 of the full one where it is certified: bounds stored in {path}")
    assert said == ["bounds for the walk by candidates: about 1 s"] and list(path.parent.iterdir()) == [path]
    walk, chain = candidates.find_walk(draft), draft.sequential_head.chain()
    assert np.array_equal(walk._bound, topk.bounds(chain.w1, chain.w2)) and walk._least == pytest.approx(0.1)


@pytest.mark.parametrize(("cost", "seconds", "message"), [
    (0.81, 1.0, "the walk by candidates would cost 0.81 of the full one: not used"),
    (0.8, 301.0, "the walk by candidates would cost 0.80 of the full one, but its bounds 301 s: not used"),
])
def test_bounds_that_do_not_pay_are_not_computed(monkeypatch, cost, seconds, message):
    monkeypatch.setattr(candidates, "_cost", lambda draft, chain: cost)
    monkeypatch.setattr(candidates, "_seconds", lambda chain: seconds)
    assert candidates.prepare(golden_draft()) == message and not candidates.bounds_path(golden_draft()).exists()


def test_costs_are_measured():
    draft = golden_draft()
    chain = draft.sequential_head.chain()
    assert candidates._cost(draft, chain) > 0 and candidates._seconds(chain) > 0


@pytest.mark.parametrize("spoil", ["damaged", "empty", "wrong size", "no bound", "no least"])
def test_stored_bounds_that_cannot_be_used_are_ignored(cheap, spoil):
    draft = golden_draft()
    path = candidates.bounds_path(draft)
    candidates.prepare(draft)
    arrays = {"bound": mx.zeros((320,)), "least": mx.array([0.1])}
    if spoil in ("damaged", "empty"):
        path.write_bytes(b"safetensors?" if spoil == "damaged" else b"")
    else:
        arrays |= {"bound": mx.zeros((319,))} if spoil == "wrong size" else {}
        arrays.pop({"no bound": "bound", "no least": "least"}.get(spoil), None)
        mx.save_safetensors(str(path), arrays)
    assert candidates.find_walk(draft) is None
    candidates.prepare(draft)
    assert candidates.find_walk(draft) is not None


@pytest.mark.parametrize("name", ["qwen3_dspark_gated", "qwen3_dspark_rnn", "qwen3_dflash"])
def test_other_heads_have_no_bounds(cheap, name):
    assert candidates.prepare(golden_draft(name)) is None and candidates.find_walk(golden_draft(name)) is None


@pytest.mark.parametrize("where", ["on a GPU", "by wish"])
def test_bounds_are_for_the_cpu_where_nothing_else_is_wished(monkeypatch, cheap, where):
    candidates.prepare(golden_draft())
    if where == "by wish":
        monkeypatch.setenv(VARIABLE, "reference")
    else:
        monkeypatch.setattr(candidates, "backend", lambda: ("metal", "metal is in force"))
    assert candidates.find_walk(golden_draft()) is None and candidates.prepare(golden_draft()) is None


def test_the_embedded_pair_writes_the_same_by_candidates(cheap):
    candidates.prepare(embedded_pair().draft)
    pair, prompt = load(), prompt_of("embedded", 40)
    assert pair.facts["kernels"] == {"walk_greedy": "candidates", "others": "reference"}
    assert pair.draft.certified_share is None
    mine, theirs = (generate(p, prompt, max_tokens=40, policy="fixed") for p in (pair, embedded_pair()))
    assert mine.ids == theirs.ids
    share = mine.stats.facts["certified_share"]
    walk = pair.draft.kernels.walk_greedy
    assert 0.3 < share == round(walk.certified / walk.slots, 4) < 1
    assert f"certified_share {share}" in mine.stats.summary() and "certified_share" not in theirs.stats.facts


def test_profile_stores_bounds_and_the_short_one_does_not(monkeypatch, cheap, own_cache):
    seen = []

    def measure(pair, short, progress):
        seen.append(pair.draft.kernels.walk_greedy is not None)
        return CostCurve({1: 1.0})

    monkeypatch.setattr(profile, "measure", measure)
    monkeypatch.setattr(topk, "bounds", lambda first, second: mx.zeros((first.rows,)))
    for arguments, walks in ((["--short"], False), ([], True)):
        result = CliRunner().invoke(profile.command, arguments)
        assert result.exit_code == 0 and seen.pop() is walks
        assert (own_cache / "bounds").exists() is walks


# --- bench kernels --------------------------------------------------------------------------------------------------


def bench_run(*arguments: str):
    return CliRunner().invoke(bench.command, ["kernels", *arguments])


@pytest.mark.parametrize(("head", "weights", "walks"), [
    ("vanilla", ["float32", "8"], {"op_by_op", "reference", "compiled", "candidates", "kernel"}),
    ("gated", ["4"], {"op_by_op", "reference", "compiled", "kernel"}),
    ("rnn", ["bfloat16"], {"op_by_op", "reference", "compiled", "kernel"}),
])
def test_bench_kernels_reports(head, weights, walks):
    result = bench_run("--vocab", "300", "--rank", "32", "--slots", "2", "--repeats", "1", "--group", "32",
                       "--head", head, "--weights", ",".join(weights))
    document = json.loads(result.stdout)
    assert {key: document[key] for key in ("kernels", "head", "vocab", "rank", "slots", "repeats")} == {
        "kernels": "reference", "head": head, "vocab": 300, "rank": 32, "slots": 2, "repeats": 1}
    assert document["machine"]["mlx"] and list(document["weights"]) == weights
    for entry in document["weights"].values():
        assert set(entry["walk_greedy"]["ms"]) == walks and set(entry["walk_sampled"]["ms"]) == {"reference", "kernel"}
        assert entry["walk_greedy"]["ms"]["kernel"] is None and entry["walk_greedy"]["of_reference"]["reference"] == 1
        assert entry["walk_greedy"]["of_reference"].keys() == walks - {"kernel"}
        for op in ("walk_greedy", "walk_sampled"):
            assert 0 < entry["bytes_a_slot"][op]["minimum"] <= entry["bytes_a_slot"][op]["kernel"]
    assert set(document["accept"]) == {"accept_greedy", "accept_sampled"}


@emulated
def test_bench_kernels_times_the_kernels_of_a_device(monkeypatch, on_metal):
    monkeypatch.setitem(pick.BACKENDS, "metal", Emulator())
    document = json.loads(bench_run("--vocab", "300", "--rank", "32", "--slots", "2", "--repeats", "1", "--weights",
                                    "bfloat16").stdout)
    entry = document["weights"]["bfloat16"]
    assert document["kernels"] == "metal" and entry["walk_greedy"]["ms"]["candidates"] > 0
    assert all(part["ms"]["kernel"] > 0 for part in (entry["walk_greedy"], entry["walk_sampled"],
                                                     *document["accept"].values()))


@pytest.mark.parametrize(("arguments", "message"), [
    (["--weights", "float64"], "--weights names 'float64': give some of float32, float16, bfloat16, 8, 4"),
    (["--weights", "8", "--rank", "48"], "--rank 48 does not divide into groups of 64: give another --group"),
    (["--vocab", "1"], "1 is not in the range x>=2"), (["--head", "none"], "'none' is not one of"),
    (["--group", "48"], "'48' is not one of"), (["--repeats", "0"], "0 is not in the range x>=1"),
])
def test_bench_kernels_refuses(arguments, message):
    result = bench_run("--slots", "1", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
