"""Which schedules the portable kernel can run, and its schedule when no table knows better."""

from __future__ import annotations

from .block_m import BlockMModel
from .devices import Device
from .legality import Rule
from .problem import MoeProblem
from .profiles import Profile
from .schedule import Schedule

BLOCK_M = (8, 16, 32, 64, 128, 256)
BLOCK_N = (16, 32, 64, 128, 256)
BLOCK_K = (64, 128, 256)
NUM_WARPS = (1, 2, 4, 8, 16)
SLICE = 8  # tokens per slice: the smallest N of a tensor-core instruction
SLICED_BLOCK_M = (16, 32, 64)  # one accumulator a slice: eight at most
MAX_STAGES = 8
ACCUMULATORS = 128  # fp32 accumulators a thread can hold beside the weights it dequantises, of 255 registers


def smem_estimate(schedule: Schedule, capability: int = 90) -> int:
    """Bytes of shared memory per CTA: codes, scales and activations of every stage but the one in registers.

    From Hopper on activations stay in shared memory while the tensor cores read them, so every stage has its own.
    """
    weights = schedule.block_n * schedule.block_k // 2 + schedule.block_n * schedule.block_k // 32 * 2
    activations = schedule.block_m * schedule.block_k * 2
    ahead = max(1, schedule.num_stages - 1)
    return weights * ahead + activations * (schedule.num_stages if capability >= 90 else ahead)


def padded_k(problem: MoeProblem) -> int:
    """K as the layout stores it: whole blocks of 64, the last one half zeros when K is an odd number of groups."""
    return -(-problem.K // 64) * 64


def _one_of(name: str, legal: tuple[int, ...]) -> Rule:
    def check(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
        value = getattr(schedule, name)
        return None if value in legal else f"{name} {value}: legal are {', '.join(map(str, legal))}"

    return Rule(name, check)


def _needs_16(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.swap_ab or schedule.block_m >= 16:
        return None
    return (
        f"block_m {schedule.block_m} on the MMA's M side needs 16; swap_ab puts tokens on its N side, where 8 is legal"
    )


def _tile_divides_n(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if problem.N % schedule.block_n == 0:
        return None
    fitting = [str(n) for n in BLOCK_N if problem.N % n == 0]
    return f"block_n {schedule.block_n} does not divide N={problem.N}; dividing: {', '.join(fitting) or 'none'}"


def _tile_divides_k(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if padded_k(problem) % schedule.block_k == 0:
        return None
    fitting = [str(k) for k in BLOCK_K if padded_k(problem) % k == 0]
    return f"block_k {schedule.block_k} does not divide K={problem.K}; dividing: {', '.join(fitting)}"


def _split_divides_k(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    steps = padded_k(problem) // schedule.block_k
    if steps % schedule.split_k == 0:
        return None
    return (
        f"split_k {schedule.split_k} does not divide the {steps} steps of block_k {schedule.block_k} in K={problem.K}"
    )


def _warps_fit_tile(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    rows = schedule.block_n if schedule.swap_ab else schedule.block_m
    columns = schedule.block_m if schedule.swap_ab else schedule.block_n
    pieces = max(1, rows // 16) * max(1, columns // 8)  # 16 x 8: one tensor-core instruction's output
    if schedule.num_warps <= pieces:
        return None
    return f"{schedule.num_warps} warps for a tile of {pieces} MMA outputs (16 x 8 each)"


def _accumulator(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    need = schedule.block_m * schedule.block_n // (32 * schedule.num_warps)
    if need <= ACCUMULATORS:
        return None
    return f"{need} fp32 accumulators a thread, at most {ACCUMULATORS}: use more warps or a smaller tile"


def _slicing(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.token_slicing == "static":
        return None
    if schedule.token_slicing == "branched":
        return "token_slicing branched is not in the portable kernel: static, semi_static or dynamic"
    if schedule.swap_ab and schedule.block_m in SLICED_BLOCK_M:
        return None
    legal = ", ".join(map(str, SLICED_BLOCK_M))
    return f"token_slicing {schedule.token_slicing} cuts 8-token slices: needs swap_ab and block_m {legal}"


def _grid(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.stream_k:
        return "stream_k is not in the portable kernel: split_k shares a tile's K there"
    if schedule.tile_order != "static":
        return f"tile_order {schedule.tile_order} is not in the portable kernel: static"
    if schedule.ctas_per_sm > 1 and not schedule.persistent:
        return f"ctas_per_sm {schedule.ctas_per_sm} sets the size of a persistent grid; this schedule is not persistent"
    return None


def _shared_memory(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    need = smem_estimate(schedule, device.capability)
    if need <= device.smem_per_cta:
        return None
    return (
        f"about {need} bytes of shared memory for {schedule.num_stages} stages; {device.slug} has {device.smem_per_cta}"
    )


RULES: tuple[Rule, ...] = (
    _one_of("block_m", BLOCK_M),
    _one_of("block_n", BLOCK_N),
    _one_of("block_k", BLOCK_K),
    _one_of("num_warps", NUM_WARPS),
    _one_of("num_stages", tuple(range(1, MAX_STAGES + 1))),
    Rule("MMA shape", _needs_16),
    Rule("tile divides N", _tile_divides_n),
    Rule("tile divides K", _tile_divides_k),
    Rule("split divides K", _split_divides_k),
    Rule("warps fit tile", _warps_fit_tile),
    Rule("accumulator registers", _accumulator),
    Rule("token slicing", _slicing),
    Rule("grid", _grid),
    Rule("shared memory", _shared_memory),
)


def default_schedule(
    problem: MoeProblem, routed_m: int, profile: Profile, device: Device | None, model: BlockMModel | None = None
) -> Schedule:
    """The schedule for a shape that no table knows: block_m by tokens per expert, a wide tile that divides N.

    H200 measurements at Kimi K2's shapes chose the tiles of 8, 16 and 64 rows; 32 rows follow 64. At 128 rows two CTAs
    of one warpgroup share an SM, so that one multiplies while the other dequantises. Without wgmma such a tile needs
    eight warps not to spill; with tcgen05 every product of a step moves the sums, so steps stay short.
    """
    block_m = (model or BlockMModel()).choose(problem.num_experts, routed_m, BLOCK_M)
    generation = (device.capability if device else 90) // 10
    widest = 256 if block_m in (32, 64) and generation in (9, 10) else 128
    block_n = next((n for n in reversed(BLOCK_N) if n <= widest and problem.N % n == 0), None)
    if block_n is None:
        raise ValueError(f"N={problem.N} is not a multiple of 16, the smallest tile of the portable kernel")
    long_steps = (block_m == 8 or (block_m == 16 and generation == 9)) and padded_k(problem) % 128 == 0
    four_warps = block_m <= 16 or block_n < 128 or (block_m == 128 and generation == 9)
    return Schedule(
        kernel="portable",
        block_m=block_m,
        block_n=block_n,
        block_k=128 if long_steps else 64,
        num_warps=min(4 if four_warps else 8, max(1, block_n // 16)),
        num_stages=4,
        swap_ab=True,
    )
