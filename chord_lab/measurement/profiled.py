"""What runs under a profiler: ``python -m chord_lab.measurement.profiled SPEC RESULT``.

SPEC is JSON: ``{"jobs": [{"key", "point", "candidate"}], "tool": "ncu" | "nsight-python" | "cupti", "metrics": [...],
"bench": settings of `Bench`}``. Each job's
tensors, routing and check are those of a measurement (`bench.Bench`); then one launch is marked for the profiler, in
NVTX ranges that name scenario, projection with rows and draw, schedule, and the record's key. RESULT, written whole at
the end, is ``{"environment", "done": [{"key", ...}], "error"}``; exit code 3 when a job failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from chord_lab.records.attempt import (
    Candidate,
    Point,
    candidate_from_dict,
    candidate_to_dict,
    point_from_dict,
    point_to_dict,
)

TOOLS = ("ncu", "nsight-python", "cupti")
METHOD = {"timer": "cuda_event"}
KEY_PREFIX = "record "  # innermost range: how a kernel is joined to its record


def spec_of(
    jobs: Sequence[tuple[Point, Candidate]], tool: str, metrics: Sequence[str], bench: Mapping[str, Any]
) -> dict[str, Any]:
    """The SPEC for these attempts; attempts at one point should follow each other. ``bench``: a worker's settings."""
    return {
        "tool": tool,
        "bench": dict(bench),
        "metrics": list(metrics),
        "jobs": [{"key": c.key_at(p), "point": point_to_dict(p), "candidate": candidate_to_dict(c)} for p, c in jobs],
    }


def range_names(point: Point, candidate: Candidate) -> tuple[str, str, str, str]:
    """NVTX range names around a profiled launch, outermost first."""
    where = f"{point.projection} {point.routed_m} rows {point.routing.draw}"
    return point.scenario, where, candidate.label(), KEY_PREFIX + candidate.key_at(point)


def main(spec_path: str, result_path: str) -> int:
    """Run every job of a SPEC."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"environment": {}, "done": [], "error": None}
    code = 0
    try:
        if spec["tool"] not in TOOLS:
            raise ValueError(f"tool {spec['tool']!r}: legal are {', '.join(TOOLS)}")
        _run(spec, result)
    except Exception as error:
        result["error"] = (str(error).splitlines() or [type(error).__name__])[0]
        code = 3
    temporary = f"{result_path}.tmp"
    Path(temporary).write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, result_path)
    return code


def _run(spec: dict[str, Any], result: dict[str, Any]) -> None:
    tool = None
    if spec["tool"] != "ncu":  # nsight attaches before CUDA starts
        from chord_lab.measurement.profiled_nsight import NsightTool

        tool = NsightTool(spec["tool"], spec["metrics"])
    from chord_lab.measurement.bench import Bench

    bench = Bench(**spec["bench"])
    result["environment"] = bench.hello()
    opened = None
    for job in spec["jobs"]:
        if job["point"] != opened:
            bench.open(job["point"], METHOD)
            opened = job["point"]
        checked = bench.check(job["key"], job["candidate"])
        point, candidate = point_from_dict(job["point"]), candidate_from_dict(job["candidate"])
        launch = bench.launch_of(job["key"]).run
        names = range_names(point, candidate)
        rows = tool.profile(job["key"], launch) if tool else _marked(names, launch, bench.timer.device)
        bench.drop(job["key"])
        result["done"].append({"key": job["key"], **checked, "rows": rows})


def _marked(names: Sequence[str], launch: Any, device: str) -> list[dict[str, Any]]:
    """One launch between cudaProfilerStart and Stop, which is all that ncu records."""
    import torch

    if device != "cuda":  # nothing that ncu could record
        launch()
        return []
    torch.cuda.synchronize()
    with nvtx_ranges(names):
        torch.cuda.profiler.start()
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return []


@contextmanager
def nvtx_ranges(names: Sequence[str]) -> Any:
    """Nested ranges, outermost first."""
    import torch

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(torch.cuda.nvtx.range(name.replace("{", "(").replace("}", ")")))  # it formats the text
        yield


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
