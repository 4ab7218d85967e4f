"""What identifies the software behind a number, without a GPU."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import pathlib
from functools import cache

# Modules that choose, describe or read checkpoints but do not run in the timed region.
_NOT_TIMED = (
    "tables",
    "resolve",
    "legality",
    "offline",
    "devices",
    "profiles",
    "block_m",
    "heuristics",
    "reference",
    "checkpoint",
)


@cache
def kernels_hash() -> str:
    """Hash of the kernel package's code without comments and docstrings: other code is another environment."""
    import w4a16_moe

    digest = hashlib.sha256()
    root = pathlib.Path(w4a16_moe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.stem in _NOT_TIMED or path.stem.endswith("rules"):
            continue
        code = canonical_code(path.read_text(encoding="utf-8"))
        digest.update(f"{path.relative_to(root).as_posix()}\0{code}".encode())
    return digest.hexdigest()[:12]


def canonical_code(source: str) -> str:
    """A module's syntax tree as text: without comments and docstrings, the same under every Python."""
    return _canonical(_without_docstrings(ast.parse(source)))


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


def _canonical(value: object) -> str:
    """What `ast.dump` gives, less absent and empty fields: Python versions add and drop those."""
    if isinstance(value, ast.AST):
        fields = [(name, item) for name, item in ast.iter_fields(value) if item is not None and item != []]
        return f"{type(value).__name__}({', '.join(f'{name}={_canonical(item)}' for name, item in fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_canonical, value))}]"
    return repr(value)


def ptxas_version(capability: int) -> str:
    """Version text of the assembler that Triton uses; empty where it cannot be asked."""
    try:
        from w4a16_moe.offline import ptxas_version as ask

        return ask(capability)
    except Exception:  # another Triton build without the tool: the record says so by an empty field
        return ""


def peer_versions() -> str:
    """``humming-kernels 0.1.19``, or nothing where no peer is installed."""
    try:
        return f"humming-kernels {importlib.metadata.version('humming-kernels')}"
    except importlib.metadata.PackageNotFoundError:
        return ""
