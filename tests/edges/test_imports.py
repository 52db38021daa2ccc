"""Who may import whom: what the drawing in docs/architecture.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "transfer", "frontend", "workers")
ALLOWED = {
    "configs": {"configs"},
    "transfer": {"transfer", "configs"},
    "frontend": {"frontend", "transfer", "configs"},
    "workers": {"workers", "transfer", "configs"},
}


def sources() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_by(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, wherever in it."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name_of(path)} has a relative import"
            modules.add(node.module)
    return modules


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_package_imports_only_those_below_it(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {module.split(".")[0] for module in imported_by(path)} & {*PACKAGES, "tests"}
    assert ours <= ALLOWED[package]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_the_router_stands_on_its_own(path: Path) -> None:
    if not name_of(path).startswith("frontend/router/"):
        return
    ours = {m for m in imported_by(path) if m.split(".")[0] in PACKAGES}
    assert all(m.startswith(("frontend.router.", "transfer.", "configs.")) for m in ours)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_file_that_touches_vllm_says_what_it_relies_on(path: Path) -> None:
    touches = any(module.split(".")[0] == "vllm" for module in imported_by(path))
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    if touches and path.name != "__main__.py":
        assert "vLLM names relied on" in docstring
    if not touches:
        assert "vLLM names relied on" not in docstring


def test_configs_does_without_vllm_and_torch() -> None:
    for path in sorted((ROOT / "configs").glob("*.py")):
        assert not imported_by(path) & {"vllm", "torch", "zmq"}, name_of(path)
