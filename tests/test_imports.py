"""Imports go one way (DESIGN.md, section 5), read from the sources."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx_dspark.convert
import pytest

import mlx_dspark

PACKAGE = Path(mlx_dspark.__file__).parent
CONVERT = Path(mlx_dspark.convert.__file__).parent  # beside the package, installed as mlx_dspark.convert
ORDER = [  # a module may import modules of earlier lines
    {"errors", "structs", "backend", "text"},
    {"commands", "registry", "hub"},  # click alone, or nothing
    {"models", "stats", "schedule"},
    {"plot", "record", "store", "terminal", "prompts", "progress", "tables"},
    {"acceptance"},
    {"kernels"},
    {"sampling", "cache"},
    {"draft", "target"},
    {"convert", "pairing", "flight", "candidates"},
    {"load"},
    {"decode"},
    {"profile"},
    {"scheduling"},
    {"generate"},
    {"serve"},
    {"samples", "regenerate"},
    {"bench_kernels", "bench_requests"},
    {"bench"},
    {"loads"},
    {"simulate"},
    {"calibrate"},
    {"selfcheck"},
    {"report"},
    {"evaluate", "data"},
    {"doctor"},
    {"train"},
    {"server"},
    {"cli"},
    {"__main__"},
]
DRAFT_ORDER = ["spec", "context tables heads qwen3", "gemma4 dflash2", "backbone base", "block", "eagle3 classic",
               "build", "__init__"]  # fmt: skip
# bench times plain mlx_lm; two backbones use its rotary embeddings; serve.packed wraps its attention
USE_MLX_LM = {"target", "cache", "load", "bench", "draft.qwen3", "draft.gemma4", "serve.packed"}
PURE = {"store", "errors", "structs", "stats", "text", "schedule", "schedule.policies", "commands", "cli", "draft.spec",
        "registry", "models", "hub", "prompts", "acceptance", "tables", "progress", "train", "train.config",
        "train.command", "server", "server.command"}


def run_python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts if path.is_relative_to(PACKAGE) else \
        ("convert", *path.relative_to(CONVERT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): path for path in [*sorted(PACKAGE.rglob("*.py")), *sorted(CONVERT.rglob("*.py"))]}
MODULES = sorted(SOURCES.keys() - {"__init__"})


def top_level(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported, those for type checkers left out."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from top_level([*node.body, *node.orelse])
        elif isinstance(node, (ast.Try, ast.With, ast.ClassDef)):
            yield from top_level([child for child in ast.walk(node) if isinstance(child, (ast.Import, ast.ImportFrom))])


def imported(module: str, everywhere: bool = False) -> set[str]:
    """Absolute names of what a module imports: at its top, or anywhere at run time."""
    path = SOURCES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))] if everywhere \
        else top_level(tree.body)
    package = ["mlx_dspark", *module.split(".")[: None if path.name == "__init__.py" else -1]]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif not node.level:
            names.add(node.module)
        else:
            base = ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))
            names |= {base} if node.module else {f"{base}.{alias.name}" for alias in node.names}
    return names


def ours(module: str) -> set[str]:
    """Top-level imports of the package's own modules, without the package's name."""
    return {name.removeprefix("mlx_dspark.") for name in imported(module) if name.startswith("mlx_dspark.")}


def rank(module: str, order=ORDER) -> int:
    first = module.split(".")[0]
    found = [i for i, names in enumerate(order) if first in names]
    assert found, f"{first} has no place in the import order: add it to ORDER in {Path(__file__).name}"
    return found[0]


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_a_later_one(module):
    for other in ours(module):
        same_package = module.split(".")[0] == other.split(".")[0]
        assert same_package or rank(other) < rank(module), f"{module} imports {other}, which comes later"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("draft")])
def test_the_draft_package_has_an_order_of_its_own(module):
    order = [set(line.split()) for line in DRAFT_ORDER]
    own = module.removeprefix("draft").removeprefix(".") or "__init__"
    for other in ours(module):
        if other.startswith("draft."):
            assert rank(other.removeprefix("draft."), order) < rank(own, order), f"{module} imports {other}"


def test_only_the_modules_around_the_target_import_mlx_lm():
    users = {module for module in SOURCES if any(name.split(".")[0] == "mlx_lm" for name in imported(module, True))}
    assert users <= USE_MLX_LM, f"{sorted(users - USE_MLX_LM)} import mlx_lm"


@pytest.mark.parametrize("module", sorted(PURE | {"generate", "backend", "__init__", "__main__"}))
def test_what_must_start_fast_imports_no_mlx_at_the_top(module):
    assert not {name for name in imported(module) if name.split(".")[0] in ("mlx", "mlx_lm", "transformers", "numpy")}


def test_pure_modules_run_without_mlx():
    names = ", ".join(f"mlx_dspark.{module}" for module in sorted(PURE - {"draft.spec"} | {"generate", "backend"}))
    heavy = "{'mlx', 'mlx_lm', 'transformers', 'numpy'}"
    done = run_python("-c", f"import sys, {names}\nprint(*{{name.split('.')[0] for name in sys.modules}} & {heavy})")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


FUNCTIONS = ("load", "generate", "decode")
FRESH_IMPORTS = """
import sys
for statement in sys.argv[1:]:
    for module in [module for module in sys.modules if module.split(".")[0] == "mlx_dspark"]:
        del sys.modules[module]
    exec(statement, {})
    package = sys.modules["mlx_dspark"]
    for name in ("load", "generate", "decode"):
        value = getattr(package, name)
        right = callable(value) and value is getattr(sys.modules[f"mlx_dspark.{name}"], name)
        print(statement, name, "function" if right else value, sep="|")
"""


def test_public_functions_are_not_replaced_by_their_modules():
    """`import mlx_dspark.load` would make `mlx_dspark.load` the module."""
    statements = [f"import mlx_dspark.{name}" for name in FUNCTIONS]
    statements += [f"from mlx_dspark.{name} import {name}" for name in FUNCTIONS]
    statements += ["import mlx_dspark; mlx_dspark.load; import mlx_dspark.load, mlx_dspark.decode"]
    done = run_python("-c", FRESH_IMPORTS, *statements)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{text}|{name}|function" for text in statements for name in FUNCTIONS]


def test_every_public_name_exists_and_is_listed():
    for name in mlx_dspark.__all__:
        assert getattr(mlx_dspark, name).__name__ == name
    assert sorted(mlx_dspark.__all__) == sorted(mlx_dspark._PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mlx_dspark' has no attribute 'nothing'"):
        mlx_dspark.nothing  # noqa: B018


def test_every_command_is_in_the_group_and_has_a_script():
    from mlx_dspark.cli import _COMMANDS

    found = r'^@click.(?:command|group)\("(\w+)"'
    declared = {name for path in SOURCES.values() for name in re.findall(found, path.read_text(), re.M)}
    scripts = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert declared == set(_COMMANDS) and len(declared) > 5
    assert all(f'"mlx_dspark.{name}" = ' in scripts for name in declared)
