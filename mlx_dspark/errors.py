"""The three errors a user can cause. Each message is one line: the value, the place, the remedy."""


LONGEST = 200  # characters of an error that are passed on


class FormatError(ValueError):
    """A file or folder is not what it should be (missing, truncated, unknown layout, NaN weights)."""


class PairError(ValueError):
    """Target, draft or tokenizer do not belong together; the message names both values."""


class CacheError(ValueError):
    """The target keeps state that cannot be rolled back after a rejected draft."""


def first_line(error: BaseException) -> str:
    """What an error says, without its details; its name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:LONGEST]
