"""Draft models. A draft is a backbone and heads, composed; nothing above this package knows a family."""

from .base import Draft, Resumable, propose_many
from .block import BlockDraft
from .build import build_draft
from .eagle3 import Eagle3Draft
from .spec import DraftSpec
from .tables import TargetTables

__all__ = ["BlockDraft", "Draft", "DraftSpec", "Eagle3Draft", "Resumable", "TargetTables", "build_draft",
           "propose_many"]
