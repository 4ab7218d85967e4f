"""The traced MoE layer: its annotations, and the records that its GEMMs belong to. Through the Triton interpreter."""

import os
import subprocess
import sys

from chord_lab.traces import read_trace
from chord_lab.traces.identity import key_in_path

SCRIPT = """
import sys
from pathlib import Path
from w4a16_moe.problem import MoeProblem
from chord_lab.measurement.layer_trace import trace_layers
from chord_lab.records.attempt import Point
from chord_lab.sweeps.points import routing_ref

routing = routing_ref("uniform", num_tokens=5, num_experts=4, top_k=2, seed=1)

def point(projection, N, K, top_k):
    problem = MoeProblem(num_experts=4, N=N, K=K, top_k=top_k)
    return Point(scenario="toy/ep1/decode", projection=projection, problem=problem, profile="portable", num_tokens=5, routing=routing)

trace_layers([(point("gate_up", 128, 64, 2), point("down", 64, 64, 1))], Path(sys.argv[1]))
"""  # noqa: E501 (a program of its own)


def test_a_traced_layer_names_its_steps_and_carries_its_records(tmp_path):
    out = tmp_path / "layer.pt.trace.json.gz"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, out], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
    trace = read_trace(out)
    steps = {p.split(" > ")[1].split()[0] for p in trace.nvtx["path"].astype(str) if " > " in p}
    assert {"routing", "gate_up", "SwiGLU", "down", "combine"} <= steps
    keys = {key_in_path(p) for p in trace.nvtx["path"].astype(str)} - {None}
    assert len(keys) == 2  # one for each projection; on the CPU there is no kernel to give them to
    assert trace.identity == () and len(trace.kernels) == 0


def test_kernels_of_a_traced_layer_get_the_rows_in_the_file(tmp_path):
    import json

    path = tmp_path / "t.json"
    ranges = [("layer", 0.0, 100.0), ("gate_up wgmma", 1.0, 50.0), ("record abc", 2.0, 40.0)]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": n, "ts": t, "dur": d, "pid": 1, "tid": 1} for n, t, d in ranges
    ]
    for i, ts in ((1, 5.0), (2, 60.0)):
        both = {"ph": "X", "args": {"correlation": i}}
        events.append(both | {"cat": "cuda_runtime", "name": "launch", "ts": ts, "dur": 1.0, "pid": 1, "tid": 1})
        events.append(both | {"cat": "kernel", "name": "k", "ts": ts + 9, "dur": 4.0, "pid": 0, "tid": 7})
    rows = [{"key": "abc", "routed_m": 400, "power_limit_w": 700.5}, "no row", {"routed_m": 1}]
    path.write_text(json.dumps({"chord_lab_records": rows, "traceEvents": events}))
    assert read_trace(path).identity == ({"key": "abc", "routed_m": 400, "power_limit_w": 700.5}, None)
