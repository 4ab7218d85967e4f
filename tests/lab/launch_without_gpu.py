"""What a launch would compile, with a driver that has no device: prints the kernels that Triton's cache gained."""

from __future__ import annotations

import json
import os
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from w4a16_moe import portable
from w4a16_moe.problem import MoeProblem
from w4a16_moe.schedule import Schedule


class NoDevice:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


problem = MoeProblem(num_experts=4, N=256, K=512, top_k=2)
schedule = Schedule.from_dict(json.loads(sys.argv[1]))
driver.set_active(NoDevice())
cache = os.environ["TRITON_CACHE_DIR"]
before = set(os.listdir(cache))
tensors = [torch.empty(256, dtype=d) for d in (torch.bfloat16, torch.uint8, torch.int32, torch.bfloat16)]
tensors += [torch.empty(256, dtype=torch.int32) for _ in range(3)]
constexprs = portable.constexprs(schedule, problem, 2, 90)
portable.portable_kernel.warmup(
    *tensors, 16, **constexprs, num_warps=schedule.num_warps, num_stages=schedule.num_stages, grid=(1,)
)
print(len(before), sorted(set(os.listdir(cache)) - before))
