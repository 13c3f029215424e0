"""Which public drafts belong to which target. Pure Python: nothing here imports mlx or goes to the network.

A target is recognised by what it is, never by a part of its name: the exact repo id; the exact repo id
that a conversion names in its card or that a cached snapshot lies under; or a config that only one known
target has. Drafts are listed best first: DSpark, DFlash, Eagle3, and within a kind the one whose
acceptance was published. Giants that no single machine of ours runs are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("dspark", "dflash", "eagle3")


@dataclass(frozen=True)
class Fingerprint:
    """What a config says of a text model. types: the spellings of `model_type` in use for it."""

    types: frozenset[str]
    layers: int
    hidden: int
    vocabulary: int

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json, or the text part of one, has all four values."""
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        types = [part.get("model_type") for part in (config, text)]
        numbers = [text.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")]
        return (any(isinstance(kind, str) and kind in self.types for kind in types)
                and numbers == [self.layers, self.hidden, self.vocabulary])


@dataclass(frozen=True)
class KnownDraft:
    """A public draft repo.

    kind: one of KINDS. packaging: who packed it so. revision: a full commit to load, where one is known.
    tau: published accepted lengths (bonus included) by benchmark, for a warning when a run is far below;
    source: where they were published, and under which conditions.
    blocked: why this version cannot run it.
    """

    repo: str
    kind: str
    packaging: str
    revision: str | None = None
    tau: Mapping[str, float] = field(default_factory=dict)
    blocked: str | None = None
    source: str | None = None

    def expected(self) -> str | None:
        """The range of the published tau, or None."""
        least, most = min(self.tau.values(), default=0), max(self.tau.values(), default=0)
        return None if not self.tau else f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


@dataclass(frozen=True)
class KnownTarget:
    """A public target repo and its drafts, best first. blocked: why no draft can run on it here."""

    repo: str
    drafts: tuple[KnownDraft, ...]
    fingerprint: Fingerprint | None = None
    blocked: str | None = None

    def why_not(self, draft: KnownDraft) -> str | None:
        """Why a draft of this target does not run; None when it does."""
        return self.blocked or draft.blocked


@dataclass(frozen=True)
class Found:
    """A recognised target. how: "name", "cache", "card" or "config". exact: it cannot be a fine-tune."""

    target: KnownTarget
    name: str
    how: str
    exact: bool = True

    def describe(self) -> str:
        """One clause for a note: what was recognised, and by what."""
        if self.how == "name":
            return f"{self.name} is a known target"
        by = {"cache": "by its place in the cache", "card": "by the base_model of its card", "config": "by its config"}
        caution = "" if self.exact else "; a fine-tune may accept less"
        return f"{self.name} was recognised as {self.target.repo} ({by[self.how]}{caution})"

    def best(self) -> tuple[KnownDraft | None, str | None]:
        """The first draft that runs here, or None and the reason."""
        for draft in self.target.drafts:
            if self.target.why_not(draft) is None:
                return draft, None
        return None, self.target.why_not(self.target.drafts[0])


BENCHMARKS = ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "lcb", "mt-bench", "alpaca", "arena")
TABLE_1 = "the paper's Table 1 (arXiv 2607.05147): temperature 1, no thinking"


def _tau(*values: float) -> dict[str, float]:
    return dict(zip(BENCHMARKS, values, strict=True))


def _deepspec(
    name: str, tau: Mapping[str, float], pins: Sequence[str | None] = (None, None, None),
    dflash_tau: Mapping[str, float] | None = None,
) -> tuple[KnownDraft, ...]:
    """DeepSeek's three drafts of one target: DSpark, DFlash, Eagle3."""
    return (
        KnownDraft(f"deepseek-ai/dspark_{name}_block7", "dspark", "DeepSpec", pins[0], tau, source=TABLE_1),
        KnownDraft(f"deepseek-ai/dflash_{name}_block7", "dflash", "DeepSpec", pins[1], dflash_tau or {},
                   source="vllm-ascend pull request 11153: greedy, 100 prompts" if dflash_tau else None),
        KnownDraft(f"deepseek-ai/eagle3_{name}_ttt7", "eagle3", "DeepSpec Eagle3", pins[2]),
    )


def _sorted(*drafts: KnownDraft) -> tuple[KnownDraft, ...]:
    return tuple(sorted(drafts, key=lambda draft: KINDS.index(draft.kind)))  # stable: the order given, within a kind


def _qwen3(layers: int, hidden: int) -> Fingerprint:
    return Fingerprint(frozenset({"qwen3"}), layers, hidden, 151936)


_HYBRID = "recurrent layers keep a state that cannot be rolled back after a rejected draft"
_QWEN_HYBRID = f"Qwen3.5 and its successors are hybrids: their {_HYBRID}"
_LFM2 = f"LFM2 models are hybrids: their {_HYBRID}"

TARGETS = (
    KnownTarget("Qwen/Qwen3-4B", _sorted(
        *_deepspec("qwen3_4b", _tau(6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29)),
        KnownDraft("AQ-MedAI/Qwen3-4B-DSpark", "dspark", "speculators",
                   tau=_tau(6.00, 5.67, 5.19, 5.04, 5.26, 4.66, 4.21, 2.61, 4.18), source="its model card"),
        KnownDraft("RedHatAI/Qwen3-4B-speculator.dspark", "dspark", "speculators"),
        KnownDraft("z-lab/Qwen3-4B-DFlash-b16", "dflash", "z-lab DFlash"),
    ), _qwen3(36, 2560)),
    KnownTarget("Qwen/Qwen3-8B", _sorted(
        *_deepspec("qwen3_8b", _tau(6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21), (
            "03326e5043815da1f81b109078b2889737c26017", "9e44dbbb6cb68b0c943abf9c5fc3c17c00897cdf",
            "f6485ba8d21e11942958617dbe7e71b467f38f38"), {"gsm8k": 4.73}),
        KnownDraft("mgoin/Qwen3-8B-speculator.dspark", "dspark", "speculators"),
        KnownDraft("mpashkovskii/dspark-qwen3-8b", "dspark", "speculators"),
        KnownDraft("z-lab/Qwen3-8B-DFlash-b16", "dflash", "z-lab DFlash", "9b41424b7109f9c5413454f481b09a82b85333f4"),
    ), _qwen3(36, 4096)),
    KnownTarget("Qwen/Qwen3-14B",
                _deepspec("qwen3_14b", _tau(6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13)), _qwen3(40, 5120)),
    KnownTarget("google/gemma-4-12B-it", _sorted(
        *_deepspec("gemma4_12b", _tau(6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92)),
        KnownDraft("z-lab/gemma4-12B-it-DFlash", "dflash", "z-lab DFlash"),
    ), Fingerprint(frozenset({"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"}), 48, 3840, 262144)),
    KnownTarget("google/gemma-4-26B-A4B-it", (
        KnownDraft("makora-ai/gemma4-26b-a4b-dspark", "dspark", "speculators"),
    )),
    KnownTarget("google/gemma-4-31B-it", (
        KnownDraft("RedHatAI/gemma-4-31B-it-speculator.dspark", "dspark", "speculators"),
        KnownDraft("z-lab/gemma-4-31B-it-DFlash", "dflash", "z-lab DFlash"),
    )),
    KnownTarget("google/gemma-4-E2B-it", (
        KnownDraft("rasyosef/gemma-4-E2B-it-dspark", "dspark", "speculators"),
    )),
    KnownTarget("microsoft/Phi-4-mini-instruct", (
        KnownDraft("rasyosef/Phi-4-mini-instruct-DSpark", "dspark", "speculators"),
    )),
    KnownTarget("openai/gpt-oss-120b", (
        KnownDraft("z-lab/gpt-oss-120b-DFlash", "dflash", "z-lab DFlash"),
    )),
    KnownTarget("openbmb/MiniCPM5-2B", (
        KnownDraft("openbmb/MiniCPM5-2B-DSpark", "dspark", "DeepSpec"),
    )),
    KnownTarget("Nanbeige/Nanbeige4.2-3B", (
        KnownDraft("Nanbeige/Nanbeige4.2-3B-DSpark", "dspark", "SpecForge"),
    ), blocked="it runs its layers twice and its draft taps the second pass, which is not implemented"),
    KnownTarget("Qwen/Qwen3.6-27B", (
        KnownDraft("z-lab/Qwen3.6-27B-DFlash", "dflash", "z-lab DFlash"),
    ), blocked=_QWEN_HYBRID),
    KnownTarget("Qwen/Qwen3.6-35B-A3B", (
        KnownDraft("RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", "dspark", "speculators"),
        KnownDraft("z-lab/Qwen3.6-35B-A3B-DFlash", "dflash", "z-lab DFlash"),
    ), blocked=_QWEN_HYBRID),
    KnownTarget("Qwen/Qwen3.8-27B", (
        KnownDraft("RadixArk/Qwen3.8-27B-DSpark", "dspark", "SpecForge"),
        KnownDraft("RedHatAI/Qwen3.8-27B-speculator.dspark", "dspark", "speculators"),
        KnownDraft("incoai/Qwen3.8-27B-DFlash2", "dflash", "z-lab DFlash2"),
    ), blocked=_QWEN_HYBRID),
    *(KnownTarget(f"LiquidAI/LFM2.5-{size}", (
        KnownDraft(f"LiquidAI/LFM2.5-{size}-DSpark", "dspark", "LiquidAI"),
    ), blocked=_LFM2) for size in ("1.2B-Instruct", "2.6B", "8B-A1B", "24B-A2B", "VL-3B")),
)
_BY_REPO = {target.repo.lower(): target for target in TARGETS}


def find_target(name: str, folder: Path | None = None) -> Found | None:
    """The known target that a repo id or a folder is; None for all others.

    name: what the user gave. folder: where its files lie, to look at its card and config; None looks at
    the name alone. Never raises: a damaged file only says nothing.
    """
    local = folder is not None and folder == Path(name).expanduser()  # a folder's name proves nothing
    if not local and name.lower() in _BY_REPO:
        return Found(_BY_REPO[name.lower()], name, "name")
    if folder is None:
        return None
    cached = _BY_REPO.get((cached_repo(folder) or "").lower())
    if cached is not None:
        return Found(cached, name, "cache")
    config = _config(folder)
    card = _front_matter(folder)
    bases = {base.lower() for base in card.get("base_model", ())} & _BY_REPO.keys()
    if len(bases) == 1:
        quantised = "quantization" in config or card.get("base_model_relation") == ["quantized"]
        return Found(_BY_REPO[bases.pop()], name, "card", exact=quantised)
    alike = [target for target in TARGETS if target.fingerprint is not None and target.fingerprint.matches(config)]
    return Found(alike[0], name, "config", exact=False) if len(alike) == 1 else None


def find_draft(target: KnownTarget, name: str, folder: Path | None = None) -> KnownDraft | None:
    """The registered draft of a target that a repo id, or a folder converted from one, is."""
    names = {name.lower()}
    if folder is not None:
        section = _config(folder).get("mlx_dspark")
        source = section.get("source") if isinstance(section, Mapping) else None
        names |= {str(source.get("name")).lower()} if isinstance(source, Mapping) else set()
        names |= {(cached_repo(folder) or "").lower()}
    return next((draft for draft in target.drafts if draft.repo.lower() in names), None)


def cached_repo(folder: Path) -> str | None:
    """The repo id of a snapshot in the Hugging Face cache, from the folders it lies in."""
    if folder.parent.name != "snapshots":
        return None
    kind, *parts = folder.parent.parent.name.split("--")
    return "/".join(parts) if kind == "models" and len(parts) == 2 else None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _front_matter(folder: Path) -> dict[str, list[str]]:
    """Keys of a model card's header with their values: a scalar, `[a, b]`, or a list of `- a` lines."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    fields: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines[1:]:
        if line.strip() == "---":
            return fields
        if item := re.fullmatch(r"\s*-\s+(.+)", line):
            current.append(_unquoted(item[1]))
        elif pair := re.fullmatch(r"(\w+):(.*)", line):
            value = pair[2].strip()
            current = [_unquoted(part) for part in value.strip("[]").split(",") if part.strip()]
            fields[pair[1]] = current
    return {}  # never closed: no header


def _unquoted(text: str) -> str:
    return re.sub(r"\s+#.*$", "", text.strip()).strip().strip("'\"")
