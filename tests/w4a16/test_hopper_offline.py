"""The Hopper kernels without a GPU: rules, defaults, and what each Triton release makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton has no build for this platform")

from w4a16_moe import DEVICES, PROFILES, MoeProblem, Schedule, resolve_schedule, why_illegal  # noqa: E402
from w4a16_moe.hopper import decode, prefill  # noqa: E402
from w4a16_moe.hopper.barriers import offsets_in  # noqa: E402
from w4a16_moe.hopper.heuristics import default_schedule  # noqa: E402
from w4a16_moe.hopper.rules import WGMMA_BLOCK_M, smem_wgmma  # noqa: E402
from w4a16_moe.hopper.wgmma_body import bodies_of  # noqa: E402
from w4a16_moe.hopper.wgmma_ptx import width  # noqa: E402
from w4a16_moe.offline import compile_kernel  # noqa: E402

H200 = DEVICES["nvidia_h200"]
GATE_UP = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)
DOWN = MoeProblem(num_experts=48, N=7168, K=2048)
TP8_GATE_UP = MoeProblem(num_experts=384, N=512, K=7168, top_k=8)
TP8_DOWN = MoeProblem(num_experts=384, N=7168, K=256)
PROBLEMS = {"gate_up": GATE_UP, "down": DOWN, "tp8_gate_up": TP8_GATE_UP, "tp8_down": TP8_DOWN}

DECODE = Schedule(
    kernel="mma_sync", block_m=16, block_n=256, block_k=128, num_warps=4, num_stages=2, ctas_per_sm=3, swap_ab=True,
    token_slicing="branched",
)  # fmt: skip
PREFILL = Schedule(
    kernel="wgmma", block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=6, swap_ab=True, persistent=True,
    tile_order="dynamic", token_slicing="branched",
)  # fmt: skip
STREAM_K = replace(DECODE, stream_k=True, persistent=True)
SPILL_BUDGET = 64  # bytes per thread outside the main loop: what seven CTAs per SM cost at 72 registers
DECODE_SCHEDULES = [
    DECODE,
    STREAM_K,
    replace(DECODE, block_n=128, ctas_per_sm=7),
    replace(DECODE, block_m=32, block_k=64, num_stages=4, ctas_per_sm=2),
    replace(DECODE, block_m=24, token_slicing="dynamic", ctas_per_sm=2),
    replace(DECODE, token_slicing="semi_static", dequant="exponent"),
    replace(DECODE, block_m=8, block_n=64, block_k=64, ctas_per_sm=4),
]
PREFILL_SCHEDULES = [
    PREFILL,
    replace(PREFILL, tile_order="static", dequant="exponent"),
    replace(PREFILL, block_m=96),
    replace(PREFILL, block_m=64, num_warps=16),
    replace(PREFILL, block_m=32, ctas_per_sm=2, token_slicing="static"),
    replace(PREFILL, block_m=192, block_n=128, num_stages=5, group_m=4),
    replace(PREFILL, block_m=256, block_n=128, num_stages=5),
    replace(PREFILL, block_m=112),
    replace(PREFILL, block_m=80),
    replace(PREFILL, block_m=72),
    replace(PREFILL, block_m=64, block_n=512),
    replace(PREFILL, block_m=64, block_n=512, token_slicing="static"),
    replace(PREFILL, block_m=56, block_n=512),
    replace(PREFILL, block_m=48, block_n=512),
    replace(PREFILL, block_m=24, block_n=512),
    replace(PREFILL, block_m=176, block_n=128, num_stages=5),
]


def ptxas(kernel, target: str = "sm_90a") -> str:
    """What the assembler says about a compiled kernel: registers, spills, warnings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [str(tool), f"-arch={target}", "-v", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr


def spilled(report: str) -> int:
    return max(map(int, re.findall(r"(\d+) bytes spill stores", report)), default=0)


def serialised(report: str) -> list[str]:
    """C75xx is how ptxas says that it serialises every wgmma: a third of the speed, and nothing else would show it."""
    return re.findall(r"C75[0-9][0-9]", report)


@pytest.mark.parametrize("schedule", DECODE_SCHEDULES, ids=Schedule.label)
def test_decode_kernels_compile_within_the_budget(schedule):
    kernel = compile_kernel(decode.compile_spec(schedule, GATE_UP, 8), 90)
    assert "mma.sync" in kernel.asm["ptx"]
    assert "ldmatrix" in kernel.asm["ptx"]
    assert spilled(ptxas(kernel)) <= SPILL_BUDGET


@pytest.mark.parametrize("schedule", PREFILL_SCHEDULES, ids=Schedule.label)
def test_wgmma_stays_asynchronous(schedule):
    spec = prefill.compile_spec(schedule, DOWN, 1)
    kernel = compile_kernel(spec, 90)
    report = ptxas(kernel)
    assert not serialised(report), report[:400]
    assert spilled(report) <= SPILL_BUDGET
    x, barriers = offsets_in(kernel.asm["ptx"], prefill.barrier_counts(spec.constexprs))
    assert x % 1024 == 0 and x < barriers < kernel.metadata.shared <= smem_wgmma(schedule)
    assert f"m64n{width(schedule.block_m)}k16" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    "schedule",
    [
        replace(PREFILL, token_slicing="static"),
        replace(PREFILL, block_m=256, block_n=128, num_stages=5, token_slicing="static"),
    ],
    ids=Schedule.label,
)
def test_contiguous_rows_stay_asynchronous(schedule):
    spec = prefill.compile_spec_contiguous(schedule, GATE_UP)
    kernel = compile_kernel(spec, 90)
    assert not serialised(ptxas(kernel))
    offsets_in(kernel.asm["ptx"], prefill.barrier_counts(spec.constexprs))
    assert kernel.metadata.shared <= smem_wgmma(schedule)


@pytest.mark.parametrize("capability", [100, 103])
def test_the_decode_kernel_compiles_for_blackwell(capability):
    """blackwell_decode_ep8 is checked by its resource report only: not measured."""
    assert not PROFILES["blackwell_decode_ep8"].measured
    kernel = compile_kernel(decode.compile_spec(DECODE, GATE_UP, 8), capability)
    assert f"sm_{capability}" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= DEVICES["nvidia_b200"].smem_per_cta


def test_barrier_offsets_are_refused_when_the_code_looks_different():
    with pytest.raises(RuntimeError, match="unexpected"):
        offsets_in("mov.u32 %r1, 0;", [256])


CHILD = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import test_hopper_offline as t
import triton
static = t.replace(t.PREFILL, token_slicing="static")
facts = {}
for name, spec in (
    ("mma_sync", t.decode.compile_spec(t.DECODE, t.DOWN, 1)),
    ("stream_k", t.decode.compile_spec(t.STREAM_K, t.GATE_UP, 8)),
    ("wgmma", t.prefill.compile_spec(t.PREFILL, t.GATE_UP, 8)),
    ("wide", t.prefill.compile_spec(t.replace(t.PREFILL, block_m=56, block_n=512), t.GATE_UP, 8)),
    ("contiguous", t.prefill.compile_spec_contiguous(static, t.DOWN)),
):
    kernel = t.compile_kernel(spec, 90)
    if name in ("wgmma", "wide", "contiguous"):
        t.offsets_in(kernel.asm["ptx"], t.prefill.barrier_counts(spec.constexprs))
    report = t.ptxas(kernel)
    facts[name] = [t.spilled(report), t.serialised(report)]
print(json.dumps({"version": triton.__version__, "facts": facts}))
"""


def test_every_triton_release_compiles_them_alike(triton_versions, root):
    """3.6, 3.7 and 3.8: no serialised wgmma, no spill beyond the budget, barriers where the code expects them."""
    assert triton_versions
    command = [sys.executable, "-c", CHILD, str(root / "kernels"), str(root / "tests" / "w4a16")]
    for version, variables in triton_versions.items():
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer["version"] == version
        for name, (spills, warnings) in answer["facts"].items():
            assert spills <= SPILL_BUDGET, (version, name)
            assert not warnings, (version, name, warnings)


ILLEGAL = {
    "swap_ab must be true": replace(DECODE, swap_ab=False),
    "split_k 2": replace(DECODE, split_k=2),
    "block_m 48": replace(DECODE, block_m=48),
    "block_n 512": replace(DECODE, block_n=512),
    "8 warps and one CTA per SM": replace(PREFILL, block_m=16, block_n=512, ctas_per_sm=2, token_slicing="static"),
    "block_m 36": replace(PREFILL, block_m=36),
    "block_m 136": replace(PREFILL, block_m=136),
    "does not divide K": replace(DECODE, block_k=256, num_stages=3),
    "persistent with stream_k": replace(DECODE, persistent=True),
    "tile_order static": replace(DECODE, tile_order="dynamic"),
    "8 warps of 16 rows": replace(DECODE, block_n=64, num_warps=8),
    "registers a thread": replace(DECODE, block_m=32, ctas_per_sm=6),
    "token_slicing semi_static is not in wgmma": replace(PREFILL, token_slicing="semi_static"),
    "wgmma is persistent": replace(PREFILL, persistent=False),
    "accumulators a thread": replace(PREFILL, block_m=256),
    "two CTAs per SM": replace(PREFILL, ctas_per_sm=2),
    "leave too few registers": replace(PREFILL, block_m=16, block_n=128, ctas_per_sm=3, token_slicing="static"),
    "bytes of shared memory": replace(PREFILL, num_stages=8),
}


@pytest.mark.parametrize("text", ILLEGAL)
def test_an_illegal_schedule_says_why_before_launch(text):
    profile = PROFILES["h200_decode_ep8"]
    illegal = why_illegal(ILLEGAL[text], GATE_UP, profile, H200)
    assert illegal is not None
    assert text in illegal.reason
    assert "\n" not in illegal.reason


def test_a_profile_of_other_kernels_names_itself():
    illegal = why_illegal(DECODE, GATE_UP, PROFILES["h200_grouped_prefill"], H200)
    assert illegal is not None
    assert "h200_grouped_prefill" in illegal.reason


@pytest.mark.parametrize("profile", [name for name, p in PROFILES.items() if p.layout == "fragment64"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_default_is_legal_at_every_size(problem, profile):
    device = DEVICES[PROFILES[profile].devices[0]]
    for routed_m in (1, 8, 160, 400, 768, 1024, 2048, 4096, 8192, 16384, 131072, 1_000_000):
        schedule = default_schedule(problem, routed_m, PROFILES[profile], device)
        assert why_illegal(schedule, problem, PROFILES[profile], device) is None


@pytest.mark.parametrize(("N", "K"), [(1408, 2048), (2880, 2880), (192, 704), (4096, 1536)])
def test_odd_shapes_have_a_schedule_too(N, K):
    problem = MoeProblem(num_experts=32, N=N // 64 * 64, K=K)
    for routed_m in (32, 4096):
        resolved = resolve_schedule(problem, routed_m, "h200_decode_ep8", "nvidia_h200")
        assert resolved.schedule is not None
        assert resolved.rule in ("heuristic", "default")


def test_a_shape_without_a_schedule_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="profile portable takes any shape"):
        resolve_schedule(MoeProblem(num_experts=2, N=64, K=64), 32, "h200_decode_ep8", "nvidia_h200")


@pytest.mark.parametrize("block_n", [128, 256, 512])
@pytest.mark.parametrize("block_m", WGMMA_BLOCK_M)
def test_bodies_cover_the_tile_and_shrink(block_m, block_n):
    """The largest body holds block_m tokens; each next one holds fewer; each is a number that wgmma has."""
    bodies = bodies_of(block_m, block_n, 8, "branched")
    assert bodies[0] == block_m
    assert 1 <= len(bodies) <= 4
    assert list(bodies) == sorted(set(bodies), reverse=True)
    assert all(0 < width(tokens) <= 128 and width(tokens) % 8 == 0 for tokens in bodies)
    assert all(tokens % width(tokens) == 0 for tokens in bodies)
    assert bodies_of(block_m, block_n, 8, "static") == (block_m,)
