"""A real JupyterLab on loopback, driven by a real Chromium."""

from __future__ import annotations

import contextlib
import http.cookiejar
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking")

# JupyterLab's own objects, which it shows to the page when it is started with expose_app_in_browser.
NOTEBOOK = "window.jupyterapp?.shell.currentWidget"
KERNEL = f"{NOTEBOOK}?.sessionContext?.session?.kernel"
CODE_CELLS = f"[...{NOTEBOOK}.content.model.cells].filter(c => c.type === 'code')"
# Messages of JupyterLab 4.6 itself on an empty notebook; none comes from a panel.
LAB_OWN_MESSAGES = re.compile(r"favicon|ResizeObserver loop|/api/(contents|sessions|kernels).*(404|ERR_ABORTED)")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` runs these after the others, in one process: they share one JupyterLab and one browser."""
    if pathlib.Path(str(item.fspath)).is_relative_to(ROOT / "tests" / "browser"):
        item.add_marker(pytest.mark.browser)
        item.add_marker(pytest.mark.timeout(300))


def _missing(reason: str) -> None:
    if os.environ.get("CHORD_LAB_REQUIRE_BROWSER"):
        pytest.fail(f"{reason}, but CHORD_LAB_REQUIRE_BROWSER is set")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless browser that no test shares a context of."""
    executable = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if executable is None:
        _missing("no Chromium; on Debian: apt-get install chromium fonts-dejavu")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(command: list[str], url: str, folder: pathlib.Path, environment: dict[str, str]) -> Iterator[str]:
    """Start a server, wait until it answers, stop it in the end."""
    log = folder / "server.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            for _ in range(240):
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60):
                    break
                if process.poll() is not None:
                    pytest.fail(f"server ended with {process.returncode}: {log.read_text()[-2000:]}")
                time.sleep(0.25)
            else:
                pytest.fail(f"server did not answer: {log.read_text()[-2000:]}")
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            process.kill()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the notebooks: what a test saves or exports never touches the checkout."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    return folder


@pytest.fixture(scope="session")
def server_environment(workspace: pathlib.Path) -> dict[str, str]:
    """No setting of the user's own Jupyter reaches the server, and nothing of the server reaches them."""
    private = {
        "JUPYTER_CONFIG_DIR": str(workspace / "config"),
        "JUPYTER_DATA_DIR": str(workspace / "data"),
        "JUPYTER_RUNTIME_DIR": str(workspace / "runtime"),
        "IPYTHONDIR": str(workspace / "ipython"),
        "CHORD_LAB_OUT": str(workspace / "out"),
        "JUPYTER_PLATFORM_DIRS": "1",
    }
    from chord_lab.cli.lab import server_environment as defaults

    return {**defaults(), **private, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def lab_url(workspace: pathlib.Path, server_environment: dict[str, str]) -> Iterator[str]:
    """JupyterLab with the arguments that `chord-lab lab` gives it, less the token."""
    from chord_lab.cli.lab import lab_command

    port = free_port()
    command = lab_command(workspace / "notebooks", "00_tour.ipynb", port, browser=False)
    command += [
        "--LabApp.expose_app_in_browser=True",
        "--ServerApp.token=",
        "--ServerApp.password=",
        "--ServerApp.port_retries=0",
    ]
    with serving(command, f"http://127.0.0.1:{port}/lab", workspace, server_environment) as url:
        yield url


@pytest.fixture
def serve_here(tmp_path: pathlib.Path) -> Callable[..., Any]:
    """Start any server for one test: ``serve_here(port -> command, path of its first page, environment)``."""

    def start(command: Callable[[int], list[str]], page: str, environment: dict[str, str]) -> Any:
        port = free_port()
        return serving(command(port), f"http://127.0.0.1:{port}/{page}", tmp_path, environment)

    return start


def end_kernels(server: str) -> None:
    """End the kernels that earlier notebooks left: each holds some 400 MB."""
    cookies = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    opener.open(f"{server}/lab", timeout=30).close()  # the page that gives the token for what changes something
    token = next((str(cookie.value) for cookie in cookies if cookie.name == "_xsrf"), "")
    with opener.open(f"{server}/api/kernels", timeout=30) as answer:
        kernels = json.load(answer)
    for kernel in kernels:
        request = urllib.request.Request(f"{server}/api/kernels/{kernel['id']}", method="DELETE")
        request.add_header("X-XSRFToken", token)
        opener.open(request, timeout=30).close()


class Watch:
    """A page that remembers console errors and every request that left the machine."""

    def __init__(self, page: Any, shots: pathlib.Path) -> None:
        self.page = page
        self.shots = shots
        self.errors: list[str] = []
        self.outside: list[str] = []
        page.on("console", lambda message: message.type == "error" and self._error(message.text))
        page.on("pageerror", lambda error: self._error(str(error)))
        page.on("request", lambda request: self._request(request.url))

    def _error(self, text: str) -> None:
        if not LAB_OWN_MESSAGES.search(text):
            self.errors.append(text[:500])

    def _request(self, url: str) -> None:
        if not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:|chrome", url):
            self.outside.append(url)

    def shot(self, name: str) -> None:
        """Keep a picture in out/browser."""
        self.shots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.shots / f"{name}.png")

    def assert_clean(self) -> None:
        """Neither a console error nor a request to another machine."""
        assert not self.outside, self.outside
        assert not self.errors, self.errors

    def run_notebook(self, lab_url: str, name: str, timeout_s: float = 240) -> None:
        """Open a notebook, run all its cells, wait until the last one is done, and keep a picture."""
        page = self.page
        end_kernels(lab_url.removesuffix("/lab"))
        page.goto(f"{lab_url}/tree/{name}?reset", wait_until="domcontentloaded")
        page.wait_for_function(f"() => {KERNEL}?.status === 'idle'", timeout=60_000)
        page.click('.lm-MenuBar-item:has-text("Run")')
        page.click('li.lm-Menu-item[data-command="runmenu:run-all"]')
        # Cells outside the window are not in the page, so the model is asked. The first error ends a run.
        page.wait_for_function(
            f"""() => {CODE_CELLS}.some(c => c.outputs.toJSON().some(o => o.output_type === 'error')) ||
                ({CODE_CELLS}.every(c => c.executionCount !== null) && {KERNEL}.status === 'idle')""",
            timeout=timeout_s * 1000,
        )
        self.assert_no_errors()
        page.wait_for_timeout(1000)  # figures draw after their cells are done
        self.shot(pathlib.PurePosixPath(name).stem)

    def assert_no_errors(self) -> None:
        """No cell ended in an error or wrote a traceback."""
        found = self.page.evaluate(
            f"""() => {CODE_CELLS}.flatMap(c => c.outputs.toJSON()).filter(
                o => o.output_type === 'error' || (o.name === 'stderr' && /Traceback/.test(o.text)))"""
        )
        assert not found, str(found[0].get("evalue") or found[0].get("text"))[-1500:]


@pytest.fixture
def watch(chromium: Any) -> Iterator[Callable[[], Watch]]:
    """Make watched pages: each in a context of its own, closed at the end."""
    contexts = []

    def make(**options: Any) -> Watch:
        context = chromium.new_context(viewport={"width": 1500, "height": 1100}, **options)
        contexts.append(context)
        return Watch(context.new_page(), ROOT / "out" / "browser")

    yield make
    for context in contexts:
        context.close()
