"""MoE layers of models, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What one MoE layer of a model is, before any sharding. All counts are whole numbers of at least 1."""

    name: str
    num_experts: int  # routed experts of one layer, in the whole system
    top_k: int  # routed experts per token
    hidden: int  # width of the residual stream: K of gate_up, N of down
    intermediate: int  # width inside one expert: K of down; gate_up has twice as many output columns when gated
    num_moe_layers: int  # layers with routed experts
    gated: bool = True  # gate and up projections fused in one GEMM; False: up alone
    num_shared_experts: int = 0  # always-on experts, computed apart from the routed ones
    source: str = ""  # the config the numbers come from

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "intermediate", "num_moe_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{self.name}: {name} must be a whole number of at least 1, not {value!r}")
        if self.top_k > self.num_experts:
            raise ValueError(f"{self.name}: top_k={self.top_k} is more than its {self.num_experts} experts")


MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape(
            name="kimi-k2",
            num_experts=384,
            top_k=8,
            hidden=7168,
            intermediate=2048,
            num_moe_layers=60,
            num_shared_experts=1,
            source="moonshotai/Kimi-K2.5 config.json",
        ),
        ModelShape(
            name="deepseek-v3",
            num_experts=256,
            top_k=8,
            hidden=7168,
            intermediate=2048,
            num_moe_layers=58,
            num_shared_experts=1,
            source="deepseek-ai/DeepSeek-V3 config.json",
        ),
        ModelShape(
            name="qwen3-235b",
            num_experts=128,
            top_k=8,
            hidden=4096,
            intermediate=1536,
            num_moe_layers=94,
            source="Qwen/Qwen3-235B-A22B config.json",
        ),
        ModelShape(
            name="qwen3-30b",
            num_experts=128,
            top_k=8,
            hidden=2048,
            intermediate=768,
            num_moe_layers=48,
            source="Qwen/Qwen3-30B-A3B config.json",
        ),
        ModelShape(
            name="glm-5",
            num_experts=256,
            top_k=8,
            hidden=6144,
            intermediate=2048,
            num_moe_layers=75,
            num_shared_experts=1,
            source="zai-org/GLM-5 config.json",
        ),
        ModelShape(
            name="gpt-oss-120b",
            num_experts=128,
            top_k=4,
            hidden=2880,
            intermediate=2880,
            num_moe_layers=36,
            source="openai/gpt-oss-120b config.json",
        ),
    )
}
