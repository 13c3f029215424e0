"""Give the packed draft its temperatures and put the pair into the package.

    PYTHONPATH=examples python -m tiny.install --out build/tiny --assets mlx_dspark/assets/tiny
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

LARGEST = 9_000_000  # bytes: the pair travels with every copy of the package
FILES = ("target/config.json", "target/model.safetensors", "target/tokenizer.json", "target/tokenizer_config.json",
         "draft/config.json", "draft/model.safetensors", "heldout.jsonl")


def give_temperatures(draft: Path, temperatures: Path) -> None:
    """Write the list that mlx_dspark.calibrate printed into the draft's config."""
    values = json.loads(temperatures.read_text(encoding="utf-8"))
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        raise ValueError(f"{temperatures} is no list of numbers: make it with mlx_dspark.calibrate --list-only")
    path = draft / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["mlx_dspark"]["spec"]["temperatures"] = [round(value, 4) for value in values]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def install(packed: Path, assets: Path) -> int:
    """Copy the pair's files; gives their bytes. Raises ValueError, before anything is copied, for what is unfit."""
    missing = [name for name in FILES if not (packed / name).exists()]
    if missing:
        raise ValueError(f"{packed} lacks {', '.join(missing)}: run make tiny from its beginning")
    size = sum((packed / name).stat().st_size for name in FILES)
    if size > LARGEST:
        raise ValueError(f"the pair has {size / 1e6:.1f} MB, the package takes {LARGEST / 1e6:.0f}: quantise it, or "
                         "make the draft smaller")
    for name in FILES:
        (assets / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(packed / name, assets / name)
    return size


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
@click.option("--assets", type=click.Path(path_type=Path), default=Path("mlx_dspark/assets/tiny"), show_default=True)
def main(out: Path, assets: Path) -> None:
    try:
        if (out / "temperatures.json").exists():
            give_temperatures(out / "packed" / "draft", out / "temperatures.json")
        click.echo(f"{assets}: {install(out / 'packed', assets) / 1e6:.2f} MB")
    except (ValueError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
