"""Bodies, prompts, answers and tool calls, without HTTP."""

import json
from dataclasses import replace

import pytest
from helpers import embedded_pair
from pydantic import ValidationError
from stand_in import chat_model, chat_tokenizer, generated, plain_model, saying

from mlx_dspark.decode import DecodeOptions
from mlx_dspark.generate import Answer, Chunk
from mlx_dspark.sampling import make_rule
from mlx_dspark.schedule import make_policy
from mlx_dspark.serve.request import Request
from mlx_dspark.server.answers import ChatForm, CompletionForm, Reader, merged, usage_of
from mlx_dspark.server.asking import Defaults, chat_request, completion_request
from mlx_dspark.server.errors import Refusal, encode, invalid
from mlx_dspark.server.schema import ChatBody, CompletionBody, parse_json
from mlx_dspark.server.tools import CALL, CONTENT, THOUGHT, Markers, Splitter, first_state, markers_of
from mlx_dspark.stats import Statistics
from mlx_dspark.structs import Round, Sampling, Schedule

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
USER = [{"role": "user", "content": "hello"}]


def completion(**fields):
    return CompletionBody.model_validate({"prompt": "import os", **fields})


def chat(**fields):
    return ChatBody.model_validate({"messages": USER, **fields})


def problem(make, **fields):
    """(field, message) of a refused body."""
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    refusal = invalid([{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()])
    assert refusal.status == 422
    return refusal.param, str(refusal)


@pytest.mark.parametrize("text", [b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b"[1,", b"\xff",
                                  b'{"a": "\\ud800"}', b"[" * 100_000, b"1" * 5000, b"", b"\xed\xa0\x80",
                                  '{"a": 1}'.encode("utf-16"), '{"a": "\ud800"}'.encode("utf-16-le", "surrogatepass"),
                                  '{"a": 1}'.encode("utf-32-be")])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


def test_json_is_read():
    text = b'{"a": [1, 2.5, null, true, "\\ud83d\\ude00", "\\u00e9"]}'
    assert parse_json(text) == {"a": [1, 2.5, None, True, "😀", "é"]}
    assert parse_json(b"\xef\xbb\xbf" + text) == parse_json(text)  # with a byte order mark


@pytest.mark.parametrize("field, value", [
    ("max_tokens", "5"), ("max_tokens", 5.0), ("max_tokens", True), ("max_tokens", -2), ("temperature", "0.5"),
    ("temperature", -0.1), ("temperature", True), ("temperature", 10**400), ("top_p", 1.5), ("top_k", 0.5),
    ("min_p", 2), ("seed", 1.5), ("seed", 2**64), ("stop", 5), ("stop", ["a", 5]), ("stop", [""]), ("stop", ["x"] * 17),
    ("stop", "x" * 257), ("stream", "yes"), ("stream", 1), ("stream_options", []), ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": "x"}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": True}), ("logit_bias", [1]),
    ("logit_bias", {"²": 1}), ("presence_penalty", []), ("repetition_penalty", 0.005), ("n", 2), ("n", "1"),
    ("n", True), ("model", 5), ("dspark", "on"), ("response_format", {"type": "json_object"}),
    ("response_format", "text"), ("repetition_penalty", -1), ("xtc_probability", 0.5),
    ("xtc_probability", False), ("adapters", "folder"), ("draft_model", "default_model"),
])
@pytest.mark.parametrize("make", [completion, chat])
def test_a_wrong_value_is_refused_by_name(make, field, value):
    param, message = problem(make, **{field: value})
    assert param == field and message.startswith(field)


@pytest.mark.parametrize("field, value", [
    ("prompt", 5), ("prompt", ""), ("prompt", []), ("prompt", [1.5]), ("prompt", [True]), ("prompt", None),
    ("prompt", {"a": 1}), ("prompt", [""]), ("prompt", [[]]), ("prompt", [["x"]]), ("prompt", [[[1]]]),
    ("best_of", 2), ("echo", True), ("suffix", "x"), ("logprobs", 6), ("logprobs", -1),
    ("logprobs", True), ("logprobs", 1.0),
])
def test_a_wrong_completion_is_refused_by_name(field, value):
    assert problem(completion, **{field: value})[0] == field


@pytest.mark.parametrize("prompt", ["one text", [1, 2, 3]])
def test_one_prompt_may_be_in_a_list(prompt):
    assert completion(prompt=[prompt]).prompt == completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize("prompt", [["one", "two"], [[1, 2], [3]], [[1, 2], 3]])
def test_several_prompts_are_refused_with_the_remedy(prompt):
    assert problem(completion, prompt=prompt) == ("prompt", "prompt: several prompts in one request are not served: "
                                                            "send one request each")


@pytest.mark.parametrize("field, value", [
    ("messages", []), ("messages", "hi"), ("messages", [{"role": "robot", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]), ("messages", [5]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]),
    ("tools", {}), ("tools", [{"type": "web_search"}]), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("logprobs", 1), ("top_logprobs", True),
    ("top_logprobs", 2.0),
    ("functions", [{"name": "f"}]), ("max_completion_tokens", "many"), ("chat_template_kwargs", {"a": [1]}),
])
def test_a_wrong_chat_is_refused_by_name(field, value):
    assert problem(chat, **{field: value})[0] == field


@pytest.mark.parametrize("content, found", [
    ([{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "x"}}],
     "a part of type 'image_url' is not served, only text is"),
    ([{"text": "x"}], "a part without a type"), (["x"], "a part without a type"),
    (5, "give a text or a list of text parts"),
])
def test_what_is_no_text_is_refused_with_what_to_give_instead(content, found):
    param, message = problem(chat, messages=[{"role": "user", "content": content}])
    assert param == "messages" and message.startswith(f"messages.0.content: {found}") and "text" in message


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False},
                                    {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": -1, "logprobs": True}])
def test_top_logprobs_of_a_chat_are_0_to_20_beside_logprobs(fields):
    param, message = problem(chat, **fields)
    assert param == "top_logprobs" and message.startswith("top_logprobs: ")
    assert ('"logprobs": true' in message) == (not fields.get("logprobs"))


@pytest.mark.parametrize("fields, wanted", [
    ({}, (False, 0)), ({"logprobs": False, "top_logprobs": 0}, (False, 0)), ({"logprobs": True}, (True, 0)),
    ({"logprobs": True, "top_logprobs": 0}, (True, 0)), ({"logprobs": True, "top_logprobs": 20}, (True, 20)),
])
def test_logprobs_of_a_chat(fields, wanted):
    asked = chat_request(chat_model(), chat(**fields)).request
    assert (asked.logprobs, asked.top_logprobs) == wanted


@pytest.mark.parametrize("given, wanted", [(None, (False, 0)), (0, (True, 0)), (5, (True, 5))])
def test_logprobs_of_a_completion(given, wanted):
    asked = completion_request(plain_model(), completion(logprobs=given)).request
    assert (asked.logprobs, asked.top_logprobs) == wanted


def test_two_limits_must_agree():
    assert "differ" in problem(chat, max_tokens=5, max_completion_tokens=6)[1]
    assert chat(max_completion_tokens=6).max_tokens == 6


def test_fields_that_change_nothing_are_accepted():
    body = chat(n=1, top_logprobs=0, response_format={"type": "text"}, tool_choice="auto", functions=[], user="me",
                xtc_probability=0.0, xtc_threshold=0.1, adapters=None, draft_model=None,
                metadata={"a": 1}, store=False, stream_options=None, temperature=None, stop=None, tools=None)
    assert body.temperature is None and not body.tools


def test_sampling_comes_from_the_body_and_the_server():
    model = chat_model(defaults=Defaults(7, Sampling(temperature=0.5, top_k=9)))
    asked = completion_request(model, completion(top_p=0.9, presence_penalty=0.5, frequency_penalty=-0.5, seed=-1,
                                                 repetition_penalty=1.1, repetition_context_size=64,
                                                 logit_bias={"5": -100}, stop="\n", logprobs=0)).request
    assert asked.sampling == Sampling(temperature=0.5, top_k=9, top_p=0.9, presence_penalty=0.5,
                                      frequency_penalty=-0.5, seed=2**64 - 1, repetition_penalty=1.1,
                                      repetition_context_size=64, logit_bias={5: -100.0})
    assert (asked.stop, asked.logprobs, asked.max_tokens) == (("\n",), True, 7)
    assert completion_request(model, completion(temperature=0)).request.sampling.temperature == 0
    penalised = chat_model(defaults=Defaults(7, Sampling(repetition_penalty=1.3)))
    for given, wanted in ({}, 1.3), ({"repetition_penalty": 0.0}, None), ({"repetition_penalty": 1}, 1):
        assert completion_request(penalised, completion(**given)).request.sampling.repetition_penalty == wanted


def test_the_prompt_is_encoded_as_it_is_or_given_as_ids():
    ids = tuple(embedded_pair().tokenizer.encode("import os"))
    assert completion_request(plain_model(), completion()).request.prompt == ids
    assert completion_request(plain_model(), completion(prompt=list(ids))).request.prompt == ids


def refused(ask, body, model=None):
    with pytest.raises(Refusal) as caught:
        ask(model or chat_model(), body)
    return caught.value


def test_limits_are_told_with_their_numbers():
    model = chat_model(context=10)
    ids = [5] * 8
    assert completion_request(model, completion(prompt=ids)).request.max_tokens == 2  # what is left
    assert completion_request(model, completion(prompt=ids, max_tokens=2)).request.max_tokens == 2
    assert completion_request(model, completion(prompt=ids, max_tokens=-1)).request.max_tokens == -1
    over = refused(completion_request, completion(prompt=ids, max_tokens=3), model)
    assert (over.status, over.code, over.param) == (400, "context_length_exceeded", "max_tokens")
    assert "8 prompt tokens and max_tokens 3 exceed the context of 10: ask for at most 2" in str(over)
    full = refused(completion_request, completion(prompt=[5] * 10), model)
    assert (full.status, full.code, full.param) == (400, "context_length_exceeded", "prompt")
    assert "the prompt has 10 tokens" in str(full)
    unbounded = chat_model(context=None, defaults=Defaults(-1))
    assert completion_request(unbounded, completion()).request.max_tokens == -1


class Unread:
    """A tokenizer that notes what it is made to encode."""

    def __init__(self, tokenizer):
        self._tokenizer, self.encoded = tokenizer, []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **options):
        self.encoded.append(text)
        return self._tokenizer.encode(text, **options)

    def apply_chat_template(self, *messages, tokenize=True, **options):
        text = self._tokenizer.apply_chat_template(*messages, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def test_no_text_has_fewer_tokens_than_the_longest_allows():
    model = plain_model()
    assert model.longest_text == model.context * model.longest_token
    for text in (" " * 3200, "é" * 500, "import os\n" * 99, "\U0001f600" * 99):
        assert len(model.tokenizer.encode(text)) * model.longest_token >= len(text.encode())


@pytest.mark.parametrize("ask, body, param", [
    (completion_request, completion(prompt="é" * 301), "prompt"),
    (chat_request, chat(messages=[{"role": "user", "content": "x" * 300}, *USER, *USER, *USER]), "messages"),
    (chat_request, chat(tools=[{"type": "function", "function": {"name": "f", "description": "x" * 601}}]), "messages"),
], ids=["completion", "chat", "tools"])
def test_what_no_context_holds_is_refused_before_it_is_encoded(ask, body, param):
    tokenizer = Unread(chat_tokenizer())
    model = chat_model(tokenizer=tokenizer, context=20, longest_token=15 if ask is chat_request else 30)
    over = refused(ask, body, model)
    assert (over.status, over.code, over.param) == (400, "context_length_exceeded", param)
    assert tokenizer.encoded == [] and "bytes and the context of 20 tokens holds at most" in str(over)
    assert refused(ask, body, replace(model, longest_token=500)).code == "context_length_exceeded"  # by its tokens
    assert len(tokenizer.encoded) == 1
    assert ask(replace(model, context=None), body).request.prompt  # bounded by --max-body-mb alone


def test_what_the_template_leaves_out_does_not_count():
    """As templates do with the thoughts of earlier turns."""
    messages = [{"role": "user", "content": "hello", "reasoning_content": "hm " * 999}]
    model = chat_model(tokenizer=Unread(chat_tokenizer()), context=20, longest_token=15)
    short = chat_request(chat_model(), chat()).request
    assert chat_request(model, chat(messages=messages)).request.prompt == short.prompt


@pytest.mark.parametrize("fields, param", [({"prompt": [-1]}, "prompt"), ({"prompt": [10**9]}, "prompt"),
                                           ({"logit_bias": {"999999": 1}}, "logit_bias")])
def test_tokens_outside_the_vocabulary(fields, param):
    refusal = refused(completion_request, completion(**fields))
    assert (refusal.status, refusal.param) == (422, param) and "outside the vocabulary" in str(refusal)


def rendered(**fields):
    return chat_tokenizer().decode(chat_request(chat_model(), chat(**fields)).request.prompt)


def test_messages_go_through_the_template():
    assert rendered() == "<user>hello<assistant><think>"
    texts = [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]
    parts = [{"role": "developer", "content": texts}, *USER]
    assert rendered(messages=parts, chat_template_kwargs={"enable_thinking": False}) == \
        "<system>be brief<user>hello<assistant>"
    calls = [*USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"}]
    assert "<assistant>Oslo<tool>rain" in rendered(messages=calls)


def test_tools_are_offered_unless_they_are_not_wanted():
    assert '"name": "weather"' in rendered(tools=[TOOL])
    assert "weather" not in rendered(tools=[TOOL], tool_choice="none")
    without = chat_model(tokenizer=chat_tokenizer(tools=False))
    assert refused(chat_request, chat(tools=[TOOL]), without).param == "tools"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "add_generation_prompt", "conversation",
                                  "return_dict", "tools"])
def test_a_client_cannot_reach_the_renderer(name):
    refusal = refused(chat_request, chat(chat_template_kwargs={name: "{{ 1 }}"}))
    assert (refusal.status, refusal.param) == (422, "chat_template_kwargs") and name in str(refusal)


def test_a_template_may_refuse():
    refusal = refused(chat_request, chat(messages=[{"role": "assistant", "content": "hi"}]))
    assert (refusal.status, refusal.param) == (422, "messages") and "the last turn must be the user's" in str(refusal)
    assert refused(chat_request, chat(), plain_model()).code == "no_chat_template"


# Telling thoughts, calls and text apart

WITH_CALLS = Markers({CONTENT: [("<think>", THOUGHT), ("<tool_call>", CALL)], THOUGHT: [("</think>", CONTENT)],
                      CALL: [("</tool_call>", CONTENT)]}, lambda text, tools: json.loads(text), [TOOL], "<tool_call>",
                     "</tool_call>")
CALL_TEXT = '<tool_call>{"name": "weather", "arguments": {"city": "Ålesund"}}</tool_call>'


def split(text, size, markers=WITH_CALLS, state=CONTENT):
    splitter = Splitter(markers, state)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", last=True)]
    return ("".join(p.content for p in parts), "".join(p.reasoning for p in parts),
            [call for p in parts for call in p.tool_calls])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_answer_is_split_however_it_is_cut(size):
    text = f"<think>so <b>be it</think>I < you{CALL_TEXT} and {CALL_TEXT}<end"
    content, reasoning, calls = split(text, size)
    assert (content, reasoning) == ("I < you and <end", "so <b>be it")
    assert [call["index"] for call in calls] == [0, 1] and calls[0]["id"] != calls[1]["id"]
    assert calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Ålesund"}'}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("text", ["<tool_call>no json</tool_call>!", '<tool_call>{"name": "weather", "argu',
                                  "<tool_call>", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
                                  "<tool_call>[1]</tool_call>",
                                  '<tool_call>{"name": "f", "arguments": NaN}</tool_call>'])
def test_what_is_no_call_is_given_back_as_it_was_written(text, size):
    assert split(text, size) == (text, "", [])


def test_a_call_without_an_end_marker_ends_with_the_text():
    def parse(text, tools):
        return [{"name": name, "arguments": "{}", "id": name} for name in text.split()]

    markers = Markers({CONTENT: [("[TOOL_CALLS]", CALL)], CALL: []}, parse, [TOOL], "[TOOL_CALLS]", "")
    content, _, calls = split("yes[TOOL_CALLS]a b", 4, markers)
    assert content == "yes" and [call["id"] for call in calls] == ["a", "b"]
    assert calls[0]["function"]["arguments"] == "{}"


def test_thoughts_that_the_template_opened():
    assert split("hm</think>yes", 3, state=THOUGHT) == ("yes", "hm", [])
    assert split("hm, cut off</thi", 3, state=THOUGHT) == ("", "hm, cut off</thi", [])
    tokenizer = chat_tokenizer()
    opened = tokenizer.encode("<user>x<assistant><think>", add_special_tokens=False)
    closed = tokenizer.encode("<think>a</think>b", add_special_tokens=False)
    assert (first_state(tokenizer, opened), first_state(tokenizer, closed)) == (THOUGHT, CONTENT)


def test_markers_follow_the_tokenizer():
    assert markers_of(chat_tokenizer(), [TOOL]).moves[CONTENT] == [("<think>", THOUGHT), ("<tool_call>", CALL)]
    assert markers_of(chat_tokenizer(), None).moves[CONTENT] == [("<think>", THOUGHT)]
    assert markers_of(embedded_pair().tokenizer, None).moves == {CONTENT: [], THOUGHT: [], CALL: []}


# Chunks as OpenAI's objects


def read(chunks, splitter=None, watched=False, stop=()):
    tokenizer = chat_tokenizer()
    reader = Reader(tokenizer, embedded_pair().stop_ids, splitter, watched, stop)
    kept = list(chunks)
    return [reader.read(chunk) for chunk in kept], kept[-1].stats


def test_a_call_ends_the_turn():
    deltas, stats = read(saying("on it ", CALL_TEXT)(Request((1, 2))), Splitter(WITH_CALLS, CONTENT))
    document = ChatForm("m").document(merged(deltas), stats)
    choice = document["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "on it "
    assert set(choice["message"]["tool_calls"][0]) == {"id", "type", "function"}  # a stream's index is no part of it
    cut, _ = read(saying(CALL_TEXT, finish="length")(Request((1,))), Splitter(WITH_CALLS, CONTENT))
    assert merged(cut).finish == "length"


def test_stream_and_document_say_the_same():
    request = Request(tuple(embedded_pair().tokenizer.encode("import os")), max_tokens=12, logprobs=True)
    form = CompletionForm("m")
    deltas, stats = read(generated(request))
    events = [event for delta in deltas for event in form.events(delta)]
    document = form.document(merged(deltas), stats)
    choice = document["choices"][0]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
    assert {event["id"] for event in events} == {document["id"]}
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 12 == document["usage"]["completion_tokens"]
    assert all(value <= 0 for value in logprobs["token_logprobs"]) and logprobs["top_logprobs"] is None
    for text, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert choice["text"][offset:].startswith(text)


def test_offsets_of_an_answer_that_begins_with_a_space():
    request = Request(tuple(embedded_pair().tokenizer.encode("import os\nimport")), max_tokens=40, logprobs=True)
    deltas, stats = read(generated(request))
    choice = CompletionForm("m").document(merged(deltas), stats)["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(" ") and "".join(tokens) == choice["text"]
    assert offsets == [len("".join(tokens[:place])) for place in range(40)]


def pieces_of(text, stop=(), size=1):
    """The answer's text, and its pieces in the events, where the engine's rounds have so many tokens."""
    pair = embedded_pair()
    ids = pair.tokenizer.encode(text, add_special_tokens=False)
    plain = DecodeOptions(make_rule(Sampling()), make_policy("plain", 0, False), stop_ids=pair.stop_ids)
    answer, chunks = Answer(pair, 1, plain, stop, {}), []
    for index in range(0, len(ids), size):
        kept = tuple(ids[index : index + size])
        chunks.append(answer.take(Round(index, 0, len(kept), len(kept), kept, len(kept) - 1, kept,
                                        Schedule(len(kept), "fixed", "said"), {})))
        if answer.finish:
            break
    chunks.append(answer.end("length"))
    watches = [delta.watch for delta in read(chunks, watched=True, stop=stop)[0]]
    return "".join(chunk.text for chunk in chunks), "".join(
        piece for watch in watches for piece, _ in watch.get("tokens", ()))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("text, stop, wanted", [
    (" path", (), " path"), ("   ", (), "   "), (" ", (), " "), ("a ", (), "a "), ("\n \n", (), "\n \n"),
    ("f(x)) + 1", ("))",), "f(x"), ("f(x) + 1", ("))",), "f(x) + 1"), ("f(x)", ("))",), "f(x)"),
    (" )) + 1", ("))",), " "), ("naïve 😀", (), "naïve 😀"),
])
def test_pieces_put_together_are_the_answers_text(text, stop, wanted, size):
    assert pieces_of(text, stop, size) == (wanted, wanted)


def test_every_round_is_described_when_it_is_asked_for():
    request = Request(tuple(embedded_pair().tokenizer.encode("import os\n")), max_tokens=24)
    chunks = list(generated(request))
    deltas, _ = read(chunks, watched=True)
    rounds = [delta.watch for delta in deltas if "round" in delta.watch]
    assert "".join(text for watch in rounds for text, _ in watch["tokens"]) == "".join(c.text for c in chunks)
    for watch, chunk in zip(rounds, chunks):
        assert sum(accepted for _, accepted in watch["tokens"]) == watch["accepted"] == chunk.round.accepted
        assert len(watch["rejected"]) == len(chunk.round.drafts) - chunk.round.accepted
    assert any(watch["rejected"] for watch in rounds) and any(watch["accepted"] for watch in rounds)
    assert "stats" in deltas[-1].watch and not set(deltas[-1].watch["stats"]) & {"target", "blas"}  # no paths


def test_usage_counts_reused_tokens():
    assert usage_of(Statistics(9, {"cached_tokens": 4}, generated_tokens=3)) == {
        "prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}


def test_impossible_tokens_have_a_finite_logprob():
    chunk = Chunk("a", (5, 6), (float("-inf"), float("nan")), "length", None, Statistics(1))
    deltas, _ = read([chunk])
    assert [said.logprob for said in deltas[0].logprobs] == [-9999.0, -9999.0]
    chunk = replace(chunk, top_logprobs=(((5, 0.0), (6, float("-inf"))), ((7, float("nan")), (8, float("nan")))))
    for form in (ChatForm("m"), CompletionForm("m")):
        (event,) = form.events(read([chunk])[0][0])
        assert encode(event).count(b"-9999.0") == (5 if isinstance(form, ChatForm) else 6)


LIKELY = (((65, -0.25), (66, -1.5)), ((65, -0.5), (66, -1.0)))


def test_a_chats_top_logprobs_are_the_most_likely_tokens_and_no_other():
    chunk = Chunk("", (66, 67), (-1.5, -3.0), "length", None, Statistics(1), LIKELY)
    decode = plain_model().tokenizer.decode
    (event,) = ChatForm("m").events(read([chunk])[0][0])
    first, second = event["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"]) == (decode([66]), -1.5)
    assert second["token"] == decode([67]) and [one["logprob"] for one in second["top_logprobs"]] == [-0.5, -1.0]
    assert first["top_logprobs"] == [{"token": text, "logprob": value, "bytes": list(text.encode())}
                                     for text, value in ((decode([65]), -0.25), (decode([66]), -1.5))]


def test_a_completions_top_logprobs_hold_the_chosen_token_too():
    chunk = Chunk("", (66, 67), (-1.5, -3.0), "length", None, Statistics(1), LIKELY)
    texts = [plain_model().tokenizer.decode([token]) for token in (65, 66, 67)]
    (event,) = CompletionForm("m").events(read([chunk])[0][0])
    first, second = event["choices"][0]["logprobs"]["top_logprobs"]
    assert first == dict(zip(texts, (-0.25, -1.5))) and list(first) == texts[:2]
    assert second == dict(zip(texts, (-0.5, -1.0, -3.0))) and list(second) == texts


def test_of_tokens_with_one_text_the_likeliest_counts():
    """Parts of characters are all one text."""
    decode = plain_model().tokenizer.decode
    parts = [token for token in range(2000) if decode([token]) == "\ufffd"][:2]
    chunk = Chunk("", (parts[1],), (-2.0,), "length", None, Statistics(1), (((parts[0], -0.5), (65, -1.0)),))
    (event,) = CompletionForm("m").events(read([chunk])[0][0])
    assert event["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, decode([65]): -1.0}]


def test_any_text_can_be_sent():
    assert json.loads(encode({"a": "\ud800é"})) == {"a": "\ud800é"}
