"""The README's commands and examples run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """What stands in fences of a language; indented fences are a model's own."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def run(arguments):
    return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=300)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("python -m mlx_dspark")]


def test_there_are_commands():
    assert COMMANDS and blocks("python")


@pytest.mark.parametrize("line", COMMANDS)
def test_command(line):
    words = shlex.split(line, comments=True)
    done = run([sys.executable, *words[1:]])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_block(code):
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "tau" in done.stdout


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_example(path):
    done = run([sys.executable, str(path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
