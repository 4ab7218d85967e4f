"""Devices as data: limits that decide legality, so that a laptop can judge a schedule for a card it does not have."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """Limits of one GPU. Sources: CUDA C++ Programming Guide, compute capabilities; vendor data sheets for memory."""

    slug: str  # reported name, lower case, spaces and signs -> _: what tables and data folders are named after
    capability: int  # 90 for compute capability 9.0
    num_sms: int
    smem_per_cta: int  # bytes one CTA may use
    smem_per_sm: int  # bytes all resident CTAs share
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    memory_bytes: int = 0


DEVICES: dict[str, Device] = {
    d.slug: d
    for d in (
        Device(
            slug="nvidia_h200",
            capability=90,
            num_sms=132,
            smem_per_cta=232448,
            smem_per_sm=233472,
            memory_bytes=150754820096,
        ),
        Device(
            slug="nvidia_h100_80gb_hbm3",
            capability=90,
            num_sms=132,
            smem_per_cta=232448,
            smem_per_sm=233472,
            memory_bytes=85899345920,
        ),
        Device(
            slug="nvidia_a100_sxm4_80gb",
            capability=80,
            num_sms=108,
            smem_per_cta=166912,
            smem_per_sm=167936,
            memory_bytes=85899345920,
        ),
        Device(
            slug="nvidia_b200",
            capability=100,
            num_sms=148,
            smem_per_cta=232448,
            smem_per_sm=233472,
            memory_bytes=193273528320,
        ),
        Device(
            slug="nvidia_b300",
            capability=103,
            num_sms=148,
            smem_per_cta=232448,
            smem_per_sm=233472,
            memory_bytes=309237645312,
        ),
    )
}


def device_slug(reported_name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``nvidia_h100_80gb_hbm3``: the whole name, so that unlike cards share no table."""
    return re.sub(r"[^a-z0-9]+", "_", reported_name.lower()).strip("_")
