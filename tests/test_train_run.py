"""New drafts for targets, what is refused before the first step, and runs inside the process."""

import math
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, build_model, embedded_pair, thin_target
from mlx.utils import tree_flatten
from mlx_dspark.convert.checkpoint import open_checkpoint

from mlx_dspark.commands import Notes
from mlx_dspark.errors import FormatError
from mlx_dspark.load import ASSETS, load, read_draft
from mlx_dspark.target import Target
from mlx_dspark.train.command import command, make_run
from mlx_dspark.train.config import TrainConfig
from mlx_dspark.train.curve import Validation, panels
from mlx_dspark.train.recipe import check_head, draft_config, find_mask, new_draft, spread_taps
from mlx_dspark.train.trainer import Trainer

TINY = {"layers": 1, "rank": 8, "gamma": 3, "taps": (1, 3), "anchors": 4, "max_length": 32, "batch": 2, "steps": 6,
        "save_every": 3, "valid_every": 3, "valid_rows": 4, "lr": 3e-3}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("import os\nfor name in os.listdir('.'):\n    print(name)\n" * 30)
    return path


@pytest.fixture(scope="module")
def thin(tmp_path_factory):
    return thin_target(tmp_path_factory.mktemp("thin") / "target")


@pytest.fixture
def run_of(thin, text):
    """A run of settings that differ from `TINY`, by default for the thin target."""
    def made(model=thin, start=None, **changes):
        return make_run(str(model), None, (text,), TrainConfig(**{**TINY, **changes}), Notes(), start)

    return made


def test_taps_are_spread_as_in_the_released_drafts():
    assert spread_taps(36) == (1, 9, 17, 25, 33)
    assert spread_taps(40) == (1, 10, 19, 28, 37)
    assert spread_taps(6) == (1, 2, 3) and spread_taps(6, fewer=False) == (0, 1, 2, 3, 4)
    assert spread_taps(36, fewer=False) == spread_taps(36)
    for layers in range(2, 50):
        taps = spread_taps(layers)
        assert all(a < b for a, b in zip(taps, taps[1:])) and taps[0] >= 0 and taps[-1] < layers - 1


def test_mask_tokens():
    def tokenizer(**vocabulary):
        return SimpleNamespace(get_vocab=lambda: vocabulary)

    assert find_mask(tokenizer(**{"<|mask|>": 1, "a": 2}), 10) == 1
    assert find_mask(tokenizer(a=0, b=7), 10) == 8  # an unused row of a padded table
    assert find_mask(tokenizer(**{"a": 0, "<unused5>": 2, "<|reserved_7|>": 1}), 3) == 1
    with pytest.raises(ValueError, match="--mask-token"):
        find_mask(tokenizer(a=0, b=1), 2)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma4"])
def test_a_new_draft_is_written_as_deepspec_does(kind, head, tmp_path):
    from mlx_dspark.convert.files import read_config as facts_of

    from mlx_dspark.train.folder import write_draft

    folder = GOLDEN / f"{kind}_target"
    target = target_of(folder)
    config = draft_config(facts_of(folder), target, None, TrainConfig(head=head, rank=4, layers=2, mask_token=3))
    draft, spec = new_draft(config, target, 1)
    tables = target.tables()
    write_draft(tmp_path, config, draft, mx.float32)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.packaging, checkpoint.spec) == ("DeepSpec", spec)
    again = read_draft(tmp_path)
    assert mx.array_equal(again.tables.embed_tokens.weight, tables[0])
    assert mx.array_equal(again.tables.lm_head.weight, tables[1])
    for (name, ours), (_, theirs) in zip(tree_flatten(draft.parameters()), tree_flatten(again.parameters())):
        assert mx.array_equal(ours, theirs), name


def target_of(folder):
    from mlx_lm.utils import load_model

    model, config = load_model(folder)
    return Target(model, config, str(folder))


def test_other_families_get_qwen3_layers():
    model = build_model("llama")
    target = Target(model, {}, "llama")
    config = draft_config({**vars(model.args), "rope_theta": 500.0}, target, None, TrainConfig(mask_token=0, layers=1))
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["rope_parameters"]["rope_theta"] == 500.0
    draft, spec = new_draft(config, target, 0)
    assert spec.taps == (1,) and spec.vocab_size == 300
    check_head(draft, target, mx.array([[1, 2, 3]]), spec.taps)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text"])
def test_features_are_taps_and_the_head_s_input(kind):
    model = build_model(kind)
    target, ids = Target(model, {}, kind), mx.array([[5, 6, 7, 8]])
    logits, classes = model(ids), [type(m) for m in model.modules()]
    taps, last = target.features(ids, (-1, 1))
    assert taps.shape == (1, 4, 128)
    np.testing.assert_allclose(target.head(last), logits, 1e-5, 1e-5)
    assert [type(m) for m in model.modules()] == classes


def test_a_head_that_is_not_the_last_matrix_is_refused():
    model = build_model("llama")
    target = Target(model, {}, "llama")
    config = draft_config(vars(model.args), target, None, TrainConfig(mask_token=0, layers=1))
    draft, spec = new_draft(config, target, 0)
    draft.tables.lm_head.weight = draft.tables.lm_head.weight[::-1]
    with pytest.raises(ValueError, match="cannot be trained yet"):
        check_head(draft, target, mx.array([[1, 2, 3]]), spec.taps)


def test_training_lowers_the_loss_and_the_draft_loads(run_of, tmp_path):
    trainer = Trainer(run_of(ASSETS / "target", steps=8, valid_every=4), tmp_path / "draft", False)
    reports = list(trainer.reports())
    held_out = [report.loss for report in reports if isinstance(report, Validation)]
    assert len(reports) == 8 + 3 and held_out[-1] < held_out[0] - 0.5
    drawn = panels(tmp_path / "draft")
    assert len(drawn["loss"]["training"]) == 8 and [x for x, _ in drawn["loss"]["held out"]] == [0, 4, 8]
    pair = load(draft=tmp_path / "draft")
    assert pair.draft.gamma == 3 and pair.draft.taps == (1, 3) and pair.draft.has_confidence
    masters = dict(tree_flatten(trainer.state.masters))
    np.testing.assert_allclose(pair.draft.backbone.fc.weight, masters["backbone.fc.weight"], 1e-2, 1e-4)


@pytest.mark.parametrize("changes", [
    {"kind": "dflash"}, {"kind": "eagle3", "taps": (0, 1, 2, 3, 4)}, {"head": "rnn"}, {"head": "none"},
    {"dtype": "bfloat16"}, {"accumulate": 2, "batch": 1}, {"columns": 64},
], ids=["dflash", "eagle3", "rnn", "none", "bfloat16", "accumulate", "columns"])
def test_every_kind_trains(thin, run_of, tmp_path, changes):
    trainer = Trainer(run_of(steps=4, lr=5e-4, valid_every=4, **changes), tmp_path / "draft", False)
    reports = list(trainer.reports())
    before, after = (report.loss for report in reports if isinstance(report, Validation))
    assert after < before and all(math.isfinite(report.loss) for report in reports)
    assert load(thin, tmp_path / "draft").draft.gamma == 3


def test_accumulated_micro_batches_are_their_mean(run_of, tmp_path):
    """Each micro-batch has its own divisor, as in DeepSeek's runs."""
    run = run_of(batch=1, accumulate=2, steps=1, valid_every=0)
    trainer = Trainer(run, tmp_path / "draft", False)
    parts = [trainer._micro(micro, rows)[0].item() for micro, rows in enumerate(trainer._rows())]
    assert next(trainer.reports()).loss == pytest.approx(sum(parts), rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"kind": "eagle3", "taps": (0, 1, 2, 3, 4)}], ids=["dspark", "eagle3"])
def test_what_is_logged_adds_up_to_the_loss(run_of, tmp_path, changes):
    trainer = Trainer(run_of(batch=2, accumulate=3, steps=1, valid_every=0, **changes), tmp_path / "draft", False)
    report = next(trainer.reports())
    if trainer.run.settings.kind == "eagle3":  # its micro-batches are of one size
        assert report.sums.loss(trainer.run.task.loss_weights) == pytest.approx(report.loss, rel=1e-5)
    else:  # theirs are weighted by what counts in them
        assert report.sums.loss(trainer.run.task.loss_weights) == pytest.approx(report.loss, rel=1e-2)


def test_a_step_that_is_broken_off_leaves_nothing(run_of, tmp_path, monkeypatch):
    """An interrupt at the worst moment: all is computed, nothing is kept yet."""
    trainer = Trainer(run_of(valid_every=0), tmp_path / "draft", False)
    reports = trainer.reports()
    next(reports)
    before = dict(tree_flatten((trainer.state.masters, trainer.state.moments)))
    copies = {name: np.array(array) for name, array in before.items()}

    def interrupted(table, report):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(reports)
    assert trainer.state.step == 1
    for name, array in tree_flatten((trainer.state.masters, trainer.state.moments)):
        np.testing.assert_array_equal(array, copies[name], name)


def test_full_memory_is_one_line(run_of, tmp_path, monkeypatch):
    trainer = Trainer(run_of(valid_every=0), tmp_path / "draft", False)

    def full(chosen):
        raise RuntimeError("[malloc] Unable to allocate 9 bytes.")

    monkeypatch.setattr(trainer, "_micros", full)
    with pytest.raises(ValueError, match=r"step 0: mlx stopped .*Unable to allocate.*smaller --batch.*start again"):
        next(trainer.reports())


def test_nan_stops_with_step_and_sequences(run_of, tmp_path):
    run = run_of(valid_every=0)
    trainer = Trainer(run, tmp_path / "draft", False)
    reports = trainer.reports()
    for _ in range(4):
        next(reports)
    before = trainer.state
    trainer.state.masters["backbone"]["norm"]["weight"] = mx.full((32,), mx.nan)
    with pytest.raises(ValueError, match=r"step 4: loss nan.*on \S+text.txt: train again.*lower --lr.*checkpoint"):
        next(reports)
    assert trainer.state is before
    assert mx.isfinite(read_draft(tmp_path / "draft").backbone.norm.weight).all()


def test_a_full_disk_is_one_line(run_of, tmp_path, monkeypatch):
    from mlx_dspark.train import checkpoint

    trainer = Trainer(run_of(valid_every=0), tmp_path / "draft", False)
    reports = trainer.reports()
    for _ in range(4):
        next(reports)

    def full(path, write):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "replace_file", full)
    with pytest.raises(ValueError, match=r"state.safetensors: step 6 could not be written \(No space left on device\): "
                                         r"make room \(step 3 is saved: continue with --resume\)"):
        list(reports)


def test_too_little_data(run_of, tmp_path):
    with pytest.raises(ValueError, match="gives 17 sequences to train on, a step takes batch 500"):
        Trainer(run_of(batch=500), tmp_path / "draft", False)


def test_a_folder_that_holds_a_model_is_left_alone(run_of):
    with pytest.raises(FormatError, match="holds a model"):
        Trainer(run_of(), ASSETS / "draft", False)


@pytest.mark.parametrize(("options", "code", "problem"), [
    (["--taps", "1,x"], 2, "not a list of layers"),
    (["--taps", "1,5"], 1, "cannot be tapped"),
    (["--lr", "-1"], 1, "lr is -1.0"),
    (["--head", "big"], 2, "'big' is not one of"),
    (["--mask-token", "9999"], 1, "mask_token_id 9999"),
    (["--model", "nowhere"], 1, "nowhere does not exist"),
    (["--max-length", "4096"], 1, "more than"),
    (["--kind", "dflash", "--head", "rnn"], 1, 'head is "rnn", but with kind dflash'),
    (["--template", "qwen", "--data"], 2, "requires an argument"),
])
def test_the_command_refuses_before_it_works(text, tmp_path, options, code, problem):
    out = tmp_path / "draft"
    done = CliRunner().invoke(command, ["--data", str(text), "--out", str(out), *options])
    assert done.exit_code == code and problem in done.output and not out.exists()


def test_the_same_seed_gives_the_same_first_weights():
    pair = embedded_pair()
    config = {"architectures": ["Qwen3DSparkModel"], **_config(pair)}
    first, second, other = (new_draft(config, pair.target, seed)[0] for seed in (1, 1, 2))
    assert mx.array_equal(first.backbone.fc.weight, second.backbone.fc.weight)
    assert not mx.array_equal(first.backbone.fc.weight, other.backbone.fc.weight)


def finished(run, out):
    list(Trainer(run, out, False).reports())
    return out


def weights(run):
    return dict(tree_flatten(run.draft.parameters()))


def test_a_run_may_start_with_another_draft(run_of, tmp_path):
    """Its weights are those of the file, another head is new, and another block length does not matter."""
    first = finished(run_of(), tmp_path / "first")
    stored = dict(tree_flatten(read_draft(first).parameters()))
    same, rnn, fresh = run_of(start=first), run_of(start=first, head="rnn", gamma=5), run_of()
    names = [name for name in stored if not name.startswith("tables.")]
    assert all(mx.array_equal(weights(same)[name], stored[name].astype(mx.float32)) for name in names)
    backbone = [name for name in names if name.startswith("backbone.")]
    assert all(mx.array_equal(weights(rnn)[name], weights(same)[name]) for name in backbone)
    assert not mx.array_equal(weights(same)["backbone.fc.weight"], weights(fresh)["backbone.fc.weight"])
    trainer = Trainer(same, tmp_path / "second", False)
    held_out = [report.sums.tau for report in trainer.reports() if isinstance(report, Validation)]
    last = (first / "valid.csv").read_text().splitlines()[-1].split(",")
    assert held_out[0] == pytest.approx(float(last[2]), rel=0.01)  # it goes on from where the first one ended
    with pytest.raises(FormatError, match="start"):
        Trainer(run_of(), tmp_path / "second", True)


def test_what_a_run_cannot_start_with(run_of, tmp_path):
    first = finished(run_of(steps=1), tmp_path / "first")
    with pytest.raises(ValueError, match="leave --start out"):
        run_of(start=first, layers=2)
    with pytest.raises(ValueError, match="backbone.fc.weight has shape .* of the same layers and taps"):
        run_of(start=first, taps=(1,))


def _config(pair):
    from mlx_dspark.convert.files import read_config as facts_of

    return draft_config(facts_of(ASSETS / "target"), pair.target, pair.tokenizer, TrainConfig(**TINY))
