"""The state of a run on disk: one file, replaced as a whole, from which the run goes on exactly where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import FormatError
from ..store import replace_file

STATE = "training_state.safetensors"
SETTINGS = "train.toml"


@dataclass(frozen=True)
class State:
    """A run after `step` optimiser steps: trees of float32 masters and of AdamW's moments, and what it took."""

    step: int
    tokens: int
    seconds: float
    masters: dict[str, Any]
    moments: dict[str, Any]


class Checkpoints:
    """The run in `folder`. identity: what a run must share with the one that it continues."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder, self.identity = folder, identity
        self.saved: int | None = None  # the step that a crash would go back to

    def open(self, fresh: State, resume: bool, settings: str) -> State:
        """Begin with `fresh` in a folder without a run, which gets a file of `settings`; or take up the run in it.

        Raises FormatError for another run than this, for none to resume, or for one that nobody asked to resume.
        """
        found = _read(self.folder / STATE)
        if found is None:
            if resume:
                raise FormatError(f"{self.folder} holds no {STATE} to resume: leave --resume out")
            if self.folder.exists() and any(path.suffix == ".safetensors" for path in self.folder.iterdir()):
                raise FormatError(f"{self.folder} holds a model: give another --out")
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / SETTINGS, lambda file: file.write(settings.encode()))
            return fresh
        arrays, facts = found
        if not resume:
            raise FormatError(f"{self.folder} holds a run of {facts['step']} steps: --resume continues it, or give "
                              "another --out")
        self._compare(facts["identity"])
        self.saved = int(facts["step"])
        masters, moments = (_filled(tree, name, arrays) for name, tree in (("draft", fresh.masters),
                                                                          ("adam", fresh.moments)))
        return State(self.saved, int(facts["tokens"]), float(facts["seconds"]), masters, moments)

    def save(self, state: State) -> None:
        """Replace the state on disk. Raises OSError with the old one in place."""
        arrays = {f"draft.{name}": array for name, array in tree_flatten(state.masters)}
        arrays |= {f"adam.{name}": array for name, array in tree_flatten(state.moments)}
        facts = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds, "identity": self.identity}
        about = {"facts": json.dumps(facts)}
        replace_file(self.folder / STATE, lambda file: mx.save_safetensors(file, arrays, about))
        self.saved = state.step

    def remedy(self) -> str:
        """What is left after an error that a second try may not meet, and how to go on."""
        if self.saved is None:
            return "there is no checkpoint yet: start again"
        return f"step {self.saved} is saved: continue with --resume"

    def _compare(self, before: Mapping[str, Any]) -> None:
        for name, value in self.identity.items():
            if before.get(name) != value:
                raise FormatError(f"{self.folder} was trained with {name} {before.get(name)}, now it is {value}: "
                                  "resume with the same settings and data, or give another --out")


def _filled(tree: dict[str, Any], prefix: str, arrays: Mapping[str, mx.array]) -> Any:
    """`tree` with the arrays of a file, in its own order: a norm is a sum over it, whose rounding depends on that."""
    return tree_unflatten([(name, arrays[f"{prefix}.{name}"]) for name, _ in tree_flatten(tree)])


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
    if not path.exists():
        return None
    try:
        arrays, about = mx.load(str(path), return_metadata=True)
        mx.eval(arrays)
        return arrays, json.loads(about["facts"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise FormatError(f"{path} is damaged ({str(error)[:80]}): train again in another --out") from None
