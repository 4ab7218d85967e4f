"""Which schedules the Hopper kernels can run. Limits marked "compiler" were found by compiling offline (Triton 3.6 to 3.8)."""

from __future__ import annotations

from ..devices import Device
from ..legality import Check, Rule
from ..problem import MoeProblem
from ..profiles import Profile
from ..schedule import Schedule

MMA_BLOCK_M = (8, 16, 24, 32)  # up to four token slices: accumulators of one thread
WGMMA_BLOCK_M = (*range(16, 129, 8), *range(144, 257, 16))  # above 128 by two instructions of half as many tokens
BLOCK_N = {"mma_sync": (64, 128, 256), "wgmma": (128, 256, 512)}
GROUP_ROWS = 128  # grouped_contiguous: rows that share an expert
SMEM_RESERVED = 1024  # barriers, tile queue, alignment


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def smem_mma_sync(schedule: Schedule) -> int:
    """Bytes per CTA: ring of codes, scales, tokens; rows on their way out."""
    steps = schedule.block_k // 64
    stage = steps * (schedule.block_n * 36 + schedule.block_m * 128)
    return schedule.num_stages * stage + _pow2(schedule.block_m) * schedule.block_n * 2


def smem_wgmma(schedule: Schedule) -> int:
    """Bytes per CTA: ring of codes, scales, tokens; rows on their way out, a part of them; barriers."""
    rows = _pow2(schedule.block_m)
    leaving = min(rows, 128) * min(schedule.block_n, 32 * schedule.num_warps)
    return schedule.num_stages * (rows * 128 + schedule.block_n * 36) + leaving * 2 + SMEM_RESERVED


def _is(kernel: str, check: Check) -> Check:
    """The rule holds for one of the two kernels only."""

    def checked(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
        return check(schedule, problem, profile, device) if schedule.kernel == kernel else None

    return checked


def _legal(name: str, values: tuple[int, ...]) -> Check:
    def check(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
        value = getattr(schedule, name)
        return (
            None
            if value in values
            else f"{name} {value}: legal for {schedule.kernel} are {', '.join(map(str, values))}"
        )

    return check


def _operands(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if not schedule.swap_ab:
        return "the Hopper kernels hold weights on the MMA's M side: swap_ab must be true"
    if schedule.split_k != 1:
        return f"split_k {schedule.split_k}: stream_k divides K in the Hopper kernels"
    return None


def _tile_divides(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if problem.N % schedule.block_n == 0:
        return None
    fitting = [str(n) for n in BLOCK_N[schedule.kernel] if problem.N % n == 0]
    return f"block_n {schedule.block_n} does not divide N={problem.N}; dividing: {', '.join(fitting) or 'none'}"


def _warps_fit(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    rows = schedule.num_warps * 16
    if schedule.block_n % rows:
        return f"{schedule.num_warps} warps of 16 rows each do not divide block_n {schedule.block_n}"
    return None


def _mma_rounds(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    step = schedule.block_k * schedule.num_stages
    if problem.K % step:
        return f"block_k x num_stages = {step} does not divide K={problem.K}: the loop is unrolled over the stages"
    if schedule.stream_k and problem.K // step < 2:
        return f"stream_k needs two rounds of block_k x num_stages = {step} in K={problem.K}"
    return None


def _mma_grid(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.persistent != schedule.stream_k:
        return "mma_sync is persistent with stream_k and only with it"
    if schedule.tile_order != "static" or schedule.group_m != 1:
        return "mma_sync walks tiles in order: tile_order static, group_m 1"
    if profile.interface == "grouped_contiguous":
        return "grouped_contiguous runs wgmma"
    return None


def _wgmma_grid(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if not schedule.persistent or schedule.stream_k:
        return "wgmma is persistent, without stream_k"
    if profile.interface == "grouped_contiguous" and schedule.token_slicing != "static":
        return "grouped_contiguous runs whole groups: token_slicing static"
    if profile.interface == "grouped_contiguous" and schedule.block_m not in (GROUP_ROWS, 2 * GROUP_ROWS):
        return f"block_m {schedule.block_m}: groups have {GROUP_ROWS} rows, legal are {GROUP_ROWS} and {2 * GROUP_ROWS}"
    return None


def _wgmma_slicing(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.token_slicing in ("static", "branched"):
        return None
    return f"token_slicing {schedule.token_slicing} is not in wgmma: static, or branched (a body per number of tokens)"


def _wgmma_registers(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    """Accumulators plus two sets of A registers per thread; beyond these limits ptxas serialises the wgmmas (compiler)."""
    accumulators = schedule.block_m * schedule.block_n // (32 * schedule.num_warps)
    if schedule.block_n > 256 and (schedule.num_warps, schedule.ctas_per_sm) != (8, 1):
        return f"block_n {schedule.block_n} runs with 8 warps and one CTA per SM"
    if schedule.ctas_per_sm > 2 or (schedule.ctas_per_sm > 1 and schedule.num_warps > 8):
        return f"{schedule.ctas_per_sm} CTAs per SM of {schedule.num_warps} warps and 8 more leave too few registers"
    if schedule.ctas_per_sm > 1 and (accumulators > 32 or schedule.token_slicing != "static"):
        return "two CTAs per SM leave 64 registers: at most 32 accumulators a thread, token_slicing static"
    limit = {8: 128, 16: 32}[schedule.num_warps]
    if accumulators > limit:
        return f"{accumulators} accumulators a thread with {schedule.num_warps} warps: at most {limit}"
    return None


def _shared_memory(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.kernel == "mma_sync":
        need = smem_mma_sync(schedule)
    else:
        need = smem_wgmma(schedule)
    fits = min(device.smem_per_cta, device.smem_per_sm // schedule.ctas_per_sm - 1024)
    if need <= fits:
        return None
    return f"{need} bytes of shared memory, {device.slug} has {fits} for each of {schedule.ctas_per_sm} CTAs per SM"


def _registers(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    """mma_sync: accumulators, one dequantised half and the words of two steps must fit beside the addresses (compiler)."""
    rows = schedule.block_n // (16 * schedule.num_warps)  # 16-row pieces a warp holds
    need = rows * (schedule.block_m // 8 * 4 + 8 + 6) + 28
    room = min(255, device.registers_per_sm // (32 * schedule.num_warps * schedule.ctas_per_sm) // 8 * 8)
    if need <= room:
        return None
    return f"about {need} registers a thread, {room} for each of {schedule.ctas_per_sm} CTAs per SM"


RULES: tuple[Rule, ...] = (
    Rule("operands", _operands),
    Rule("block_m", _is("mma_sync", _legal("block_m", MMA_BLOCK_M))),
    Rule("block_m", _is("wgmma", _legal("block_m", WGMMA_BLOCK_M))),
    Rule("block_n", _is("mma_sync", _legal("block_n", BLOCK_N["mma_sync"]))),
    Rule("block_n", _is("wgmma", _legal("block_n", BLOCK_N["wgmma"]))),
    Rule("block_k", _is("mma_sync", _legal("block_k", (64, 128, 256)))),
    Rule("block_k", _is("wgmma", _legal("block_k", (64,)))),
    Rule("num_warps", _is("mma_sync", _legal("num_warps", (4, 8)))),
    Rule("num_warps", _is("wgmma", _legal("num_warps", (8, 16)))),
    Rule("num_stages", _is("mma_sync", _legal("num_stages", tuple(range(2, 17))))),
    Rule("num_stages", _is("wgmma", _legal("num_stages", (3, 4, 5, 6, 7, 8)))),
    Rule("tile divides N", _tile_divides),
    Rule("warps fit tile", _warps_fit),
    Rule("rounds divide K", _is("mma_sync", _mma_rounds)),
    Rule("grid", _is("mma_sync", _mma_grid)),
    Rule("grid", _is("wgmma", _wgmma_grid)),
    Rule("token slicing", _is("wgmma", _wgmma_slicing)),
    Rule("registers", _is("wgmma", _wgmma_registers)),
    Rule("registers", _is("mma_sync", _registers)),
    Rule("shared memory", _shared_memory),
)
