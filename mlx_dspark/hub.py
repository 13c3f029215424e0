"""Local folders and Hugging Face repos, with one-line errors. Nothing here imports mlx."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from .errors import FormatError

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Never "*.py": code that comes with a checkpoint is not run, so it need not be here.
_PATTERNS = ["*.json", "README.md", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """A local folder, or the local copy of a Hugging Face repo (downloaded if need be).

    Raises FormatError with the place looked at and the remedy.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise FormatError(f"{path} is a GGUF file, which drafts are not read from: use the safetensors checkpoint "
                          "it was made from")
    if path.exists():
        raise FormatError(f"{path} is a file: give the folder that holds config.json and the weights")
    if not _REPO_ID.fullmatch(str(name)):
        raise FormatError(f"{name} does not exist: give a model folder or a Hugging Face repo id (owner/name)")
    return _download(str(name), revision)


def revision_of(folder: Path) -> str | None:
    """The commit of a downloaded repo: its snapshot folder is named after it."""
    commit = re.fullmatch(r"[0-9a-f]{40}", folder.name)
    return folder.name if commit and folder.parent.name == "snapshots" else None


def download_file(dataset: str, name: str) -> Path:
    """The local copy of one file of a dataset repo, downloaded if need be. Raises FormatError with the remedy."""
    from huggingface_hub import hf_hub_download

    return _fetched(dataset, None, "dataset", lambda: hf_hub_download(dataset, name, repo_type="dataset"))


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return _fetched(repo, revision, "repo",
                    lambda: snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS))


def _fetched(repo: str, revision: str | None, what: str, fetch: Callable[[], str]) -> Path:
    """What `fetch` downloads, or one line that says what is wrong with the repo, the network or the disk."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(fetch())
    except GatedRepoError:
        reason = "is gated: accept its terms on its page, then run hf auth login"
    except RepositoryNotFoundError:
        reason = (f"is neither a local folder nor a Hugging Face {what} you can see: check the spelling, "
                  "or run hf auth login for a private one")
    except RevisionNotFoundError:
        reason = f"has no revision {revision!r}: check --revision and --draft-revision"
    except HFValidationError:
        reason = "is no Hugging Face repo id: give owner/name or a local folder"
    except LocalEntryNotFoundError:
        reason = f"is not completely in the cache ({HF_HUB_CACHE}) and the hub cannot be reached: check the network"
    except EntryNotFoundError:
        reason = "holds no such file: look up its name on the hub"
    except Exception as error:  # the disk's, or the HTTP client's own, some of which are OSErrors without a number
        if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
            reason = f"could not be downloaded ({error.strerror}): check disk and {HF_HUB_CACHE}"
        else:
            status = getattr(getattr(error, "response", None), "status_code", None)
            what = type(error).__name__ if status is None else f"the hub answers {status}"
            reason = f"could not be downloaded ({what}): check the network, or give a local folder"
    raise FormatError(f"{repo} {reason}")
