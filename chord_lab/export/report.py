"""One offline HTML file of a run: figures, tables, verdicts, failures, environment. Nothing is fetched to read it."""

from __future__ import annotations

import os
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chord_lab import __version__
from chord_lab.analysis import environments, source_line
from chord_lab.errors import UserError
from chord_lab.export.report_parts import Figure, Section
from chord_lab.export.report_sections import SECTIONS, Content, headline
from chord_lab.export.tables.points import Missing
from chord_lab.records import to_frame
from chord_lab.scenarios import get_scenario
from chord_lab.sweeps.recorded import newest_runs
from chord_lab.sweeps.winners import Winner, winners

if TYPE_CHECKING:
    import pyarrow as pa

HEIGHT = 380


class Written(NamedTuple):
    """What was written."""

    path: Path
    num_figures: int
    num_points: int
    remarks: list[str]


def write_report(table: pa.Table, path: Path, *, title: str = "", remarks: tuple[str, ...] = ()) -> Written:
    """Write the report of a records table, atomically.

    Raises:
        UserError: nothing to report, or the place cannot be written.
    """
    content = report_content(table, remarks)
    sections = [make(content) for make in SECTIONS]
    scenarios = ", ".join(dict.fromkeys(w.scenario for w in content.winners))
    html = render(
        title=title or f"Which schedule wins at {scenarios}?",
        source=content.source,
        headline=headline(content),
        sections=sections,
    )
    _write(path, html)
    num_figures = sum(isinstance(block, Figure) for section in sections for block in section.blocks)
    return Written(path, num_figures, len(content.winners), list(content.remarks))


def report_content(table: pa.Table, remarks: tuple[str, ...] = ()) -> Content:
    """Records of the environment with most of them, their winners, and what was left out.

    Raises:
        UserError: no candidate of our kernels.
    """
    frame = to_frame(table)
    tried = frame[frame["kind"] != "ceiling"]
    parts = environments(tried)
    if not parts or not (tried["kind"] == "candidate").any():
        raise UserError("no candidate of our kernels in these records: nothing to report")
    main = parts[0]
    ceilings = frame[(frame["kind"] == "ceiling") & frame["run_id"].isin(main["run_id"].unique())]
    keep = frame.index.isin(main.index.union(ceilings.index))
    table, found = newest_runs(table.filter(keep))
    found = [*remarks, *found]
    if len(parts) > 1:
        others = "; ".join(f"{len(part)} {source_line(part)}" for part in parts[1:])
        found.append(f"records of unlike environments are not shown here: {others}")
    shown = winners(table)
    frame = to_frame(table)
    return Content(frame=frame, winners=shown, missing=_missing(shown), remarks=found, source=source_line(main))


def _missing(shown: list[Winner]) -> list[Missing]:
    """Published points of each scenario that have no verdict, and points where nothing succeeded."""
    missing = []
    for scenario, projection in dict.fromkeys((w.scenario, w.projection) for w in shown):
        have = {w.routed_m for w in shown if (w.scenario, w.projection) == (scenario, projection)}
        try:
            published = [p.routed_m for p in get_scenario(scenario).points if p.published]
        except UserError:
            published = []
        missing += [Missing(f"{scenario} {projection}", m, "not measured") for m in published if m not in have]
    missing += [
        Missing(f"{w.scenario} {w.projection}", w.routed_m, f"no candidate succeeded (draw {w.draw})")
        for w in shown
        if w.verdict == "none"
    ]
    return missing


def render(*, title: str, source: str, headline: list[str], sections: list[Section]) -> str:
    """The HTML text; plotly.js stands in it once, however many figures there are."""
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("chord_lab.export").joinpath("report.html.j2").read_text("utf-8"))
    return template.render(
        title=title,
        source=source,
        headline=headline,
        sections=[{"id": s.id, "title": s.title, "blocks": [_block(b) for b in s.blocks]} for s in sections],
        plotly_js=Markup(get_plotlyjs().replace("</script", "<\\/script")),
        footer=f"Written by chord-lab {__version__}. {source}.",
    )


def _block(block: Any) -> Any:
    """A figure as JSON that may stand inside a script element; other blocks as they are."""
    if not isinstance(block, Figure):
        return block
    from markupsafe import Markup

    figure = block.figure
    return {
        "block": "figure",
        "json": Markup(figure.to_json().replace("</", "<\\/")),
        "height": figure.layout.height or HEIGHT,
        "half": block.half,
        "alt": re.sub(r"<[^>]*>", " ", figure.layout.title.text or ""),
        "look_at": block.look_at,
    }


def _write(path: Path, text: str) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # renaming onto /dev/null would replace the device
        raise UserError(f"{path} is a device or a pipe; a report needs a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
