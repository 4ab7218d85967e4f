"""Compiling without a GPU: the facts, their cache, and every Triton release at hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton has no build for this platform")

from w4a16_moe import DEVICES, MoeProblem, Schedule, compile_facts, occupancy, routing_gpu  # noqa: E402
from w4a16_moe.families import kernel_module  # noqa: E402
from w4a16_moe.offline import (  # noqa: E402
    CompileError,
    CompileFacts,
    CompileSpec,
    compile_kernel,
    count_loads,
    count_mma,
    disassemble,
)
from w4a16_moe.portable_kernel import sum_parts_kernel  # noqa: E402
from w4a16_moe.portable_rules import smem_estimate  # noqa: E402

PROBLEM = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)
DECODE = Schedule(kernel="portable", block_m=8, block_n=128, block_k=128, num_warps=4, num_stages=4, swap_ab=True)
PREFILL = Schedule(kernel="portable", block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4, swap_ab=True)
TENSOR_CORE = {80: {"HMMA"}, 90: {"HMMA", "HGMMA"}, 100: {"HMMA", "UTCHMMA"}, 103: {"HMMA", "UTCHMMA"}}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "facts"


@pytest.mark.parametrize("capability", [80, 90, 100, 103])
@pytest.mark.parametrize("schedule", [DECODE, PREFILL], ids=Schedule.label)
def test_facts_of_real_shapes(schedule, capability, cache):
    """Tensor cores are used, loads are 16 bytes wide, nothing spills: from Ampere to Blackwell."""
    facts = compile_facts(schedule, PROBLEM, capability, cache_dir=cache)
    assert facts.spills_bytes == facts.stack_bytes == 0
    assert 32 <= facts.registers <= 255
    assert facts.num_warps == schedule.num_warps
    assert sum(facts.mma_instructions.values()) >= 4
    if facts.load_widths:  # empty where Triton's disassembler does not know the target (3.6: sm_103a)
        assert set(facts.mma_instructions) <= TENSOR_CORE[capability]
        assert facts.load_widths["128"] >= 4
        assert not {"8", "16"} & set(facts.load_widths)
    else:
        assert set(facts.mma_instructions) <= {"mma.sync", "tcgen05.mma"}
    assert facts.smem_bytes <= DEVICES["nvidia_a100_sxm4_80gb"].smem_per_cta
    assert (facts.triton_version, facts.capability) == (triton.__version__, capability)
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts.ptxas_version)


@pytest.mark.parametrize(
    "changes", [{}, {"num_stages": 3}, {"block_m": 64}, {"block_n": 256}, {"block_k": 128}], ids=str
)
def test_the_shared_memory_estimate_is_close_to_what_the_compiler_takes(changes, cache):
    """`why_illegal` judges by the estimate, so it must neither pass what cannot fit nor refuse what does."""
    schedule = replace(PREFILL, **changes)
    for capability in (80, 90):
        exact = compile_facts(schedule, PROBLEM, capability, cache_dir=cache).smem_bytes
        assert smem_estimate(schedule, capability) == pytest.approx(exact, rel=0.15)


def test_wgmma_takes_weights_from_registers_on_hopper(cache):
    """The 128-row tile must use warpgroup instructions and keep two CTAs on an SM."""
    facts = compile_facts(PREFILL, PROBLEM, 90, cache_dir=cache)
    assert set(facts.mma_instructions) == {"HGMMA"}
    assert occupancy(facts, DEVICES["nvidia_h200"]) >= 2
    ptx = compile_kernel(kernel_module("portable").compile_spec(PREFILL, PROBLEM, 8), 90).asm["ptx"]
    operands = re.search(
        r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \{[^}]*\}, *\{([^}]*)\}", one_line(ptx)
    )
    assert operands, "the weights' operand is a set of registers, not a shared-memory descriptor"


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_slicing": "semi_static", "block_m": 16},
        {"token_slicing": "semi_static", "block_m": 32, "block_k": 64},
        {"token_slicing": "dynamic", "block_m": 16},
        {"split_k": 4},
        {"persistent": True, "ctas_per_sm": 2, "group_m": 4},
        {"swap_ab": False, "block_m": 64},
        {"dequant": "exponent"},
    ],
    ids=str,
)
def test_every_knob_compiles_without_spilling(changes, cache):
    facts = compile_facts(replace(DECODE, **changes), PROBLEM, 90, cache_dir=cache)
    assert facts.spills_bytes <= 8  # under Triton 3.6 semi_static parks one register, outside the main loop


def test_dequantisation_variants_differ_in_code(cache):
    digests = {
        compile_facts(replace(DECODE, dequant=d), PROBLEM, 90, cache_dir=cache).cubin_digest
        for d in ("subnormal", "exponent")
    }
    assert len(digests) == 2


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_constants_of_the_subnormal_path_reach_ptx_exactly(capability):
    """2^113, 2^109 and -2^-17 as bf16 bits. Triton makes -7.99e-06 of the last as a literal: 5 % off, no error."""
    ptx = compile_kernel(kernel_module("portable").compile_spec(DECODE, PROBLEM, 8), capability).asm["ptx"]
    for value, found in (
        (2.0**113, r"mov\.b16 \s*%rs\d+, 0x7800;"),
        (2.0**109, r"mov\.b16 \s*%rs\d+, 0x7600;"),
        (-(2.0**-17), r"mov\.b32 factor, 0xb700b700;"),
    ):
        bits = int(torch.tensor(value, dtype=torch.bfloat16).view(torch.uint16))
        assert f"{bits:04x}" in found, "the pattern is the value's bits"
        assert re.search(found, ptx), f"{value} is not among the constants"


def longest_loop(sass: str) -> list[str]:
    """Opcodes of the longest loop body: from a label to the jump back to it."""
    lines = sass.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_\S+):", line))}
    loops = [
        lines[labels[m.group(1)] : i]
        for i, line in enumerate(lines)
        if (m := re.search(r"BRA.*`\((\.L_\S+)\)", line)) and labels.get(m.group(1), i) < i
    ]
    body = max(loops, key=len)
    opcodes = (re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line) for line in body)
    return [m.group(1) for m in opcodes if m]


@pytest.mark.parametrize(
    "schedule, tensor_ops, limit", [(PREFILL, 4, 175), (DECODE, 16, 350)], ids=["prefill", "decode"]
)
def test_weights_go_from_shared_memory_to_the_tensor_cores_without_a_detour(schedule, tensor_ops, limit):
    """The stored order lets a thread read its share of a row at once. If Triton's layouts stop agreeing with it, the
    main loop grows by half with byte loads, shuffles or stores back to shared memory, and nothing else tells."""
    kernel = compile_kernel(kernel_module("portable").compile_spec(schedule, PROBLEM, 8), 90)
    loop = longest_loop(disassemble(kernel.asm["cubin"]))
    assert sum("MMA" in opcode for opcode in loop) == tensor_ops
    assert not [opcode for opcode in loop if opcode.startswith(("STS", "SHFL", "LDS.U"))]
    assert len(loop) <= limit  # 151 to 158 and 322 to 334, by Triton release


@pytest.mark.parametrize("block_m, block_k", [(16, 128), (32, 64)])
def test_token_slices_are_copied_ahead_into_swizzled_memory(block_m, block_k):
    """A slice's load feeds a product under an `if`: unless told, Triton neither pipelines nor swizzles it."""
    schedule = replace(DECODE, block_m=block_m, block_k=block_k, token_slicing="semi_static")
    kernel = compile_kernel(kernel_module("portable").compile_spec(schedule, PROBLEM, 8), 90)
    x = r"memdesc<\d+x64x8xbf16, #(\w+)"
    layouts = set(re.findall(x, kernel.asm["ttgir"]))
    encodings = [re.search(rf"#{name} = (.*)", kernel.asm["ttgir"]).group(1) for name in layouts]
    assert encodings and all(re.search("maxPhase = 8|swizzlingByteWidth = 128", text) for text in encodings)
    loop = longest_loop(disassemble(kernel.asm["cubin"]))
    copies = 2 * block_m // 8 if block_k == 128 else block_m // 8
    assert sum(opcode.startswith("LDGSTS") for opcode in loop) >= copies + 2
    assert not [opcode for opcode in loop if opcode.startswith(("LDG.", "LDL", "STL"))]


def test_the_second_call_reads_the_cache_and_the_key_follows_the_schedule(cache):
    first = compile_facts(DECODE, PROBLEM, 90, cache_dir=cache)
    second = compile_facts(DECODE, PROBLEM, 90, cache_dir=cache)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first == second
    assert first.seconds > 0 == second.seconds
    other = compile_facts(replace(DECODE, num_stages=3), PROBLEM, 90, cache_dir=cache)
    assert not other.from_cache
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"null", b"[]", b'{"registers": 1}', b'{"registers":' + b"\0" * 20]
)
def test_a_corrupt_entry_is_a_miss_with_one_line(content, cache, capsys):
    first = compile_facts(DECODE, PROBLEM, 90, cache_dir=cache)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    again = compile_facts(DECODE, PROBLEM, 90, cache_dir=cache)
    assert again == first
    assert not again.from_cache
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"{entry.name} is unreadable" in message
    assert json.loads(entry.read_text())["registers"] == first.registers


def test_an_unwritable_cache_costs_nothing_but_a_line(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compile_facts(DECODE, PROBLEM, 90, cache_dir=blocked).registers > 0
    assert "cannot write" in capsys.readouterr().err


def test_unknown_capability_and_refused_schedules_are_one_line(cache):
    with pytest.raises(ValueError, match="capability=70: legal are 80"):
        compile_facts(DECODE, PROBLEM, 70, cache_dir=cache)
    with pytest.raises(CompileError) as caught:
        compile_facts(replace(DECODE, block_n=96), PROBLEM, 90, cache_dir=cache)  # no power of two
    assert "\n" not in str(caught.value)


def test_occupancy_is_the_least_of_registers_shared_memory_and_threads():
    facts = CompileFacts(
        registers=128, spills_bytes=0, stack_bytes=0, smem_bytes=40_000, num_warps=4, mma_instructions={},
        load_widths={},
        ptx_digest="", cubin_digest="", capability=90, triton_version="", ptxas_version="",
    )  # fmt: skip
    h200 = DEVICES["nvidia_h200"]
    assert occupancy(facts, h200) == 4  # 65536 / (128 * 128)
    assert occupancy(replace(facts, registers=40), h200) == 5  # 233472 / (40000 + 1024)
    assert occupancy(replace(facts, registers=16, smem_bytes=0, num_warps=16), h200) == 4  # 2048 / 512
    assert occupancy(replace(facts, registers=129), h200) == 3  # 136 after rounding to 8 per thread
    assert occupancy(replace(facts, registers=255, num_warps=16), h200) == 0
    assert occupancy(replace(facts, registers=16, smem_bytes=0, num_warps=1), h200) == 32


def test_counting_instructions_in_sass():
    sass = """
        /*0100*/ @!P0 LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0110*/ LDG.E.U16 R7, desc[UR4][R8.64] ;
        /*0120*/ LDG.E R7, desc[UR4][R8.64] ;
        /*0130*/ HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0140*/ HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
    """
    assert count_loads(sass) == {"128": 1, "16": 1, "32": 1}
    assert count_mma(sass) == {"HGMMA": 1, "HMMA": 1}


@pytest.mark.slow
def test_the_portable_kernel_compiles_under_every_triton_at_hand(triton_versions, tmp_path):
    """One child per release: same kernel, no spills, tensor cores, on three generations of GPU."""
    code = (
        "import sys, triton\n"
        "from w4a16_moe import MoeProblem, Schedule, compile_facts\n"
        "problem = MoeProblem(num_experts=48, N=4096, K=7168, top_k=8)\n"
        "base = dict(kernel='portable', block_n=128, num_stages=4, swap_ab=True)\n"
        "for more in (dict(block_m=8, block_k=128, num_warps=4), dict(block_m=128, block_k=64, num_warps=8),\n"
        "             dict(block_m=32, block_k=64, num_warps=4, token_slicing='semi_static')):\n"
        "    for capability in (80, 90, 100, 103):\n"
        "        facts = compile_facts(Schedule(**base, **more), problem, capability)\n"
        "        assert facts.spills_bytes == 0 and facts.mma_instructions, (more, capability, facts)\n"
        "print(triton.__version__)\n"
    )
    for version, environment in triton_versions.items():
        child = {
            **environment,
            "W4A16_MOE_COMPILE_CACHE": str(tmp_path / version),
            "TRITON_CACHE_DIR": str(tmp_path / f"t{version}"),
        }
        done = subprocess.run([sys.executable, "-c", code], env=child, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == version, done.stdout + done.stderr


def routing_specs(ids: str, with_map: bool) -> list[CompileSpec]:
    """Every kernel of the GPU alignment, as `routing_gpu` launches it for 385 experts in blocks of 64."""
    sizes = {"NUM_EXPERTS": 385, "NUM_IDS": 770 if with_map else 385, "HAS_MAP": with_map, "BINS": 512}
    values = {
        routing_gpu._align_in_one_launch_kernel: {**sizes, "BLOCK_M": 64, "LENGTH": 512, "WIDTH": 1024},
        routing_gpu._count_kernel: {**sizes, "LENGTH": 256, "WIDTH": 1024},
        routing_gpu._scan_kernel: {"BINS": 512, "WIDTH": 32, "ROWS": 64},
        routing_gpu._start_kernel: {"NUM_EXPERTS": 385, "BINS": 512, "BLOCK_M": 64},
        routing_gpu._scatter_kernel: {**sizes, "BLOCK_M": 64, "LENGTH": 256},
        sum_parts_kernel: {
            "N": 7168,
            "SPLIT_K": 4,
            "BLOCK_M": 64,
            "BLOCK_N": 1024,
            "COMPUTE": triton.language.bfloat16,
        },
    }
    types = {"topk_ids_ptr": ids, "parts_ptr": "*fp32", "out_ptr": "*bf16"}
    if not with_map:
        types["expert_map_ptr"] = ids

    def kind(name: str, constants: dict[str, object]) -> str:
        if name in constants:
            return "constexpr"
        return types.get(name, "*i32" if name.endswith("_ptr") else "i32")

    return [
        CompileSpec(fn, {name: kind(name, constants) for name in fn.arg_names}, constants, {"num_warps": 8})
        for fn, constants in values.items()
    ]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("with_map", [False, True])
def test_alignment_and_reduction_kernels_compile(capability, with_map):
    for spec in routing_specs("*i64" if with_map else "*i32", with_map):
        assert compile_kernel(spec, capability).asm["cubin"]
