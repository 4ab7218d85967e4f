"""Which reader a file needs, told by its content and never by its name alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chord_lab.errors import UserError
from chord_lab.traces.table import Trace
from chord_lab.traces.text_files import GZIP_MAGIC, open_bytes, read_text

Progress = Callable[[str], None]
READABLE = (
    "Nsight Compute reports (.ncu-rep) and its CSV pages, Nsight Systems SQLite exports and stats CSV, "
    "PyTorch profiler JSON (.json, .json.gz), this project's own Parquet tables"
)
# First bytes of files that people try, and what to do instead
OTHER_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file; unpack it first"),
    (b"\xfd7zXZ", "an xz file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"\x7fELF", "an ELF binary (a program or a cubin), not a profile"),
    (b"%PDF", "a PDF document"),
    (b"\x89PNG", "a PNG picture"),
    (b"\x80\x04", "a Python pickle, which is code and never loaded"),
    (b"\x80\x05", "a Python pickle, which is code and never loaded"),
)
FORBIDDEN = (
    "the driver forbade the GPU's performance counters (ERR_NVGPUCTRPERM): a setting of the host, not of this image. "
    "Its administrator can allow them (NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN for the container); "
    "times by CUDA events and the PyTorch profiler work without"
)
NSYS_REPORT_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")


def read_trace(path: str | Path, progress: Progress | None = None) -> Trace:
    """The kernel table of any known profile. Raises UserError in one line for everything else.

    ``progress`` is told now and then how much has been read: files of gigabytes take a minute.
    """
    path = Path(path)
    head = _first_bytes(path)
    if path.suffix in NSYS_REPORT_SUFFIXES:
        export = f"nsys export --type sqlite {path.name}"
        raise UserError(f"{path}: Nsight Systems' own report; export it where nsys is installed: {export}")
    if head.startswith(b"SQLite format 3\x00"):
        from chord_lab.traces.nsys_sqlite import read_nsys_sqlite

        return read_nsys_sqlite(path, progress)
    if head.startswith(b"NVR\x00"):
        from chord_lab.traces.ncu_report import read_ncu_report

        return read_ncu_report(path)
    if head.startswith(b"PAR1"):
        from chord_lab.traces.stored import read_stored

        return read_stored(path)
    for magic, what in OTHER_FORMATS:
        if head.startswith(magic):
            raise UserError(f"{path}: {what}. Readable are: {READABLE}")
    if head.startswith(GZIP_MAGIC):
        return _read_unpacked(path, progress)
    return _read_text_form(path, head, progress)


def _first_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise UserError(f"{path}: a folder, not a profile file")
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever, and all is read more than once
            raise UserError(f"{path}: a pipe or a device, not a file: write it to a file first")
        with open(path, "rb") as stream:
            head = stream.read(4096)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not head:
        raise UserError(f"{path}: an empty file")
    return head


def _read_unpacked(path: Path, progress: Progress | None) -> Trace:
    from chord_lab.traces.json_stream import GZIP_DAMAGE

    try:
        with open_bytes(path) as stream:
            inside = stream.read(4096)
    except GZIP_DAMAGE as error:
        raise UserError(f"{path}: damaged or cut-off gzip file ({error})") from None
    if not inside:
        raise UserError(f"{path}: a gzip file with nothing in it")
    if inside.startswith((b"SQLite format 3\x00", b"NVR\x00", b"PAR1")):
        raise UserError(f"{path}: a profile packed with gzip; unpack it first: gunzip {path.name}")
    return _read_text_form(path, inside, progress)


def _read_text_form(path: Path, head: bytes, progress: Progress | None) -> Trace:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith((b"{", b"[")) and not start.startswith(b"[CUDA"):
        from chord_lab.traces.torch_profiler import read_torch_profiler

        return read_torch_profiler(path, progress)
    if b"\x00" in head and head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: a binary file of no known kind. Readable are: {READABLE}")
    text, notes = read_text(path)
    from chord_lab.traces.ncu_csv import has_ncu_table, read_ncu_csv
    from chord_lab.traces.nsys_csv import has_nsys_table, read_nsys_csv

    if has_ncu_table(text):
        return read_ncu_csv(path, text, notes)
    if has_nsys_table(text):
        return read_nsys_csv(path, text, notes)
    raise UserError(f"{path}: {_what_text_is(text)}")


def _what_text_is(text: str) -> str:
    """A run that brought no table has a reason in its chatter: say that one."""
    if "ERR_NVGPUCTRPERM" in text:
        return FORBIDDEN
    if "No kernels were profiled" in text:
        return "a log of Nsight Compute: no kernels were profiled (filter too narrow, or nothing was launched)"
    error = next((line for line in text.splitlines() if line.startswith("==ERROR==")), None)
    if error:
        return f"a log of Nsight Compute that failed: {error.removeprefix('==ERROR==').strip()}"
    if not text.strip():
        return "nothing but white space"
    first = next(line for line in text.splitlines() if line.strip()).strip()
    return f"text that holds no kernel table of Nsight Compute or Nsight Systems (first line: {first[:60]!r})"
