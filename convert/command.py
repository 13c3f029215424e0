"""`python -m mlx_dspark.convert`: any public draft packaging into one normalised folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_dspark.commands import SETTINGS, Notes, run_command

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


@click.command("convert", context_settings=SETTINGS)
@click.option("--draft", required=True, metavar="PATH_OR_REPO", help="The draft: folder or Hugging Face repo.")
@click.option("--target", metavar="PATH_OR_REPO", help="Leave out tables that are byte-equal to this target's.")
@click.option("--mlx-path", type=click.Path(path_type=Path), help="The new folder.")
@click.option("-q", "--quantize", is_flag=True, help="Quantise the weights; 8 bits lose nothing that was measured.")
@click.option("--q-bits", type=click.Choice(["8", "4"]), default="8")
@click.option("--q-group-size", type=click.Choice(["32", "64", "128"]), default="64")
@click.option("--revision", metavar="REV", help="Revision of the draft's repo.")
@click.option("--dry-run", is_flag=True, help="Only print the normalised facts.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON document.")
@run_command
def command(draft: str, target: str | None, mlx_path: Path | None, quantize: bool, q_bits: str, q_group_size: str,
            revision: str | None, dry_run: bool, as_json: bool) -> None:
    """Convert a DSpark, DFlash or Eagle3 draft checkpoint for mlx_dspark.

    Weights keep their type unless -q is given. `generate --draft` also reads unconverted drafts.
    """
    if not dry_run and mlx_path is None:
        raise click.UsageError("where to? give --mlx-path FOLDER, or --dry-run to only look")
    from mlx_dspark.hub import resolve, revision_of

    from .checkpoint import open_checkpoint
    from .write import Quantisation, Source, equal_tables, write_draft

    folder = resolve(draft, revision)
    checkpoint = open_checkpoint(folder)
    drop = equal_tables(checkpoint, resolve(target)) if target else {}
    if not dry_run:
        quantisation = Quantisation(int(q_bits), int(q_group_size)) if quantize else None
        source = Source(draft, revision_of(folder) or revision)
        write_draft(checkpoint, mlx_path, source, quantisation, drop, Notes.progress)
        Notes.progress("")
    facts = facts_of(checkpoint, drop)
    click.echo(json.dumps(facts) if as_json else _table(facts))


def facts_of(checkpoint: Checkpoint, drop: dict[str, str]) -> dict[str, Any]:
    """What a person wants to know of a checkpoint before using it."""
    tables = {}
    for table in ("embed_tokens", "lm_head"):
        name = f"tables.{table}.weight"
        tables[table] = f"left out: {drop[name]}" if name in drop else "own" if name in checkpoint.names else "target's"
    return {
        "packaging": checkpoint.packaging,
        "gamma": checkpoint.spec.gamma,
        **checkpoint.spec.to_dict(),
        **tables,
        "dtypes": sorted({checkpoint.info(name).dtype for name in checkpoint.names}),
        "bytes": sum(checkpoint.info(name).nbytes for name in checkpoint.names if name not in drop),
    }


def _table(facts: dict[str, Any]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{key:<{width}}  {value if isinstance(value, str) else json.dumps(value)}"
                     for key, value in facts.items())


def main() -> None:
    """Entry point of `mlx_dspark.convert`."""
    command(prog_name="mlx_dspark.convert")
