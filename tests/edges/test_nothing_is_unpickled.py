"""No code of ours opens a pickle or runs what it was sent, wherever it came from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.edges.test_imports import imported_by, name_of, sources

FORBIDDEN_MODULES = frozenset({
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal",
    "shelve",
    # Their queues, pipes and managers pickle.
    "multiprocessing", "concurrent.futures.process",
})
ALLOWED_MODULES = frozenset({
    "multiprocessing.process",  # knows who started this one, and reads nothing
})
FORBIDDEN_CALLS = frozenset({
    "eval", "exec", "compile", "__import__",
    "torch.load", "torch.save", "np.load", "numpy.load",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load",
})
FORBIDDEN_METHODS = frozenset({
    "recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized",
})
FORBIDDEN_NAMES = frozenset({"ProcessPoolExecutor", "allow_pickle", "weights_only"})


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression; empty where it is not like that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else f".{node.attr}"
    return ""


def offences(code: str) -> Iterator[str]:
    """What a module does that it must not, as ``line: what``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in FORBIDDEN_CALLS:
                yield f"{node.lineno}: {called}()"
            if called.rpartition(".")[2] in FORBIDDEN_METHODS:
                yield f"{node.lineno}: .{called.rpartition('.')[2]}()"
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_NAMES:
                    yield f"{node.lineno}: {keyword.arg}="
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in FORBIDDEN_NAMES:
                yield f"{node.lineno}: {name}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_module_imports_what_unpickles(path: Path) -> None:
    for module in imported_by(path):
        parts = module.split(".")
        above = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        allowed = bool(above & ALLOWED_MODULES)
        assert allowed or not above & FORBIDDEN_MODULES, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_module_calls_what_unpickles_or_runs_what_it_is_given(path: Path) -> None:
    assert list(offences(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "eval(x)", "exec(x)", "torch.load(f)", "np.load(f)",
        "numpy.load(f, allow_pickle=True)",
        "socket.recv_pyobj()", "self._socket.send_pyobj(x)", "yaml.load(f)",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
        "concurrent.futures.ProcessPoolExecutor()", "safe(x, weights_only=False)",
    ],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(offences(code))
