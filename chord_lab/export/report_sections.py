"""The report's sections, each an answer to one question; what a run does not hold is said, not left out silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from chord_lab import analysis
from chord_lab.analysis.selection import candidates
from chord_lab.errors import UserError
from chord_lab.export import comparison_figures, figures, palette, panel_figures
from chord_lab.export.report_parts import Cell, Figure, Note, Section, Table, beside, us, winners_table
from chord_lab.records.peer_tile import tile_text

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

    def parts(self) -> list[Part]:
        """The groups of points, the one with most candidates first."""
        found: dict[tuple[str, str, str], list[Winner]] = {}
        for w in self.winners:
            found.setdefault((w.scenario, w.profile, w.draw), []).append(w)
        ordered = sorted(found.items(), key=lambda item: -sum(w.candidates for w in item[1]))
        return [Part(*place, self._of_profile(place[1]), members) for place, members in ordered]

    def _of_profile(self, profile: str) -> pd.DataFrame:
        """Records of one profile; a peer's or a ceiling's that names none belongs to each."""
        frame = self.frame
        unnamed = (frame["kind"] != "candidate") & (frame["profile"].isna() | (frame["profile"] == ""))
        return frame[(frame["profile"] == profile) | unnamed | (frame["kind"] == "ceiling")]


class Part(NamedTuple):
    """Points whose schedules may compete: weights are packed for one profile, and a draw is a load of its own."""

    scenario: str
    profile: str
    draw: str
    frame: pd.DataFrame  # its records and the ceilings
    winners: list[Winner]

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.scenario}, profile {self.profile}, draw {self.draw}"

    @property
    def where(self) -> dict[str, str]:
        """What `analysis` selects by."""
        return {"scenario": self.scenario, "draw": self.draw}

    def chosen(self) -> dict[tuple[str, int, str], str]:
        """(projection, routed_m, draw) -> label of the schedule that stands for ours."""
        return {(w.projection, w.routed_m, w.draw): w.schedule.label() for w in self.winners if w.schedule is not None}


def headline(content: Content) -> list[str]:
    """The answers in a few lines."""
    lines = []
    for part in content.parts():
        wins = [w for w in part.winners if w.verdict == "win"]
        saved = sorted(w.margin for w in wins if w.margin is not None)
        span = f", saving {saved[0]:.0%} to {saved[-1]:.0%} of its time" if saved else ""
        points = f"{len(wins)} of {len(part.winners)} points"
        said = f"{part.name}: {points} have a schedule that beats the default by more than the noise{span}."
        info = _try(analysis.layer_info, part.frame, **part.where, chosen=part.chosen())
        if info and info.implementation:
            said += f" {comparison_figures.layer_finding(info)}."
        lines.append(said)
    failed = sum(w.failed for w in content.winners)
    if failed:
        tried = sum(w.candidates for w in content.winners)
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
    section.blocks += [
        *(Note(_problem(content.frame, scenario)) for scenario in dict.fromkeys(w.scenario for w in content.winners)),
        Note(
            "A profile is the form that weights are packed in for one family of kernels; schedules of two profiles are "
            "not ranked together. The default is what the package ran untuned when this was measured. A win beats it "
            "by more than the noise: its whole 95 % interval, from repeats taken in turns with the default's, lies "
            "below. Everything else is a tie, and the default stays. Humming, a public kernel library, ran on the same "
            "routing in the same process; its ratio says how many times our time it takes."
        ),
        Note(
            "A schedule reads: kernel, block_m x block_n x block_k of a tile (rows x columns x reduction), w warps, "
            "s pipeline stages, c CTAs per SM; swap: the weights lie on the wide side of the multiply instruction; "
            "then other switches."
        ),
    ]
    for part in content.parts():
        section.blocks.append(Figure(figures.draw_winners(part.winners, f"{content.source}; {part.name}")))
        for projection in ("gate_up", "down"):
            rows = [w for w in part.winners if w.projection == projection]
            if rows:
                section.blocks.append(winners_table(rows, f"{projection}, {part.name}: {content.source}"))
    return section


def _problem(frame: pd.DataFrame, scenario: str) -> str:
    """What one GPU computes in a scenario."""
    rows = frame[(frame["scenario"] == scenario) & (frame["kind"] == "candidate")].drop_duplicates("projection")
    parts = [f"{r['projection']} makes N = {r['N']:.0f} columns from K = {r['K']:.0f}" for r in rows.to_dict("records")]
    return (
        f"{scenario}: {rows['num_experts'].iloc[0]:.0f} experts on one GPU; {', '.join(parts)}. Rows are routed rows: "
        "(token, expert) pairs that reach this GPU; per expert is their mean."
    )


def block_m_section(content: Content) -> Section:
    """Time against block_m for each number of tokens per expert, and where the choice should turn."""
    section = Section("block-m", "How does block_m follow tokens per expert, and where should the rule turn?")
    for part in content.parts():
        for projection in ("gate_up", "down"):
            info = _try(analysis.crossover_info, part.frame, projection=projection, **part.where, profile=part.profile)
            if info is None or len(info.block_m) < 2:
                continue
            about = f"{part.name}. "
            section.blocks.append(
                Figure(figures.draw_block_m(info), about + "Best time over the other knobs at each block_m.")
            )
            if len(info.routed_m) > 1:
                turn = analysis.turn_info(info)
                judged = turn if turn.both_sides else None  # points on one side of a threshold say nothing of it
                section.blocks.append(
                    Figure(
                        figures.draw_crossover(info, judged), about + "Where two lines cross, the better one changes."
                    )
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
    for part in content.parts():
        for w in part.winners:
            if (w.scenario, w.draw, w.routed_m) == (scenario, draw, routed_m) and w.schedule is not None:
                return w.schedule.block_m
    return None


def peers_section(content: Content) -> Section:
    """Ours beside the others, and the layer as a whole."""
    section = Section("peers", "How does ours compare with the others?")
    for part in content.parts():
        chosen = part.chosen()
        layer = _try(analysis.layer_info, part.frame, **part.where, chosen=chosen)
        if layer and layer.implementation:
            if not section.blocks:
                said = "Ours is the winner of the tables above, the default where there is none."
                section.blocks.append(Note(" ".join([said, *(f"{c[0].upper()}{c[1:]}." for c in layer.caveats)])))
            section.blocks.append(Figure(comparison_figures.draw_layer(layer), part.name))
        both = _try(analysis.compare_info, part.frame, **part.where, chosen=chosen)
        if both:
            look_at = f"{part.name}; hover for times, tiles and padding, or see the table below."
            section.blocks += [Figure(comparison_figures.draw_compare(both), look_at), _peer_tiles(both, part.name)]
    if not section.blocks:
        section.blocks.append(Note("No other implementation was measured in this run.", "doubt"))
    return section


def _peer_tiles(info: analysis.CompareInfo, part: str) -> Table:
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
                row.append(Cell(tile_text(info.config[i][k]) or "–", "code"))
                row.append(Cell(str(padded) if padded else "–", "number"))
        rows.append(row)
    return Table(f"What the others ran, {part}: {info.source}", columns, rows)


def ceiling_section(content: Content) -> Section:
    """How near to what the card can do?"""
    section = Section("ceilings", "How near to what the card can do?")
    for part in content.parts():
        info = _try(analysis.roofline_info, part.frame, **part.where)
        if info:
            section.blocks.append(Figure(figures.draw_roofline(info), part.name))
    return section


def slicing_section(content: Content) -> Section:
    """What do empty slices of a tile cost?"""
    section = Section("slicing", "What do empty slices of a tile cost?")
    section.blocks.append(
        Note(
            "With swapped operands a tile's rows are multiplied 8 at a time, a token slice. Token slicing is what a "
            "kernel does with slices that hold no row: static multiplies them too, the others skip them, each its way."
        )
    )
    for part in content.parts():
        for projection in ("gate_up", "down"):
            info = _try(analysis.slicing_info, part.frame, projection=projection, **part.where)
            if info and len(info.routed_m) > 1:
                section.blocks.append(Figure(figures.draw_slicing(info), part.name))
    if len(section.blocks) == 1:
        section.blocks = [Note("This run tried no two token slicings that differ in nothing else.")]
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
    slicing_section,
    failures_section,
    environment_section,
)
