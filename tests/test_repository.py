"""Promises about the repository as a whole: what is tracked, how big it is, what the README says."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_BYTES = 25_000_000
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60  # CONTRIBUTING.md asks for 40; the end of what a reason can excuse
MAX_KERNEL_LINES = 120
MAX_RUNTIME_PARAMETERS = 16  # of a device function
PURE_LAYERS = ("scenarios", "routing", "records", "sweeps", "analysis", "traces", "export")
DRAWING_LAYER = "export"  # its figures import plotly at the top; its tables, which `tune` writes anywhere, do not


def tracked(*patterns: str) -> list[pathlib.Path]:
    """Files that git tracks here, or would after `git add`; a source archive without .git has its files."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def python_modules() -> list[pathlib.Path]:
    return [path for path in tracked("*.py") if "tests" not in path.relative_to(ROOT).parts]


def test_repository_stays_under_25_mb():
    sizes = {path: path.stat().st_size for path in tracked()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    report = ", ".join(f"{path.relative_to(ROOT)} {sizes[path] / 1e6:.1f} MB" for path in largest)
    assert sum(sizes.values()) < MAX_BYTES, f"{sum(sizes.values()) / 1e6:.1f} MB; largest: {report}"


def test_no_init_hides_another_package():
    forbidden = [p for p in tracked("tests/**/__init__.py", "tests/__init__.py", "kernels/__init__.py") if p.exists()]
    assert not forbidden


def test_notebooks_are_stripped():
    for path in tracked("*.ipynb"):
        for index, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                assert not cell["outputs"] and cell["execution_count"] is None, f"{path.name} cell {index} has outputs"
            assert not cell.get("attachments"), f"{path.name} cell {index} has a pasted image"


def test_text_names_no_machine_path():
    # A path of one machine in a shipped file is a fault on every other one.
    private = re.compile(r"(?<![\w.])/(?:work|tmp|root|home)/\w")
    hits = []
    for path in tracked():
        if (
            path.suffix in {".parquet", ".png", ".npz", ".ncu-rep", ".sqlite", ".gz", ".pdf"}
            or path == ROOT / ".ci/run"
        ):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if private.search(line) and path != pathlib.Path(__file__):
                hits.append(f"{path.relative_to(ROOT)}:{number}")
    assert not hits


def test_layers_hold():
    linter = pathlib.Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("layer", PURE_LAYERS)
def test_pure_layer_loads_without_heavy_packages(layer):
    if not any((ROOT / "chord_lab").glob(f"{layer}*")):
        pytest.skip(f"chord_lab.{layer} does not exist")
    heavy = {"torch", "triton", "ipywidgets", "anywidget"} | ({"plotly"} if layer != DRAWING_LAYER else set())
    code = (
        "import sys, pkgutil, importlib\n"
        f"top = importlib.import_module('chord_lab.{layer}')\n"
        "names = [m.name for m in pkgutil.walk_packages(getattr(top, '__path__', []), top.__name__ + '.')]\n"
        "for name in names: importlib.import_module(name)\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr[-2000:]


def test_tables_are_written_where_nothing_can_be_drawn():
    """A measuring machine has no plotly: everything of `tune` but the report must load there."""
    code = (
        "import sys\n"
        "sys.modules['plotly'] = None\n"
        "import chord_lab.cli.tune, chord_lab.cli.export, chord_lab.export.tables.kernels\n"
        "import chord_lab.export.tables.collect, chord_lab.export.tables.rows, chord_lab.export.tables.triton_moe\n"
        "print('loaded')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "loaded", result.stderr[-2000:]


def test_only_measurement_touches_a_gpu():
    touching = re.compile(r"\btorch\.cuda\b|\bpynvml\b")
    allowed = ("chord_lab/measurement/", "chord_lab/capabilities.py", "chord_lab/traces/")
    for path in tracked("chord_lab/*.py", "chord_lab/**/*.py"):
        name = path.relative_to(ROOT).as_posix()
        assert name.startswith(allowed) or not touching.search(path.read_text()), name


def test_kernel_package_stands_alone():
    code = "import sys, w4a16_moe; print(sorted(m for m in sys.modules if m.startswith('chord_lab')))"
    environment = {"PYTHONPATH": str(ROOT / "kernels"), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def requirements_of_project() -> dict[str, Requirement]:
    """What the workbench needs: base dependencies and the extras `lab` and `voila`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = project["dependencies"] + extras["lab"] + extras["voila"]
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def test_environment_yml_agrees_with_pyproject():
    rattler = pytest.importorskip("rattler")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"}
    assert environment["channels"] == ["conda-forge"]
    conda_names = {"torch": "pytorch", "kaleido": "python-kaleido"}
    wanted = {conda_names.get(name, name): req for name, req in requirements_of_project().items() if req.marker is None}
    specs = {}
    for text in (item for item in environment["dependencies"] if isinstance(item, str)):
        spec = rattler.MatchSpec(text)
        specs[str(getattr(spec.name, "normalized", spec.name))] = text.partition(" ")[2].strip()
    assert set(specs) - {"python", "pip"} == set(wanted)
    for name, requirement in wanted.items():
        assert sorted(specs[name].split(",")) == sorted(str(requirement.specifier).split(",")), name
    [pip] = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pip == ["--editable .[lab,voila]"]


def test_lock_satisfies_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked: dict[str, list[str]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            [specifier] = requirement.specifier
            assert specifier.operator == "==", line
            locked.setdefault(requirement.name.lower().replace("_", "-"), []).append(specifier.version)
    texts = project["dependencies"] + [t for t in project["optional-dependencies"]["dev"] if "[" not in t]
    texts += [
        t for extra in ("lab", "nsight", "optuna", "dask", "voila") for t in project["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, texts):
        versions = locked.get(requirement.name.lower().replace("_", "-"), [])
        assert versions, f"{requirement.name} is not in requirements.lock; run `make lock`"
        assert all(requirement.specifier.contains(version) for version in versions), (requirement, versions)


def test_readme_names_real_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    mentioned = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"run", "test", "lab"} <= mentioned <= targets


def test_readme_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_readme_commands_exist():
    from typer.main import get_command

    from chord_lab import cli

    for name in cli.COMMAND_MODULES:
        __import__(f"chord_lab.cli.{name}")
    known = set(get_command(cli.app).commands)
    mentioned = set(re.findall(r"chord-lab ([a-z][a-z-]*)", (ROOT / "README.md").read_text()))
    assert mentioned <= known, mentioned - known


def _on_device(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _breaches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Limits that a function is over; docstrings do not count, device functions have limits of their own."""
    first = function.body[0]
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    limit = MAX_KERNEL_LINES if _on_device(function) else MAX_FUNCTION_LINES
    found = [f"{lines} lines, limit {limit}"] if lines > limit else []
    if _on_device(function):
        every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        runtime = [a for a in every if a.annotation is None or "constexpr" not in ast.unparse(a.annotation)]
        if len(runtime) > MAX_RUNTIME_PARAMETERS:
            found.append(f"{len(runtime)} runtime parameters, limit {MAX_RUNTIME_PARAMETERS}")
    return found


def test_sizes_stay_readable():
    breaches, on_device = [], 0
    for path in python_modules():
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        if text.count("\n") > MAX_MODULE_LINES:
            breaches.append(f"{name}: {text.count(chr(10))} lines, limit {MAX_MODULE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                breaches += [f"{name}:{node.name}: {breach}" for breach in _breaches(node)]
                on_device += _on_device(node)
    assert not breaches, "\n".join(breaches)
    assert on_device > 30, "the device functions were not found"


def test_make_help_lists_targets():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    listing = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("run", "test", "lab", "lint", "notebooks", "test-gpu", "record", "bench"):
        assert re.search(rf"^{target}\b", listing, flags=re.M), target


def test_readme_figures_come_from_the_records():
    # Nothing between the marks is typed by hand: after new records run `make gallery readme`.
    command = [sys.executable, "-m", "scripts.readme", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-500:]
