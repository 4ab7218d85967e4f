"""``chord-lab lab``: JupyterLab on the notebooks, the workshop's own copies, or the panels without code."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Annotated

import typer

from chord_lab.cli import app, notes
from chord_lab.errors import UserError

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
PANELS = "90_panels.ipynb"
FOR_TEACHERS = "INSTRUCTOR.md"  # holds the expected answers
# Settings that a user's own ones override (no question about news, for which JupyterLab would ask another machine) and
# a Voila page that fetches nothing.
JUPYTER_SETTINGS = pathlib.Path(__file__).with_name("jupyter")


@app.command()
def lab(
    workshop: Annotated[
        bool, typer.Option("--workshop", help="Open copies of the workshop's exercises that you may edit freely.")
    ] = False,
    view: Annotated[bool, typer.Option("--view", help="Serve the panels alone, without code, by Voila.")] = False,
    folder: Annotated[
        pathlib.Path, typer.Option(help="Where the workshop's copies go; existing ones are kept.")
    ] = pathlib.Path("out/workshop"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
) -> None:
    """Open the notebooks; the server listens on 127.0.0.1 only."""
    notebooks = find_notebooks()
    if workshop and view:
        raise UserError("--workshop and --view exclude each other; take one")
    if view:
        command = voila_command(notebooks / PANELS, port, browser=browser)
    elif workshop:
        copied = copy_workshop(notebooks / "workshop", folder)
        notes.print(f"{copied} files copied to {folder}; earlier copies were kept", highlight=False)
        command = lab_command(folder, "README.ipynb", port, browser=browser)
    else:
        command = lab_command(notebooks, "00_tour.ipynb", port, browser=browser)
    raise typer.Exit(serve(command))


def find_notebooks() -> pathlib.Path:
    """The notebooks of the checkout that this package runs from."""
    folder = CHECKOUT / "notebooks"
    if not folder.is_dir():
        raise UserError(f"no notebooks beside the package ({folder} is missing); run from a clone of the repository")
    return folder


def lab_command(folder: pathlib.Path, start: str, port: int, *, browser: bool) -> list[str]:
    """JupyterLab rooted in `folder`; it asks nobody outside for news or updates."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError("jupyterlab is not installed; it comes with the extra: pip install 'chord-lab[lab]'")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}", "--ip=127.0.0.1"]
    command += [f"--port={port}", f"--LabApp.default_url=/lab/tree/{start}"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url=None"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return command if browser else [*command, "--no-browser"]


def voila_command(notebook: pathlib.Path, port: int, *, browser: bool) -> list[str]:
    """Voila on one notebook, its code hidden."""
    if importlib.util.find_spec("voila") is None:
        raise UserError("voila is not installed; it comes with an extra: pip install 'chord-lab[voila]'")
    command = [sys.executable, "-m", "voila", str(notebook), "--Voila.ip=127.0.0.1", f"--port={port}"]
    command += ["--strip_sources=True", "--show_tracebacks=False", "--theme=light", "--template=chord_lab"]
    return command if browser else [*command, "--no-browser"]


def copy_workshop(source: pathlib.Path, folder: pathlib.Path) -> int:
    """Copy exercises that are not there yet; a learner's work is never overwritten. Returns how many were copied."""
    copied = 0
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if path.is_dir() or path.name == FOR_TEACHERS or ".ipynb_checkpoints" in path.parts or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(target.name + ".tmp")
        shutil.copyfile(path, unfinished)
        unfinished.replace(target)
        copied += 1
    return copied


def server_environment() -> dict[str, str]:
    """The caller's environment, with the settings of `JUPYTER_SETTINGS` as defaults."""
    added = {
        name: os.pathsep.join(filter(None, [os.environ.get(name, ""), str(JUPYTER_SETTINGS)]))
        for name in ("JUPYTER_CONFIG_PATH", "JUPYTER_PATH")
    }
    return {**os.environ, **added}


def serve(command: list[str]) -> int:
    """Run the server until it ends; Ctrl-C reaches it too, and is no error."""
    with subprocess.Popen(command, env=server_environment()) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait(timeout=20)
            return 0
