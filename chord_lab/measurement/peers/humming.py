"""humming-kernels 0.1.19 as a peer: its own heuristics, and exact tiles forced around them.

Facts about it that decide how it is measured: weights in which no code is 0 are silently stored in another, slower
format (so ours hold every code); its heuristics model random routing and cap block_m at 96 for indexed rows (so tiles
that fit the routing at hand are tried too); every call costs 50 to 110 us on the host (so short points are replayed
from a graph).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from chord_lab.measurement.launch import Launch
from chord_lab.records.attempt import Candidate, Point, point_from_dict

if TYPE_CHECKING:
    from chord_lab.measurement.tensors import Layer, PointTensors

WEIGHTS = {"dtype": "uint4", "group_size": 32, "scale_dtype": "bfloat16"}
FORCED_BLOCK_M = (8, 16, 24, 32, 48, 64, 96, 128, 176)
NUM_FORCED = 3  # exact tiles tried beside the heuristics' own
# A tile that the wheel itself uses where its producer-consumer policy does not apply.
PLAIN_TILE: dict[str, Any] = {
    "block_shape": [16, 256, 128],
    "warp_shape": [16, 64, 64],
    "num_stages": 4,
    "num_ctas_per_sm": 2,
    "mma_type": "wgmma",
    "use_stream_k": False,
}


class PeerError(RuntimeError):
    """The peer cannot run this; a record says so."""

    status = "launch_error"
    rule = "humming"


def compute_config(interface: str) -> str:
    """fp32 accumulation and the interface, as the peer wants them: a JSON string, since it parses on every call."""
    return json.dumps({"use_f16_accum": False, "gemm_type": interface})


def launch_humming(tensors: PointTensors, candidate: Candidate) -> Launch:
    """One peer configuration, its routing aligned to its own block_m."""
    point = tensors.point
    config = json.loads(candidate.config)
    layer = _peer_layer(tensors.layer)
    block_m = config["block_shape"][0]
    if point.interface != "indexed":
        from chord_lab.measurement.grouped import humming_grouped

        return humming_grouped(tensors, layer, candidate.config, _kernel_name(layer, point.interface, candidate.config))
    sorted_ids, expert_ids, padded = _exact_buffers(tensors, block_m)
    arguments = {
        "inputs": tensors.x,
        "outputs": tensors.out,
        "sorted_ids": sorted_ids,
        "expert_ids": expert_ids,
        "num_tokens_padded": padded,
        "top_k": point.problem.top_k,
        "compute_config": compute_config("indexed"),
        "tuning_config": candidate.config,
    }
    return Launch(
        run=lambda: layer(**arguments),
        ran_kernel=_kernel_name(layer, "indexed", candidate.config),
        ran_gemm_type="indexed",
        num_tokens_padded=point.routing.num_tokens_padded(block_m),
    )


def _exact_buffers(tensors: PointTensors, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routing trimmed to what is in use: in the peer's favour, and what its own benchmark does."""
    routing = tensors.routing(block_m)
    rows = tensors.point.routing.num_tokens_padded(block_m)
    sorted_ids = routing.sorted_ids[:rows].contiguous()
    return sorted_ids, routing.expert_ids[: rows // block_m].contiguous(), routing.num_tokens_padded


def _peer_layer(layer: Layer) -> Any:
    """The same codes and scales in the peer's layer, made once a problem; its format must have stayed uint4."""
    if "humming" not in layer.peers:
        from humming.layer import HummingLayer

        problem = layer.problem
        peer = HummingLayer(
            shape_n=problem.N,
            shape_k=problem.K,
            num_experts=problem.num_experts,
            torch_dtype=torch.bfloat16,
            weight_config=dict(WEIGHTS),
            input_config={"dtype": "bfloat16"},
        ).to(layer.device)
        weight = peer.weight.data.view(problem.num_experts, problem.N, problem.K // 8)
        scale = peer.weight_scale.data.view(problem.num_experts, problem.N, problem.num_groups)
        for expert in range(problem.num_experts):
            codes, scales = layer.expert(expert)
            weight[expert] = pack_words(codes)
            scale[expert] = scales
        peer.transform()
        if "uint4" not in str(peer.humming_config.b_dtype):
            raise PeerError(f"weights became {peer.humming_config.b_dtype} instead of uint4")
        layer.peers["humming"] = peer
    return layer.peers["humming"]


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K] to int32 [N, K/8]: eight codes a word, low nibble first."""
    words = codes.view(codes.shape[0], -1, 8).to(torch.int32)
    packed = words[..., 0].clone()
    for nibble in range(1, 8):
        packed |= words[..., nibble] << (4 * nibble)
    return packed


def _kernel_name(layer: Any, interface: str, config: str) -> str:
    """Compile if need be and ask the peer for its kernel's name; a refused tile is a compile error of the peer."""
    from humming.kernel.humming import HummingKernel

    try:
        table = HummingKernel.prepare_kernels(layer.humming_config.to_str(), compute_config(interface), config, 0)
        kernel = HummingKernel._id2kernel[int(table.flatten()[2])]
        return f"humming {kernel.kernel_name}"[:120]
    except (KeyError, AttributeError, IndexError):
        return "humming"
    except Exception as error:
        failure = PeerError(f"{type(error).__name__}: {error}")
        failure.status = "compile_error"  # type: ignore[misc]
        raise failure from error


class HummingAhead:
    """Serves a process of its own: the peer's heuristics (seconds of Python) and its compilation."""

    def __init__(self, threads: int = 8):
        from humming.layer import HummingLayer  # noqa: F401 (absence is the answer to the first command)

        self._threads = threads
        self._tables: dict[Any, Any] = {}

    def configs(self, point: dict[str, Any], forced: bool) -> list[dict[str, str]]:
        """Configurations for a point, compiled into the peer's disk cache: its own first, then exact tiles."""
        opened = point_from_dict(point)
        layer_config = self._layer_config(opened)
        own = self._own(opened, layer_config)
        wanted = [("humming", own)]
        wanted += [("humming_tile", tile) for tile in forced_tiles(opened, own)] if forced else []
        with ThreadPoolExecutor(self._threads) as pool:
            done = list(pool.map(lambda item: self._compile(layer_config, opened.interface, item[1]), wanted))
        return [
            {"implementation": name, "config": json.dumps(config, sort_keys=True)}
            for (name, config), fine in zip(wanted, done, strict=True)
            if fine or name == "humming"
        ]

    def _layer_config(self, point: Point) -> Any:
        from humming.schema import BaseInputSchema, BaseWeightSchema
        from humming.transform import prepare_layer_config

        return prepare_layer_config(
            shape_n=point.problem.N,
            shape_k=point.problem.K,
            weight_schema=BaseWeightSchema.from_config({**WEIGHTS, "quant_method": "humming"}),
            input_schema=BaseInputSchema.from_config({"dtype": "bfloat16", "quant_method": "humming"}),
            num_experts=point.problem.num_experts,
            torch_dtype=torch.bfloat16,
            device=0,
        )

    def _own(self, point: Point, layer_config: Any) -> dict[str, Any]:
        from humming.tune import get_heuristics_config

        key = (layer_config.to_str(), point.interface)
        if key not in self._tables:
            self._tables[key] = get_heuristics_config(layer_config=layer_config, gemm_type=point.interface)
        for low, high, config in self._tables[key]:
            if low < point.routed_m <= high:
                return json.loads(json.dumps(config))
        raise PeerError(f"its heuristics have no interval for {point.routed_m} rows")

    def _compile(self, layer_config: Any, interface: str, config: dict[str, Any]) -> bool:
        from humming.kernel.humming import HummingKernel

        try:
            with torch.cuda.device(0):
                text = json.dumps(config, sort_keys=True)
                HummingKernel.prepare_kernels(layer_config.to_str(), compute_config(interface), text, 0)
        except Exception as error:  # a tile its compiler refuses is not tried
            print(f"humming refused {config}: {type(error).__name__}: {error}", flush=True)
            return False
        return True


def forced_tiles(point: Point, own: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The peer's configuration with the block_m that fit this very routing, cheapest first."""
    base: dict[str, Any] = own if own.get("mma_type") == "wgmma" else PLAIN_TILE
    own_block_m = own["block_shape"][0]

    def cost(block_m: int) -> float:
        return point.routing.num_m_blocks(block_m) * (block_m + 32)

    fitting = sorted((m for m in FORCED_BLOCK_M if m != own_block_m), key=cost)[:NUM_FORCED]
    for block_m in fitting:
        tile = {
            **base,
            "block_shape": [block_m, *base["block_shape"][1:]],
            "warp_shape": [block_m, *base["warp_shape"][1:]],
        }
        if block_m > 96:  # larger activations: three stages fit shared memory, and 512 columns do not
            tile["block_shape"][1] = 256
            tile["warp_shape"][1] = 32
            tile["num_stages"] = 3 if block_m > 128 else base.get("num_stages", 4)
            tile["num_ctas_per_sm"] = 1
        yield tile
