"""From a client's body to the engine's request: the template, the limits, the sampling."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..load import encode_prompt
from ..serve.request import Request
from ..structs import Sampling
from .errors import Refusal, encode
from .schema import Body, ChatBody, CompletionBody, Message
from .tools import Splitter, first_state, markers_of

if TYPE_CHECKING:
    from ..load import Pair

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                   "repetition_penalty", "presence_context_size", "frequency_context_size", "repetition_context_size",
                   "logit_bias")
TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Defaults:
    """For requests that say nothing: max_tokens (-1: the rest of the context), sampling, template variables."""

    max_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """What the server knows about the pair it serves. context, vocab_size: None if the target does not say.

    longest_token: bytes of text that no token exceeds; with it a text that no context could hold is refused unread.
    """

    name: str
    tokenizer: Any
    stop_ids: frozenset[int]
    context: int | None = None
    vocab_size: int | None = None
    gamma: int | None = None
    defaults: Defaults = Defaults()
    longest_token: int | None = None

    @property
    def chats(self) -> bool:
        return bool(self.tokenizer.has_chat_template)

    @property
    def longest_text(self) -> int | None:
        """Bytes of UTF-8 above which a text certainly exceeds the context; None where nothing is known."""
        return None if self.context is None or self.longest_token is None else self.context * self.longest_token


@dataclass(frozen=True)
class Asked:
    """A request for the engine, and how its text will be split (None: not at all)."""

    request: Request
    splitter: Splitter | None


def model_of(pair: Pair, name: str, defaults: Defaults) -> Model:
    """The facts of a loaded pair."""
    pair.tokenizer.encode("a")  # the first call may change a tokenizer's settings: now, while one thread uses it
    return Model(name, pair.tokenizer, pair.stop_ids, pair.target.context, pair.target.vocab_size,
                 None if pair.draft is None else pair.draft.gamma, defaults, longest_token(pair.tokenizer))


def longest_token(tokenizer: Any) -> int:
    """A bound on the bytes of text that one token stands for.

    In all spellings of a vocabulary (bytes as letters, spaces as \u2581, bytes as <0x0A>) a token's name is at least as
    long as its text.
    """
    return max(len(name.encode("utf-8", "replace")) for name in tokenizer.get_vocab())


def check_model(model: Model, body: Body) -> None:
    """One model is served; a request may leave its name out. Raises Refusal for another name."""
    if body.model is not None and body.model != model.name:
        raise Refusal(404, f"the model {body.model[:200]!r} is not served here: use {model.name!r}", "model",
                      "model_not_found")


def completion_request(model: Model, body: CompletionBody) -> Asked:
    """POST /v1/completions. Raises Refusal."""
    if isinstance(body.prompt, str):
        ids = _encoded(model, body.prompt)
    else:
        ids = body.prompt
        outside = [token for token in ids if token < 0 or token >= (model.vocab_size or 2**31)]
        if outside:
            raise Refusal(422, f"prompt: token {outside[0]} is outside the vocabulary of {model.vocab_size}", "prompt")
    return Asked(_request(model, body, ids, "prompt", body.logprobs), None)


def chat_request(model: Model, body: ChatBody) -> Asked:
    """POST /v1/chat/completions. Raises Refusal."""
    if not model.chats:
        raise Refusal(422, "this model has no chat template: use /v1/completions, or start the server with "
                           "--chat-template", "messages", "no_chat_template")
    tools = None
    if body.tools and body.tool_choice != "none":
        if not model.tokenizer.has_tool_calling:
            raise Refusal(422, "tools: this model's tokenizer has no form for tool calls: leave them out", "tools")
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools]
    ids = _rendered(model, [_plain(message) for message in body.messages], tools, body.chat_template_kwargs or {})
    request = _request(model, body, ids, "messages", (body.top_logprobs or 0) if body.logprobs else None)
    return Asked(request, Splitter(markers_of(model.tokenizer, tools), first_state(model.tokenizer, ids)))


def _request(model: Model, body: Body, ids: Sequence[int], param: str, top: int | None) -> Request:
    """top: how many likely tokens get log-probabilities beside the chosen one; None for no log-probabilities."""
    for token in body.logit_bias or ():
        if model.vocab_size is not None and token >= model.vocab_size:
            raise Refusal(422, f"logit_bias: token {token} is outside the vocabulary of {model.vocab_size}",
                          "logit_bias")
    return Request(tuple(ids), _limit(model, len(ids), body.max_tokens, param), _sampling(model, body),
                   tuple(body.stop or ()), top is not None, top or 0)


def _sampling(model: Model, body: Body) -> Sampling:
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if given.get("repetition_penalty") == 0:
        given["repetition_penalty"] = None
    seed = None if body.seed is None else body.seed % 2**64  # OpenAI's seeds have a sign
    return dataclasses.replace(model.defaults.sampling, **given, seed=seed)


def _limit(model: Model, prompt: int, wanted: int | None, param: str) -> int:
    """How many tokens may be written; checked here so that the client is told the numbers before any work."""
    default = model.defaults.max_tokens
    if model.context is None:
        return default if wanted is None else wanted
    room = model.context - prompt
    if room < 1 and wanted != 0:
        raise Refusal(400, f"the prompt has {prompt} tokens and the context is {model.context}: shorten the prompt",
                      param, "context_length_exceeded")
    if wanted is not None and wanted > room:
        raise Refusal(400, f"{prompt} prompt tokens and max_tokens {wanted} exceed the context of {model.context}: "
                           f"ask for at most {room}, or -1 for all of it", "max_tokens", "context_length_exceeded")
    return wanted if wanted is not None else min(default, room) if default >= 0 else -1


def _check_length(model: Model, text: str, param: str) -> None:
    """Refuse what no context holds before it is encoded: that may take seconds, and all requests would wait."""
    size = len(text.encode("utf-8", "replace"))
    if model.longest_text is not None and size > model.longest_text:
        raise Refusal(400, f"the prompt has {size} bytes and the context of {model.context} tokens holds at most "
                           f"{model.longest_text}: shorten the prompt", param, "context_length_exceeded")


def _encoded(model: Model, text: str) -> list[int]:
    _check_length(model, text, "prompt")
    try:
        return encode_prompt(model.tokenizer, text, raw=True)
    except ValueError as error:
        raise Refusal(422, f"prompt: {error}", "prompt") from None


def _rendered(
    model: Model, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
) -> list[int]:
    """Token ids of a conversation, ready for the answer."""
    for name in variables:
        if name in TEMPLATE_VARIABLES | _renderer_options(model.tokenizer):
            raise Refusal(422, f"chat_template_kwargs: {name} is not the client's to set", "chat_template_kwargs")
    given = len(encode([messages, tools, variables]))
    if model.longest_text is not None and given > model.longest_text:  # what counts is what the template makes of it
        _check_length(model, _template(model, messages, tools, variables, tokenize=False), "messages")
    ids = _template(model, messages, tools, variables, tokenize=True)
    if not ids:
        raise Refusal(422, "messages: the conversation is empty", "messages")
    return list(ids)


def _template(
    model: Model, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any],
    tokenize: bool,
) -> Any:
    """What the model's template makes of a conversation: token ids, or the text alone."""
    try:
        return model.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=tokenize,
            **{**model.defaults.template, **variables})
    except Exception as error:  # the template is code that came with the model, and may raise anything
        raise Refusal(422, f"messages: the model's chat template refuses them: {error}", "messages") from None


def _renderer_options(tokenizer: Any) -> frozenset[str]:
    """Names that reach the renderer itself (chat_template=...: a program of the client's) and not the template."""
    renderer = getattr(tokenizer, "_tokenizer", tokenizer).apply_chat_template
    return frozenset(inspect.signature(renderer).parameters) - {"kwargs"}


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments of calls as objects."""
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    plain |= {name: value for name in ("name", "tool_call_id", "reasoning_content")
              if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]
    return plain


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """OpenAI's clients send a call's arguments as JSON text; templates want the object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments  # as the model wrote it, broken or not
