"""Compiles the runner once and every kernel once, into a folder that all test processes share."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime"
SANITIZERS = (None, "thread", "address")

# A kernel's library needs no start-up files and no C++ library: the runner brings what it calls.
_KERNEL = ["-O2", "-std=c++17", "-g1", "-w", "-shared", "-fPIC", "-nostdlib", "-fno-exceptions", "-fno-rtti",
           "-fno-strict-aliasing", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern"]
# Undefined in C++ and different on GPUs; with every sanitizer, for only then speed does not count.
_UNDEFINED = "alignment,bounds,shift,integer-divide-by-zero,float-cast-overflow"
_RUNNER = ["-O2", "-std=c++17", "-g1", "-rdynamic"]
_RUNNER_LIBRARIES = ["-Wl,--no-as-needed", "-lm", "-ldl"]


class Fault(Exception):
    """What is wrong with a kernel, in one line that starts with its kind: race, bounds, divergent barrier, ..."""

    @property
    def kind(self) -> str:
        return str(self).split(":")[0]


def compiler() -> str:
    """A g++: DSPARK_CXX (with flags, if any), or the one on the path."""
    return os.environ.get("DSPARK_CXX", "g++")


def clang() -> str | None:
    """A clang++ for the address spaces: DSPARK_CLANG, or the one on the path."""
    on_path = (shutil.which(f"clang++{version}") for version in ("", "-21", "-20", "-19", "-18"))
    return os.environ.get("DSPARK_CLANG") or next(filter(None, on_path), None)


def nvcc() -> str | None:
    """CUDA's compiler: on the path, or where the toolkit installs itself."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@cache
def available_modes() -> dict[str, str]:
    """Mode -> why it cannot be used here, "" if it can.

    run, thread, address: Emulator without a sanitizer and with each. clang: the address spaces of `lint`.
    nvcc: `nvcc_compile`.
    """
    reason = "" if platform.system() == "Linux" else "the emulator runs on Linux"
    if not reason and not shutil.which(compiler().split()[0]):
        reason = f"no C++ compiler {compiler()}"
    modes = dict.fromkeys(("run", "thread", "address"), reason)
    if not reason and not _has("libasan.so"):
        modes["address"] = f"{compiler()} comes without AddressSanitizer"
    modes["clang"] = "" if clang() else "no clang++ on the path: address spaces are not checked"
    modes["nvcc"] = "" if nvcc() else "no nvcc on the path: nothing is compiled for NVIDIA"
    return modes


def _has(library: str) -> bool:
    command = [*compiler().split(), f"-print-file-name={library}"]  # the bare name comes back where there is none
    return "/" in subprocess.run(command, capture_output=True, text=True).stdout


def folder() -> Path:
    """Where binaries are kept: DSPARK_EMULATOR_CACHE, or a folder among the temporary ones."""
    named = os.environ.get("DSPARK_EMULATOR_CACHE")
    path = Path(named) if named else Path(tempfile.gettempdir()) / f"dspark_emulator_{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def runner(sanitize: str | None) -> Path:
    """The program that loads a kernel and runs it."""
    address = sanitize == "address"
    flags = _RUNNER + (["-fsanitize=address"] if address else [])
    return compiled([*flags, *map(str, sorted(RUNTIME.glob("*.cpp"))), *_RUNNER_LIBRARIES], "")


def library(source: str, dialect: str, sanitize: str | None) -> Path:
    """A kernel as a library for the runner."""
    flags = [*_KERNEL, "-I", str(RUNTIME)]
    if dialect == "metal":
        flags.append("-fsingle-precision-constant")  # 1.0 is a float there
    if sanitize:
        flags.append(f"-fsanitize={sanitize},{_UNDEFINED}")
    return compiled([*flags, "-x", "c++", "-", "-lgcc"], source)


def compiled(flags: list[str], source: str) -> Path:
    """Run the compiler unless it was run with the same before. source: what it reads from standard input."""
    command = [*compiler().split(), *flags]
    key = "\0".join([*command, source, _version(compiler()), _runtime()]).replace(str(RUNTIME), "")  # wherever it lies
    path = folder() / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as own:  # two processes may do the same at once
            done = subprocess.run([*command, "-o", f"{own}/made"], input=source, capture_output=True, text=True)
            if done.returncode:
                raise Fault(f"compile error: {_first_error(done.stderr)}")
            os.replace(f"{own}/made", path)
    return path


def _first_error(messages: str) -> str:
    lines = messages.splitlines()
    return next((line for line in lines if "error" in line or "undefined" in line), lines[-1] if lines else "unknown")


@cache
def _version(command: str) -> str:
    return subprocess.run([*command.split(), "--version"], capture_output=True, text=True).stdout


@cache
def _runtime() -> str:
    return "".join(path.read_text() for path in sorted(RUNTIME.iterdir()))


def line_of(binary: Path, address: str) -> str | None:
    """The line of the kernel's text at an address of its library; None if that cannot be told."""
    tool = shutil.which("addr2line")
    if not tool:
        return None
    shown = subprocess.run([tool, "-e", str(binary), hex(int(address, 16) - 1)], capture_output=True, text=True).stdout
    found = re.search(r":(\d+)", shown)
    return found[1] if found else None
