"""Profiles: what is fixed when weights are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Interface = Literal["indexed", "grouped_contiguous", "grouped_masked"]
LayoutName = Literal["rows", "fragment64"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A load-time contract. The token count picks a schedule inside a profile, never another profile."""

    name: str
    interface: Interface  # how routed rows reach the kernel
    layout: LayoutName  # how weights lie in memory: see `layout`
    kernels: tuple[str, ...]  # device schedules that a table of this profile may name
    devices: tuple[str, ...]  # device slugs it was built for; () = any that Triton compiles for
    shard_axis: Literal["expert", "tensor", "any"]
    measured: bool  # False: compiled and checked by resource report only
    summary: str


PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile(
            name="portable",
            interface="indexed",
            layout="rows",
            kernels=("portable",),
            devices=(),
            shard_axis="any",
            measured=True,
            summary="plain Triton, any legal shape, Ampere to Blackwell",
        ),
        Profile(
            name="h200_decode_ep8",
            interface="indexed",
            layout="fragment64",
            kernels=("mma_sync", "wgmma"),
            devices=("nvidia_h200",),
            shard_axis="expert",
            measured=True,
            summary="whole experts, 8 to 1024 routed rows: mma.sync, swapped operands",
        ),
        Profile(
            name="h200_prefill_ep8",
            interface="indexed",
            layout="fragment64",
            kernels=("wgmma", "mma_sync"),
            devices=("nvidia_h200",),
            shard_axis="expert",
            measured=True,
            summary="whole experts, 512 to 65536 routed rows: wgmma, weights in registers",
        ),
        Profile(
            name="h200_tp8",
            interface="indexed",
            layout="fragment64",
            kernels=("mma_sync", "wgmma"),
            devices=("nvidia_h200",),
            shard_axis="tensor",
            measured=True,
            summary="sliced experts, both phases from one layout",
        ),
        Profile(
            name="h200_grouped_prefill",
            interface="grouped_contiguous",
            layout="fragment64",
            kernels=("wgmma",),
            devices=("nvidia_h200",),
            shard_axis="expert",
            measured=True,
            summary="rows sorted by expert in 128-row groups (m_indices)",
        ),
        Profile(
            name="h200_grouped_decode",
            interface="grouped_masked",
            layout="fragment64",
            kernels=("mma_sync", "wgmma"),
            devices=("nvidia_h200",),
            shard_axis="expert",
            measured=True,
            summary="[E, max_m, K] with masked_m valid rows; capacity never picks the tile",
        ),
        Profile(
            name="blackwell_decode_ep8",
            interface="indexed",
            layout="fragment64",
            kernels=("mma_sync",),
            devices=("nvidia_b200", "nvidia_b300"),
            shard_axis="expert",
            measured=False,
            summary="as h200_decode_ep8, compiled for sm_100a and sm_103a, not measured",
        ),
    )
}


def get_profile(name: str) -> Profile:
    """The profile of that name; a KeyError-free refusal otherwise."""
    if name not in PROFILES:
        raise ValueError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]
