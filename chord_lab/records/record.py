"""One measurement, or the reason why there is none, as plain data."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import pathlib
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule

Kind = Literal["candidate", "peer", "baseline", "ceiling"]
Implementation = Literal[
    "w4a16_moe",
    "humming",  # with its own tile
    "humming_tile",  # with a tile forced on it
    "humming_best_tile",  # derived: the fastest of those
    "torch_dequant_bf16",
    "copy",
    "dense_bf16",
    "triton_autotune",
]
Status = Literal[
    "ok",
    "invalid",
    "compile_error",
    "out_of_resources",
    "launch_error",
    "wrong_result",
    "crashed",
    "timeout",
    "does_not_fit",
]
Source = Literal["live", "recorded", "predicted"]

FORMAT = 1  # of a record's row; a reader refuses a newer one by name


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a number was measured. Records of unlike environments are never ranked together."""

    device: str  # slug of the reported name: nvidia_h200
    device_name: str  # as the driver reports it
    num_sms: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    ptxas: str = ""  # the compiler behind triton: its version text
    python: str = ""
    power_limit_w: float = 0.0
    max_sm_mhz: float = 0.0
    kernels: str = ""  # hash of the kernel package's sources: other code is another environment's number
    peers: str = ""  # versions of the peers that ran: humming-kernels 0.1.19

    def likeness(self) -> tuple[Any, ...]:
        """What must agree before two numbers may be compared; the Python version and the peers do not matter."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("python", "peers"))

    def stamp(self) -> str:
        """`likeness` in short: repeats of an unfinished attempt carry it, and no other environment takes them up."""
        return hashlib.sha256(repr(self.likeness()).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class RoutingRef:
    """Which routing was measured: generator and seed to draw it again, and the counts themselves to check it."""

    draw: str  # uniform | balanced | zipf:S | file:PATH
    generator: str  # which random generator drew it: CPU and GPU generators give different routings for one seed
    seed: int
    num_tokens: int
    num_experts: int  # local experts
    top_k: int
    tok_e: tuple[int, ...]  # [num_experts] routed rows of each local expert

    @property
    def routed_m(self) -> int:
        """Routed rows on this GPU."""
        return sum(self.tok_e)

    @property
    def active_experts(self) -> int:
        """Experts with at least one row: only their weights are read."""
        return sum(1 for count in self.tok_e if count)

    def num_m_blocks(self, block_m: int) -> int:
        """Blocks of block_m rows, each expert padded to whole blocks."""
        return sum(-(-count // block_m) for count in self.tok_e)

    def num_tokens_padded(self, block_m: int) -> int:
        """Rows in use after padding."""
        return self.num_m_blocks(block_m) * block_m


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a time was taken. Times of unlike methods are never ranked together."""

    timer: str = "cuda_event"  # cuda_event: a pair of events a launch | graph_replay: events around a captured launch
    l2: str = "cleared"  # cleared before every launch | warm
    timed: str = "gemm"  # what lies between the two events: the GEMM launches alone; routing and activation are not
    flush_bytes: int = 0  # bytes written between two launches to clear L2
    warmup_ms: float = 0.0  # discarded launches before each repeat
    rep_ms: float = 0.0  # length of one repeat
    load_s: float = 0.0  # discarded load before the first repeat: gets past the power controller's first dip

    def likeness(self) -> tuple[Any, ...]:
        """What must agree before two times may be compared."""
        return (self.timer, self.l2, self.timed)

    def stamp(self, environment: Environment) -> str:
        """Of a repeat taken this way there: an unfinished attempt takes up no other repeats."""
        return "-".join((environment.stamp(), *self.likeness()))


@dataclass(frozen=True, kw_only=True)
class CompileFacts:
    """What the compiler said of a kernel."""

    registers: int | None = None  # per thread
    smem_bytes: int | None = None  # shared memory per CTA
    spill_bytes: int | None = None  # local memory per thread


@dataclass(frozen=True, kw_only=True)
class Record:
    """One (environment, problem, routing, schedule) that was tried. Statistics are derived from it, never stored."""

    run_id: str
    date: str  # UTC, ISO 8601
    kind: Kind = "candidate"
    implementation: str = "w4a16_moe"
    status: Status = "ok"
    rule: str = ""  # the rule or the error class that refused it
    reason: str = ""  # one line
    source: Source = "live"
    default: bool = False  # the schedule that the package would have used untuned
    scenario: str = ""
    projection: str = ""  # gate_up | down; "" for a ceiling
    profile: str = ""
    problem: MoeProblem | None = None  # None for a ceiling
    schedule: Schedule | None = None  # None for peers, baselines and ceilings
    config: str = ""  # a peer's own configuration, as it was passed
    num_tokens: int = 0
    routed_m: int = 0
    routing: RoutingRef | None = None
    environment: Environment
    method: Method = field(default_factory=Method)
    times_us: tuple[tuple[float, ...], ...] = ()  # a row per interleaved repeat: microseconds of each launch
    rounds: tuple[int, ...] = ()  # in which interleaved round each row was taken: rows of one round are paired
    sm_mhz: tuple[float, ...] = ()  # SM clock after each row; empty where it cannot be read
    power_w: tuple[float, ...] = ()
    rel_error: float | None = None  # ||out - ref|| / ||ref|| before timing
    rel_error_after: float | None = None  # and after it
    ran_kernel: str = ""  # what actually ran
    ran_gemm_type: str = ""  # indexed | grouped_contiguous | grouped_masked
    num_tokens_padded: int = 0  # rows that the kernel saw, padding included
    work_bytes: int = 0  # a ceiling's own work; for a GEMM it follows from problem and routing
    work_flops: int = 0
    facts: CompileFacts = field(default_factory=CompileFacts)
    peak_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ValueError(f"status={self.status!r}: legal are {', '.join(get_args(Status))}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: legal are {', '.join(get_args(Kind))}")

    def key(self) -> str:
        """What was tried, not how it went: equal for the same attempt, whatever order its parts were given in."""
        return candidate_key(
            implementation=self.implementation,
            scenario=self.scenario,
            projection=self.projection,
            profile=self.profile,
            problem=self.problem,
            schedule=self.schedule,
            config=self.config,
            routing=self.routing,
        )


def candidate_key(**parts: Any) -> str:
    """A hash of named parts: keyword order, tuple or list, enum or its value make no difference."""
    text = json.dumps(plain({k: v for k, v in parts.items() if v is not None}), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def plain(value: Any) -> Any:
    """`value` in JSON types: dataclasses and enums at any depth, NaN and infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, dict):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=repr)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
