"""Why a schedule cannot run, before anything is compiled or launched.

Each kernel family brings its own rules (`families`); the rules here hold for all. Nothing imports torch or triton, so a
laptop can judge a schedule for a card it does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .devices import Device
from .families import rules_module
from .problem import MoeProblem
from .profiles import PROFILES, Profile
from .schedule import Schedule

Check = Callable[[Schedule, MoeProblem, Profile, Device], str | None]


class Rule(NamedTuple):
    """One named reason why schedules are illegal; ``check`` returns the reason in one line, or None."""

    name: str
    check: Check


class Illegality(NamedTuple):
    """The first rule that a schedule breaks."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}"


def why_illegal(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> Illegality | None:
    """The first rule that ``schedule`` breaks for ``problem`` under ``profile`` on ``device``; None if it may run.

    A legal schedule can still fail to compile: shared memory and registers are estimates here, exact in `offline`.
    """
    for rule in COMMON_RULES:
        if reason := rule.check(schedule, problem, profile, device):
            return Illegality(rule.name, reason)
    try:
        rules: tuple[Rule, ...] = rules_module(schedule.kernel).RULES
    except ValueError as error:
        return Illegality("kernel", str(error))
    for rule in rules:
        if reason := rule.check(schedule, problem, profile, device):
            return Illegality(rule.name, reason)
    return None


def rule_names(kernel: str) -> list[str]:
    """Every rule that `why_illegal` applies to schedules of a kernel, in order."""
    return [rule.name for rule in (*COMMON_RULES, *rules_module(kernel).RULES)]


def _kernel_of_profile(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if schedule.kernel in profile.kernels:
        return None
    homes = ", ".join(p.name for p in PROFILES.values() if schedule.kernel in p.kernels)
    allowed = ", ".join(profile.kernels)
    return f"profile {profile.name} runs {allowed}; {schedule.kernel} belongs to {homes}"


def _device_of_profile(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if not profile.devices or device.slug in profile.devices:
        return None
    return f"profile {profile.name} is built for {', '.join(profile.devices)}, not {device.slug}"


def _group_size(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    if problem.group_size == 32:
        return None
    return f"group_size {problem.group_size}: the kernels read one scale per 32 of K"


def _memory(schedule: Schedule, problem: MoeProblem, profile: Profile, device: Device) -> str | None:
    need = problem.num_experts * problem.weight_bytes
    if not device.memory_bytes or need <= device.memory_bytes:
        return None
    return f"weights take {need / 1e9:.1f} GB, {device.slug} has {device.memory_bytes / 1e9:.1f} GB"


COMMON_RULES: tuple[Rule, ...] = (
    Rule("kernel of profile", _kernel_of_profile),
    Rule("device of profile", _device_of_profile),
    Rule("group size", _group_size),
    Rule("device memory", _memory),
)
