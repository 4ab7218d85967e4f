"""File names of other tools' tuned tables: ``E=48,N=2048,device_name=NVIDIA_H200,dtype=int4_w4a16.json``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST_DIGITS = 18
KNOWN_FIELDS = ("E", "N", "device_name", "dtype", "block_shape", "per_channel_quant")


@dataclass(frozen=True, kw_only=True)
class TableName:
    """What a file name says. Fields that its tool does not know are kept and reported, never dropped."""

    E: int | None = None
    N: int | None = None
    device_name: str = ""
    dtype: str = ""
    block_shape: tuple[int, ...] = ()
    down: bool = False  # SGLang's second file, for the down projection alone
    unknown: dict[str, str] = field(default_factory=dict)

    def remarks(self) -> list[str]:
        """One line for each thing about the name that a user should know."""
        lines = [
            f"file name has the field {name}={value}, which is not part of the format "
            f"(known: {', '.join(KNOWN_FIELDS)}): its tool will not look for a file of this name"
            for name, value in self.unknown.items()
        ]
        missing = [name for name in ("E", "N", "device_name") if getattr(self, name) in (None, "")]
        if missing:
            lines.append(f"file name does not say {', '.join(missing)}")
        return lines


def device_field(reported_name: str) -> str:
    """The reported device name with spaces as underscores, nothing shortened: what vLLM and SGLang look for."""
    return reported_name.replace(" ", "_")


def vllm_name(*, E: int, N: int, device_name: str, dtype: str = "int4_w4a16") -> str:
    """vLLM's name. E: local experts. N: logical intermediate width per rank. device_name: as the driver reports it."""
    return f"E={E},N={N},device_name={device_field(device_name)}" + (f",dtype={dtype}" if dtype else "") + ".json"


def sglang_path(*, E: int, N: int, device_name: str, triton_version: str, dtype: str = "int4_w4a16") -> str:
    """SGLang's folder and name: the Triton version is the folder; for int4, N is the packed half."""
    numbers = [*triton_version.partition("+")[0].split("."), "0", "0"]
    folder = "triton_" + "_".join(numbers[:3])
    name = vllm_name(E=E, N=N // 2 if dtype.startswith("int4") else N, device_name=device_name, dtype=dtype)
    return f"{folder}/{name}"


def parse_name(file_name: str) -> TableName:
    """Read a table's file name; any name gives a result."""
    stem = file_name.removesuffix(".json")
    down = stem.endswith("_down")
    stem = stem.removesuffix("_down")
    values: dict[str, str] = {}
    # A comma inside block_shape=[128,128] does not part two fields.
    for part in re.split(r",(?![^\[]*\])", stem):
        key, mark, value = part.partition("=")
        if mark:
            values[key] = value
        elif part:
            values[part] = ""
    shape = values.pop("block_shape", "")
    numbers = tuple(int(n) for n in re.findall(r"[0-9]{1,18}", shape))
    return TableName(
        E=whole(values.pop("E", "")),
        N=whole(values.pop("N", "")),
        device_name=values.pop("device_name", ""),
        dtype=values.pop("dtype", ""),
        block_shape=numbers,
        down=down,
        unknown=values,
    )


def whole(text: str) -> int | None:
    """The whole number that a key or a field says in plain digits; None for anything else, however long."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def tried_names(*, E: int, N: int, device_name: str, dtype: str = "int4_w4a16") -> list[str]:
    """Names a reader of such tables tries, most specific first; the driver's own device name decides."""
    return list(dict.fromkeys(vllm_name(E=E, N=N, device_name=device_name, dtype=d) for d in (dtype, "")))
