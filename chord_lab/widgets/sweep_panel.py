"""SweepPanel: a sweep that streams into an open figure, stops at a button, and takes up where its journal ends."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets

from chord_lab.records import Record, read_records
from chord_lab.records.attempt import Measure
from chord_lab.records.parquet import JOURNAL_GLOB
from chord_lab.sweeps.plan import Plan
from chord_lab.sweeps.run import Budget, Progress, run
from chord_lab.widgets import controls
from chord_lab.widgets.measurements import Measurements

REDRAW_S = 0.5  # twice a second is smooth to the eye and leaves the kernel free


class Stopped(KeyboardInterrupt):
    """The person pressed Stop; a run treats it as Ctrl-C and keeps what it has."""


class _Tee:
    """A sink that shows each record to `take` as well."""

    def __init__(self, sink: Any, take: Callable[[Record], None]):
        self._sink, self._take = sink, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def append(self, record: Record) -> None:
        self._sink.append(record)
        self._take(record)

    def append_table(self, table: Any) -> None:
        self._sink.append_table(table)
        self._take(table)


class _Streamed:
    """A measure whose records are seen as they come."""

    def __init__(self, measure: Measure, take: Callable[[Record], None]):
        self._measure, self._take, self.source = measure, take, measure.source

    def measure(self, plan: Plan, sink: Any) -> None:
        self._measure.measure(plan, _Tee(sink, self._take))


class SweepPanel(ipywidgets.VBox):
    """Start, Stop, a progress bar, and what is best so far.

    plan, measure: what to try and how. directory: where the journal lives; records found there are taken up.
    """

    def __init__(
        self, plan: Plan, measure: Measure, directory: str | pathlib.Path, *, measurements: Measurements | None = None
    ):
        self.plan, self.inner, self.directory = plan, measure, pathlib.Path(directory)
        self.measurements = measurements  # records stream into it, and `on_records` tells the open panels
        self.on_records: list[Callable[[], None]] = []
        self.records: list[Record] = []
        self.error: str = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._fresh: list[Any] = []
        self._lock = threading.Lock()
        self.start = controls.button("Start", "measure what has no record yet", style="primary")
        self.halt = controls.button("Stop", "finish the candidate at hand, keep everything measured")
        self.halt.disabled = True
        self.bar = ipywidgets.IntProgress(min=0, max=max(1, len(plan)), description="Progress", style=controls.LABEL)
        self.status, self.best = controls.text(), controls.text()
        self.start.on_click(lambda _button: self.begin())
        self.halt.on_click(lambda _button: self._stop.set())
        super().__init__([controls.row(self.start, self.halt, self.bar, self.status), self.best])
        self._take_up()

    @classmethod
    def of_scenario(
        cls, scenario: str, directory: str | pathlib.Path, *, source: str = "replay", **request: Any
    ) -> SweepPanel:
        """The panel of a scenario's sweep: `source` is replay, live, predict or auto (live where there is a GPU).

        request: further fields of the command line's `Request`: draws, tokens, projections, space, peers, ...
        """
        from chord_lab.cli.measuring import Request, prepare

        measure, plan = prepare(Request(scenario=scenario, source=source, **request), pathlib.Path(directory))
        return cls(plan, measure, directory, measurements=Measurements.empty())

    def begin(self) -> None:
        """Run in the background; the notebook stays usable."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self.start.disabled, self.halt.disabled, self.error = True, False, ""
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the sweep ends; False if it still runs after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _take_up(self) -> None:
        """Show what an earlier kernel left in the journal."""
        if self.directory.is_dir() and any(self.directory.glob(JOURNAL_GLOB)):
            found = read_records(self.directory)
            self.records = found.records
            self._deliver(found.records)
            done = sum(record.kind == "candidate" for record in found.records)
            self.bar.value = done
            self.status.value = (
                f"{done} of {len(self.plan)} are in the journal of {self.directory}; Start measures the rest"
            )
        else:
            self.status.value = f"{len(self.plan)} candidates to try"

    def _run(self) -> None:
        shown = 0.0
        earlier = self.bar.value

        def watch(progress: Progress) -> None:
            nonlocal shown
            if self._stop.is_set():
                raise Stopped
            if time.monotonic() - shown >= REDRAW_S:
                shown = time.monotonic()
                self._show(progress, earlier)

        try:
            measure = _Streamed(self.inner, self._take)
            finished = run(self.plan, measure, self.directory, resume=True, budget=Budget(), watch=watch)
            self._show(finished.progress, earlier)
            self.status.value = f"done: {self.bar.value} of {len(self.plan)}; records in {self.directory}"
        except Stopped:
            self._flush()
            self.status.value = f"stopped at {self.bar.value} of {len(self.plan)}; Start goes on from there"
        except Exception as error:  # the thread has nobody above it: the panel must say what ended it
            self._flush()
            self.error = f"{type(error).__name__}: {error}"
            self.status.value = f"<b role='alert'>the sweep ended: {error}</b>"
        finally:
            self.start.disabled, self.halt.disabled = False, True

    def _take(self, record_or_table: Any) -> None:
        with self._lock:
            self._fresh.append(record_or_table)

    def _show(self, progress: Progress, earlier: int) -> None:
        self.bar.value = min(self.bar.max, max(self.bar.value, earlier + progress.finished))
        failed = f", {sum(progress.failed.values())} failed" if progress.failed else ""
        self.status.value = f"{self.bar.value} of {len(self.plan)}{failed}; {progress.rate:.1f}/s; {progress.now_at}"
        lines = [
            f"<li>{place}: <b>{time_us:.1f} us</b> {label}</li>" for place, (time_us, label) in progress.best.items()
        ]
        self.best.value = f"<ul>{''.join(lines)}</ul>"
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        if fresh:
            self._deliver(fresh)

    def _deliver(self, fresh: list[Any]) -> None:
        if self.measurements is not None:
            self.measurements.add(fresh)
        for act in self.on_records:
            act()
