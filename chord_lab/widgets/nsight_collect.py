"""NsightCollect: a button that profiles a schedule on this machine's GPU, and says why where it cannot."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from chord_lab.scenarios import scenario_names
from chord_lab.traces.collectors import METRIC_SETS, capabilities
from chord_lab.widgets import controls
from chord_lab.widgets.folders import out_folder
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel


class NsightCollect(Panel):
    """Runs ``chord-lab profile`` in a process of its own; `finished` is called with the folder when it is done."""

    title = "Collect counters here"

    def __init__(self, finished: Callable[[Path], Any] | None = None, out: str | Path | None = None):
        super().__init__(None, Measurements.empty())
        self.finished = finished
        self.out = Path(out) if out is not None else out_folder() / "profile"
        names = list(scenario_names())
        self.scenario = controls.choice("Scenario", names, names[0], "whose layer is profiled")
        self.projection = controls.choice("Projection", ("gate_up", "down"), "gate_up", "which GEMM")
        self.schedules = ipywidgets.Textarea(
            description="Schedules", value="default", placeholder="one a line: default, a label, or block_m=64",
            tooltip="one schedule a line", style=controls.LABEL, layout={"width": "60em", "height": "5em"},
        )  # fmt: skip
        self.metrics = controls.choice("Metrics", METRIC_SETS, "lab", "lab: what the figures here need")
        self.go = controls.button("Profile", "run the schedules under a profiler", style="primary")
        self.stop = controls.button("Stop", "end the run; nothing is kept of it")
        self.progress = controls.text()
        self.state = controls.text(capability_table())
        self.process: subprocess.Popen[str] | None = None
        usable = [c.name for c in capabilities() if c.available]
        self.collector = controls.choice("Collector", ("auto", *usable), "auto", "what records; auto takes counters")
        self.stop.disabled = True
        self.go.on_click(self._start)
        self.stop.on_click(lambda _: self._end())
        pickers = [self.scenario, self.projection, self.schedules, self.collector, self.metrics]
        self.arrange(self.state, ipywidgets.VBox(pickers), controls.row(self.go, self.stop), self.progress)

    def draw(self) -> None:
        """Nothing follows a selection here."""

    def command(self) -> list[str]:
        """The command line that the button runs: it can be copied to a terminal."""
        schedules = [line.strip() for line in self.schedules.value.splitlines() if line.strip()] or ["default"]
        options = [option for schedule in schedules for option in ("--schedule", schedule)]
        options += ["--projection", self.projection.value, "--collector", self.collector.value]
        options += ["--metrics", self.metrics.value, "--out", str(self.out)]
        return [sys.executable, "-m", "chord_lab", "profile", self.scenario.value, *options]

    def _start(self, _button: Any) -> None:
        self.go.disabled, self.stop.disabled = True, False
        self.progress.value = "<em>running</em>"
        self.process = subprocess.Popen(
            self.command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._follow, args=(self.process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        lines: list[str] = []
        for line in process.stdout or ():
            lines.append(line.rstrip())
            self.progress.value = f"<pre>{escape(chr(10).join(lines[-12:]))}</pre>"
        code = process.wait()
        self.go.disabled, self.stop.disabled = False, True
        if code == 0 and self.finished is not None:
            self.finished(self.out)
        elif code < 0:
            self.progress.value = "stopped; nothing was kept"

    def _end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # it removes its own half-made files


def capability_table() -> str:
    """What can record here, and why the rest cannot."""
    rows = []
    for found in capabilities():
        state = (
            f"yes ({found.found})" if found.available and found.found else "yes" if found.available else found.why_not
        )
        rows.append(
            f"<tr><th style='text-align:left;padding-right:1em'>{escape(found.name)}</th><td>{escape(state)}</td></tr>"
        )
    return f"<table aria-label='collectors'>{''.join(rows)}</table>"
