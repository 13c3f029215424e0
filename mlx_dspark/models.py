"""`python -m mlx_dspark.models`: the known targets and their drafts, or how one target is recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from .commands import SETTINGS, run_command
from .hub import resolve
from .registry import TARGETS, Found, KnownDraft, KnownTarget, find_draft, find_target


def entry(target: KnownTarget) -> dict[str, Any]:
    """A target as JSON."""
    return {"target": target.repo, "drafts": [
        {"draft": draft.repo, "kind": draft.kind, "packaging": draft.packaging, "revision": draft.revision,
         "tau": dict(draft.tau), "runs": target.why_not(draft) is None, "reason": target.why_not(draft)}
        for draft in target.drafts
    ]}


def recognise(name: str) -> Found | None:
    """How `load` would see a target, from what is on this machine alone."""
    folder = Path(name).expanduser()
    return find_target(name, folder if folder.is_dir() else None)


def known_pair(fields: Mapping[str, Any]) -> tuple[Found | None, KnownDraft | None]:
    """The recognised target and draft of a command's pair options; None for what the registry does not know.

    Without --draft, the draft is the one that `load` takes.
    """
    if not fields["model"]:
        return None, None
    found = find_target(fields["model"], resolve(fields["model"], fields["revision"]))
    if found is None:
        return None, None
    name = fields["draft"]
    if not name:
        return found, found.best()[0]
    local = Path(name).expanduser()
    return found, find_draft(found.target, name, local if local.is_dir() else None)


@click.command("models", context_settings=SETTINGS)
@click.argument("target", required=False, metavar="[TARGET]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@run_command
def command(target: str | None, as_json: bool) -> None:
    """List the targets whose drafts are known, best draft first; --draft may be left out for these.

    With TARGET, a folder or a repo id: how it is recognised, and its drafts.
    """
    found = None if target is None else recognise(target)
    shown = TARGETS if target is None else () if found is None else (found.target,)
    if as_json:
        document: dict[str, Any] = {"models": [entry(known) for known in shown]}
        if target is not None:
            document |= {"name": target, "recognised_by": found.how if found else None}
        click.echo(json.dumps(document))
        return
    if target is not None:
        click.echo(_answer(target, found))
    if shown:
        click.echo(_table(shown))


def _answer(name: str, found: Found | None) -> str:
    if found is not None:
        return f"{found.describe()}.\n"
    if Path(name).expanduser().is_dir():
        return (f"{name} is unknown by its card and its config: it is decoded plainly unless --draft is given. "
                "mlx_dspark models lists what is known.")
    return (f"{name} is no known repo id: it is decoded plainly unless --draft is given, or its card (base_model) or "
            "config names a known target once it is downloaded. mlx_dspark models lists what is known.")


def _table(targets: Sequence[KnownTarget]) -> str:
    rows = [("target", "draft", "packaging", "revision", "tau", "runs")]
    rows += [(target.repo, *_cells(target, draft)) for target in targets for draft in target.drafts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = [f"no [{mark}]: {reason}" for mark, reason in enumerate(_reasons(), start=1)
               if any(target.why_not(draft) == reason for target in targets for draft in target.drafts)]
    return "\n".join(lines + ([""] if reasons else []) + reasons)


def _cells(target: KnownTarget, draft: KnownDraft) -> tuple[str, ...]:
    reason = target.why_not(draft)
    return (draft.repo, draft.packaging, (draft.revision or "-")[:8], draft.expected() or "-",
            "yes" if reason is None else f"no [{_reasons().index(reason) + 1}]")


def _reasons() -> list[str]:
    found = (target.why_not(draft) for target in TARGETS for draft in target.drafts)
    return list(dict.fromkeys(reason for reason in found if reason is not None))


def main() -> None:
    """Entry point of `mlx_dspark.models`."""
    command(prog_name="mlx_dspark.models")


if __name__ == "__main__":
    main()
