"""Compile a schedule with no GPU and read what it costs: registers, spills, shared memory, tensor instructions."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .devices import Device
from .families import kernel_module
from .problem import MoeProblem
from .schedule import Schedule

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
CACHE_ENV = "W4A16_MOE_COMPILE_CACHE"  # folder of the on-disk cache; empty turns it off


@dataclass(frozen=True)
class CompileSpec:
    """What Triton needs to compile one kernel: made by a family's ``compile_spec``."""

    fn: Any  # triton.JITFunction or GluonJITFunction
    signature: Mapping[str, str]  # every parameter in order: "*bf16", "i32", ..., or "constexpr"
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]  # num_warps, num_stages, maxnreg, ...
    divisible_by_16: tuple[str, ...] = ()  # parameters that a launch would specialise: aligned pointers, round sizes
    by_capability: Callable[[int], Mapping[str, Any]] | None = None  # constexprs that differ between GPU generations

    def at(self, capability: int) -> CompileSpec:
        """The specification with its constexprs settled for one compute capability."""
        more = self.by_capability(capability) if self.by_capability else {}
        return replace(self, constexprs={**self.constexprs, **more}, by_capability=None)


@dataclass(frozen=True)
class CompileFacts:
    """What the compiler says about one schedule on one compute capability."""

    registers: int  # per thread
    spills_bytes: int  # local memory written and read per thread, stack frame included
    stack_bytes: int
    smem_bytes: int  # per CTA, static and dynamic
    num_warps: int  # in all, copy warps of a warp-specialised kernel included
    mma_instructions: dict[
        str, int
    ]  # SASS opcode (HGMMA: wgmma, HMMA: mma.sync, UTCHMMA: tcgen05) or PTX name -> count
    load_widths: dict[str, int]  # SASS global loads by width in bits -> count, cp.async and TMA included
    ptx_digest: str
    cubin_digest: str
    capability: int
    triton_version: str
    ptxas_version: str
    seconds: float = field(default=0.0, compare=False)  # compile time; 0 when read from the cache
    from_cache: bool = field(default=False, compare=False)


def compile_facts(
    schedule: Schedule, problem: MoeProblem, capability: int, *, top_k: int | None = None, cache_dir: Path | None = None
) -> CompileFacts:
    """Compile ``schedule`` for ``problem`` on ``capability`` (80, 90, 100, 103, ...) and return the facts.

    Cached on disk by kernel source, constants, target and compiler versions. Raises `CompileError` with one line when
    the compiler refuses the schedule.
    """
    if capability not in CAPABILITIES:
        raise ValueError(f"capability={capability}: legal are {', '.join(map(str, CAPABILITIES))}")
    top_k = problem.top_k if top_k is None else top_k
    spec = kernel_module(schedule.kernel).compile_spec(schedule, problem, top_k).at(capability)
    path = _cache_path(spec, capability, cache_dir)
    known = _read(path)
    if known is not None:
        return known
    facts = _compile(spec, capability)
    _write(path, facts)
    return facts


class CompileError(RuntimeError):
    """The compiler refused a schedule; the message is one line."""


def occupancy(facts: CompileFacts, device: Device) -> int:
    """CTAs of this kernel that one SM of ``device`` holds: the least of registers, shared memory and threads."""
    return max(0, min(*occupancy_limits(facts, device).values(), 32))


def occupancy_limits(facts: CompileFacts, device: Device) -> dict[str, int]:
    """CTAs that one SM could hold if only registers, shared memory or threads counted."""
    per_warp = -(-facts.registers * 32 // 256) * 256  # registers are given out in pieces of 256 per warp
    warps = -(-facts.num_warps // 4) * 4  # one warp scheduler of four takes every fourth warp
    return {
        "registers": device.registers_per_sm // (per_warp * warps),
        "shared memory": device.smem_per_sm // (facts.smem_bytes + 1024),  # 1 KiB of each CTA belongs to the system
        "threads": device.threads_per_sm // (32 * facts.num_warps),
    }


def source_of(spec: CompileSpec) -> ASTSource:
    """The compiler's input: Gluon or plain Triton, by the kind of function."""
    names = spec.fn.arg_names
    unknown = set(names) ^ set(spec.signature)
    if unknown:
        raise ValueError(
            f"compile_spec of {spec.fn.__name__} and its parameters differ in {', '.join(sorted(unknown))}"
        )
    signature = {name: spec.signature[name] for name in names}
    constexprs = {(names.index(name),): value for name, value in spec.constexprs.items()}
    attrs = _attributes(spec, names)
    make: Any = ASTSource
    if type(spec.fn).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource

        make = GluonASTSource
    source: ASTSource = make(fn=spec.fn, signature=signature, constexprs=constexprs, attrs=attrs)
    return source


def _attributes(spec: CompileSpec, names: list[str]) -> dict[tuple[int, ...], list[Any]]:
    """As a launch would state them, empty entries included: they are part of Triton's cache key, and what is compiled
    here must serve the launch. Triton 3.6 lists constants that are words, later ones all constants."""
    lists_all = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    attributes: dict[tuple[int, ...], list[Any]] = {}
    for index, name in enumerate(names):
        if name in spec.divisible_by_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in spec.constexprs and (lists_all or isinstance(spec.constexprs[name], str)):
            attributes[(index,)] = []
    return attributes


def compile_kernel(spec: CompileSpec, capability: int) -> Any:
    """Triton's compiled kernel: ``asm`` holds ttgir, ptx and cubin."""
    try:
        return triton.compile(
            source_of(spec.at(capability)), target=GPUTarget("cuda", capability, 32), options=dict(spec.options)
        )
    except (
        Exception
    ) as error:  # Triton raises what its passes raise: RuntimeError, AssertionError, CompilationError, ...
        raise CompileError(_one_line(error)) from error


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, one instruction a line, by the nvdisasm that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _tool("nvdisasm", "-c", file.name)


def _compile(spec: CompileSpec, capability: int) -> CompileFacts:
    start = time.perf_counter()
    facts = _facts(compile_kernel(spec, capability), spec, capability)
    return replace(facts, seconds=round(time.perf_counter() - start, 3))


def _facts(kernel: Any, spec: CompileSpec, capability: int) -> CompileFacts:
    cubin = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    try:
        sass, ptx = disassemble(cubin), ""
    except (
        CompileError
    ):  # the disassembler of Triton 3.6 does not know sm_103a: count in PTX, take the stack for spills
        sass, ptx = "", kernel.asm["ptx"]
    metadata = kernel.metadata
    return CompileFacts(
        registers=counts["REG"],
        spills_bytes=counts["LOCAL"] + (_spill_bytes(sass) if sass else counts["STACK"]),
        stack_bytes=counts["STACK"],
        smem_bytes=max(int(metadata.shared), counts["SHARED"]),
        num_warps=_num_warps(kernel, spec),
        mma_instructions=count_mma(sass) if sass else count_mma_in_ptx(ptx),
        load_widths=count_loads(sass),
        ptx_digest=hashlib.sha256(kernel.asm["ptx"].encode()).hexdigest()[:16],
        cubin_digest=hashlib.sha256(cubin).hexdigest()[:16],
        capability=capability,
        triton_version=triton.__version__,
        ptxas_version=ptxas_version(capability),
    )


def _num_warps(kernel: Any, spec: CompileSpec) -> int:
    """Warps in all: PTX states the threads of a CTA, copy warps included."""
    match = re.search(r"\.reqntid (\d+)", kernel.asm["ptx"])
    return int(match.group(1)) // 32 if match else int(spec.options["num_warps"])


def count_mma(sass: str) -> dict[str, int]:
    """Tensor-core instructions by opcode."""
    return dict(Counter(re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTCOMMA|QGMMA|IMMA)\b", sass)))


def count_mma_in_ptx(ptx: str) -> dict[str, int]:
    """Tensor-core instructions by PTX name, for targets that cannot be disassembled."""
    return dict(
        Counter(re.findall(r"^\s*(?:@%?\w+\s+)?(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx, re.MULTILINE))
    )


def count_loads(sass: str) -> dict[str, int]:
    """Global loads by width in bits: LDG (to registers) and LDGSTS (cp.async); TMA counts as `tma`."""
    widths: Counter[str] = Counter()
    for modifiers in re.findall(r"\bLDG(?:STS)?\.([A-Z0-9._]+)", sass):
        parts = modifiers.split(".")
        width = next((p for p in parts if p in ("128", "64", "U16", "U8", "S16", "S8")), "32")
        widths[width.lstrip("US")] += 1
    tma = len(re.findall(r"\bUTMALDG\b|\bUBLKCP\b", sass))
    if tma:
        widths["tma"] = tma
    return dict(widths)


def _spill_bytes(sass: str) -> int:
    """Bytes of local-memory stores and loads: each is one register that did not fit (or a local array)."""
    total = 0
    for modifiers in re.findall(r"\b(?:STL|LDL)((?:\.[A-Z0-9]+)*)", sass):
        total += 16 if ".128" in modifiers else 8 if ".64" in modifiers else 4
    return total


@cache
def ptxas_version(capability: int) -> str:
    """Version of the assembler that Triton uses for a capability: Blackwell has its own."""
    name = "ptxas-blackwell" if capability >= 100 and (_bin() / "ptxas-blackwell").exists() else "ptxas"
    match = re.search(r"release [\d.]+, V([\d.]+)", _tool(name, "--version"))
    return match.group(1) if match else "unknown"


def _bin() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _tool(name: str, *arguments: str) -> str:
    path = _bin() / name
    if not path.exists():
        raise CompileError(f"{name} is not part of this Triton installation ({path})")
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{name} failed: {_one_line(done.stderr or done.stdout)}")
    return done.stdout


def _one_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|Error|must|requires|out of", line)]
    name = type(error).__name__ + ": " if isinstance(error, Exception) else ""
    return name + (telling or lines or ["no message"])[-1][:300]


# ---- on-disk cache


def cache_folder() -> Path | None:
    """Folder of cached facts; None when it is turned off."""
    named = os.environ.get(CACHE_ENV)
    if named is not None:
        return Path(named) if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "w4a16_moe" / "compile"


def _cache_path(spec: CompileSpec, capability: int, folder: Path | None) -> Path | None:
    folder = folder or cache_folder()
    if folder is None:
        return None
    key = json.dumps(
        {
            "source": spec.fn.cache_key,  # hash of the function and of every function that it calls
            "signature": dict(spec.signature),
            "constexprs": {name: repr(value) for name, value in spec.constexprs.items()},
            "options": {name: repr(value) for name, value in spec.options.items()},
            "divisible_by_16": sorted(spec.divisible_by_16),
            "capability": capability,
            "triton": triton.__version__,
            "ptxas": ptxas_version(capability),
            "facts": [f.name for f in fields(CompileFacts)],
        },
        sort_keys=True,
    )
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path | None) -> CompileFacts | None:
    """Cached facts; a corrupt entry is a miss, named in one line."""
    if path is None or not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = CompileFacts(**{**values, "seconds": 0.0, "from_cache": True})
        if not isinstance(known.registers, int) or not isinstance(known.mma_instructions, dict):
            raise TypeError("wrong types")
        return known
    except (OSError, ValueError, TypeError) as error:
        print(f"compile cache: {path.name} is unreadable ({_one_line(error)}); compiling again", file=sys.stderr)
        return None


def _write(path: Path | None, facts: CompileFacts) -> None:
    """Write to a temporary name, then rename: a reader never sees half an entry."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(asdict(facts), file)
        os.replace(file.name, path)
    except OSError as error:
        print(f"compile cache: cannot write {path} ({_one_line(error)})", file=sys.stderr)
