"""What an evaluation found: the JSON document of `--json` and the tables on stdout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .acceptance import acceptance
from .samples import PAPER, Settings
from .schedule.calibration import summarise
from .tables import cell, table

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .evaluate import Evaluation, Measured
    from .registry import KnownDraft

REGISTRY_NAMES = {"livecodebench": "lcb", "arena-hard-v2": "arena"}  # where they differ from the suite's


def to_document(found: Evaluation, known: KnownDraft | None) -> dict[str, Any]:
    """The numbers as JSON. known: the registry's draft, for what was published of it."""
    return {
        "settings": asdict(found.settings),
        "gamma": found.gamma,
        "interrupted": found.interrupted,
        "data": {about.name: _entry(about, found, known) for about in found.data},
        "confidence": None if found.calibration is None else _confidence(found.calibration),
    }


def to_text(document: Mapping[str, Any]) -> str:
    """The document as tables."""
    parts = [_heading(document), _main_table(document), *_positions(document), *_sweeps(document)]
    if document["confidence"] is not None:
        parts.append(_confidence_table(document["confidence"]))
    return "\n\n".join([*parts, *_remarks(document)])


def describe(settings: Settings, gamma: int) -> str:
    """The protocol in one line."""
    paper = settings.protocol == PAPER
    policy = f"fixed blocks of {gamma}, no thinking" if paper else "the default policy, thinking as the template has it"
    return (f"{settings.protocol} protocol: {policy}; temperature {settings.temperature:g}, at most "
            f"{settings.max_tokens} tokens, seed {settings.seed}")


def _entry(about: Measured, found: Evaluation, known: KnownDraft | None) -> dict[str, Any]:
    tau = None if known is None else known.tau.get(REGISTRY_NAMES.get(about.name, about.name))
    speed = about.tokens_per_second()
    return {
        "samples": len(about.runs.get(0.0, {})),
        "left_out": about.left_out,
        "shortened": about.shortened,
        **acceptance(about.rounds(), found.gamma).to_dict(),
        "tokens_per_second": None if speed is None else round(speed, 2),
        "published": None if known is None or tau is None else
        {"acceptance_length": tau, "draft": known.repo, "source": known.source},
        "thresholds": [_threshold(about, threshold, found.gamma) for threshold in (0.0, *found.thresholds)
                       if about.runs.get(threshold)] if found.thresholds else [],
    }


def _threshold(about: Measured, threshold: float, gamma: int) -> dict[str, Any]:
    counted = acceptance(about.rounds(threshold), gamma).to_dict()
    names = ("rounds", "acceptance_length", "draft_tokens_per_proposal", "verify_rate")
    return {"threshold": threshold, "samples": len(about.runs[threshold]),
            "replayed": about.replayed.get(threshold, 0), **{name: counted[name] for name in names}}


def _confidence(calibration: Calibration) -> dict[str, Any]:
    """Calibration of the survivals: raw, and with temperatures fitted on the other half of the prompts."""
    held_out = calibration.held_out
    return {
        "raw": {**summarise(calibration.before), "slots": [slot.to_dict() for slot in calibration.before]},
        "held_out": None if held_out is None else
        {**summarise(held_out), "slots": [slot.to_dict() for slot in held_out]},
        "temperatures": list(calibration.temperatures),
    }


def _heading(document: Mapping[str, Any]) -> str:
    heading = describe(Settings(**document["settings"]), document["gamma"])
    return f"{heading}\nINTERRUPTED: samples are missing" if document["interrupted"] else heading


def _main_table(document: Mapping[str, Any]) -> str:
    published = any(entry["published"] for entry in document["data"].values())
    product = document["settings"]["protocol"] != PAPER
    lines = [["data", "samples", "rounds", "tau", *["published", "difference"] * published, "drafts", "verify rate",
              *["tokens/s"] * product]]
    for name, entry in document["data"].items():
        known = entry["published"] and entry["published"]["acceptance_length"]
        difference = f"{entry['acceptance_length'] - known:+.2f}" if known else "-"
        lines.append([name, str(entry["samples"]), str(entry["rounds"]), cell(entry["acceptance_length"]),
                      *[cell(known), difference] * published, cell(entry["draft_tokens_per_proposal"]),
                      cell(entry["verify_rate"], 3), *[cell(entry["tokens_per_second"], 1)] * product])
    return table(lines)


def _positions(document: Mapping[str, Any]) -> Iterator[str]:
    titles = {"accept_rates_by_position": "kept up to slot",
              "conditional_acceptance_by_position": "kept if all before were"}
    for key, title in titles.items():
        lines = [[title, *(str(slot + 1) for slot in range(document["gamma"]))]]
        lines += [[name, *(cell(share) for share in entry[key])] for name, entry in document["data"].items()]
        yield table(lines)


def _sweeps(document: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in document["data"].items():
        if entry["thresholds"]:
            lines = [[f"{name}, threshold", "samples", "tau", "drafts", "verify rate"]]
            lines += [[f"{at['threshold']:g}", str(at["samples"]), cell(at["acceptance_length"]),
                       cell(at["draft_tokens_per_proposal"]), cell(at["verify_rate"], 3)]
                      for at in entry["thresholds"]]
            yield table(lines)


def _confidence_table(confidence: Mapping[str, Any]) -> str:
    raw, held = confidence["raw"], confidence["held_out"]
    others = held["slots"] if held else [{"ece": None}] * len(raw["slots"])
    lines = [["survival up to slot", "count", "ECE", "held out", "AUC", "Brier", "temperature"]]
    for slot, other, temperature in zip(raw["slots"], others, confidence["temperatures"], strict=True):
        lines.append([str(slot["slot"] + 1), str(slot["count"]), cell(slot["ece"], 3), cell(other["ece"], 3),
                      cell(slot["auc"], 3), cell(slot["brier"], 3), f"{temperature:.3f}"])
    lines.append(["all", "", cell(raw["ece"], 3), cell(held["ece"] if held else None, 3), cell(raw["auc"], 3),
                  cell(raw["brier"], 3), ""])
    return table(lines)


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    sources = {entry["published"]["source"] for entry in document["data"].values() if entry["published"]}
    if sources:
        yield f"published: {', '.join(sorted(map(str, sources)))}."
    for name, entry in document["data"].items():
        if entry["left_out"]:
            yield f"{name}: {entry['left_out']} prompts do not fit the context and were left out."
        if entry["shortened"]:
            yield f"{name}: {entry['shortened']} samples got fewer tokens than asked, because the context ends."
        replayed = sum(at["replayed"] for at in entry["thresholds"])
        if replayed:
            yield (f"{name}: {replayed} greedy samples under a threshold were "
                   "read off the main run, which says exactly what they do.")
