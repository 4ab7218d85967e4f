"""``chord-lab scenarios [NAME]``: what can be looked at, and where its E, N and K come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord_lab.cli import app, console, notes, print_json
from chord_lab.errors import UserError

if TYPE_CHECKING:
    from chord_lab.scenarios import ModelConfig, Scenario


@app.command("scenarios")
def scenarios(
    name: Annotated[str, typer.Argument(help="A scenario, a model, or a Hugging Face config.json.")] = "",
    shard: Annotated[str, typer.Option(help="With a config.json: ep8, tp8, ep4tp2, ep8r16, ...")] = "",
    phase: Annotated[str, typer.Option(help="With a config.json: prefill, decode (taken if not given), ...")] = "",
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="Take a config's shapes even if its weights are stored another way.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List scenarios, or show one: problems, default profile, token sweep. A config.json works too."""
    from chord_lab.scenarios import MODELS, get_scenario

    if name.endswith(".json") or (name and Path(name).expanduser().is_dir()):
        _show_config(name, shard, phase, shapes_only, as_json)
        return
    if shard or phase or shapes_only:
        wanted = f"{name.split('/')[0] or 'MODEL'}/{shard or 'ep8'}/{phase or 'decode'}"
        raise UserError(f"--shard, --phase and --shapes-only go with a config.json; a known model is named {wanted}")
    if not name:
        _list(as_json)
    elif name in MODELS:
        _show_model(name, as_json)
    else:
        _show_scenario(get_scenario(name), as_json)


def scenario_dict(scenario: Scenario) -> dict[str, Any]:
    """A scenario in JSON types."""
    problems = scenario.problems
    experts = problems["down"].num_experts
    return {
        "name": scenario.name,
        "model": scenario.model,
        "shard": scenario.shard.name,
        "phase": scenario.phase,
        "interface": scenario.interface,
        "profile": scenario.profile,
        "draw": scenario.draw,
        "token_unit": scenario.token_unit,
        "capacity": scenario.capacity,
        "problems": {projection: problem.to_dict() for projection, problem in problems.items()},
        "weight_bytes": {p: problem.weight_bytes * problem.num_experts for p, problem in problems.items()},
        "points": [
            {
                "num_tokens": p.num_tokens,
                "routed_m": p.routed_m,
                "tokens_per_expert": p.tokens_per_expert(experts),
                "published": p.published,
            }
            for p in scenario.points
        ],
    }


def _list(as_json: bool) -> None:
    from chord_lab.cli.verdict_tables import compact_table
    from chord_lab.records.places import shipped_scenarios
    from chord_lab.scenarios import get_scenario, scenario_names

    found, recorded = [get_scenario(name) for name in scenario_names()], shipped_scenarios()
    if as_json:
        print_json([scenario_dict(s) | {"recorded": s.name in recorded} for s in found])
        return
    console.print("model / shard / phase; both GEMMs as N x K of E local experts", highlight=False)
    table = compact_table()
    for column, justify in (
        ("", "left"), ("name", "left"), ("E", "right"), ("gate_up", "right"), ("down", "right"), ("profile", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for s in found:
        gate_up, down = s.problem("gate_up"), s.problem("down")
        shapes = (f"{gate_up.N}x{gate_up.K}", f"{down.N}x{down.K}")
        mark = "*" if s.name in recorded else ""
        table.add_row(mark, s.name, str(down.num_experts), *shapes, s.profile, style="bold" if mark else "")
    console.print(table)
    if recorded:
        console.print("* recorded: `chord-lab tune NAME` replays real measurements without a GPU", highlight=False)
    console.print(
        "Any other shard of these models works too, as in kimi-k2/ep4tp2/prefill; so does a config.json.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _show_model(name: str, as_json: bool) -> None:
    from chord_lab.scenarios import MODELS, scenario_names, shard_table

    model = MODELS[name]
    rows = shard_table(model)
    if as_json:
        print_json({"model": model, "shards": rows})
        return
    _print_shards(rows, f"{model.num_experts} experts, top {model.top_k}, {model.hidden} x {model.intermediate}")
    console.print("scenarios: " + ", ".join(n for n in scenario_names() if n.startswith(name + "/")))


def _show_config(path: str, shard: str, phase: str, shapes_only: bool, as_json: bool) -> None:
    from chord_lab.scenarios import PHASES, Shard, make_scenario, read_config, shard_table

    phase = phase or "decode"
    if phase not in PHASES:
        raise UserError(f"phase {phase!r} is unknown; legal: {', '.join(PHASES)}")
    config = read_config(path)
    if shapes_only:
        if config.quantization.why_not():
            notes.print(f"shapes only: {config.quantization.why_not()}", style="yellow", markup=False)
    else:
        reason = config.quantization.why_not()
        if reason:
            raise UserError(f"{path}: {reason}; --shapes-only takes its shapes all the same")
    if shard:
        _show_scenario(make_scenario(config.model, Shard.parse(shard), phase), as_json, config)
        return
    rows = shard_table(config.model)
    if as_json:
        print_json({**_config_dict(config), "shards": rows})
        return
    _print_config(config)
    _print_shards(rows, "pick one with --shard, as in --shard ep8")


def _config_dict(config: ModelConfig) -> dict[str, Any]:
    return {
        "model": config.model,
        "quantization": config.quantization,
        "weights": config.quantization.label(),
        "why_not": config.quantization.why_not(),
        "notes": config.notes,
    }


def _print_config(config: ModelConfig) -> None:
    m = config.model
    console.print(
        f"{m.name}: {m.num_experts} experts, top {m.top_k}, hidden {m.hidden}, intermediate {m.intermediate}, "
        f"{m.num_moe_layers} MoE layers; weights: {config.quantization.label()}",
        highlight=False,
    )
    for note in config.notes:
        console.print(f"  {note}", style="dim", highlight=False)


def _print_shards(rows: list[Any], title: str) -> None:
    from rich.table import Table

    table = Table(
        title=title, caption="table key: what vLLM's tuning files call this shape (N = intermediate per rank)"
    )
    for column in ("shard", "E", "gate_up N x K", "down N x K", "weights MiB / layer", "table key"):
        table.add_column(column, justify="left" if column in ("shard", "table key") else "right")
    for r in rows:
        shapes = (f"{r.gate_up_N} x {r.gate_up_K}", f"{r.down_N} x {r.down_K}")
        table.add_row(r.shard, str(r.num_experts), *shapes, f"{r.weight_mib:.0f}", r.table_key)
    console.print(table)


def _show_scenario(scenario: Scenario, as_json: bool, config: ModelConfig | None = None) -> None:
    from rich.table import Table

    content = scenario_dict(scenario)
    if as_json:
        print_json(content | (_config_dict(config) if config else {}))
        return
    if config:
        _print_config(config)
    console.print(f"[bold]{scenario.name}[/bold]  ({scenario.model.source})", highlight=False)
    for projection, problem in scenario.problems.items():
        gib = problem.weight_bytes * problem.num_experts / 2**30
        console.print(
            f"  {projection:<8} E={problem.num_experts} N={problem.N} K={problem.K} group {problem.group_size} "
            f"top_k {problem.top_k}; weights {gib:.2f} GiB a layer",
            highlight=False,
        )
    console.print(
        f"  profile {scenario.profile}, interface {scenario.interface}, draw {scenario.draw}\n"
        f"  tokens: {scenario.token_unit}"
        + (f"; capacity {scenario.capacity} rows per expert" if scenario.capacity else ""),
        highlight=False,
    )
    table = Table()
    for column in ("tokens", "routed_m", "rows per expert", "published"):
        table.add_column(column, justify="right")
    for p in content["points"]:
        cells = (str(p["num_tokens"]), str(p["routed_m"]), f"{p['tokens_per_expert']:.1f}")
        table.add_row(*cells, "yes" if p["published"] else "added")
    console.print(table)
