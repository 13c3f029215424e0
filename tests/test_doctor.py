"""The doctor sees what shapes cannot show, and says what the machine is good for."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from click.testing import CliRunner

import mlx_dspark
from mlx_dspark import doctor, selfcheck
from mlx_dspark.backend import Blas
from mlx_dspark.load import ASSETS, encode_prompt, load, read_draft
from mlx_dspark.registry import KnownDraft
from mlx_dspark.selfcheck import run_trial, self_check, variants

GOLDEN = Path(__file__).parent / "golden"
KNOWN = json.loads((GOLDEN / "qwen3_target" / "golden.json").read_text())["prompts"]
PROMPTS = [KNOWN[name] for name in sorted(KNOWN)[:2]]
TOKENS = 16


@pytest.fixture(scope="module")
def golden():
    """The trained reference target, to be joined with a draft."""
    from mlx_lm.utils import load_model

    tokenizer = load(None, False).tokenizer
    return lambda draft: load(load_model(GOLDEN / "qwen3_target")[0], draft, tokenizer=tokenizer)


def read(name: str, **changes):
    """A golden draft, read as its config does not say."""
    draft = read_draft(GOLDEN / name)
    draft.spec = dataclasses.replace(draft.spec, **changes)
    return draft


def run(*arguments):
    return CliRunner().invoke(doctor.command, [str(argument) for argument in arguments])


# --- the check


@pytest.mark.parametrize("name", ["qwen3_dspark_vanilla", "qwen3_eagle3"])
def test_a_good_pair_is_healthy(golden, name):
    trial, checks = self_check(golden(read_draft(GOLDEN / name)), PROMPTS, TOKENS)
    assert [check.passed for check in checks] == [True, True] and trial.tau > 2
    assert checks[0].detail == "2 of 2 texts equal plain decoding"
    assert checks[1].detail == f"tau {trial.tau:.2f} over {trial.rounds} rounds"


def test_the_numbers_are_those_of_the_rounds(golden):
    trial = run_trial(golden(read_draft(GOLDEN / "qwen3_dspark_vanilla")), PROMPTS, TOKENS, "fixed")
    assert all(len(text) == TOKENS for text in trial.texts)
    assert trial.tau == pytest.approx((2 * TOKENS - 2) / trial.rounds)  # one token of each text is the prefill's
    assert len(trial.accepted) == 7 and all(0 <= share <= 1 for share in trial.accepted)
    assert trial.accepted[0] > trial.accepted[4]
    plain = run_trial(golden(False), PROMPTS, TOKENS, "plain")
    assert plain.texts == trial.texts and (plain.tau, plain.accepted) == (1, ())


def test_the_wrong_anchor_rule_is_found(golden):
    """A DFlash draft of DeepSeek's, read as one of z-lab's: right text, tau near one."""
    draft = read("qwen3_dflash", anchor_predicts=False)
    trial, (texts, tau) = self_check(golden(draft), PROMPTS, TOKENS)
    assert trial.tau < selfcheck.NEAR_ONE and texts.passed and not tau.passed
    assert "is near one" in tau.detail and "the other anchor rule (slot 0 predicts) tau is " in tau.detail
    assert not draft.spec.anchor_predicts  # the trial leaves no trace


def test_shifted_taps_are_found_where_the_registry_knows_better(golden):
    right = self_check(golden(read_draft(GOLDEN / "qwen3_eagle3")), PROMPTS, TOKENS)[0].tau
    draft = read("qwen3_eagle3", taps=tuple(tap - 1 for tap in read("qwen3_eagle3").taps))
    pair = golden(draft)
    assert "tau is" not in self_check(pair, PROMPTS, TOKENS)[1][1].detail  # too good to be suspicious by itself
    known = KnownDraft("a/draft", "eagle3", "", tau={"gsm8k": 12.0, "arena": 11.0})
    tau = self_check(pair, PROMPTS, TOKENS, known)[1][1]
    assert tau.passed and "a/draft was published with 11.00 to 12.00" in tau.detail
    assert f"with taps [0, 1, 2, 3, 4] tau is {right:.2f}" in tau.detail


def test_a_hopeless_draft_gets_the_likely_causes(golden):
    draft = read_draft(GOLDEN / "qwen3_dflash")
    draft.backbone.fc.weight = mx.zeros_like(draft.backbone.fc.weight)
    draft.backbone.norm.weight = -draft.backbone.norm.weight
    tau = self_check(golden(draft), PROMPTS, TOKENS)[1][1]
    assert not tau.passed and "likely causes: taps shifted by one" in tau.detail and "tau is" not in tau.detail
    assert "tried without gain: taps [-1, 1, 3], the other anchor rule" in tau.detail


def test_a_draft_that_has_no_facts_is_named(golden):
    class Wrong:
        gamma, taps, has_confidence = 2, (), False

        def start(self):
            return None

        def observe(self, state, tokens, taps):
            return None

        def propose(self, state, anchor, slots, pick):
            from mlx_dspark.structs import Proposal

            return Proposal(mx.full((1, slots), 3, dtype=mx.int32))

    assert "a draft model of another target" in self_check(golden(Wrong()), PROMPTS, 8)[1][1].detail


@pytest.mark.parametrize("taps, layers, wanted", [
    ((0, 2, 4), 6, ["[-1, 1, 3]"]), ((-1, 2), 6, ["[0, 3]"]), ((1, 3), 6, ["[0, 2]", "[2, 4]"]), ((-1, 4), 6, []),
])
def test_variants_stay_in_range(taps, layers, wanted):
    spec = read("qwen3_eagle3", taps=taps).spec
    assert list(variants(spec, layers)) == [f"taps {text}" for text in wanted]


@pytest.mark.parametrize("block, predicts, wanted", [(7, True, 6), (7, False, 7), (1, True, None)])
def test_the_other_anchor_rule(block, predicts, wanted):
    spec = read("qwen3_dspark_vanilla", block_size=block, anchor_predicts=predicts).spec
    gammas = [variant.gamma for name, variant in variants(spec, 6).items() if "anchor" in name]
    assert gammas == ([] if wanted is None else [wanted])


@pytest.mark.parametrize("change, passed, fragment", [
    pytest.param(lambda pair, text: second_best(pair, text, 5), False, "more than rounding explains", id="other-token"),
    pytest.param(lambda pair, text: text[:5], False, "gap at a first difference is inf", id="cut"),
    pytest.param(lambda pair, text: text, True, "2 of 2", id="equal"),
])
def test_a_text_that_differs_is_weighed_by_its_logit_gap(golden, monkeypatch, change, passed, fragment):
    pair, kept = golden(read_draft(GOLDEN / "qwen3_dspark_vanilla")), run_trial

    def changed(pair, prompts, max_tokens, policy):
        trial = kept(pair, prompts, max_tokens, policy)
        if policy != "plain":
            trial = dataclasses.replace(trial, texts=(trial.texts[0], change(pair, trial.texts[1])))
        return trial

    monkeypatch.setattr(selfcheck, "run_trial", changed)
    texts = self_check(pair, PROMPTS, TOKENS)[1][0]
    assert texts.passed == passed and fragment in texts.detail
    monkeypatch.setitem(selfcheck.NEAR_TIE, "float32", 1e9)
    if passed or "inf" in fragment:
        return
    texts = self_check(pair, PROMPTS, TOKENS)[1][0]
    assert texts.passed and "1 of 2 texts" in texts.detail and "near-tie" in texts.detail


def second_best(pair, text, at):
    logits = pair.target.model(mx.array([[*PROMPTS[1], *text[:at]]]))[0, -1]
    return (*text[:at], mx.argsort(-logits)[1].item(), *text[at + 1:])


# --- the machine


@pytest.mark.parametrize("device, blas, fragments", [
    pytest.param("metal", Blas(None, ""), ["GPU (metal)", "nothing here is known to be slow"], id="mac"),
    pytest.param("cuda", Blas(None, ""), ["GPU (cuda)"], id="cuda"),
    pytest.param("cpu", Blas("/lib/blas.so", ""), ["CPU", "targets will be slow", "With OpenBLAS"], id="openblas"),
    pytest.param("cpu", Blas(None, "none found", missing=True), ["install it", "much as the first"], id="none"),
    pytest.param("cpu", Blas(None, "MLX_DSPARK_BLAS=none"), ["MLX_DSPARK_BLAS=none"], id="switched-off"),
])
def test_the_verdict(device, blas, fragments):
    text = doctor.verdict({"device": device}, blas)
    assert "\n" not in text and all(fragment in text for fragment in fragments)


def distribution(name, version, files=(), top_level=""):
    return SimpleNamespace(metadata={"Name": name}, version=version, files=[Path(file) for file in files],
                           read_text=lambda name: top_level, locate_file=lambda path: Path("/site"))


CLI = "mlx_dspark/cli.py"


@pytest.mark.parametrize("others, wanted", [
    pytest.param([], [], id="alone"),
    pytest.param([distribution("mlx-dspark", "0.20.3", [CLI])], ["mlx-dspark 0.20.3 (/site)"], id="pypi's"),
    pytest.param([distribution("Mlx_DSpark", "0.20.3")], ["mlx-dspark 0.20.3 (/site)"], id="other-spelling"),
    pytest.param([distribution("fork", "1", [CLI])] * 2, ["fork 1 (/site)"], id="fork, twice on the path"),
    pytest.param([distribution("fork", "1", top_level="mlx_dspark\n")], ["fork 1 (/site)"], id="editable-fork"),
    pytest.param([distribution("dspark-mlx", "0.1.0", ["dspark_mlx/cli.py"])], [], id="another-package"),
    pytest.param([distribution("tools", "1", ["bin/mlx_dspark/x"], "mlx_dspark_x")], [], id="alike"),
])
def test_a_package_of_the_same_name(others, wanted):
    ours = distribution("mlx-dspark", mlx_dspark.__version__, [CLI])
    assert doctor.name_clashes([ours, *others]) == wanted


# --- the command


def test_without_options_it_looks_at_the_machine_alone(monkeypatch):
    monkeypatch.setattr(doctor, "name_clashes", list)
    monkeypatch.setattr(doctor, "open_pair", lambda *args, **kwargs: pytest.fail("a pair was loaded"))
    result = run("--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["healthy"] and "pair" not in document
    assert {"chip", "device", "mlx", "blas"} <= document["machine"].keys() and document["verdict"]
    assert document["verdict"] in run().stdout


def test_a_name_clash_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "name_clashes", lambda: ["mlx-dspark 0.20.3 (/site)"])
    result = run()
    assert result.exit_code == 1
    assert "failed: mlx-dspark 0.20.3 (/site) also brings a package mlx_dspark" in result.stdout
    assert json.loads(run("--json").stdout)["healthy"] is False


@pytest.fixture
def no_clash(monkeypatch):
    monkeypatch.setattr(doctor, "name_clashes", list)


def test_the_small_pair_is_healthy(no_clash, monkeypatch):
    monkeypatch.setattr(doctor, "EMBEDDED_PROMPTS", 1)
    result = run("--self-check", "-m", 16, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["healthy"] and document["pair"]["tau"] > 1.5
    assert [check["name"] for check in document["pair"]["checks"]] == ["texts", "tau"]
    assert document["pair"]["checks"][0]["detail"].startswith("1 of 1")


def test_a_bad_pair_exits_with_one(no_clash, golden, monkeypatch):
    pair = golden(read("qwen3_dflash", anchor_predicts=False))
    monkeypatch.setattr(doctor, "open_pair", lambda notes, **fields: pair)
    monkeypatch.setattr(doctor, "_prompts", lambda pair, model: PROMPTS)
    result = run("--self-check", "-m", TOKENS)
    assert result.exit_code == 1 and "ok: 2 of 2 texts" in result.stdout and "failed: tau 1." in result.stdout
    assert "accepted by slot: 0." in result.stdout and result.stderr == ""


def test_what_the_registry_knows_is_said(no_clash, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(ASSETS / "target", folder)
    (folder / "README.md").write_text("---\nbase_model: Qwen/Qwen3-4B\n---\n")
    result = run("--model", folder, "--draft", ASSETS / "draft", "-m", 4, "--json")
    pair = json.loads(result.stdout)["pair"]
    assert pair["known_draft"] == "deepseek-ai/dspark_qwen3_4b_block7" and "Qwen/Qwen3-4B" in pair["recognised"]
    assert "published with 3.29 to 6.11" in pair["checks"][1]["detail"]


def test_a_target_without_a_draft_is_no_failure(no_clash):
    result = run("--model", ASSETS / "target")
    assert result.exit_code == 0 and "ok: there is no draft" in result.stdout


def test_a_draft_of_another_target_is_one_line(no_clash):
    result = run("--draft", GOLDEN / "qwen3_dspark_vanilla")
    assert result.exit_code == 1 and result.stdout == "" and "hidden width is 64" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_prompts_are_sentences_for_any_other_target():
    pair = load(None, False)
    assert doctor._prompts(pair, "some/model") == [encode_prompt(pair.tokenizer, text) for text in selfcheck.PROMPTS]


@pytest.mark.parametrize("module", ["doctor", "models"])
def test_help_needs_no_mlx(module):
    code = (f"import sys; sys.argv = ['x', '--help']\nfrom mlx_dspark.{module} import main\n"
            "try: main()\nfinally: print({'mlx', 'mlx_lm', 'numpy'} & {m.split('.')[0] for m in sys.modules})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("set()\n"), done.stderr
