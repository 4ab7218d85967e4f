"""The Hopper kernels on the card: right everywhere, bit-equal when repeated, capturable, past 2^31 elements."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from w4a16_moe import (
    DEVICES,
    PROFILES,
    MoeProblem,
    Schedule,
    align_to_blocks,
    build_m_indices,
    get_profile,
    grouped_contiguous_gemm,
    grouped_masked_gemm,
    indexed_gemm,
    pack,
    why_illegal,
)
from w4a16_moe.hopper.workspace import SPARE, counters
from w4a16_moe.reference import gemm_reference, relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = 3e-3  # bf16 output rounding alone is 1.66e-3
H200 = DEVICES["nvidia_h200"]
SHAPES = {
    "ep8/gate_up": MoeProblem(num_experts=48, N=4096, K=7168, top_k=8),
    "ep8/down": MoeProblem(num_experts=48, N=7168, K=2048),
    "tp8/gate_up": MoeProblem(num_experts=384, N=512, K=7168, top_k=8),
    "tp8/down": MoeProblem(num_experts=384, N=7168, K=256),
    "small": MoeProblem(num_experts=12, N=512, K=1024, top_k=4),
}
DECODE = Schedule(
    kernel="mma_sync", block_m=16, block_n=256, block_k=128, num_warps=4, num_stages=2, ctas_per_sm=3, swap_ab=True,
    token_slicing="branched",
)  # fmt: skip
STREAM_K = replace(DECODE, stream_k=True, persistent=True)
PREFILL = Schedule(
    kernel="wgmma", block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=6, swap_ab=True, persistent=True,
    tile_order="dynamic", token_slicing="branched",
)  # fmt: skip
WIDE = replace(PREFILL, block_m=56, block_n=512)
EACH = [DECODE, STREAM_K, PREFILL, WIDE]
SCHEDULES = [
    DECODE,
    replace(DECODE, block_m=8),
    replace(DECODE, block_n=128, ctas_per_sm=6),
    replace(DECODE, block_n=64, block_k=64),
    replace(DECODE, block_m=24, token_slicing="static", ctas_per_sm=2),
    replace(DECODE, block_m=24, token_slicing="semi_static", ctas_per_sm=2),
    replace(DECODE, block_m=32, token_slicing="dynamic", ctas_per_sm=2),
    replace(DECODE, block_m=32, block_k=64, num_stages=4, ctas_per_sm=2),
    replace(DECODE, num_warps=8, ctas_per_sm=2, dequant="exponent"),
    STREAM_K,
    replace(STREAM_K, block_m=24, token_slicing="dynamic", ctas_per_sm=2),
    replace(STREAM_K, block_m=32, block_n=128, token_slicing="semi_static", ctas_per_sm=2),
    PREFILL,
    replace(PREFILL, tile_order="static", dequant="exponent"),
    replace(PREFILL, token_slicing="static", num_stages=4),
    replace(PREFILL, block_m=96),
    replace(PREFILL, block_m=64, num_warps=16),
    replace(PREFILL, block_m=32, ctas_per_sm=2, token_slicing="static"),
    replace(PREFILL, block_m=16),
    replace(PREFILL, block_m=192, block_n=128, num_stages=5, group_m=4),
    replace(PREFILL, block_m=256, block_n=128, num_stages=5),
    replace(PREFILL, block_m=112),
    WIDE,
    replace(PREFILL, block_m=64, block_n=512, token_slicing="static"),
    replace(PREFILL, block_m=24, block_n=512, dequant="exponent"),
    replace(PREFILL, block_m=176, block_n=128, num_stages=5),
]
ROUTINGS = {
    "one token": [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    "all on one": [0, 0, 300, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    "ragged": [0, 1, 7, 8, 9, 63, 64, 65, 0, 129, 200, 257],
    "empty ends": [0, 5, 0, 0, 17, 33, 0, 128, 127, 0, 2, 0],
}


@cache
def layer(shape: str, profile: str = "h200_decode_ep8"):
    problem = SHAPES[shape]
    generator = torch.Generator(device="cuda").manual_seed(0)
    size = (problem.num_experts, problem.N, problem.K)
    codes = torch.randint(0, 16, size, dtype=torch.uint8, device="cuda", generator=generator)
    scales = torch.rand((*size[:2], problem.num_groups), device="cuda", generator=generator) * 0.02 + 0.002
    return pack(codes, scales.to(torch.bfloat16), problem, get_profile(profile))


def normal(shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).bfloat16()


def ids_of_counts(counts) -> torch.Tensor:
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(0))
    return flat[order].unsqueeze(1).cuda()


def random_routes(shape: str, num_tokens: int) -> torch.Tensor:
    problem = SHAPES[shape]
    scores = normal((num_tokens, problem.num_experts), num_tokens).float()
    ids = scores.topk(min(8, problem.num_experts), dim=1).indices
    return ids if problem.top_k > 1 else ids.reshape(-1, 1)


def run(packed, ids, schedule, expert_map=None, x=None):
    """One launch into a NaN-filled buffer."""
    x = normal((ids.shape[0], packed.problem.K), 1) if x is None else x
    out = torch.full((ids.numel(), packed.problem.N), float("nan"), dtype=torch.bfloat16, device="cuda")
    routing = align_to_blocks(ids, packed.problem.num_experts, schedule.block_m, expert_map)
    return indexed_gemm(x, packed, routing, top_k=ids.shape[1], schedule=schedule, out=out), x


def legal(schedule: Schedule, shape: str) -> bool:
    return why_illegal(schedule, SHAPES[shape], PROFILES["h200_decode_ep8"], H200) is None


REAL = [
    DECODE,
    replace(DECODE, block_n=128, ctas_per_sm=6),
    replace(DECODE, block_m=8, block_k=64, ctas_per_sm=4),
    STREAM_K,
    PREFILL,
    replace(PREFILL, block_m=64, tile_order="static"),
    replace(PREFILL, block_m=32, ctas_per_sm=2, token_slicing="static"),
    replace(PREFILL, block_m=192, block_n=128, num_stages=5),
    replace(PREFILL, block_m=48, block_n=512),
]  # every schedule is compiled for each shape: the others run at the small one


@cache
def truth(shape: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routes, activations and reference, made once a shape: with 384 experts that takes seconds."""
    ids = random_routes(shape, num_tokens)
    x = normal((ids.shape[0], SHAPES[shape].K), 1)
    return ids, x, gemm_reference(x, layer(shape), ids, top_k=ids.shape[1])


@pytest.mark.parametrize("schedule", REAL, ids=Schedule.label)
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "small"])
def test_schedules_at_real_shapes(shape, schedule):
    if not legal(schedule, shape):
        pytest.skip(f"{schedule.label()} is illegal for {shape}")
    ids, x, reference = truth(shape, {"mma_sync": 40, "wgmma": 260}[schedule.kernel])
    first, again = (run(layer(shape), ids, schedule, x=x)[0] for _ in range(2))
    error = relative_error(first, reference)
    assert error <= TOLERANCE, f"{schedule.label()}: relative error {error:.2e}"
    assert torch.equal(again, first), f"{schedule.label()}: not bit-equal when repeated"


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=Schedule.label)
def test_awkward_routings(schedule, routing):
    if not legal(schedule, "small"):
        pytest.skip(f"{schedule.label()} is illegal for the small shape")
    ids = ids_of_counts(ROUTINGS[routing])
    first, x = run(layer("small"), ids, schedule)
    again, _x = run(layer("small"), ids, schedule)
    error = relative_error(first, gemm_reference(x, layer("small"), ids, top_k=1))
    assert error <= TOLERANCE, f"{schedule.label()}: relative error {error:.2e}"
    assert torch.equal(again, first), f"{schedule.label()}: not bit-equal when repeated"


@pytest.mark.parametrize("schedule", EACH, ids=Schedule.label)
def test_foreign_routes_stay_untouched(schedule):
    packed = layer("small")
    expert_map = torch.full((48,), -1, dtype=torch.int32, device="cuda")
    expert_map[5:17] = torch.arange(12, dtype=torch.int32, device="cuda")
    ids = normal((90, 48), 3).float().topk(4, dim=1).indices
    out, x = run(packed, ids, schedule, expert_map)
    local = expert_map[ids].reshape(-1)
    reference = gemm_reference(x, packed, expert_map[ids], top_k=4)
    assert relative_error(out[local >= 0], reference[local >= 0]) <= TOLERANCE
    assert bool(torch.isnan(out[local < 0].float()).all())


@pytest.mark.parametrize("schedule", EACH, ids=Schedule.label)
def test_blocks_of_nobody_are_skipped(schedule):
    """A block table as others build it under expert parallelism: -1 for blocks of experts that live elsewhere."""
    packed = layer("small")
    ids = ids_of_counts(ROUTINGS["ragged"])
    routing = align_to_blocks(ids, 12, schedule.block_m)
    used = int(routing.num_tokens_padded) // schedule.block_m
    routing.expert_ids[1:used:2] = -1
    x = normal((ids.shape[0], 1024), 1)
    out = torch.full((ids.numel(), 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    indexed_gemm(x, packed, routing, top_k=1, schedule=schedule, out=out)
    blocks = routing.sorted_ids[: used * schedule.block_m].view(used, -1)
    skipped = blocks[1::2][blocks[1::2] < ids.numel()].long()
    kept = blocks[::2][blocks[::2] < ids.numel()].long()
    assert bool(torch.isnan(out[skipped].float()).all())
    assert relative_error(out[kept], gemm_reference(x, packed, ids, top_k=1)[kept]) <= TOLERANCE


@pytest.mark.parametrize("schedule", EACH, ids=Schedule.label)
def test_nan_in_unrouted_rows_never_leaks(schedule):
    packed = layer("small")
    ids = ids_of_counts(ROUTINGS["empty ends"])
    x = normal((ids.shape[0] + 64, 1024), 1)
    x[ids.shape[0] :] = float("nan")
    out, _x = run(packed, ids, schedule, x=x[: ids.shape[0]])
    assert not bool(torch.isnan(out.float()).any())


@pytest.mark.parametrize("scale", [2.0**-105, 2.0**14])
@pytest.mark.parametrize("dequant", ["subnormal", "exponent"])
@pytest.mark.parametrize("schedule", [DECODE, PREFILL], ids=Schedule.label)
def test_scales_at_the_ends_of_the_range(schedule, dequant, scale):
    """The reference is scaled by a power of two on the way, so that fp32 does not run out of range first."""
    problem = MoeProblem(num_experts=2, N=256, K=256)
    codes = torch.randint(0, 16, (2, 256, 256), dtype=torch.uint8, device="cuda")
    scales = torch.full((2, 256, 8), scale, dtype=torch.bfloat16, device="cuda")
    packed = pack(codes, scales, problem, get_profile("h200_decode_ep8"))
    ids = ids_of_counts([40, 50])
    out, x = run(packed, ids, replace(schedule, dequant=dequant))
    plain = pack(codes, torch.ones_like(scales), problem, get_profile("h200_decode_ep8"))
    assert relative_error(out.double() / scale, gemm_reference(x, plain, ids, top_k=1).double()) <= TOLERANCE


@pytest.mark.parametrize("schedule", EACH, ids=Schedule.label)
def test_graph_replays_with_another_routing(schedule):
    """One capture serves every routing: nothing was read back, counters and flags are back to zero."""
    packed = layer("small")
    ids = ids_of_counts(ROUTINGS["ragged"])
    x = normal((ids.shape[0], 1024), 1)
    out = torch.empty((ids.shape[0], 512), dtype=torch.bfloat16, device="cuda")
    static_ids = ids.clone()

    def step() -> None:
        indexed_gemm(x, packed, align_to_blocks(static_ids, 12, schedule.block_m), top_k=1, schedule=schedule, out=out)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        static_ids.copy_(ids[torch.randperm(ids.shape[0], generator=torch.Generator().manual_seed(seed)).cuda()])
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, gemm_reference(x, packed, static_ids, top_k=1)) <= TOLERANCE


@pytest.mark.parametrize("schedule", [STREAM_K, PREFILL], ids=Schedule.label)
def test_two_graphs_replay_at_once(schedule):
    """Each capture has counters of its own: two graphs on two streams do not meet in them, nor does a third launch."""
    packed = layer("small")
    jobs = []
    for name in ("ragged", "empty ends"):
        ids = ids_of_counts(ROUTINGS[name])
        x = normal((ids.shape[0], 1024), 1)
        routing = align_to_blocks(ids, 12, schedule.block_m)
        expected = indexed_gemm(x, packed, routing, top_k=1, schedule=schedule)
        out = torch.empty_like(expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            indexed_gemm(x, packed, routing, top_k=1, schedule=schedule, out=out)
        jobs.append((graph, torch.cuda.Stream(), x, routing, expected, out))
    for _ in range(20):
        for graph, stream, *_rest in jobs:
            with torch.cuda.stream(stream):
                graph.replay()
        _graph, _stream, x, routing, expected, _out = jobs[0]
        assert torch.equal(indexed_gemm(x, packed, routing, top_k=1, schedule=schedule), expected)
    torch.cuda.synchronize()
    for *_rest, expected, out in jobs:
        assert torch.equal(out, expected)


def test_counters_of_captures_are_apart():
    """From the stock they are distinct, aligned and never set to zero again; past its end the graph zeroes them."""
    where = torch.device("cuda")
    counters(2, where)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [counters(num, where) for num in (2, 529, 5)]
        beyond = counters(SPARE + 1, where)
        beyond += 1
    for one, following in itertools.pairwise(made):
        assert one.data_ptr() % 16 == 0
        assert one.data_ptr() + 4 * one.numel() <= following.data_ptr()
    for _ in range(2):
        graph.replay()
        assert all(not one.any() for one in made)
        assert (beyond == 1).all()


@pytest.mark.parametrize("schedule", [STREAM_K, PREFILL], ids=Schedule.label)
def test_two_streams_at_once(schedule):
    packed = layer("small")
    jobs = [(ids_of_counts(ROUTINGS[name]), torch.cuda.Stream()) for name in ("ragged", "empty ends")]
    expected = [run(packed, ids, schedule)[0] for ids, _ in jobs]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for ids, stream in jobs:
            with torch.cuda.stream(stream):
                results.append(run(packed, ids, schedule)[0])
    torch.cuda.synchronize()
    for index, result in enumerate(results):
        assert torch.equal(result, expected[index % 2])


@pytest.mark.parametrize("schedule", EACH, ids=Schedule.label)
def test_a_thousand_launches_are_equal(schedule):
    packed = layer("small")
    ids = ids_of_counts(ROUTINGS["ragged"])
    first, x = run(packed, ids, schedule)
    routing = align_to_blocks(ids, 12, schedule.block_m)
    out = torch.empty_like(first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        indexed_gemm(x, packed, routing, top_k=1, schedule=schedule, out=out)
        differing += (out != first).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("schedule", [DECODE, PREFILL], ids=Schedule.label)
def test_offsets_past_2_31(schedule):
    """x and y of more than 2^31 elements; 300 rows near the end are routed."""
    problem = MoeProblem(num_experts=2, N=7168, K=7168)
    if torch.cuda.mem_get_info()[0] < 14e9:
        pytest.skip("needs 14 GB of free device memory")
    codes = torch.randint(0, 16, (2, 7168, 7168), dtype=torch.uint8, device="cuda")
    scales = torch.full((2, 7168, 224), 0.01, dtype=torch.bfloat16, device="cuda")
    packed = pack(codes, scales, problem, get_profile("h200_decode_ep8"))
    num_rows = 2**31 // 7168 + 400
    ids = torch.full((num_rows, 1), 7, dtype=torch.int64, device="cuda")
    ids[-300:] = torch.randint(0, 2, (300, 1), device="cuda")
    expert_map = torch.tensor([0, 1, -1, -1, -1, -1, -1, -1], dtype=torch.int32, device="cuda")
    x = torch.empty((num_rows, 7168), dtype=torch.bfloat16, device="cuda")
    x[-300:] = normal((300, 7168), 1)
    out, _x = run(packed, ids, schedule, expert_map, x=x)
    reference = gemm_reference(x[-300:].contiguous(), packed, ids[-300:], top_k=1)
    assert relative_error(out[-300:], reference) <= TOLERANCE


CONTIGUOUS = [
    replace(PREFILL, token_slicing="static", num_stages=4),
    replace(PREFILL, block_m=256, block_n=128, num_stages=4, token_slicing="static"),
    replace(PREFILL, block_m=256, block_n=128, num_stages=5, token_slicing="static", tile_order="static", group_m=4),
]


@pytest.mark.parametrize("counts", [[128] * 12, [256, 0, 130, 65, 128, 512, 1, 0, 300, 128, 0, 7], [0] * 11 + [3]])
@pytest.mark.parametrize("schedule", CONTIGUOUS, ids=Schedule.label)
def test_grouped_contiguous(schedule, counts):
    """Groups of whole and partial 128 rows, a block of padding in the middle, tiles of 256 over two experts."""
    packed = layer("small", "h200_grouped_prefill")
    m_indices = build_m_indices(counts, device="cuda")
    m_indices = torch.cat((m_indices[:128], torch.full((128,), -1, dtype=torch.int32, device="cuda"), m_indices[128:]))
    x = normal((m_indices.numel(), 1024), 1)
    x[m_indices < 0] = float("nan")
    out = torch.full((m_indices.numel(), 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    grouped_contiguous_gemm(x, packed, m_indices, schedule=schedule, out=out)
    real = m_indices >= 0
    reference = gemm_reference(x[real], packed, m_indices[real].unsqueeze(1), top_k=1)
    assert relative_error(out[real], reference) <= TOLERANCE
    assert bool(torch.isnan(out[~real].float()).all())


@pytest.mark.parametrize("interface", ["grouped_contiguous", "grouped_masked"])
def test_grouped_calls_replay_from_a_graph(interface):
    """The public calls, checks and all: nothing in them waits for the device."""
    packed = layer(
        "small", {"grouped_contiguous": "h200_grouped_prefill", "grouped_masked": "h200_grouped_decode"}[interface]
    )
    counts = [0, 1, 8, 9, 16, 17, 32, 5, 0, 31, 24, 3]
    if interface == "grouped_masked":
        index = torch.tensor(counts, dtype=torch.int32, device="cuda")
        x = normal((12, 32, 1024), 1)
        call = partial(grouped_masked_gemm, x, packed, index, expected_m=12)
    else:
        index = build_m_indices(counts, device="cuda")
        x = normal((index.numel(), 1024), 1)
        call = partial(grouped_contiguous_gemm, x, packed, index)
    plain = torch.zeros((*x.shape[:-1], 512), dtype=torch.bfloat16, device="cuda")
    call(out=plain)
    out = torch.zeros_like(plain)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out=out)
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, plain)


@pytest.mark.parametrize("max_m", [32, 64, 300])
@pytest.mark.parametrize("schedule", [STREAM_K, replace(STREAM_K, block_m=24), PREFILL, WIDE, None], ids=str)
def test_grouped_masked(schedule, max_m):
    """Capacity changes nothing but the buffers; rows past masked_m are neither read nor written."""
    packed = layer("small", "h200_grouped_decode")
    masked_m = torch.tensor([0, 1, 8, 9, 16, 17, 32, 5, 0, 31, 24, 3], dtype=torch.int32, device="cuda")
    x = normal((12, max_m, 1024), 1)
    valid = torch.arange(max_m, device="cuda")[None, :] < masked_m[:, None]
    x[~valid] = float("nan")
    out = torch.full((12, max_m, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    grouped_masked_gemm(x, packed, masked_m, expected_m=12, schedule=schedule, out=out)
    experts = torch.arange(12, device="cuda")[:, None].expand(12, max_m)[valid].unsqueeze(1)
    assert relative_error(out[valid], gemm_reference(x[valid], packed, experts, top_k=1)) <= TOLERANCE
    assert bool(torch.isnan(out[~valid].float()).all())
