"""What clients may send. Types are strict: a wrong one is an error that names the field, never a guess.

Fields of OpenAI's interface that only describe the caller (user, metadata, ...) are ignored. Those that would
change the answer and are not served are refused, with what to do instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

MOST_STOPS, LONGEST_STOP = 16, 256
LEAST_PENALTY = 0.01  # of repetition_penalty, which divides logits


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def parse_json(text: bytes) -> Any:
    """JSON as the standard has it: UTF-8, no NaN and no infinities, however written. Raises JSONDecodeError."""

    def refuse(name: str) -> NoReturn:
        raise json.JSONDecodeError(f"{name} is not a JSON number", "", 0)

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            refuse(digits)
        return value

    try:
        document = json.loads(text.decode("utf-8-sig"), parse_constant=refuse, parse_float=number)
        if b"\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return document
    except UnicodeEncodeError:
        raise json.JSONDecodeError("a text holds half of a surrogate pair", "", 0) from None
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("the document is nested too deeply", "", 0) from None
    except ValueError as error:  # bytes that are no UTF-8, an integer of thousands of digits
        raise json.JSONDecodeError(str(error).splitlines()[0], "", 0) from None


def _only(allowed: Callable[[Any], bool], remedy: str) -> AfterValidator:
    """For a field that is accepted with the values that change nothing."""

    def check(value: Any) -> Any:
        if value is not None and not allowed(value):
            raise ValueError(remedy)
        return value

    return AfterValidator(check)


def _is(*wanted: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in wanted)


OneAnswer = Annotated[Any, _only(_is(1), "one answer a request: leave it out, or send the request again")]
PlainText = Annotated[Any, _only(lambda value: isinstance(value, dict) and value.get("type") == "text",
                                 'only {"type": "text"} is served')]
NotRepeated = Annotated[Any, _only(_is(False), "the prompt is not repeated: leave echo out")]
NotFilledIn = Annotated[Any, _only(_is(), "text cannot be filled in: leave suffix out")]
FreeChoice = Annotated[Any, _only(_is("auto", "none"), 'a call cannot be enforced: give "auto" or "none", or offer '
                                                       "only the tool that is wanted")]
NotFunctions = Annotated[Any, _only(_is([]), "functions are given as tools")]
NotExcluded = Annotated[Any, _only(lambda value: type(value) in (int, float) and value == 0,
                                   "the likeliest tokens are not excluded: leave it out, or give 0")]
NotAdapted = Annotated[Any, _only(_is(), "one model is served, without adapters: leave it out")]
NotDrafted = Annotated[Any, _only(_is(), "the draft is chosen when the server is started: leave it out")]
NotFunctionCall = Annotated[Any, _only(_is("auto", "none"), "give tool_choice instead")]


def _stops(value: Any) -> Any:
    """A string or a list of them, as a list."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("give a string or a list of strings")
    if len(value) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in value):
        raise ValueError(f"give at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return value


def _one_prompt(value: Any) -> Any:
    """A text or token ids, which may be the only element of a list."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise ValueError("several prompts in one request are not served: send one request each")
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ValueError("give a text or a list of token ids")
    return value


def _repetition(value: float) -> float:
    """0 is off, as mlx_lm.server has it."""
    if value and value < LEAST_PENALTY:
        raise ValueError(f"give 0 (off), or {LEAST_PENALTY} to 100")
    return value


def _content(value: Any) -> Any:
    """A text or parts of text. Raises ValueError for other parts, with what to do instead."""
    if value is not None and not isinstance(value, (str, list)):
        raise ValueError("give a text or a list of text parts")
    for part in value if isinstance(value, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            found = f"a part of type {kind[:40]!r}" if isinstance(kind, str) else "a part without a type"
            raise ValueError(f'{found} is not served, only text is: give parts as {{"type": "text", "text": "..."}}')
    return value


def _bias(value: Any) -> Any:
    """{"token id": number} with the ids as integers."""
    if not isinstance(value, dict):
        raise ValueError("give an object of token ids and numbers")
    for token, number in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"{token[:20]!r} is not a token id")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise ValueError(f"the value of token {token} is not a number from -100 to 100")
    return {int(token): float(number) for token, number in value.items()}


class StreamOptions(Strict):
    include_usage: bool | None = None


class Body(Strict):
    """What both kinds of request share. None is the server's default."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=10**9)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100), AfterValidator(_repetition)] | None = None
    presence_context_size: Annotated[int, Field(ge=1, le=10**6)] | None = None
    frequency_context_size: Annotated[int, Field(ge=1, le=10**6)] | None = None
    repetition_context_size: Annotated[int, Field(ge=1, le=10**6)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    dspark: bool | None = None
    n: OneAnswer = None
    response_format: PlainText = None
    xtc_probability: NotExcluded = None
    adapters: NotAdapted = None
    draft_model: NotDrafted = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: OneAnswer = None
    echo: NotRepeated = None
    suffix: NotFilledIn = None


class Part(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[Part] | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Strict):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: FreeChoice = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    functions: NotFunctions = None
    function_call: NotFunctionCall = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError('give "logprobs": true with it, or leave it out')
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        """Both names mean the same; OpenAI's clients send either."""
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
            self.max_tokens = self.max_completion_tokens
        return self
