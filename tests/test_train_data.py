"""From files to sequences with a loss mask: plain text, token ids, dialogues by three kinds of template."""

import json
import logging

import numpy as np
import pytest
from helpers import embedded_pair
from transformers import PreTrainedTokenizerFast

from mlx_dspark.errors import FormatError
from mlx_dspark.load import ASSETS, load
from mlx_dspark.train.config import TrainConfig, read_config
from mlx_dspark.train.data import read_data
from mlx_dspark.train.dialogue import EMPTY_THOUGHT, SYSTEM, make_renderer

SETTINGS = TrainConfig(max_length=32, valid=0.0)


class Letters:
    """A tokenizer of single characters with a chat template."""

    bos_token_id, eos_token_id, has_chat_template = None, 0, True

    def __init__(self, kind):
        self.kind = self.chat_template = kind

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        begin, end = {"qwen": ("<|im_start|>{}\n", "<|im_end|>\n"), "gemma4": ("<|turn>{}\n", "<turn|>\n"),
                      "plain": ("[{}]", "")}[self.kind]
        names = {"assistant": "model"} if self.kind == "gemma4" else {}
        opened = [begin.format(names.get(m["role"], m["role"])) + m["content"] + end for m in messages]
        answer = begin.format(names.get("assistant", "assistant")) if add_generation_prompt else ""
        return "".join(opened) + answer


def counted(ids, mask):
    """The text that counts, and the whole."""
    return "".join(chr(i) for i in ids[mask == 1]), "".join(map(chr, ids))


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]


def test_qwen_dialogues():
    text, whole = counted(*make_renderer(Letters("qwen"), "qwen")(TALK, [], "here"))
    assert text == "yes<|im_end|>\nno<|im_end|>\n"
    assert whole.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi")


def test_qwen_keeps_the_dialogue_s_own_system_message():
    own = [{"role": "system", "content": "Be brief."}, *TALK]
    _, whole = counted(*make_renderer(Letters("qwen"), "qwen")(own, [], "here"))
    assert "Be brief." in whole and "helpful" not in whole


def test_gemma4_dialogues_begin_with_an_empty_thought_that_does_not_count():
    messages = [{"role": "system", "content": "x"}, *TALK]
    text, whole = counted(*make_renderer(Letters("gemma4"), "gemma4")(messages, [], "here"))
    assert text == "yes<turn|>\nno<turn|>\n"
    assert whole.count(EMPTY_THOUGHT) == 2 and "system" not in whole


def test_dialogues_of_any_template():
    text, whole = counted(*make_renderer(Letters("plain"), "tokenizer")(TALK, [], "here"))
    assert (text, whole) == ("yesno", "[user]hi[assistant]yes[user]so[assistant]no")


class Named(Letters):
    """Qwen's marks with a template text, and a system message that the template writes by itself."""

    def __init__(self, source, system=""):
        super().__init__("qwen")
        self.chat_template, self.system = f"{{% ... %}}<|im_start|>assistant {source} {system}", system

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False):
        own = [{"role": "system", "content": self.system}] if self.system and messages[0]["role"] != "system" else []
        return super().apply_chat_template([*own, *messages], tokenize, add_generation_prompt)


SMOL = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.mark.parametrize(("tokenizer", "system"), [
    pytest.param(Named("</think>"), SYSTEM["content"], id="qwen3"),
    pytest.param(Named("", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
                 SYSTEM["content"], id="qwen2.5"),
    pytest.param(Named("", SYSTEM["content"]), SYSTEM["content"], id="qwen2"),
    pytest.param(Named("", SMOL), SMOL, id="smollm2"),
    pytest.param(Named("</think>", "## Metadata"), "## Metadata", id="thinks-with-a-message-of-its-own"),
    pytest.param(Named(""), None, id="only-the-marks"),
])
def test_auto_takes_for_qwen_s_what_says_so(tokenizer, system):
    text, whole = counted(*make_renderer(tokenizer, "auto")(TALK, [], "x"))
    assert whole.startswith(f"<|im_start|>system\n{system}<|im_end|>\n" if system else "<|im_start|>user\nhi")
    assert whole.count("<|im_start|>system") == bool(system) and text == "yes<|im_end|>\nno<|im_end|>\n"


def test_auto_recognises_the_other_templates():
    assert counted(*make_renderer(Letters("plain"), "auto")(TALK, [], "x"))[0] == "yesno"
    gemma = Letters("gemma4")
    gemma.chat_template = "{% ... %}<|turn>model"
    assert EMPTY_THOUGHT in counted(*make_renderer(gemma, "auto")(TALK, [], "x"))[1]


@pytest.mark.parametrize(("kind", "template"), [("qwen", "qwen"), ("qwen", "tokenizer"), ("gemma4", "gemma4"),
                                                ("plain", "tokenizer")])
def test_nothing_counts_behind_an_answer_that_was_cut(kind, template):
    """One in the middle stands there as the model saw it afterwards; the last one ends the text."""
    render = make_renderer(Letters(kind), template)
    end = {"qwen": "<|im_end|>\n", "gemma4": "<turn|>\n", "plain": ""}[kind]
    text, whole = counted(*render(TALK, ["length", "stop"], "here"))
    assert text == f"yesno{end}" and whole == counted(*render(TALK, [], "here"))[1]
    text, whole = counted(*render(TALK, ["stop", "length"], "here"))
    assert text == f"yes{end}no" and whole.endswith("no")


def test_how_answers_ended_is_read_from_the_lines(tmp_path):
    talk = {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w" * 20}]}
    lines = [{**talk, "endings": [ending]} for ending in ("stop", "length")]
    read = read_data([write(tmp_path / "d.jsonl", *lines)], Letters("qwen"), TrainConfig(valid=0.0), 300).train
    assert [int(read.row(i)[1].sum()) for i in range(2)] == [20 + len("<|im_end|>\n"), 20]


@pytest.mark.parametrize("endings", [["stop"], ["stop"] * 3, "stop"])
def test_endings_belong_to_the_answers(endings):
    with pytest.raises(FormatError, match="line 3: endings must say of each of 2 answers"):
        make_renderer(Letters("qwen"), "qwen")(TALK, endings, "line 3")


def test_a_cut_answer_that_the_template_rewrites_cannot_be_told():
    class Shouting(Letters):
        def apply_chat_template(self, messages, **options):
            return super().apply_chat_template([{**m, "content": m["content"].upper()} for m in messages], **options)

    with pytest.raises(FormatError, match="here: the chat template rewrites"):
        make_renderer(Shouting("plain"), "tokenizer")(TALK, ["stop", "length"], "here")


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "a"}], [{"role": "user", "content": "a"}],
                                      [{"role": "user"}, {"role": "assistant", "content": "b"}], "text",
                                      [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]])
def test_what_is_no_dialogue(messages):
    with pytest.raises(FormatError, match="line 3: not a dialogue"):
        make_renderer(Letters("qwen"), "qwen")(messages, [], "line 3")


def test_a_template_that_does_not_fit():
    with pytest.raises(FormatError, match="give --template tokenizer"):
        make_renderer(Letters("plain"), "qwen")(TALK, [], "here")


def write(path, *entries):
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_plain_text_is_joined_and_cut_into_windows(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a" * 40)
    lines = write(tmp_path / "b.jsonl", {"text": "b" * 30})
    corpus = read_data([text, lines], Letters("plain"), SETTINGS, 300).train
    rows = [corpus.row(index) for index in range(len(corpus))]
    assert [len(ids) for ids, _ in rows] == [32, 32]  # the last 8 tokens are too few
    whole = [0, *[97] * 40, 0, *[98] * 30]
    assert np.concatenate([ids for ids, _ in rows]).tolist() == whole[:64]
    assert all(mask.all() for _, mask in rows)
    assert [source[-5:] for source in corpus.sources] == ["a.txt", "a.txt"]


def test_ids_and_dialogues_are_sequences_of_their_own(tmp_path):
    short = {"ids": list(range(20)), "loss_mask": [0] * 4 + [1] * 16}
    empty = {"ids": [1] * 20, "loss_mask": [0, 1] * 10}
    talk = {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w" * 50}]}
    data = read_data([write(tmp_path / "d.jsonl", short, empty, talk)], Letters("plain"), SETTINGS, 300)
    assert (len(data.train), data.dropped, data.cut) == (2, 1, 1)
    assert [source[-6:] for source in data.train.sources] == ["line 1", "line 3"]
    assert data.train.length([0, 1]) == 52
    ids, mask, lengths = data.train.rows([0, 1])
    assert lengths.tolist() == [20, 32] and ids.shape == (2, 32)
    assert mask[0].tolist() == [0] * 4 + [1] * 16 + [0] * 12


def test_documents_are_held_out_by_their_text(tmp_path):
    lines = [{"ids": [n + 1, *range(1, 20)]} for n in range(200)]
    settings = TrainConfig(max_length=32, valid=0.2)
    data = read_data([write(tmp_path / "a.jsonl", *lines)], Letters("plain"), settings, 300)
    again = read_data([write(tmp_path / "b.jsonl", *lines[::-1])], Letters("plain"), settings, 300)
    assert 20 <= len(data.valid) <= 60 and len(data.train) + len(data.valid) == 200
    assert {data.valid.row(i)[0][0] for i in range(len(data.valid))} == \
        {again.valid.row(i)[0][0] for i in range(len(again.valid))}


def test_few_documents_fall_on_both_sides(tmp_path):
    """One text is one document: its last windows are held out, whichever side its hash falls on."""
    for text in map(str, range(40)):
        path = tmp_path / "a.txt"
        path.write_text(text * 500)
        data = read_data([path], Letters("plain"), TrainConfig(max_length=32, valid=0.2), 300)
        whole = len(data.train) + len(data.valid)
        assert len(data.valid) == round(whole / 5) > 1
        assert len(data.train.sources) == len(data.train) and data.valid.row(0)[0].shape == (32,)


def test_separators_inside_a_line_do_not_end_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b" * 30}, ensure_ascii=False), encoding="utf-8")
    assert len(read_data([path], Letters("plain"), SETTINGS, 9000).train) == 3


@pytest.mark.parametrize("entry", ["{", "[]", '{"ids": [1, -2]}', '{"ids": [1, 2], "loss_mask": [1]}', '{"other": 1}',
                                   '{"ids": "abc"}', '{"ids": [[1]]}', '{"ids": [1.5, 2]}', '{"ids": []}',
                                   '{"ids": [3000000000]}', '{"ids": [1, 2], "loss_mask": [0, 2]}'])
def test_damaged_lines_are_named(tmp_path, entry):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + entry)
    with pytest.raises(FormatError, match="a.jsonl, line 3: not an object"):
        read_data([path], Letters("plain"), SETTINGS, 300)


def test_tokens_that_the_target_does_not_have(tmp_path):
    with pytest.raises(FormatError, match="holds token 500, the target has 300 rows"):
        read_data([write(tmp_path / "a.jsonl", {"ids": [500] * 20})], Letters("plain"), SETTINGS, 300)


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(ValueError, match="nothing to train on"):
        read_data([write(tmp_path / "a.jsonl", {"text": "short"})], Letters("plain"), SETTINGS, 300)


def test_a_corpus_knows_its_content(tmp_path):
    one, other = ({"ids": [n] * 20} for n in (1, 2))
    found = [read_data([write(tmp_path / "a.jsonl", *rows)], Letters("plain"), SETTINGS, 300).train.digest()
             for rows in ([one, other], [one, other], [one, one])]
    assert found[0] == found[1] != found[2]


def test_a_real_tokenizer(tmp_path):
    text = tmp_path / "a.py"
    text.write_text("import os\n" * 20)
    tokenizer = embedded_pair().tokenizer
    ids, mask = read_data([text], tokenizer, SETTINGS, 4096).train.row(0)
    assert ids[0] == 0 and tokenizer.decode(ids[1:].tolist()).startswith("import os\nimport") and mask.all()


def test_a_long_text_brings_no_warning(tmp_path):
    """The small pair's tokenizer names 2048 tokens; plain text is cut into windows only after it is encoded."""
    heard, handler = [], logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    tokenizer = load(ASSETS / "target", False).tokenizer
    try:
        loud = PreTrainedTokenizerFast(tokenizer_file=str(ASSETS / "target" / "tokenizer.json"), model_max_length=2048)
        loud.encode("import os\n" * 3000)
        assert len(heard) == 1  # so it would be heard
        text = tmp_path / "a.py"
        text.write_text("import os\n" * 3000)
        assert len(read_data([text], tokenizer, SETTINGS, 4096).train) > 200
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert len(heard) == 1


def test_settings_of_a_file_and_of_options(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text('lr = 1e-3\ntaps = [1, 3]\nhead = "rnn"\n')
    settings = read_config(path, {"lr": 0.5, "gamma": None})
    assert (settings.lr, settings.taps, settings.head, settings.gamma) == (0.5, (1, 3), "rnn", 7)
    path.write_text(settings.to_toml())
    assert read_config(path, {}) == settings


def test_kinds_bring_their_losses():
    dflash, eagle = TrainConfig(kind="dflash"), TrainConfig(kind="eagle3", layers=4)
    assert (dflash.head, dflash.ce, dflash.tv, dflash.confidence) == ("none", 1.0, 0.0, False)
    assert eagle.layers == 1


@pytest.mark.parametrize(("values", "problem"), [
    ({"kind": "dflash", "tv": 0.5}, "tv is 0.5, but with kind dflash .* only be 0.0"),
    ({"kind": "eagle3", "columns": 9}, "columns is 9, but with kind eagle3"),
    ({"confidence": True, "confidence_weight": 0.0}, "confidence is true, but"),
])
def test_settings_that_contradict_each_other(values, problem):
    with pytest.raises(ValueError, match=problem):
        read_config(None, values)
    assert read_config(None, {"kind": "dflash", "tv": 0.0}).ce == 1.0


@pytest.mark.parametrize(("text", "problem"), [
    ("lr = ", "is not TOML"), ("zoom = 1", "zoom is no setting: the settings are"), ("lr = true", "lr is True"),
    ("warmupp = 1", "warmupp is no setting: did you mean warmup"),
    ("taps = 3", "taps is 3"),
    ('head = "big"', "head is 'big'"), ("gamma = 0", "gamma is 0: give 1 or more"), ("valid = 0.95", "give 0.0 to 0.9"),
])
def test_settings_that_cannot_be(tmp_path, text, problem):
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_config(path, {})
