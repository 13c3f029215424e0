"""The draft's context cache, its state between rounds, loading, and what its config must say."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import (
    GAMMA,
    GOLDEN,
    best,
    embedded_pair,
    golden_draft,
    golden_target,
    pair_of,
    prompt_of,
    random_tokens,
    tiny_model,
    untrained_draft,
)
from mlx.utils import tree_flatten
from mlx_dspark.convert.detect import detect

from mlx_dspark import load
from mlx_dspark.draft.block import FLUSH_ROWS
from mlx_dspark.draft.context import ContextCache
from mlx_dspark.draft.spec import RopeSpec
from mlx_dspark.errors import FormatError, PairError
from mlx_dspark.load import ASSETS, read_draft
from mlx_dspark.structs import KVOptions

NAME = "qwen3_dspark_vanilla"
GOLDENS = sorted(path.name for path in GOLDEN.glob("qwen3_d*"))
ANCHOR = mx.array([217])


def propose(draft, state, slots=None, anchor=ANCHOR):
    slots = draft.gamma if slots is None else slots
    return draft.propose(state, anchor, slots, best)


def golden_taps(draft, rows=12):
    target = golden_target()
    return target.forward(mx.array([prompt_of("golden", rows)]), target.start(KVOptions()), draft.taps).taps


def first_proposal(draft, rows=12):
    state = draft.start()
    draft.observe(state, mx.array([prompt_of("golden", rows)]), golden_taps(draft, rows))
    return propose(draft, state)


def arrays_of(proposal):
    return [a for a in (proposal.tokens, proposal.logits, proposal.confidence_logits) if a is not None]


def same(a, b):
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


def same_proposal(a, b):
    return all(same(x, y) for x, y in zip(arrays_of(a), arrays_of(b), strict=True))


def distance(a, b):
    return mx.abs(a - b).max().item()


# --- the context cache


def rows_of(first, count):
    """Recognisable rows [1, 2, count, 4]: row i holds i everywhere."""
    return mx.broadcast_to(mx.arange(first, first + count, dtype=mx.float32)[:, None], (1, 2, count, 4))


def column(array):
    return array[0, 1, :, 0].tolist()


def test_context_counts_what_is_kept_and_forgets_the_block():
    cache = ContextCache()
    keys, values = cache.write(rows_of(0, 5), -rows_of(0, 5), keep=3)
    assert column(keys) == [0, 1, 2, 3, 4] and column(values) == [0, -1, -2, -3, -4]
    assert cache.length == 3 and column(cache.rows()[0]) == [0, 1, 2]
    keys, values = cache.write(rows_of(10, 2), -rows_of(10, 2), keep=0)
    assert column(keys) == [0, 1, 2, 10, 11] and column(values) == [0, -1, -2, -10, -11]
    keys, _ = cache.write(rows_of(20, 1), rows_of(20, 1), keep=1)
    assert column(keys) == [0, 1, 2, 20] == column(cache.rows()[0])


@pytest.mark.parametrize("seed", range(3))
def test_context_over_many_rounds(seed):
    """Each round writes new context and a block of 7; only the context may stay, across all growth."""
    draw, cache, context, at = np.random.default_rng(seed), ContextCache(), [], 0
    for _ in range(150):
        new = int(draw.integers(0, 8))
        keys, values = cache.write(rows_of(at, new + 7), -rows_of(at, new + 7), keep=new)
        written = list(range(at, at + new + 7))
        assert column(keys) == context + written and column(values) == [-x for x in context + written]
        context += written[:new]
        at += 1000
        assert cache.length == len(context)
    assert column(cache.rows()[0]) == context and len(context) > ContextCache.step


def test_context_grows_rarely():
    cache, capacities = ContextCache(), set()
    for _ in range(3000):
        cache.write(rows_of(0, 11), rows_of(0, 11), keep=4)
        capacities.add(cache.arrays[0].shape[2])
    assert cache.length == 12_000
    assert len(capacities) < 20 and max(capacities) <= 1.25 * 12_007 + ContextCache.step


def test_context_keeps_its_dtype():
    cache = ContextCache()
    assert cache.arrays == []
    rows = rows_of(0, 300).astype(mx.bfloat16)
    cache.write(rows, rows, keep=300)
    assert {array.dtype for array in cache.arrays} == {mx.bfloat16}


LONG = 20_000


@pytest.fixture(scope="module")
def long_request():
    """A draft and a state with a context of 20,000 rows."""
    draft = untrained_draft(pair_of(tiny_model("qwen3")).target, num_kv_heads=2, head_dim=64)
    state = draft.start()
    for chunk in range(LONG // 500):
        draft.observe(state, None, mx.random.normal((1, 500, 3 * 64), key=mx.random.key(chunk)))
    mx.eval([cache.arrays for cache in state.caches])
    return draft, state


def round_peak(draft, state, seed):
    """Bytes that one round needs on top of what is there before it."""
    new = mx.random.normal((1, 3, 3 * 64), key=mx.random.key(seed))
    mx.eval(new)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    draft.observe(state, None, new)
    mx.eval(propose(draft, state).tokens)
    return mx.get_peak_memory() - before


def test_a_round_copies_no_context(long_request):
    draft, state = long_request
    one_array = state.caches[0].arrays[0].nbytes
    assert one_array > LONG * 2 * 64 * 4 and state.caches[0].length >= LONG
    assert max(round_peak(draft, state, seed) for seed in range(5)) < one_array / 5


def test_a_copied_context_would_show(long_request, monkeypatch):
    """The control: whoever holds on to last round's rows forces mlx to copy them."""
    held, write = [], ContextCache.write

    def holding(self, keys, values, keep):
        views = write(self, keys, values, keep)
        held.append(views)
        return views

    monkeypatch.setattr(ContextCache, "write", holding)
    draft, state = long_request
    round_peak(draft, state, 100)
    assert round_peak(draft, state, 101) > state.caches[0].arrays[0].nbytes


# --- a request's state


@pytest.fixture(scope="module")
def small():
    return untrained_draft(pair_of(tiny_model("qwen3")).target)


def random_taps(draft, rows, seed=0):
    return mx.random.normal((1, rows, len(draft.taps) * draft.spec.hidden_size), key=mx.random.key(seed))


def observed(draft, taps, sizes):
    state, at = draft.start(), 0
    for size in sizes:
        draft.observe(state, None, taps[:, at : at + size])
        at += size
    assert at == taps.shape[1]
    return state


ROWS = FLUSH_ROWS + 44


@pytest.mark.parametrize("sizes, waiting", [([1] * ROWS, 44), ([139] * 4, 0), ([511, 1, 44], 44), ([7] * 79 + [3], 38)])
def test_flushed_rows_equal_rows_at_once(small, sizes, waiting):
    taps = random_taps(small, ROWS)
    whole, state = observed(small, taps, [ROWS]), observed(small, taps, sizes)
    assert (whole.waiting, state.waiting) == (0, waiting)
    assert [cache.length for cache in state.caches] == [ROWS - waiting] * 2
    wanted, found = propose(small, whole), propose(small, state)
    assert same(found.tokens, wanted.tokens)
    assert distance(found.logits, wanted.logits) < 1e-5
    assert state.waiting == 0 and [cache.length for cache in state.caches] == [ROWS] * 2
    for a, b in zip(whole.caches, state.caches):
        assert distance(a.rows()[0], b.rows()[0]) < 1e-5 and distance(a.rows()[1], b.rows()[1]) < 1e-5


def test_few_rows_wait_for_the_next_block(small):
    state = observed(small, random_taps(small, FLUSH_ROWS - 1), [FLUSH_ROWS - 1])
    assert state.waiting == FLUSH_ROWS - 1 and all(cache.length == 0 for cache in state.caches)


def test_a_block_leaves_nothing_behind(small):
    taps = random_taps(small, 30)
    state = observed(small, taps, [30])
    first = propose(small, state)
    other = propose(small, state, anchor=mx.array([9]))
    assert not same(first.logits, other.logits)
    assert [cache.length for cache in state.caches] == [30, 30]
    # Later blocks find the context's K/V in the cache instead of computing them.
    assert distance(propose(small, state).logits, first.logits) < 1e-5
    small.observe(state, None, random_taps(small, 5, seed=1))
    fresh = observed(small, mx.concatenate([taps, random_taps(small, 5, seed=1)], axis=1), [35])
    assert distance(propose(small, state).logits, propose(small, fresh).logits) < 1e-5


def test_requests_do_not_share_state(small):
    a, b = (observed(small, random_taps(small, 20, seed), [20]) for seed in (1, 2))
    alone = propose(small, observed(small, random_taps(small, 20, 1), [20]))
    assert not same(propose(small, b).logits, alone.logits)
    assert same_proposal(propose(small, a), alone)


@pytest.mark.parametrize("name", GOLDENS)
def test_fewer_slots_are_the_first_slots(name):
    draft = golden_draft(name)
    whole, taps = first_proposal(draft), golden_taps(draft)
    assert whole.tokens.shape == (1, draft.gamma) and len(set(whole.tokens[0].tolist())) > 1
    for slots in range(1, draft.gamma):
        part = propose(draft, observed(draft, taps, [12]), slots)
        assert part.tokens.shape == (1, slots)
        for some, all_ in zip(arrays_of(part), arrays_of(whole), strict=True):
            assert same(some, all_[:, :slots])


# --- loading


def copy_of(name, folder, change=None, drop=(), **config):
    """A golden draft with tensors dropped or changed, and with other config values (None removes the key)."""
    shutil.copytree(GOLDEN / name, folder)
    path = folder / "config.json"
    settings = {**json.loads(path.read_text(encoding="utf-8")), **config}
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}), encoding="utf-8")
    weights = {k: v for k, v in mx.load(str(GOLDEN / name / "model.safetensors")).items() if k not in drop}
    weights = {k: change(v) if change else v for k, v in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def shard(folder):
    """Split model.safetensors in two, with an index."""
    single = folder / "model.safetensors"
    weights = mx.load(str(single))
    mx.eval(weights)
    single.unlink()
    names, index = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return folder


def test_a_sharded_folder_loads_like_a_single_file(tmp_path):
    draft = read_draft(shard(copy_of(NAME, tmp_path / "draft")))
    single = golden_draft(NAME)
    found, wanted = dict(tree_flatten(draft.parameters())), dict(tree_flatten(single.parameters()))
    assert found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)
    assert same_proposal(first_proposal(draft), first_proposal(single))


def test_a_missing_shard_is_named(tmp_path):
    folder = shard(copy_of(NAME, tmp_path / "draft"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match="model-00002-of-00002.safetensors is missing"):
        read_draft(folder)


def quantised_layers(draft):
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    return {name: module.bits for name, module in draft.named_modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("bits, error", [(8, 0.2), (4, 4.0)])
@pytest.mark.parametrize("name", ("qwen3_dspark_vanilla", "qwen3_dspark_rnn"))
def test_quantised_at_load(name, bits, error):
    draft, exact = read_draft(GOLDEN / name, bits=bits), golden_draft(name)
    layers = quantised_layers(draft)
    assert set(layers.values()) == {bits}
    assert {"backbone.fc", "backbone.layers.1.self_attn.q_proj", "backbone.layers.0.mlp.up_proj"} <= set(layers)
    assert {"tables.embed_tokens", "tables.lm_head"} <= set(layers)
    assert "confidence_head.proj" not in layers
    assert same(draft.confidence_head.proj.weight, exact.confidence_head.proj.weight)
    assert "backbone.layers.0.mlp.down_proj" not in layers  # 96 inputs are no whole number of groups
    found, wanted = first_proposal(draft), first_proposal(exact)
    assert 0 < distance(found.logits[:, 0], wanted.logits[:, 0]) < error


def test_more_bits_are_closer():
    exact = first_proposal(golden_draft())
    eight, four = (first_proposal(read_draft(GOLDEN / NAME, bits=bits)) for bits in (8, 4))
    assert 4 * distance(eight.logits[:, 0], exact.logits[:, 0]) < distance(four.logits[:, 0], exact.logits[:, 0])
    assert same(eight.tokens, exact.tokens)


@pytest.mark.parametrize("bits", (3, 5, 16))
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f"draft_bits is {bits}"):
        read_draft(GOLDEN / NAME, bits=bits)


def test_a_draft_stored_quantised_keeps_its_layers():
    draft = read_draft(ASSETS / "draft")
    stored = mx.load(str(ASSETS / "draft" / "model.safetensors"))
    names = {name.removesuffix(".scales").removeprefix("backbone.") for name in stored if name.endswith(".scales")}
    assert {name.removeprefix("backbone.") for name in quantised_layers(draft)} == names != set()
    assert same(draft.backbone.fc.weight, stored["fc.weight"])


@pytest.mark.parametrize("dtype", (None, mx.float32, mx.bfloat16, mx.float16))
def test_dtype(dtype):
    draft = read_draft(GOLDEN / NAME, dtype)
    wanted = dtype or mx.float32
    assert {array.dtype for _, array in tree_flatten(draft.parameters())} == {wanted} and draft.dtype == wanted
    proposal = first_proposal(draft)  # from float32 taps
    assert {proposal.logits.dtype, proposal.confidence_logits.dtype} == {mx.float32}  # sums are never rounded to halves
    assert distance(proposal.logits[:, 0].astype(mx.float32), first_proposal(golden_draft()).logits[:, 0]) < 0.5


def test_bf16_files_are_kept_or_cast(tmp_path):
    folder = copy_of(NAME, tmp_path / "draft", lambda array: array.astype(mx.bfloat16))
    assert read_draft(folder).dtype == mx.bfloat16
    assert read_draft(folder, mx.float32).dtype == mx.float32


TABLES = ("embed_tokens.weight", "lm_head.weight")


def load_golden(folder, **options):
    return load(golden_target().model, folder, tokenizer=embedded_pair().tokenizer, **options).draft


@pytest.mark.parametrize("drop", (TABLES, TABLES[:1], TABLES[1:]), ids=("both", "embedding", "head"))
@pytest.mark.parametrize("name", ("qwen3_dspark_vanilla", "qwen3_dspark_gated"))
def test_borrowed_tables_are_as_good_as_copies(name, drop, tmp_path):
    draft = load_golden(copy_of(name, tmp_path / "draft", drop=drop))
    own_tables = {name for name, _ in tree_flatten(draft.tables.parameters())}
    assert draft.tables.incomplete and not set(drop) & own_tables
    own = golden_draft(name)
    assert not own.tables.incomplete
    assert same_proposal(first_proposal(draft), first_proposal(own))


def test_own_tables_come_first(tmp_path):
    """A draft that carries tables uses them, whatever the target's are."""
    def doubled(array):
        return array * 2 if array.shape == (320, 64) else array

    draft = load_golden(copy_of("qwen3_dflash", tmp_path / "draft", doubled))
    assert not same(first_proposal(draft).logits, first_proposal(golden_draft("qwen3_dflash")).logits)


def test_a_draft_cannot_borrow_from_another_target(tmp_path):
    folder = copy_of(NAME, tmp_path / "draft", drop=TABLES)
    with pytest.raises(PairError, match="hidden width is 64, .* 256"):
        load(None, folder)


# --- the config


def config(**changes):
    """A golden config with other values; None removes the key."""
    original = json.loads((GOLDEN / NAME / "config.json").read_text(encoding="utf-8"))
    return {k: v for k, v in {**original, **changes}.items() if v is not None}


def facts_of(config, where):
    spec = detect(config, (), where).read(config, where)
    spec.check(where)
    return spec


def test_the_golden_config():
    spec = facts_of(config(), "here")
    assert (spec.taps, spec.block_size, spec.mask_token_id) == ((0, 2, 4), 7, 319)
    assert (spec.markov, spec.markov_rank) == ("vanilla", 16)
    assert spec.confidence and spec.confidence_with_markov and spec.rope.theta == 10000.0


NO_RANK = {"markov_rank": 0, "markov_head_type": None}
FLAT_ROPE = {"rope_parameters": None, "rope_theta": 5000}
GOOD = {
    "flat rope_theta": (FLAT_ROPE, "rope", RopeSpec(5000.0)),
    "theta beside rope_parameters":
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7}, "rope", RopeSpec(7.0)),
    "rank 0": ({**NO_RANK, "confidence_head_with_markov": False}, "markov", "none"),
    "no confidence head": ({"enable_confidence_head": False, "confidence_head_with_markov": None}, "confidence", False),
    "upper case": ({"markov_head_type": "RNN"}, "markov", "rnn"),
    "embedding tap": ({"target_layer_ids": [-1, 1, 3]}, "taps", (-1, 1, 3)),
    "unknown depth": ({"num_target_layers": None, "target_layer_ids": [40]}, "taps", (40,)),
    "kv heads of the heads": ({"num_key_value_heads": None}, "num_kv_heads", 4),
    "head_dim of the width": ({"head_dim": None}, "head_dim", 16),
}  # fmt: skip


@pytest.mark.parametrize("changes, field, value", GOOD.values(), ids=GOOD.keys())
def test_configs_that_are_fine(changes, field, value):
    assert getattr(facts_of(config(**changes), "here"), field) == value


REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
            "rms_norm_eps", "target_layer_ids", "block_size", "mask_token_id", "markov_rank", "markov_head_type",
            "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
LONG_ROPE = {"rope_theta": 10000.0, "rope_type": "longrope", "factor": 4.0}
LINEAR = {**FLAT_ROPE, "rope_scaling": {"type": "linear", "factor": 2}}
BAD = {
    **{f"no {key}": ({key: None}, (f"'{key}'",)) for key in REQUIRED},
    "no theta": ({"rope_parameters": None}, ("rope_theta",)),
    "unknown head": ({"markov_head_type": "bigram"}, ("markov_head_type", "'bigram'")),
    "head none with a rank": ({"markov_head_type": "none"}, ("markov_head_type", "'none'")),
    "Markov flag with rank 0": (NO_RANK, ("confidence_head_with_markov", "markov_rank is 0")),
    "taps not increasing": ({"target_layer_ids": [0, 4, 2]}, ("target_layer_ids", "[0, 4, 2]")),
    "taps repeated": ({"target_layer_ids": [0, 2, 2]}, ("target_layer_ids", "[0, 2, 2]")),
    "tap below -1": ({"target_layer_ids": [-2, 2]}, ("target_layer_ids", "[-2, 2]")),
    "tap of the last layer": ({"target_layer_ids": [0, 2, 5]}, ("target_layer_ids", "[0, 2, 5]", "6")),
    "no taps": ({"target_layer_ids": []}, ("target_layer_ids", "[]")),
    "taps no list": ({"target_layer_ids": 3}, ("target_layer_ids", "3")),
    "taps no numbers": ({"target_layer_ids": [0, "2"]}, ("target_layer_ids", "'2'")),
    "mask outside": ({"mask_token_id": 320}, ("mask_token_id", "320")),
    "mask negative": ({"mask_token_id": -1}, ("mask_token_id", "-1")),
    "unknown RoPE": ({"rope_parameters": LONG_ROPE}, ("rope", "'longrope'")),
    "unknown RoPE, old spelling": (LINEAR, ("rope", "'linear'")),
    "block of 0": ({"block_size": 0}, ("block_size", "0")),
    "block no number": ({"block_size": "7"}, ("block_size", "'7'")),
    "rank a truth value": ({"markov_rank": True}, ("markov_rank", "True")),
    "flag a number": ({"enable_confidence_head": 1}, ("enable_confidence_head", "1")),
    "epsilon 0": ({"rms_norm_eps": 0}, ("rms_norm_eps", "0")),
    "depth no number": ({"num_target_layers": "6"}, ("num_target_layers", "'6'")),
    "rope_parameters no object": ({"rope_parameters": [10000.0]}, ("rope_parameters", "[10000.0]")),
}  # fmt: skip


@pytest.mark.parametrize("changes, named", BAD.values(), ids=BAD.keys())
def test_configs_that_are_refused(changes, named):
    with pytest.raises(FormatError) as caught:
        facts_of(config(**changes), "some/folder")
    message = str(caught.value)
    assert "some/folder" in message and "\n" not in message
    for part in named:
        assert part.lower() in message.lower()


def test_a_random_draft_fits_every_target():
    """The builder behind the untrained drafts of these tests proposes tokens of its target."""
    for kind in ("llama", "gemma3_text"):
        target = pair_of(tiny_model(kind)).target
        draft = untrained_draft(target)
        found = target.forward(mx.array([random_tokens(9)]), target.start(KVOptions()), draft.taps)
        tokens = propose(draft, observed(draft, found.taps, [9])).tokens
        assert tokens.shape == (1, GAMMA) and tokens.max().item() < target.vocab_size
