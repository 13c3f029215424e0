"""Dialogues as training text: rendered by the tokenizer's template, with a mask of the answers' tokens.

The two named templates are DeepSeek's: `qwen` puts a system message in front and lets a thought that the template
writes count; `gemma4` begins every answer with an empty thought, which does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FormatError

Messages = Sequence[Mapping[str, str]]
Endings = Sequence[str]  # how each answer ended: "length" is one that was cut
Renderer = Callable[[Messages, Endings, str], tuple[np.ndarray, np.ndarray]]

EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CUT = "length"
TAIL = 40  # letters of a cut answer that are looked for in the rendered text


@dataclass(frozen=True)
class Marks:
    """The texts around an answer: it counts from behind `start` (and `skip`, if that follows) through `end`."""

    start: str
    end: str
    skip: str = ""


MARKS = {"qwen": Marks("<|im_start|>assistant\n", "<|im_end|>\n"),
         "gemma4": Marks("<|turn>model\n", "<turn|>\n", EMPTY_THOUGHT)}


def make_renderer(tokenizer: Any, template: str) -> Renderer:
    """How messages become ids int32 and a loss mask uint8, both [S].

    template: qwen, gemma4, tokenizer (any chat template, rendered message by message), or auto, which takes the
    first of them that the tokenizer's template is. The renderer takes messages, how each of their answers ended (may
    be empty) and a place. Behind an answer that was cut nothing counts, and the text ends with it if it is the last.
    It raises FormatError, naming the place, for messages that are no dialogue or a tokenizer without a template.
    """
    if template == "auto":
        template = _recognise(tokenizer)

    def render(messages: Messages, endings: Endings, where: str) -> tuple[np.ndarray, np.ndarray]:
        _check(messages, endings, where)
        if not getattr(tokenizer, "has_chat_template", False):
            raise FormatError(f"{where}: a dialogue needs a chat template and this tokenizer has none: give plain text")
        if template == "tokenizer":
            return _by_message(tokenizer, messages, endings, where)
        return _by_marks(tokenizer, messages, endings, template, where)

    return render


def _recognise(tokenizer: Any) -> str:
    """The named template that a tokenizer's own is, or tokenizer.

    Many models share Qwen's marks and tell themselves something else: theirs is the message to train with.
    """
    source = str(getattr(tokenizer, "chat_template", None) or "")
    if MARKS["gemma4"].start.split("\n")[0] in source:
        return "gemma4"
    if MARKS["qwen"].start.split("\n")[0] not in source:
        return "tokenizer"
    # Qwen 3 writes no system message but knows thoughts, Qwen 2 writes SYSTEM, Qwen 2.5 one that names Qwen.
    known = any(word in source for word in ("</think>", "You are Qwen", SYSTEM["content"]))
    asked = [{"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=False)
    own = text.startswith("<|im_start|>system") and not ("You are Qwen" in text or SYSTEM["content"] in text)
    return "qwen" if known and not own else "tokenizer"


def _check(messages: Messages, endings: Endings, where: str) -> None:
    given = messages if isinstance(messages, list) else []
    roles = [m.get("role") if isinstance(m, Mapping) and isinstance(m.get("content"), str) else None for m in given]
    rest = roles[1:] if roles[:1] == ["system"] else roles
    if rest[:1] != ["user"] or "assistant" not in rest or set(rest) - {"user", "assistant"}:
        raise FormatError(f"{where}: not a dialogue that begins with user (after an optional system message) and has "
                          "an answer of assistant: correct or remove the line")
    if endings and (not isinstance(endings, list) or len(endings) != rest.count("assistant")):
        raise FormatError(f"{where}: endings must say of each of {rest.count('assistant')} answers how it ended: "
                          "correct the line or leave endings out")


def _by_marks(
    tokenizer: Any, messages: Messages, endings: Endings, template: str, where: str
) -> tuple[np.ndarray, np.ndarray]:
    marks, own = MARKS[template], [dict(message) for message in messages]
    if template == "qwen" and own[0]["role"] != "system":
        own.insert(0, SYSTEM)
    if template == "gemma4":
        own = [message for message in own if message["role"] != "system"]
        for message in own:
            if message["role"] == "assistant" and not message["content"].startswith(EMPTY_THOUGHT):
                message["content"] = EMPTY_THOUGHT + message["content"]
    text = tokenizer.apply_chat_template(own, tokenize=False, add_generation_prompt=False)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.uint8)
    spans = _spans(text, marks)
    for place, (begin, end) in enumerate(spans):
        cut = place < len(endings) and endings[place] == CUT
        end -= len(marks.end) if cut and text.endswith(marks.end, begin, end) else 0
        first, last = (len(tokenizer.encode(text[:at], add_special_tokens=False)) for at in (begin, end))
        mask[first:last] = 1
        if cut and place == len(spans) - 1:
            return ids[:last], mask[:last]
    if not mask.any():
        raise FormatError(f"{where}: the tokenizer's template writes no {marks.start!r}, so it is not {template}: give "
                          "--template tokenizer")
    return ids, mask


def _spans(text: str, marks: Marks) -> list[tuple[int, int]]:
    """Where answers begin and end in a rendered text."""
    spans, at = [], text.find(marks.start)
    while at >= 0:
        begin = at + len(marks.start)
        begin += len(marks.skip) if marks.skip and text.startswith(marks.skip, begin) else 0
        end = text.find(marks.end, begin)
        end = len(text) if end < 0 else end + len(marks.end)
        spans.append((begin, end))
        at = text.find(marks.start, end)
    return spans


def _by_message(
    tokenizer: Any, messages: Messages, endings: Endings, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """An answer is what the template adds to the text before it, its opening for an answer left out."""
    whole = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False)
    ids = np.array(tokenizer.encode(whole, add_special_tokens=False), dtype=np.int32)
    mask, ended = np.zeros(len(ids), dtype=np.uint8), iter(endings)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        cut = next(ended, "") == CUT
        opened = tokenizer.apply_chat_template(list(messages[:place]), tokenize=False, add_generation_prompt=True)
        closed = tokenizer.apply_chat_template(list(messages[: place + 1]), tokenize=False, add_generation_prompt=False)
        told = closed[: _end_of(message["content"], closed)] if cut else closed
        if not (whole.startswith(closed) and closed.startswith(opened) and len(told) >= len(opened)):
            raise FormatError(f"{where}: the chat template rewrites earlier messages, so the answer's tokens cannot be "
                              "told: give ids and loss_mask instead")
        first, last = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (opened, told))
        mask[first:last] = 1
        if cut and place == len(messages) - 1:
            return ids[:last], mask[:last]
    return ids, mask


def _end_of(content: str, text: str) -> int:
    """Where the last answer `content` ends in a rendered text; 0 if it is not there."""
    tail = content.rstrip()[-TAIL:]
    at = text.rfind(tail)
    return at + len(tail) if tail and at >= 0 else 0
