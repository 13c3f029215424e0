"""Telling thoughts, tool calls and the answer apart, by the markers that the tokenizer knows.

The rules are those of mlx-lm's server: a table of states, each with the markers that lead out of it. Markers are
not part of any text. Text of states other than these three (a header, say) is dropped.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..text import overlap

CONTENT, THOUGHT, CALL = "normal", "reasoning", "tool"  # as in the tokenizer wrapper's own tables
Moves = Mapping[str, Sequence[tuple[str, str]]]  # state -> (marker, next state)


@dataclass(frozen=True)
class Split:
    """New text by kind, and the calls that became complete."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Markers:
    """What a tokenizer says about its answers. tools: the tools offered, as its parser reads them."""

    moves: Moves
    parse: Any = None
    tools: Sequence[Mapping[str, Any]] | None = None
    begin: str = ""
    end: str = ""


def markers_of(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> Markers:
    """The table for one request; calls are looked for only if tools were offered."""
    moves: dict[str, list[tuple[str, str]]] = {CONTENT: [], THOUGHT: [], CALL: []}
    if tokenizer.has_thinking:
        moves[CONTENT].append((tokenizer.think_start, THOUGHT))
        moves[THOUGHT].append((tokenizer.think_end, CONTENT))
    calls = bool(tools) and tokenizer.has_tool_calling
    if calls:
        moves[CONTENT].append((tokenizer.tool_call_start, CALL))
        moves[THOUGHT].append((tokenizer.tool_call_start, CALL))
        moves[CALL].append((tokenizer.tool_call_end, CONTENT))
    moves[CONTENT].extend((marker, CONTENT) for marker in tokenizer.structural_markers)
    for state, edges in tokenizer.response_transitions.items():
        moves.setdefault(state, []).extend(edge for edge in edges if calls or edge[1] != CALL)
    kept = {state: [edge for edge in edges if edge[0]] for state, edges in moves.items()}  # "": to the end of the text
    if not calls:
        return Markers(kept)
    return Markers(kept, tokenizer.tool_parser, tools, tokenizer.tool_call_start, tokenizer.tool_call_end)


def first_state(tokenizer: Any, prompt: Sequence[int]) -> str:
    """A template may have opened the thoughts already."""
    if tokenizer.response_initial_state:
        return str(tokenizer.response_initial_state)
    if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
        return THOUGHT
    return CONTENT


class Splitter:
    """Splits one answer as it comes. Text that may be the beginning of a marker is held back."""

    def __init__(self, markers: Markers, state: str):
        self._markers, self._state = markers, state
        self._held = self._call = ""
        self._calls = 0

    def feed(self, text: str, last: bool = False) -> Split:
        """Split new text; `last` releases what is held back and ends an unfinished call."""
        self._held += text
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        while True:
            at, marker, after = self._next_marker()
            piece = self._held if last and not marker else self._held[:at]
            self._held = self._held[len(piece) + len(marker):]
            if self._state == CONTENT:
                content += piece
            elif self._state == THOUGHT:
                reasoning += piece
            elif self._state == CALL:
                self._call += piece
                if marker or last:
                    found, rest = self._finish_call(marker)
                    calls, content = [*calls, *found], content + rest
            if not marker:
                return Split(content, reasoning, tuple(calls))
            self._state = after

    def _next_marker(self) -> tuple[int, str, str]:
        """(where, marker, next state) of the first marker; without one, where the held back end begins."""
        edges = self._markers.moves.get(self._state, ())
        found = [(at, -len(marker), marker, after) for marker, after in edges
                 if (at := self._held.find(marker)) >= 0]
        if found:
            at, _, marker, after = min(found)
            return at, marker, after
        return len(self._held) - overlap(self._held, [marker for marker, _ in edges]), "", self._state

    def _finish_call(self, end: str) -> tuple[list[dict[str, Any]], str]:
        """The calls in the collected text; text that is none goes back to the client as it was written."""
        text, self._call = self._call, ""
        try:
            parsed = self._markers.parse(text, self._markers.tools)
            calls = [_as_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # parsers of a dozen formats meet whatever a model wrote, and raise anything
            return [], self._markers.begin + text + end
        for call in calls:
            call["index"] = self._calls
            self._calls += 1
        return calls, ""


def _as_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed call in OpenAI's shape. Raises KeyError or ValueError for anything else."""
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return {"id": str(call.get("id") or f"call_{uuid.uuid4().hex}"), "type": "function",
            "function": {"name": name, "arguments": words}}
