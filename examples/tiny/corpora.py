"""The three corpora of the small pair, split by name into training and held-out documents.

    PYTHONPATH=examples python -m tiny.corpora --out build/tiny

code: the standard library of this interpreter, without tests and tables (PSF licence).
docs: the Python documentation as reStructuredText (PSF licence; code in it also 0BSD), from Debian's package
      python3.11-doc or from a folder.
chat: stories, answers, sums and short programs that templates in this folder write (this project's licence).
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from . import talk

KINDS = ("code", "docs", "chat")
SPLITS = ("train", "heldout")
HELD_OUT_ONE_IN = 20
DOCS_PACKAGE = "python3.11-doc"
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "lib2to3"}
SKIPPED_NAMES = ("encodings/cp", "encodings/iso", "encodings/mac", "encodings/koi", "_sysconfigdata", "encodings/big5")


@dataclass(frozen=True)
class Document:
    """A text of one kind. The name decides on which side of the split it falls."""

    kind: str
    name: str
    text: str

    @property
    def split(self) -> str:
        """train or heldout: every 20th, by a hash of the name."""
        digest = hashlib.sha256(f"{self.kind}/{self.name}".encode()).digest()
        return "heldout" if int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0 else "train"


def library_documents(folder: Path | None = None) -> Iterator[Document]:
    """The modules of the standard library; without `folder`, of the running interpreter."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and not name.startswith(SKIPPED_NAMES):
            yield from _document("code", name, path)


def manual_documents(folder: Path) -> Iterator[Document]:
    """The .rst or .rst.txt files below `folder`."""
    paths = sorted(path for path in folder.rglob("*.rst*") if path.name.endswith((".rst", ".rst.txt")))
    if not paths:
        raise ValueError(f"{folder} holds no .rst files: give the Doc folder of CPython's sources, or unpack "
                         f"Debian's {DOCS_PACKAGE} there")
    for path in paths:
        yield from _document("docs", path.relative_to(folder).as_posix().removesuffix(".txt"), path)


def talk_documents(count: int, seed: int) -> Iterator[Document]:
    """`count` different conversations and stories; the opening is the name, so no held-out one is ever trained on."""
    rng = random.Random(seed)
    seen: set[str] = set()
    for _ in range(20 * count):  # openings repeat more and more often
        piece = talk.piece(rng)
        if piece.text not in seen:
            seen.add(piece.text)
            yield Document("chat", piece.opening, piece.text)
        if len(seen) == count:
            return
    raise ValueError(f"the templates gave only {len(seen)} different texts: ask for fewer than {count}")


def fetch_manual(folder: Path) -> Path:
    """Download and unpack the documentation with apt, once; gives the folder of its sources."""
    sources = folder / "usr/share/doc/python3.11/html/_sources"
    if sources.is_dir():
        return sources
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise ValueError("the Python documentation is fetched with apt-get, which this system lacks: give --docs "
                         "a folder with its .rst files (Doc in CPython's sources, branch 3.11)")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", DOCS_PACKAGE], cwd=folder, check=True, capture_output=True, text=True)
        package = next(folder.glob(f"{DOCS_PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True, capture_output=True, text=True)
    except (subprocess.CalledProcessError, StopIteration) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        raise ValueError(f"{DOCS_PACKAGE} cannot be fetched ({' '.join(reason)}): run apt-get update, or give --docs "
                         "a folder with the documentation's .rst files") from None
    return sources


def write(documents: Iterable[Document], folder: Path) -> dict[str, int]:
    """One JSON-lines file a kind and split, {"name", "text"} a line; gives the characters of each."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {f"{kind}.{split}": 0 for kind in KINDS for split in SPLITS}
    files = {key: (folder / f"{key}.jsonl").open("w", encoding="utf-8") for key in sizes}
    try:
        for document in documents:
            key = f"{document.kind}.{document.split}"
            line = json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False)
            files[key].write(line + "\n")
            sizes[key] += len(document.text)
    finally:
        for file in files.values():
            file.close()
    return sizes


def read(folder: Path, kind: str, split: str) -> Iterator[str]:
    """The texts of one kind and split, in the order they were written."""
    path = folder / f"{kind}.{split}.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist: run python -m tiny.corpora first")
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def _document(kind: str, name: str, path: Path) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # a few modules show other encodings on purpose
    if text.strip():
        yield Document(kind, name, text)


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
@click.option("--docs", type=click.Path(path_type=Path, exists=True), help="Folder of .rst files; without it, apt-get.")
@click.option("--talks", default=40_000, show_default=True, help="How many template-written texts.")
@click.option("--seed", default=1, show_default=True)
def main(out: Path, docs: Path | None, talks: int, seed: int) -> None:
    try:
        manual = docs or fetch_manual(out / "download")
        sizes = write((*library_documents(), *manual_documents(manual), *talk_documents(talks, seed)), out / "corpus")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    for key, size in sizes.items():
        click.echo(f"{key}: {size / 1e6:.2f} million characters")


if __name__ == "__main__":
    main()
