"""A whole MoE layer under the PyTorch profiler: what lies between and around the two GEMMs."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from w4a16_moe.devices import device_slug

from chord_lab.records import Environment, now, to_row
from chord_lab.records.attempt import Candidate, Point, record_of

METADATA_KEY = "chord_lab_records"  # of the trace: rows of the records that its GEMMs are attempts of
KEY_PREFIX = "record "  # innermost annotation of a GEMM, as around a profiled launch
REPEATS = 3  # traced after as many untraced ones


def trace_layers(pairs: Sequence[tuple[Point, Point]], out: Path) -> None:
    """Trace one layer for each (gate_up, down) pair of points into ``out`` (.json.gz), whole or not at all.

    Annotations name scenario, step (routing, gate_up with its schedule, SwiGLU, down, combine). The steps are those of
    `w4a16_moe.moe.moe_layer`; their output is compared with it bit by bit before anything is traced.
    """
    import torch

    layers = [_Layer(gate_up, down) for gate_up, down in pairs]
    for layer in layers:
        layer.check()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        profiler.add_metadata_json(METADATA_KEY, json.dumps([row for layer in layers for row in layer.identities()]))
        for layer in layers:
            for _ in range(REPEATS):
                layer.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(dir=out.parent) as work:
        plain, packed = Path(work) / "trace.json", Path(work) / "trace.json.gz"
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(packed, "wb") as target:
            shutil.copyfileobj(source, target)
        os.replace(packed, out)


class _Layer:
    """Tensors of one layer and its steps."""

    def __init__(self, gate_up: Point, down: Point) -> None:
        import torch
        from w4a16_moe.gemm import default_schedule

        from chord_lab.measurement.tensors import Layer
        from chord_lab.routing.draws import draw_topk_ids

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.gate_up, self.down = gate_up, down
        self.weights = [Layer(p.problem, device).packed(p.profile) for p in (gate_up, down)]
        ref = gate_up.routing
        ids = draw_topk_ids(
            ref.draw, num_tokens=ref.num_tokens, num_experts=ref.num_experts, top_k=ref.top_k, seed=ref.seed
        )
        self.topk_ids = torch.from_numpy(ids).to(device)
        generator = torch.Generator(device=device).manual_seed(ref.seed)
        weights = torch.rand(self.topk_ids.shape, generator=generator, device=device)
        self.topk_weights = weights / weights.sum(dim=1, keepdim=True)
        x = torch.randn((ref.num_tokens, gate_up.problem.K), generator=generator, device=device)
        self.x = x.to(torch.bfloat16)
        self.schedules = [default_schedule(w, gate_up.routed_m) for w in self.weights]
        self.candidates = [Candidate(schedule=s, default=True) for s in self.schedules]
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.environment = Environment(device=device_slug(name), device_name=name, torch=torch.__version__)

    def check(self) -> None:
        """The steps must be those of the real layer."""
        import torch
        from w4a16_moe.moe import moe_layer

        gate_up, down = self.schedules
        weights = self.weights
        real = moe_layer(
            self.x, weights[0], weights[1], self.topk_ids, self.topk_weights,
            gate_up_schedule=gate_up, down_schedule=down,
        )  # fmt: skip
        if not torch.equal(self.run(), real):
            raise RuntimeError("the traced steps do not give what moe_layer gives")
        for _ in range(REPEATS):
            self.run()

    def identities(self) -> list[dict[str, Any]]:
        """A row for each GEMM: its record without times."""
        rows = []
        for point, candidate in zip((self.gate_up, self.down), self.candidates, strict=True):
            record = record_of(point, candidate, run_id="layer trace", date=now(), environment=self.environment)
            rows.append(to_row(record) | {"key": record.key()})
        return rows

    def run(self) -> Any:
        """The layer once, each step in an annotation of its own."""
        from torch.profiler import record_function
        from w4a16_moe.gemm import indexed_gemm
        from w4a16_moe.moe import combine, swiglu
        from w4a16_moe.routing import align_to_blocks

        gate_up, down = self.schedules
        experts = self.gate_up.problem.num_experts
        with record_function(f"{self.gate_up.scenario}, {self.gate_up.routed_m} rows"):
            with record_function("routing"):
                routing = align_to_blocks(self.topk_ids, experts, gate_up.block_m)
            with record_function(f"gate_up {gate_up.label()}"), record_function(self._key(0)):
                hidden = indexed_gemm(self.x, self.weights[0], routing, top_k=self.topk_ids.shape[1], schedule=gate_up)
            if down.block_m != gate_up.block_m:
                with record_function("routing for down"):
                    routing = align_to_blocks(self.topk_ids, experts, down.block_m)
            with record_function("SwiGLU"):
                activated = swiglu(hidden)
            with record_function(f"down {down.label()}"), record_function(self._key(1)):
                routed = indexed_gemm(activated, self.weights[1], routing, top_k=1, schedule=down)
            with record_function("combine"):
                return combine(routed, self.topk_ids, self.topk_weights, experts)

    def _key(self, index: int) -> str:
        return KEY_PREFIX + self.candidates[index].key_at((self.gate_up, self.down)[index])
