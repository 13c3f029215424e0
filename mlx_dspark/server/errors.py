"""Errors in OpenAI's shape, whatever text they quote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import Response

LONGEST_MESSAGE = 400


class Refusal(Exception):
    """A request that is not served: its status, one line, and the field at fault if there is one."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def document(self) -> dict[str, Any]:
        return error_document(self.status, str(self), self.param, self.code)

    def response(self) -> Response:
        return Document(self.document(), self.status, headers=self.headers)


def error_document(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """{"error": ...} as OpenAI's clients read it."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error")
    message = " ".join(message.split())[:LONGEST_MESSAGE]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


FAILED = error_document(500, "the server failed on this request; its log says why")


def invalid(problems: Sequence[Any]) -> Refusal:
    """What pydantic found, as a 422 that names the first field at fault."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return Refusal(422, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    place = [str(part) for part in first["loc"][1:]]
    message = first["msg"].removeprefix("Value error, ")
    if not place:
        return Refusal(422, message if first["type"] == "value_error" else f"the body is not a JSON object: {message}")
    return Refusal(422, f"{'.'.join(place)}: {message}", param=place[0])


def encode(document: Any) -> bytes:
    """JSON as UTF-8. A lone surrogate, which a client may send and UTF-8 cannot hold, stays an escape."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


class Document(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)
