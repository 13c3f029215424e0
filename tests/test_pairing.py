"""A draft is checked against its target before any forward; tables that differ by padding still fit."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model, save_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_dspark import generate, stream_generate
from mlx_dspark.draft import DraftSpec
from mlx_dspark.draft.spec import RopeSpec
from mlx_dspark.errors import PairError
from mlx_dspark.load import load, read_draft
from mlx_dspark.pairing import PADDING, check_pair, matched
from mlx_dspark.structs import KVOptions
from mlx_dspark.target import Target

GOLDEN = Path(__file__).parent / "golden"
ROWS, LAYERS, WIDTH = 320, 6, 64  # of the golden target
FEWER = ROWS - 2  # the draft's mask, 319, is not among them
USED = 300  # ids that the tests' tokenizer writes
PROMPT = json.loads((GOLDEN / "qwen3_target" / "golden.json").read_text())["prompts"]["A"]

SPEC = DraftSpec(
    family="qwen3", kind="block", hidden_size=WIDTH, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=32, vocab_size=ROWS, rms_norm_eps=1e-6, rope=RopeSpec(1e4), taps=(-1, 2, 4), block_size=4, windows=(None,),
    causal=(False,), mask_token_id=0,
)


def word_tokenizer(words: int = USED, unknown: int = 0) -> PreTrainedTokenizerFast:
    """Splits at spaces; knows `words` words, the `unknown`-th of which stands for all others."""
    vocabulary = {"<unk>" if i == unknown else f"w{i}": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>")


def target_like(**changes):
    facts = {"name": "the/target", "layers": [None] * LAYERS, "hidden_size": WIDTH, "vocab_size": ROWS,
             "dtype": mx.float32}
    return SimpleNamespace(**{**facts, **changes})


def draft_like(own=("embed_tokens", "lm_head"), dtype=mx.float32, **changes):
    spec = dataclasses.replace(SPEC, **changes)
    return SimpleNamespace(spec=spec, taps=spec.taps, tables=own, dtype=dtype)


KNOWS = word_tokenizer()
FITS = {
    "the same": ({}, {}),
    "embedding and second to last layer": ({}, {"taps": (-1, 4)}),
    "known depth": ({}, {"num_target_layers": 6}),
    "padding of the target": ({}, {"vocab_size": USED}),
    "most padding": ({"vocab_size": USED + PADDING}, {"vocab_size": USED}),
    "padding of the draft": ({}, {"vocab_size": ROWS + PADDING}),
    "padding of the draft, borrowed": ({}, {"vocab_size": ROWS + 9, "own": ()}),
    "last row as mask": ({}, {"own": (), "mask_token_id": ROWS - 1}),
    "mask beyond the target in an own embedding": ({}, {"vocab_size": 350, "mask_token_id": 349,
                                                        "own": ("embed_tokens",)}),
    "reduced vocabulary": ({}, {"draft_vocab_size": 100, "own": ("lm_head",)}),
    "taps of another width": ({"hidden_size": 96}, {"target_hidden_size": 96}),
    "unknown target tables": ({"vocab_size": None, "hidden_size": None}, {"vocab_size": 9}),
    "half with float32": ({"dtype": mx.float16}, {}),
    "halves of one kind": ({"dtype": mx.bfloat16}, {"dtype": mx.bfloat16}),
}


@pytest.mark.parametrize("target, draft", FITS.values(), ids=FITS.keys())
def test_a_pair_that_fits(target, draft):
    check_pair(target_like(**target), draft_like(**draft), KNOWS)


REFUSED = {
    "last layer": ({}, {"taps": (1, 5)}, ["taps layer 5", "layers 0 to 5"]),
    "below the embedding": ({}, {"taps": (-2, 1)}, ["taps layer -2", "-1 for its embeddings"]),
    "depth": ({}, {"num_target_layers": 8}, ["8 target layers", "has 6"]),
    "width": ({"hidden_size": 96}, {}, ["hidden width is 64", "is 96", "192 columns", "288"]),
    "width of a tap": ({}, {"target_hidden_size": 96}, ["hidden width is 96", "is 64"]),
    "width of borrowed tables": ({"hidden_size": 96}, {"target_hidden_size": 96, "own": ("embed_tokens",)},
                                 ["64 wide", "96 wide", "carries its tables"]),
    "fewer rows than ids": ({}, {"vocab_size": USED - 1}, ["has 299 rows", "has 320", "300 in use"]),
    "more than padding": ({}, {"vocab_size": ROWS + PADDING + 1}, [f"has {ROWS + PADDING + 1} rows", "has 320"]),
    "more than padding of the target": ({"vocab_size": USED + PADDING + 1}, {"vocab_size": USED},
                                        ["has 300 rows", f"has {USED + PADDING + 1}"]),
    "borrowed mask": ({}, {"vocab_size": 350, "mask_token_id": ROWS, "own": ("lm_head",)},
                      ["mask token is 320", "has 320 rows", "carries its embedding"]),
    "reduced without a head": ({}, {"draft_vocab_size": 100, "own": ("embed_tokens",)},
                               ["reduced vocabulary of 100", "has 320 rows", "carries its head"]),
    "float16 target": ({"dtype": mx.float16}, {"dtype": mx.bfloat16}, ["in bfloat16", "in float16", "--dtype"]),
    "bfloat16 target": ({"dtype": mx.bfloat16}, {"dtype": mx.float16}, ["in float16", "in bfloat16", "--dtype"]),
}


@pytest.mark.parametrize("target, draft, fragments", REFUSED.values(), ids=REFUSED.keys())
def test_a_pair_that_does_not_fit_names_both_values(target, draft, fragments):
    with pytest.raises(PairError) as caught:
        check_pair(target_like(**target), draft_like(**draft), KNOWS)
    message = str(caught.value)
    assert "the/target" in message and ": " in message and "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_without_a_tokenizer_no_row_is_padding():
    check_pair(target_like(), draft_like(vocab_size=ROWS + 1))
    with pytest.raises(PairError, match="has 319 rows, that of the/target has 320: "):
        check_pair(target_like(), draft_like(vocab_size=ROWS - 1))


def test_a_tokenizer_may_know_more_than_the_model():
    check_pair(target_like(), draft_like(), word_tokenizer(ROWS + 1))


# --- end to end, with the trained reference pair


def golden_model(rows: int):
    """The golden target with `rows` rows: padded with copies of its first row, or cut."""
    model, _ = load_model(GOLDEN / "qwen3_target")
    for table in ("embed_tokens", "lm_head"):
        module = model.model.embed_tokens if table == "embed_tokens" else model.get("lm_head")
        if module is not None:
            first = mx.repeat(module.weight[:1], max(0, rows - ROWS), axis=0)
            module.weight = mx.concatenate([module.weight[:rows], first])
    model.args.vocab_size = rows
    return model


def golden_folder(folder: Path, tables: bool) -> Path:
    """The golden draft, with or without tables of its own."""
    shutil.copytree(GOLDEN / "qwen3_dspark_vanilla", folder)
    if not tables:
        weights = mx.load(str(folder / "model.safetensors"))
        mx.save_safetensors(str(folder / "model.safetensors"), {
            name: array for name, array in weights.items() if not name.startswith(("embed_tokens", "lm_head"))})
    return folder


def tokens(model, draft, tokenizer, **options):
    pair = load(model, draft, tokenizer=tokenizer)
    chunks = list(stream_generate(pair, PROMPT, max_tokens=40, **options))
    return [i for chunk in chunks for i in chunk.ids], chunks[-1].stats.tau


@pytest.mark.parametrize("tables", [True, False], ids=["own tables", "borrowed tables"])
@pytest.mark.parametrize("rows", [ROWS + 40, ROWS], ids=["padded target", "equal"])
def test_padding_changes_no_proposal(tmp_path, tables, rows):
    folder = golden_folder(tmp_path / "d", tables)
    text, tau = tokens(golden_model(rows), folder, KNOWS)
    assert text == tokens(golden_model(ROWS), False, KNOWS)[0] and max(text) < ROWS
    assert tau == tokens(golden_model(ROWS), GOLDEN / "qwen3_dspark_vanilla", KNOWS)[1] > 2


def test_a_target_with_fewer_rows_than_its_draft(tmp_path):
    """The mask (319) is past the target's table, so the draft needs its own embedding; its head may be borrowed."""
    model = golden_model(FEWER)
    plain, _ = tokens(model, False, KNOWS)
    for tables in (True, False):
        folder = golden_folder(tmp_path / str(tables), tables)
        if not tables:
            weights = mx.load(str(folder / "model.safetensors"))
            own = mx.load(str(GOLDEN / "qwen3_dspark_vanilla" / "model.safetensors"))
            mx.save_safetensors(str(folder / "model.safetensors"), {
                **weights, "embed_tokens.weight": own["embed_tokens.weight"]})
        text, tau = tokens(model, folder, KNOWS)
        assert text == plain and tau > 2
    with pytest.raises(PairError, match="mask token is 319"):
        load(model, golden_folder(tmp_path / "none", False), tokenizer=KNOWS)


@pytest.mark.parametrize("rows", [FEWER, ROWS + 40])
def test_sampling_works_across_padding(rows):
    pair = load(golden_model(rows), GOLDEN / "qwen3_dspark_vanilla", tokenizer=KNOWS)
    proposed = []
    propose = pair.draft.propose
    draft = SimpleNamespace(gamma=pair.draft.gamma, taps=pair.draft.taps, has_confidence=True, start=pair.draft.start,
                            observe=pair.draft.observe,
                            propose=lambda *args: proposed.append(propose(*args)) or proposed[-1])
    answer = generate(dataclasses.replace(pair, draft=draft), PROMPT, max_tokens=20, temperature=1.0, seed=3)
    assert len(answer.ids) <= 20 and all(p.log_q.shape[-1] == p.logits.shape[-1] == rows for p in proposed)
    said = mx.exp(proposed[0].log_q)
    assert mx.abs(said.sum(-1) - 1).max() < 1e-4 and said[..., ROWS:].sum() == 0


def test_ids_of_the_padding_are_read_as_the_last_row():
    draft = read_draft(GOLDEN / "qwen3_dspark_vanilla")
    draft.tables.match(ROWS + 40)
    last, beyond = (draft.tables.embed(mx.array([[i]]), mx.float32) for i in (ROWS - 1, ROWS + 39))
    assert mx.array_equal(last, beyond)


def test_a_reduced_vocabulary_is_spread_over_a_padded_one():
    draft = read_draft(GOLDEN / "qwen3_dspark_vanilla")
    tables = type(draft.tables)(dataclasses.replace(draft.spec, draft_vocab_size=3), False, True)
    tables.d2t = mx.array([1, 1, 317])  # ids 1, 2, 319
    tables.match(ROWS + 2)
    wide = tables.widen(mx.array([[5.0, 6.0, 7.0]]))
    assert wide.shape == (1, ROWS + 2) and wide[0, [1, 2, 319]].tolist() == [5, 6, 7]
    assert mx.isinf(wide).sum().item() == ROWS - 1


# --- a whole model as draft


def model_folder(folder: Path, tokenizer, rows: int = ROWS) -> Path:
    model = golden_model(rows)
    config = json.loads((GOLDEN / "qwen3_target" / "config.json").read_text())
    folder.mkdir()
    save_config({**config, "vocab_size": rows}, folder / "config.json")
    model.save_weights(str(folder / "model.safetensors"))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("rows", [FEWER, ROWS, ROWS + 40])
def test_a_classic_draft_may_have_other_padding(tmp_path, rows):
    folder = model_folder(tmp_path / "d", KNOWS, rows)
    plain, _ = tokens(golden_model(ROWS), False, KNOWS)
    text, tau = tokens(golden_model(ROWS), folder, KNOWS)
    assert text == plain and tau > 4  # it is the target itself: every draft is right
    assert len(tokens(golden_model(ROWS), folder, KNOWS, temperature=1.0, seed=1)[0]) <= 40


def test_a_classic_draft_reads_padding_ids_as_its_last_row():
    model = Target(golden_model(FEWER), {}, "small")
    draft = matched(model, Target(golden_model(ROWS), {}, "large"))
    logits = [draft.forward(mx.array([[1, i]]), draft.start(KVOptions())).logits for i in (FEWER - 1, ROWS - 1)]
    assert mx.array_equal(*logits) and logits[0].shape == (1, 2, ROWS)
    assert matched(model, model) is model


def test_a_classic_draft_may_know_special_tokens_of_its_own(tmp_path):
    more = word_tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<more>"]})
    assert load(golden_model(ROWS), model_folder(tmp_path / "d", more), tokenizer=KNOWS).draft.gamma == 4


def test_a_classic_draft_with_another_tokenizer_is_refused(tmp_path):
    folder = model_folder(tmp_path / "d", word_tokenizer(unknown=1))
    with pytest.raises(PairError, match="has another tokenizer than the loaded model") as caught:
        load(golden_model(ROWS), folder, tokenizer=KNOWS)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_classic_draft_with_too_few_rows_is_refused(tmp_path):
    with pytest.raises(PairError, match="the draft model's vocabulary has 290 rows, that of the loaded model has 320"):
        load(golden_model(ROWS), model_folder(tmp_path / "d", KNOWS, 290), tokenizer=KNOWS)


def test_a_half_precision_draft_follows_its_target():
    model = golden_model(ROWS)
    for dtype in (mx.float16, mx.bfloat16):
        model.set_dtype(dtype)
        pair = load(model, GOLDEN / "qwen3_dspark_vanilla", tokenizer=KNOWS, dtype={
            mx.float16: "bfloat16", mx.bfloat16: "float16"}[dtype])
        assert pair.draft.dtype == dtype
