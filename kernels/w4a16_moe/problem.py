"""What is computed: one expert GEMM of a mixture-of-experts layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MoeProblem:
    """``y[row] = x[row // top_k] @ dequant(w[expert(row)]).T`` for every routed row.

    Shapes: x ``[routed_m // top_k, K]`` bf16, w ``[num_experts, N, K]`` codes 0..15 (value = code - 8) with one bf16
    scale per ``group_size`` consecutive K, y ``[routed_m, N]`` bf16; sums in fp32.
    """

    num_experts: int  # local experts: those whose weights this GPU holds
    N: int  # output columns per expert, unpacked
    K: int  # reduction length, unpacked
    group_size: int = 32  # consecutive K that share one scale
    top_k: int = 1  # routed rows that read the same row of x: the router's top_k for gate_up, 1 for down

    def __post_init__(self) -> None:
        for name in ("num_experts", "N", "K", "group_size", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.K % self.group_size:
            below = self.K - self.K % self.group_size
            raise ValueError(
                f"K={self.K} is not a multiple of group_size={self.group_size}; nearest legal K: "
                f"{below or self.group_size} and {below + self.group_size}"
            )

    @property
    def num_groups(self) -> int:
        """Scale groups along K."""
        return self.K // self.group_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of one expert's codes and scales: N * K * (1/2 + 2/group_size)."""
        return self.N * self.K // 2 + self.N * self.num_groups * 2

    def flops(self, routed_m: int) -> int:
        """Multiply-adds counted as two, real routed rows only (no padding)."""
        return 2 * routed_m * self.N * self.K

    def num_bytes(self, routed_m: int, active_experts: int) -> int:
        """Bytes that must move: active experts' weights, each x row once, each y row once."""
        return active_experts * self.weight_bytes + (-(-routed_m // self.top_k) * self.K + routed_m * self.N) * 2

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)
