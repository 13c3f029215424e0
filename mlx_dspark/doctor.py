"""`python -m mlx_dspark.doctor`: what this machine is good for, and whether a pair works on it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from .commands import SETTINGS, Notes, open_pair, pair_options, run_command
from .models import known_pair

if TYPE_CHECKING:
    from .backend import Blas
    from .load import Pair
    from .selfcheck import Check, Trial

PACKAGE, DISTRIBUTION = "mlx_dspark", "mlx-dspark"
EMBEDDED_PROMPTS = 4


@click.command("doctor", context_settings=SETTINGS)
@pair_options
@click.option("--self-check", is_flag=True, help="Also check the small pair that comes with the package.")
@click.option("-m", "--max-tokens", type=click.IntRange(2), default=64, help="Tokens per prompt of the check.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@run_command
def command(self_check: bool, max_tokens: int, as_json: bool, **pair_fields: Any) -> None:
    """Report what this machine is good for; with a pair, check that the draft works for its target.

    Exits with 1 when a check failed: a text that differs from plain decoding, a tau near one, or another
    package in this one's place.
    """
    from .backend import machine, preload_blas, require_mlx
    from .store import stored_curves

    require_mlx()
    from .kernels.pick import backend, remembered

    facts = machine()
    clashes = name_clashes()
    document: dict[str, Any] = {"machine": facts, "verdict": verdict(facts, preload_blas()), "clashes": clashes,
                                "cost_curves": stored_curves(),
                                "kernels": {"in_force": backend()[0], "reason": backend()[1],
                                            "choices": [dataclasses.asdict(choice) for choice in remembered()]}}
    healthy = not clashes
    if self_check or pair_fields["model"] or pair_fields["draft"]:
        notes = Notes()
        pair = open_pair(notes, **pair_fields)
        document["pair"], passed = examine(pair, pair_fields, max_tokens)
        healthy = healthy and passed
    document["healthy"] = healthy
    click.echo(json.dumps(document) if as_json else report(document))
    if not healthy:
        sys.exit(1)


def verdict(facts: Mapping[str, Any], blas: Blas) -> str:
    """One or two sentences: what will be slow on this machine, and why. facts: those of `machine`."""
    from .backend import BLAS_HINT

    if facts["device"] != "cpu":
        return f"mlx computes on the GPU ({facts['device']}): nothing here is known to be slow."
    start = "mlx computes on the CPU, so large targets will be slow"
    if blas.path is not None:
        return (f"{start}. With OpenBLAS in place a float32 verify forward of eight rows costs far less than eight "
                "of one row, so speculation pays for small targets.")
    hint = BLAS_HINT if blas.missing else f"no OpenBLAS is in place ({blas.reason})"
    return f"{start}, and each further row of a verify forward costs about as much as the first: {hint}."


def name_clashes(distributions: Iterable[metadata.Distribution] | None = None) -> list[str]:
    """Other installed distributions that bring a package `mlx_dspark`, as "name version (place)".

    A package of the same name, unrelated to this one, is on PyPI. distributions: None is all installed.
    """
    from . import __version__

    found = set()
    for distribution in metadata.distributions() if distributions is None else distributions:
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if (name == DISTRIBUTION and distribution.version == __version__) or not _provides(distribution, name):
            continue
        found.add(f"{name} {distribution.version} ({distribution.locate_file('')})")
    return sorted(found)


def _provides(distribution: metadata.Distribution, name: str) -> bool:
    if name == DISTRIBUTION:
        return True
    listed = (distribution.read_text("top_level.txt") or "").split()
    return PACKAGE in listed or any(file.parts[:1] == (PACKAGE,) for file in distribution.files or ())


def examine(pair: Pair, fields: Mapping[str, Any], max_tokens: int) -> tuple[dict[str, Any], bool]:
    """Check a pair; its part of the JSON document, and whether all checks passed."""
    from .selfcheck import self_check

    found, known = known_pair(fields)
    if found is not None and known is None:
        known = found.best()[0]
    entry: dict[str, Any] = {**pair.facts, "recognised": found.describe() if found else None, "notes": list(pair.notes)}
    if pair.draft is None:
        nothing = "there is no draft, so there is nothing to check: decoding is plain, give --draft"
        return {**entry, "checks": [{"name": "draft", "passed": True, "detail": nothing}]}, True
    trial, done = self_check(pair, _prompts(pair, fields["model"]), max_tokens, known)
    return {**entry, **_numbers(trial), "known_draft": known.repo if known else None,
            "checks": [dataclasses.asdict(check) for check in done]}, _passed(done)


def _passed(checks: Iterable[Check]) -> bool:
    return all(check.passed for check in checks)


def _numbers(trial: Trial) -> dict[str, Any]:
    return {"tau": round(trial.tau, 4), "rounds": trial.rounds,
            "accepted": [round(share, 4) for share in trial.accepted]}


def _prompts(pair: Pair, model: str | None) -> list[list[int]]:
    from .load import ASSETS, encode_prompt
    from .samples import read_prompts
    from .selfcheck import PROMPTS

    if model is None:  # the small pair knows nothing but code and its documentation
        held_out = read_prompts(ASSETS / "heldout.jsonl", pair)
        return held_out[:: len(held_out) // EMBEDDED_PROMPTS][:EMBEDDED_PROMPTS]
    return [encode_prompt(pair.tokenizer, text) for text in PROMPTS]


def report(document: Mapping[str, Any]) -> str:
    """The document for a person."""
    facts = document["machine"]
    width = max(map(len, facts))
    lines = [f"{key:<{width}}  {value}" for key, value in facts.items()] + ["", document["verdict"]]
    lines += [f"failed: {clash} also brings a package {PACKAGE}: uninstall one of the two"
              for clash in document["clashes"]]
    lines += ["", f"{len(document['cost_curves'])} stored cost curves"]
    lines += [_curve_line(curve) for curve in document["cost_curves"]]
    lines += ["", *_kernel_lines(document["kernels"])]
    pair = document.get("pair")
    if pair is not None:
        lines += ["", f"target {pair['target']}" + (f"; {pair['recognised']}" if pair["recognised"] else "")]
        if "accepted" in pair:
            lines.append("accepted by slot: " + " ".join(f"{share:.2f}" for share in pair["accepted"]))
        lines += [f"{'ok' if check['passed'] else 'failed'}: {check['detail']}" for check in pair["checks"]]
    return "\n".join(lines)


def _kernel_lines(kernels: Mapping[str, Any]) -> list[str]:
    """Which kernels are in force, and what was found out about each op so far."""
    from .kernels.pick import Choice

    tried = [f"  {Choice(**choice)}" for choice in kernels["choices"]]
    return [f"kernels: {kernels['in_force']} ({kernels['reason']}); {len(tried)} stored verdicts", *tried]


def _curve_line(curve: Mapping[str, Any]) -> str:
    if curve.get("damaged"):
        return f"damaged: {curve['file']}: remove it"
    kind = "short" if curve["short"] else "full"
    return f"{kind} measurement of {curve['measured']}, {curve['days']} days old: {curve['file']}"


def main() -> None:
    """Entry point of `mlx_dspark.doctor`."""
    command(prog_name="mlx_dspark.doctor")


if __name__ == "__main__":
    main()
