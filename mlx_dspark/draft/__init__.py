"""Draft models. A draft is a backbone and heads, composed; nothing above this package knows a family."""

from .base import Draft
from .block import BlockDraft
from .files import read_draft
from .spec import DraftSpec

__all__ = ["BlockDraft", "Draft", "DraftSpec", "read_draft"]
