"""`.ncu-rep`: the container's own bookkeeping finds damage that `ncu-report` passes over in silence."""

import sys
from types import SimpleNamespace

import pytest

from chord_lab.errors import UserError
from chord_lab.traces import read_trace
from chord_lab.traces.ncu_report import results_promised


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def message(**fields):
    """A protobuf message of whole numbers: f2=1 is field 2."""
    return b"".join(varint(int(name[1:]) << 3) + varint(value) for name, value in fields.items())


def container(*blocks):
    """A report's outside: file header, then blocks of (results, payload)."""
    header = message(f1=7)
    out = b"NVR\0" + len(header).to_bytes(4, "little") + header
    for results, payload in blocks:
        # field 4 is text: it must be stepped over
        head = message(f2=results) + varint(4 << 3 | 2) + varint(3) + b"abc" + message(f5=len(payload))
        out += len(head).to_bytes(4, "little") + head + payload
    return out


class Metric:
    def __init__(self, value, unit=""):
        self._value, self._unit = value, unit

    def has_value(self):
        return self._value is not None

    def value(self):
        return self._value

    def unit(self):
        return self._unit


class Action:
    """What `ncu-report` gives for one result."""

    def __init__(self, metrics, ranges=(), name="moe(int *)"):
        self.metrics, self.ranges, self._name = metrics, ranges, name

    def name(self):
        return self._name

    def metric_names(self):
        return tuple(self.metrics)

    def metric_by_name(self, name):
        return self.metrics.get(name)

    def workload_type(self):
        return 0

    def sections(self):
        return [SimpleNamespace(identifier=lambda: "LaunchStats")]

    def nvtx_state(self):
        if not self.ranges:
            return None
        domain = SimpleNamespace(start_end_ranges=tuple, push_pop_ranges=lambda: self.ranges)
        return SimpleNamespace(domains=lambda: (0,), domain_by_id=lambda _: domain)


METRICS = {
    "gpu__time_duration.sum": Metric(192192, "ns"),
    "launch__registers_per_thread": Metric(122, "register/thread"),
    "launch__shared_mem_per_block_static": Metric(16),
    "launch__shared_mem_per_block_dynamic": Metric(45044),
    "launch__shared_mem_per_block": Metric(46084),  # with what the driver reserves
    "device__attribute_display_name": Metric("NVIDIA H200"),
    "launch__stream_id": Metric(7),
    "dram__throughput": Metric(None),
}
for _what, _sizes in (("grid", (396, 1, 1)), ("block", (128, 1, 1))):
    METRICS |= {f"launch__{_what}_dim_{axis}": Metric(size) for axis, size in zip("xyz", _sizes, strict=True)}


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Write a container and let a stand-in of the package find these actions in it."""

    def _report(actions, *blocks):
        path = tmp_path / "r.ncu-rep"
        path.write_bytes(container(*blocks))
        found = SimpleNamespace(num_actions=lambda: len(actions), action_by_idx=lambda i: actions[i])
        package = SimpleNamespace(
            load_report=lambda _: SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda _: found)
        )
        monkeypatch.setitem(sys.modules, "ncu_report", package)
        return path

    return _report


def test_a_report_becomes_the_kernel_table(report):
    path = report([Action(METRICS, ("decode", "record abc"))], (0, b""), (1, b"x" * 300), (0, b""))
    trace = read_trace(path)
    row = trace.kernels.iloc[0]
    assert (trace.kind, trace.device) == ("ncu-report", "NVIDIA H200")
    assert (row["name"], row["time_us"], row["grid"], row["block"]) == ("moe(int *)", 192.192, "396x1x1", "128x1x1")
    assert (row["registers"], row["smem_bytes"], row["stream"]) == (122, 45060, 7)
    assert row["nvtx"] == "decode > record abc"
    assert trace.metrics_of(0)["gpu__time_duration.sum"] == {"value": 192192.0, "unit": "ns"}
    assert any("1 metrics have no value" in n for n in trace.notes)


def test_a_report_cut_anywhere_is_refused(report, tmp_path):
    path = report([Action(METRICS)], (0, b"abc"), (1, b"x" * 50))
    whole = path.read_bytes()
    assert results_promised(path) == 1
    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        if size in ends(whole):
            continue  # whole blocks: then the missing result tells
        with pytest.raises(UserError, match=r"cut-off|blocks do not end"):
            read_trace(path)


def ends(whole):
    """Offsets at which a block ends."""
    at = 8 + int.from_bytes(whole[4:8], "little")
    found = [at]
    for payload in (3, 50):
        at += 4 + int.from_bytes(whole[at : at + 4], "little") + payload
        found.append(at)
    return found


@pytest.mark.parametrize(
    ("actions", "promised", "words"),
    [
        ([], 1, "0 of 1 results"),
        ([Action({})], 1, "0 of 1 results"),
        ([Action(METRICS)], 3, "1 of 3 results"),
        ([Action(METRICS), Action({})], 2, "1 of 2 results"),
    ],
)
def test_results_that_the_package_lost_in_silence_are_noticed(report, actions, promised, words):
    with pytest.raises(UserError, match=f"damaged report: {words}"):
        read_trace(report(actions, (promised, b"x" * 20)))


def test_a_package_that_fails_is_one_line(report, monkeypatch):
    path = report([], (0, b""))

    def load(_):
        raise RuntimeError("cannot parse\nmany lines")

    monkeypatch.setattr(sys.modules["ncu_report"], "load_report", load)
    with pytest.raises(UserError, match=r"cannot read it .cannot parse.: damaged, or newer") as refusal:
        read_trace(path)
    assert "\n" not in str(refusal.value)


def test_a_metric_name_that_is_no_text_is_one_line(report):
    """A flipped bit in a name: the package's own C++ side then refuses the name that it gave."""

    class Torn(Action):
        def metric_by_name(self, name):
            raise TypeError("argument 2 of type 'char const *'\nAdditional information: none")

    with pytest.raises(UserError, match="damaged report: argument 2 of type 'char const") as refusal:
        read_trace(report([Torn(METRICS)], (1, b"x" * 20)))
    assert "\n" not in str(refusal.value)


def test_an_empty_report_says_so(report):
    trace = read_trace(report([], (0, b"session")))
    assert len(trace.kernels) == 0 and any("nothing was profiled" in n for n in trace.notes)
