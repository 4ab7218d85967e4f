"""ExportPanel: what a new table would change in the kernel package; then write it and prove it by the resolver."""

from __future__ import annotations

import html
import pathlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ipywidgets
from w4a16_moe.resolve import BUNDLED
from w4a16_moe.tables import TuningFile

from chord_lab.errors import UserError
from chord_lab.export.tables.collect import collect
from chord_lab.export.tables.kernels import (
    Difference,
    KernelTables,
    build,
    check,
    differences,
    load_table,
    package_path,
    write,
)
from chord_lab.export.tables.withhold import Withheld, withhold
from chord_lab.widgets import controls
from chord_lab.widgets.folders import out_folder
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.panel import Panel
from chord_lab.widgets.selection import Selection

LARGEST_CHECKED = 20000  # routed rows up to which the written file is compared with the resolver


class ExportPanel(Panel):
    """The selected scenario's winners as a tuning table of the kernel package."""

    title = "Export: what would change, and write it"

    def __init__(
        self,
        selection: Selection | None = None,
        measurements: Measurements | None = None,
        folder: str | pathlib.Path | None = None,
    ):
        super().__init__(selection, measurements)
        start = folder or out_folder("tables")
        self.folder = ipywidgets.Text(
            description="Folder", value=str(start), style=controls.LABEL, layout=controls.WIDE, continuous_update=False
        )
        self.scenario = controls.choice(
            "Scenario",
            sorted({*self.measurements.scenarios, self.selection.scenario}),
            self.selection.scenario,
            "whose winners",
        )
        self.ties = controls.switch("let ties overwrite", False, "off: a tie leaves what the package runs there")
        self.unsupported = controls.switch(
            "let rows without a result overwrite", False, "off: they keep what the package runs there"
        )
        self.into_package = controls.switch("into the kernel package", False, f"write under {BUNDLED}")
        self.export = controls.button("Export", "write the table and prove it against the resolver", style="primary")
        self.preview, self.result = controls.text(), controls.text()
        for switch in (self.ties, self.unsupported, self.into_package):
            switch.observe(self.redraw, "value")
        self.folder.observe(self.redraw, "value")
        self.scenario.observe(lambda change: setattr(self.selection, "scenario", change.new), "value")
        self.export.on_click(self._export)
        options = controls.row(self.ties, self.unsupported, self.into_package)
        self.arrange(
            controls.row(self.scenario, self.folder), options, self.preview, controls.row(self.export), self.result
        )
        self.follow("scenario", "draw")

    def draw(self) -> None:
        """Show the difference that Export would make."""
        self.export.disabled = True
        self.result.value = ""
        controls.offer(self.scenario, self.selection.scenario)
        parts = [self._preview_of(tables) for tables in self.tables()]
        self.preview.value = "".join(parts)
        self.export.disabled = False

    def tables(self) -> list[KernelTables]:
        """One set of points for each device and profile of the selected scenario.

        Scenarios that share a profile share its tables (decode and prefill ask for one problem), so all that were
        recorded under it are exported together: from one alone, its rows would be stretched over the other's.

        Raises:
            UserError: nothing measured there, or predicted times alone.
        """
        chosen, known = self.selection, self.measurements
        draws = known.draws(chosen.scenario)
        draw = chosen.draw if chosen.draw in draws else None
        key = ("collected", chosen.scenario, draw)
        found: list[KernelTables] = known.once(key, lambda: self._collected(draw))
        if any("predicted" in t.provenance["records"]["source"] for t in found):
            raise UserError("predicted times are not exported: measure or replay first")
        return found

    def _collected(self, draw: str | None) -> list[KernelTables]:
        known, scenario = self.measurements, self.selection.scenario
        mine = collect(known.table, scenario=scenario, draw=draw)
        profiles = dict.fromkeys(w.profile for w in mine.winners)
        return [tables for name in profiles for tables in collect(known.table, profile=name, draw=draw).tables]

    def path_of(self, tables: KernelTables) -> pathlib.Path:
        """Where Export would write."""
        root = BUNDLED if self.into_package.value else pathlib.Path(self.folder.value).expanduser()
        return package_path(tables.device, tables.profile, root)

    def planned(self, tables: KernelTables) -> tuple[TuningFile, Withheld, TuningFile | None]:
        """The new file, what was left alone, and the package's present file."""
        path = package_path(tables.device, tables.profile)
        shipped = load_table(path) if path.is_file() else None
        kept = withhold(tables.points, shipped, ties=self.ties.value, unsupported=self.unsupported.value)
        return build(replace(tables, points=kept.points), existing=shipped), kept, shipped

    def _preview_of(self, tables: KernelTables) -> str:
        file, kept, shipped = self.planned(tables)
        changed = differences(shipped, file)
        count = Counter(point.verdict for point in tables.points)
        scenarios = ", ".join(tables.provenance["tuned_for"]["scenarios"])
        left = len(kept.ties) + len(kept.unsupported)
        where_left = f"; {left} without a win keep the other schedule that the package runs there" if left else ""
        lines = [
            f"<p><b>{html.escape(str(self.path_of(tables)))}</b>: {len(tables.points)} measured points of "
            f"{html.escape(scenarios)}: {count['win']} wins, {count['tie']} ties, {count['none']} without a result"
            f"{where_left}.</p>"
        ]
        if not changed:
            lines.append("<p>Nothing changes against the table in the package.</p>")
        else:
            lines.append(difference_table(changed))
        return "".join(lines)

    def _export(self, _button: Any) -> None:
        try:
            said = [self._write(tables) for tables in self.tables()]
        except (ValueError, OSError) as error:
            self.result.value = f"<b role='alert'>{html.escape(str(error))}</b>"
        else:
            self.result.value = "".join(said)

    def _write(self, tables: KernelTables) -> str:
        file, kept, _shipped = self.planned(tables)
        path = self.path_of(tables)
        proved = write(file, path, kept.points)
        checked = check(path, largest=LARGEST_CHECKED)
        return (
            f"<p role='status'>Written: <code>{html.escape(str(path))}</code>. The resolver returns the table's "
            f"schedule at all {proved} measured points, and one row each for m = 0 to {checked.checked_m[1]:,} "
            f"({checked.rows} rows).</p>"
        )


def difference_table(changed: Sequence[Difference]) -> str:
    """HTML: ranges of routed rows where the schedule changes."""
    cell = "style='text-align:left;padding:0 1.5em 0 0'"
    head = "".join(f"<th scope='col' {cell}>{name}</th>" for name in ("problem", "routed rows", "package now", "new"))
    rows = [
        "<tr>"
        + "".join(
            f"<td {cell}>{html.escape(text)}</td>"
            for text in (
                d.problem,
                f"{d.min_m + 1:,} to {d.max_m:,}" if d.max_m else f"above {d.min_m:,}",
                d.old or "(no table)",
                d.new or "(none)",
            )
        )
        + "</tr>"
        for d in changed
    ]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
