"""Set-up and `chord-lab lab`: what runs before anything else, and what listens where."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """scripts/bootstrap.py acting on a folder of its own."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements.lock").write_text("# empty\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "LOCK", tmp_path / "requirements.lock")
    return module


def test_bootstrap_refuses_unknown_arguments(bootstrap, capsys):
    assert bootstrap.main(["--fast"]) == 2
    assert "--tritons" in capsys.readouterr().err


def test_environment_is_built_once_for_a_lock(bootstrap, monkeypatch):
    installs = []
    monkeypatch.setattr(bootstrap, "pip_install", lambda *arguments, **_: installs.append(arguments))
    bootstrap.build_environment()
    first = len(installs)
    bootstrap.build_environment()
    assert first == len(installs) > 0
    bootstrap.LOCK.write_text("# another\n")
    bootstrap.build_environment()
    assert len(installs) == 2 * first


def test_interrupted_build_starts_anew(bootstrap, monkeypatch):
    def interrupted(*_arguments, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "pip_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.build_environment()
    left_over = bootstrap.VENV / "half-installed"
    left_over.write_text("")
    monkeypatch.setattr(bootstrap, "pip_install", lambda *_arguments, **_named: None)
    bootstrap.build_environment()
    assert bootstrap.stamp().exists()
    assert not left_over.exists()


def test_failed_install_is_one_line_and_no_stamp(bootstrap, monkeypatch, capsys):
    def failing(*_arguments, **_named):
        raise subprocess.CalledProcessError(1, ["pip", "install"])

    monkeypatch.setattr(bootstrap, "pip_install", failing)
    assert bootstrap.main([]) == 2
    assert "set-up stopped" in capsys.readouterr().err
    assert not bootstrap.stamp().exists()


def test_second_make_waits_for_the_first(tmp_path):
    code = (
        "import importlib.util, pathlib, sys, time\n"
        f"spec = importlib.util.spec_from_file_location('b', {str(ROOT / 'scripts' / 'bootstrap.py')!r})\n"
        "b = importlib.util.module_from_spec(spec); spec.loader.exec_module(b)\n"
        f"with b.locked(pathlib.Path({str(tmp_path / 'lock')!r})):\n"
        "    print('in', flush=True); time.sleep(float(sys.argv[1]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, "1.5"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "in\n"
        started = time.monotonic()
        second = subprocess.run([sys.executable, "-c", code, "0"], capture_output=True, text=True, check=True)
    assert "waiting" in second.stdout
    assert time.monotonic() - started > 0.8


def test_other_tritons_can_be_imported(triton_versions):
    # `make test` provides 3.6.0 and 3.8.0 beside the locked one; elsewhere the installed one is enough.
    assert triton_versions


def test_lab_listens_on_loopback_only():
    from chord_lab.cli.lab import lab_command, voila_command

    notebooks = ROOT / "notebooks"
    lab = lab_command(notebooks, "00_tour.ipynb", 8888, browser=False)
    assert "--ip=127.0.0.1" in lab
    assert not [argument for argument in lab if "token" in argument]  # the token stays on
    assert "--Voila.ip=127.0.0.1" in voila_command(notebooks / "90_panels.ipynb", 8866, browser=False)


def test_lab_asks_nobody_outside():
    from chord_lab.cli.lab import lab_command, server_environment

    assert "--LabApp.news_url=None" in lab_command(ROOT, "x.ipynb", 8888, browser=False)
    folder = server_environment()["JUPYTER_CONFIG_PATH"].split(":")[-1]
    settings = (pathlib.Path(folder) / "labconfig" / "default_setting_overrides.json").read_text()
    assert '"fetchNews": "false"' in settings


def test_workshop_copies_are_never_overwritten(tmp_path):
    from chord_lab.cli.lab import copy_workshop

    source = ROOT / "notebooks" / "workshop"
    assert copy_workshop(source, tmp_path) >= 13
    assert not (tmp_path / "INSTRUCTOR.md").exists()  # it holds the expected answers
    mine = tmp_path / "1_read_a_load.ipynb"
    mine.write_text("my work")
    assert copy_workshop(source, tmp_path) == 0
    assert mine.read_text() == "my work"


def test_workshop_and_view_exclude_each_other():
    result = subprocess.run(
        [sys.executable, "-m", "chord_lab", "lab", "--workshop", "--view"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "exclude each other" in result.stderr
    assert "Traceback" not in result.stderr
