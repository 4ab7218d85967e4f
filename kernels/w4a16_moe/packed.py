"""Packed weights: tensors plus the contract they were packed for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .problem import MoeProblem
from .profiles import Profile, get_profile


@dataclass(frozen=True)
class PackedWeights:
    """One projection's weights of all local experts, in the layout of one profile. Made by `layout.pack`."""

    problem: MoeProblem
    profile: Profile
    codes: torch.Tensor  # layout `rows`: uint8 [E, K/64, N, 32]; layout `fragment64`: int16 [E, N/64, K/64, 1024]
    scales: torch.Tensor  # layout `rows`: bf16 [E, K/64, N, 2]; layout `fragment64`: int32 [E, N/64, K/64, 64]

    def for_profile(self, name: str) -> PackedWeights:
        """The same tensors under another profile of the same layout: one copy of the weights serves both phases."""
        profile = get_profile(name)
        if profile.layout != self.profile.layout:
            raise ValueError(
                f"weights packed for profile {self.profile.name} (layout {self.profile.layout}) cannot serve "
                f"profile {name} (layout {profile.layout}); pack them again for {name}"
            )
        return replace(self, profile=profile)

    def require(self, *names: str) -> None:
        """Refuse to run under a profile that these weights were not packed for."""
        if self.profile.name not in names:
            raise ValueError(
                f"weights packed for profile {self.profile.name} were given to profile {' or '.join(names)}"
            )
