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
Renderer = Callable[[Messages, str], tuple[np.ndarray, np.ndarray]]

EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


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
    first of them that the tokenizer's template fits. The renderer raises FormatError, naming the place, for
    messages that are no dialogue or a tokenizer without a template.
    """
    source = str(getattr(tokenizer, "chat_template", None) or "")
    if template == "auto":
        template = next((name for name, mark in MARKS.items() if mark.start.split("\n")[0] in source), "tokenizer")

    def render(messages: Messages, where: str) -> tuple[np.ndarray, np.ndarray]:
        _check(messages, where)
        if not getattr(tokenizer, "has_chat_template", False):
            raise FormatError(f"{where}: a dialogue needs a chat template and this tokenizer has none: give plain text")
        if template == "tokenizer":
            return _by_message(tokenizer, messages, where)
        return _by_marks(tokenizer, messages, template, where)

    return render


def _check(messages: Messages, where: str) -> None:
    given = messages if isinstance(messages, list) else []
    roles = [m.get("role") if isinstance(m, Mapping) and isinstance(m.get("content"), str) else None for m in given]
    rest = roles[1:] if roles[:1] == ["system"] else roles
    if rest[:1] != ["user"] or "assistant" not in rest or set(rest) - {"user", "assistant"}:
        raise FormatError(f"{where}: not a dialogue that begins with user (after an optional system message) and has "
                          "an answer of assistant: correct or remove the line")


def _by_marks(tokenizer: Any, messages: Messages, template: str, where: str) -> tuple[np.ndarray, np.ndarray]:
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
    for begin, end in _spans(text, marks):
        first, last = (len(tokenizer.encode(text[:at], add_special_tokens=False)) for at in (begin, end))
        mask[first:last] = 1
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


def _by_message(tokenizer: Any, messages: Messages, where: str) -> tuple[np.ndarray, np.ndarray]:
    """An answer is what the template adds to the text before it, its opening for an answer left out."""
    whole = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False)
    ids = np.array(tokenizer.encode(whole, add_special_tokens=False), dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = tokenizer.apply_chat_template(list(messages[:place]), tokenize=False, add_generation_prompt=True)
        closed = tokenizer.apply_chat_template(list(messages[: place + 1]), tokenize=False, add_generation_prompt=False)
        if not (whole.startswith(closed) and closed.startswith(opened)):
            raise FormatError(f"{where}: the chat template rewrites earlier messages, so the answer's tokens cannot be "
                              "told: give ids and loss_mask instead")
        first, last = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (opened, closed))
        mask[first:last] = 1
    return ids, mask
