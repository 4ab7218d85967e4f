"""``chord-lab routing``: rows per expert, blocks and padding of one routing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from chord_lab.cli import app, console, print_json
from chord_lab.errors import UserError

BAR_WIDTH = 32
SHOWN_BLOCKS = (8, 16, 32, 64, 96, 128, 176, 256)
MOST_BARS = 24
MOST_BLOCK_M = 1 << 20


@app.command("routing")
def routing(
    experts: Annotated[int, typer.Option(help="Local experts.")],
    tokens: Annotated[int, typer.Option(help="Tokens routed on this GPU.")],
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    block_m: Annotated[int, typer.Option(help="Rows of a tile; experts are padded to whole tiles.")] = 64,
    draw: Annotated[str, typer.Option(help="uniform, balanced, zipf:S or file:PATH (topk_ids or counts).")] = "uniform",
    seed: Annotated[int, typer.Option(help="Seed of the draw; the token count is part of it already.")] = 0,
    placement: Annotated[
        Path | None,
        typer.Option(help="File of where experts live (layer_list / device_list / ...): one GPU's share."),
    ] = None,
    gpu: Annotated[int, typer.Option(help="With --placement: whose rows to count.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """How tokens fall on experts: rows per expert, blocks, padding, balance."""
    result = describe_routing(
        experts=experts, tokens=tokens, top_k=top_k, block_m=block_m, draw=draw, seed=seed, placement=placement, gpu=gpu
    )
    if as_json:
        print_json(result)
        return
    _print(result)


def describe_routing(
    *,
    experts: int,
    tokens: int,
    top_k: int,
    block_m: int,
    draw: str,
    seed: int = 0,
    placement: Path | None = None,
    gpu: int = 0,
) -> dict[str, Any]:
    """Everything the command shows, under the JSON's keys."""
    from chord_lab import routing as r

    if not 1 <= block_m <= MOST_BLOCK_M:
        raise UserError(f"block_m must be at least 1 and at most {MOST_BLOCK_M}, not {block_m}")
    ids = r.draw_topk_ids(draw, num_tokens=tokens, num_experts=experts, top_k=top_k, seed=seed)
    load = _share_of_gpu(ids, placement, gpu, experts) if placement else r.local_load(ids, experts)
    tok_e = load.tok_e
    now = r.padding(tok_e, block_m)
    smaller = r.smaller_block(tok_e, block_m)
    return {
        "tok_e": tok_e,
        "num_m_blocks": now.num_m_blocks,
        "num_tokens_padded": now.num_tokens_padded,
        "padding_share": now.padding_share,
        "active_experts": int((tok_e > 0).sum()),
        "routed_m": int(tok_e.sum()),
        "num_foreign": load.num_foreign,
        "tokens_per_expert": float(tok_e.mean()),
        "most_loaded": int(tok_e.max()),
        "balancedness": r.balancedness(tok_e),
        "balancedness_definition": r.BALANCEDNESS_DEFINITION,
        "expert_ids": [e for e, count in enumerate(tok_e) for _ in range(-(-int(count) // block_m))],
        "block_m": block_m,
        "smaller_block": smaller,
        "padding": [r.padding(tok_e, m) for m in sorted({*SHOWN_BLOCKS, block_m})],
        "draw": draw,
        "seed": seed,
        "generator": r.GENERATOR,
        "num_tokens": tokens,
        "num_experts": experts,
        "top_k": top_k,
    }


def _share_of_gpu(ids: Any, placement: Path, gpu: int, experts: int) -> Any:
    """Rows of one GPU's experts; routes to the others are counted apart.

    A replicated expert's rows all count here: which copy a token takes is decided at run time.
    """
    from chord_lab import routing as r

    layer = r.read_expert_placement(placement)[0]
    if layer.num_logical != experts:
        raise UserError(f"{placement} places {layer.num_logical} experts, but --experts is {experts}")
    if not 0 <= gpu < len(layer.devices):
        raise UserError(f"--gpu must be from 0 to {len(layer.devices) - 1}, not {gpu}")
    return r.local_load(ids, len(layer.devices[gpu]), layer.expert_map(gpu))


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    tok_e = result["tok_e"]
    console.print(
        f"{result['num_tokens']} tokens x top {result['top_k']} of {result['num_experts']} experts, "
        f"draw {result['draw']}, seed {result['seed']} ({result['generator']})",
        highlight=False,
    )
    balance = result["balancedness"]
    console.print(
        f"{result['routed_m']} rows, {result['tokens_per_expert']:.1f} per expert (busiest {result['most_loaded']}), "
        f"{result['active_experts']} active; balancedness {'-' if balance is None else f'{balance:.2f}'} "
        f"({result['balancedness_definition'].split(' = ')[1]})",
        highlight=False,
    )
    table = Table(title="padding by block_m")
    for name in ("block_m", "blocks", "padded rows", "padding share"):
        table.add_column(name, justify="right")
    for row in result["padding"]:
        style = "bold" if row.block_m == result["block_m"] else ""
        cells = (row.block_m, row.num_m_blocks, row.num_tokens_padded, f"{row.padding_share:.1%}")
        table.add_row(*map(str, cells), style=style)
    if result["num_foreign"]:
        console.print(f"{result['num_foreign']} routes go to experts of other GPUs: counted apart", highlight=False)
    console.print(table)
    smaller = result["smaller_block"]
    if smaller:
        console.print(
            f"[yellow]block_m {result['block_m']} pads {result['padding_share']:.1%}: block_m {smaller.block_m} needs "
            f"{smaller.num_m_blocks} blocks (of {result['num_m_blocks']}) and pads {smaller.padding_share:.1%}[/yellow]"
        )
    _print_bars(tok_e)


def _print_bars(tok_e: Any) -> None:
    """Rows per expert, busiest first; many experts are thinned and said so."""
    order = sorted((e for e in range(len(tok_e)) if tok_e[e]), key=lambda e: -int(tok_e[e]))
    shown = order[:MOST_BARS]
    most = max(1, int(tok_e.max()))
    for expert in shown:
        bar = "█" * max(1, round(BAR_WIDTH * int(tok_e[expert]) / most))
        console.print(f"expert {expert:>4}  {int(tok_e[expert]):>6}  {bar}", highlight=False)
    if len(order) > len(shown):
        console.print(f"... {len(order) - len(shown)} less loaded experts not shown (--json has all)", style="dim")
    if len(order) < len(tok_e):
        console.print(f"{len(tok_e) - len(order)} experts got no row", style="dim")
