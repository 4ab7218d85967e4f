"""The report's sections, each an answer to one question; what a run does not hold is said, not left out silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chord_lab import analysis
from chord_lab.analysis.selection import candidates
from chord_lab.errors import UserError
from chord_lab.export import comparison_figures, figures, palette, panel_figures
from chord_lab.export.report_parts import Cell, Figure, Note, Section, Table, beside, us, winners_table

if TYPE_CHECKING:
    import pandas as pd

    from chord_lab.export.tables.points import Missing
    from chord_lab.sweeps.winners import Winner

MOST_LINES = 40  # of a table of failures or doubts; the rest is counted


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything a report draws on: records of one environment, their winners, what is missing."""

    frame: pd.DataFrame
    winners: Sequence[Winner]
    missing: Sequence[Missing]
    remarks: Sequence[str]
    source: str

    def places(self) -> list[tuple[str, str]]:
        """(scenario, draw) of every group of points, in order."""
        return list(dict.fromkeys((w.scenario, w.draw) for w in self.winners))

    def chosen(self, scenario: str) -> dict[tuple[str, int, str], str]:
        """(projection, routed_m, draw) -> label of the schedule that stands for ours."""
        return {
            (w.projection, w.routed_m, w.draw): w.schedule.label()
            for w in self.winners
            if w.scenario == scenario and w.schedule is not None
        }


def headline(content: Content) -> list[str]:
    """The answers in a few lines."""
    winners = content.winners
    wins = [w for w in winners if w.verdict == "win"]
    lines = []
    if winners:
        saved = sorted(w.margin for w in wins if w.margin is not None)
        span = f", saving {saved[0]:.0%} to {saved[-1]:.0%} of its time" if saved else ""
        beaten = f"{len(wins)} of {len(winners)} points have a schedule that beats the default by more than the noise"
        lines.append(f"{beaten}{span}.")
    for scenario, draw in content.places():
        info = _try(analysis.layer_info, content.frame, scenario=scenario, draw=draw, chosen=content.chosen(scenario))
        if info and info.implementation:
            finding = comparison_figures.layer_finding(info)
            lines.append(f"{scenario}, {draw}: {finding[0].lower()}{finding[1:]}.")
    failed = sum(w.failed for w in winners)
    if failed:
        tried = sum(w.candidates for w in winners)
        lines.append(f"{failed} of {tried} candidates failed; each is counted below with its reason.")
    return lines


def _try(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The info, or None where the run does not hold it."""
    try:
        return make(*arguments, **options)
    except UserError:
        return None


def winners_section(content: Content) -> Section:
    """Which schedule wins, and by how much?"""
    section = Section("winners", "Which schedule wins, and by how much?")
    section.blocks.append(
        Note(
            "A win beats the default by more than the noise: its whole 95 % interval, from repeats taken in turns with "
            "the default's, lies below. Everything else is a tie, and the default stays. Humming ran on the same "
            "routing in the same process; its ratio says how many times our time it takes."
        )
    )
    for scenario, draw in content.places():
        part = [w for w in content.winners if (w.scenario, w.draw) == (scenario, draw)]
        section.blocks.append(Figure(figures.draw_winners(part, f"{content.source}; {scenario}, draw {draw}")))
        for projection in ("gate_up", "down"):
            rows = [w for w in part if w.projection == projection]
            if rows:
                section.blocks.append(winners_table(rows, f"{scenario}, {projection}, draw {draw}: {content.source}"))
    return section


def block_m_section(content: Content) -> Section:
    """Time against block_m for each number of tokens per expert, and where the choice should turn."""
    section = Section("block-m", "How does block_m follow tokens per expert, and where should the rule turn?")
    for scenario, draw in content.places():
        for projection in ("gate_up", "down"):
            info = _try(analysis.crossover_info, content.frame, projection=projection, scenario=scenario, draw=draw)
            if info is None or len(info.block_m) < 2:
                continue
            section.blocks.append(Figure(figures.draw_block_m(info), "Best time over the other knobs at each block_m."))
            if len(info.routed_m) > 1:
                turn = analysis.turn_info(info)
                section.blocks.append(
                    Figure(figures.draw_crossover(info, turn), "Where two lines cross, the better block_m changes.")
                )
    if not section.blocks:
        section.blocks.append(Note("This run tried one block_m at each point: there is nothing to compare."))
    return section


def load_section(content: Content) -> Section:
    """Rows per expert of the routings that were measured, and what padding costs."""
    section = Section("load", "How do tokens fall on experts?")
    rows = candidates(content.frame)
    rows = rows[rows["tok_e"].notna()]
    seen = rows.drop_duplicates(["scenario", "draw", "routed_m"])
    for (scenario, draw), part in seen.groupby(["scenario", "draw"], observed=True, sort=False):
        ordered = part.sort_values("routed_m")
        picked = ordered.iloc[sorted({0, len(ordered) // 2, len(ordered) - 1})]
        for row in picked.to_dict("records"):
            where = f"{content.source}; {draw}, {row['routed_m']} rows"
            block_m = _winning_block_m(content, str(scenario), str(draw), int(row["routed_m"])) or int(row["block_m"])
            load = analysis.load_info(row["tok_e"], source=where)
            section.blocks.append(Figure(panel_figures.draw_load(load, block_m=block_m), str(scenario), half=True))
        padding = analysis.padding_info(picked.iloc[-1]["tok_e"], source=where)
        nearest = min(padding.block_m, key=lambda b: abs(b - block_m))
        section.blocks.append(Figure(panel_figures.draw_padding(padding, block_m=nearest), str(scenario), half=True))
    if not section.blocks:
        section.blocks.append(Note("Records hold no per-expert counts."))
    return section


def _winning_block_m(content: Content, scenario: str, draw: str, routed_m: int) -> int | None:
    for w in content.winners:
        if (w.scenario, w.draw, w.routed_m) == (scenario, draw, routed_m) and w.schedule is not None:
            return w.schedule.block_m
    return None


def peers_section(content: Content) -> Section:
    """Ours beside the others, and the layer as a whole."""
    section = Section("peers", "Ours beside the others")
    for scenario, draw in content.places():
        chosen = content.chosen(scenario)
        layer = _try(analysis.layer_info, content.frame, scenario=scenario, draw=draw, chosen=chosen)
        if layer and layer.implementation:
            if not section.blocks:
                section.blocks.append(Note(". ".join(caveat[0].upper() + caveat[1:] for caveat in layer.caveats) + "."))
            section.blocks.append(Figure(comparison_figures.draw_layer(layer)))
        both = _try(analysis.compare_info, content.frame, scenario=scenario, draw=draw, chosen=chosen)
        if both:
            section.blocks.append(
                Figure(
                    comparison_figures.draw_compare(both),
                    f"{scenario}; hover for times, tiles and padding, or see the table below.",
                )
            )
            section.blocks.append(_peer_tiles(both))
    if not section.blocks:
        section.blocks.append(Note("No other implementation was measured in this run.", "doubt"))
    return section


def _peer_tiles(info: analysis.CompareInfo) -> Table:
    """Which tile each of the others ran: much of a lead can be its padding."""
    names = [palette.NAMES.get(name, name) for name in info.implementation]
    tiled = [k for k in range(len(names)) if any(configs[k] for configs in info.config)]
    columns = ["projection", "rows", "ours, us"]
    for k, name in enumerate(names):
        columns += [f"{name}, us (/ ours)", *(("its tile", "padded") if k in tiled else ())]
    rows = []
    for i, projection in enumerate(info.projection):
        row = [Cell(projection), Cell(str(info.routed_m[i]), "number"), us(info.ours_us[i])]
        for k in range(len(names)):
            row.append(beside(info.other_us[i][k], info.ours_us[i]))
            if k in tiled:
                padded = info.padded_rows[i][k]
                row += [Cell(info.config[i][k] or "–", "code"), Cell(str(padded) if padded else "–", "number")]
        rows.append(row)
    return Table(f"What the others ran: {info.source}", columns, rows)


def ceiling_section(content: Content) -> Section:
    """How near to what the card can do?"""
    section = Section("ceilings", "How near to what the card can do?")
    for scenario, draw in content.places():
        info = _try(analysis.roofline_info, content.frame, scenario=scenario, draw=draw)
        if info:
            section.blocks.append(Figure(figures.draw_roofline(info)))
    for scenario, draw in content.places():
        for projection in ("gate_up", "down"):
            slicing = _try(analysis.slicing_info, content.frame, projection=projection, scenario=scenario, draw=draw)
            if slicing and len(slicing.routed_m) > 1:
                section.blocks.append(Figure(figures.draw_slicing(slicing)))
    return section


def failures_section(content: Content) -> Section:
    """What failed, what is missing, and what to be careful about."""
    section = Section("failures", "What failed, what is missing, what to be careful about")
    info = analysis.failure_info(content.frame)
    rows = [
        [
            Cell(f.status, "none"), Cell(f.rule), Cell(str(f.num_candidates), "number"), Cell(f.example, "code"),
            Cell(f.reason),
        ]
        for f in info.failures[:MOST_LINES]
    ]  # fmt: skip
    section.blocks.append(Note(f"{info.ok} of {info.tried} attempts were timed."))
    if rows:
        section.blocks.append(Table("Failures by kind", ("status", "rule", "how many", "for example", "reason"), rows))
    if content.missing:
        lines = [[Cell(m.projection), Cell(str(m.routed_m), "number"), Cell(m.reason)] for m in content.missing]
        section.blocks.append(
            Table("Published points without a result", ("projection", "rows", "why"), lines[:MOST_LINES])
        )
    doubts = analysis.doubt_info(content.frame)
    if doubts.doubt:
        lines = [
            [Cell(p), Cell(str(m), "number"), Cell(label, "code"), Cell(f"{t:.1f}", "number"), Cell(d, "doubt")]
            for p, m, label, t, d in zip(
                doubts.projection, doubts.routed_m, doubts.label, doubts.time_us, doubts.doubt, strict=True
            )
        ]
        caption = "Times to be careful about" + (
            f" ({MOST_LINES} of {len(lines)} shown)" if len(lines) > MOST_LINES else ""
        )
        section.blocks.append(Table(caption, ("projection", "rows", "what", "us", "why"), lines[:MOST_LINES]))
    section.blocks += [Note(remark, "doubt") for remark in content.remarks]
    return section


def environment_section(content: Content) -> Section:
    """Where and how it was measured."""
    section = Section("environment", "Where and how was it measured?")
    info = analysis.environment_info(content.frame)
    for count, fields in zip(info.records, info.fields, strict=True):
        rows = [[Cell(name), Cell(value, "code")] for name, value in fields]
        section.blocks.append(Table(f"{count} records", ("what", "value"), rows))
    section.blocks.append(
        Note(
            "GB/s counts active experts' codes and scales, activations and outputs once each. TFLOPS counts real "
            "routed rows, not padding. Times are medians of interleaved repeats; quartiles are of the repeats. Records "
            "of unlike cards, drivers, compilers, kernels or methods are never ranked together."
        )
    )
    return section


SECTIONS: tuple[Callable[[Content], Section], ...] = (
    winners_section,
    block_m_section,
    load_section,
    peers_section,
    ceiling_section,
    failures_section,
    environment_section,
)
