"""Planted mistakes: the check that is named for each of them fails, and passes on the kernel as it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import kernel_checks
import pytest
from emulator import Emulator, Fault, available_modes
from kernel_checks import MODES
from mutants import MUTANTS, Mutant, table

from mlx_dspark.kernels import accept, argmax, dialect, sample, topk, walk
from mlx_dspark.kernels.launch import Execute, Kernel

pytestmark = pytest.mark.skipif(bool(available_modes()["run"]), reason=available_modes()["run"])
MODULES = {module.__name__.split(".")[-1]: module for module in (accept, argmax, sample, topk, walk, kernel_checks)}
CHECKS = {**kernel_checks.core(), **kernel_checks.wide()}
PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"


def changed(text: str, mutant: Mutant) -> str:
    pieces = text.split(mutant.old)
    there = len(pieces) - 1
    assert there == 1 if mutant.nth is None else there > mutant.nth, f"{mutant.old!r} is there {there} times"
    at = (mutant.nth or 0) + 1
    return mutant.old.join(pieces[:at]) + mutant.new + mutant.old.join(pieces[at:])


def planted(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> Execute:
    """Plant the mistake; what runs the kernels then."""
    module, name = mutant.where.split(".")
    mode = MODES[mutant.mode]
    if module == "dialect":
        return Emulator(mode.dialect, mode.order, mode.sanitize, words=changed(getattr(dialect, name), mutant))
    kernel = getattr(MODULES[module], name)
    part = "source" if mutant.old in kernel.source else "header"
    monkeypatch.setattr(MODULES[module], name, replace(kernel, **{part: changed(getattr(kernel, part), mutant)}))
    return mode


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.where} {mutant.name}")
def test_a_planted_mistake_is_caught(monkeypatch, mutant):
    executor = planted(monkeypatch, mutant)
    with pytest.raises((AssertionError, Fault)) as caught:
        CHECKS[mutant.check](executor)
    assert mutant.seen == (caught.value.kind if isinstance(caught.value, Fault) else "wrong"), caught.value


@pytest.mark.parametrize(("check", "mode"), sorted({(mutant.check, mutant.mode) for mutant in MUTANTS}))
def test_the_right_kernels_pass(check, mode):
    CHECKS[check](MODES[mode])


def test_every_kernel_has_mutants():
    kernels = {f"{name}.{key}" for name, module in MODULES.items() if name != "kernel_checks"
               for key, value in vars(module).items() if isinstance(value, Kernel) and value.name.startswith(name)}
    assert {mutant.where for mutant in MUTANTS} >= kernels and len(MUTANTS) >= 30
    assert len({(mutant.where, mutant.name) for mutant in MUTANTS}) == len(MUTANTS)


def test_the_page_shows_this_list():
    assert table() in PAGE.read_text(encoding="utf-8"), f"put the output of {sys.executable} tests/mutants.py there"
