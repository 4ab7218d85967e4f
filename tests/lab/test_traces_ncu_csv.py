"""Nsight Compute CSV pages: every oddity that public files show, each with a small file of our own."""

import math

import pytest

from chord_lab.errors import UserError
from chord_lab.traces import read_trace
from chord_lab.traces.counters import counter_frame

IDENTITY = [
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
]
PUSH_POP = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
START_STOP = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def csv_line(*fields):
    return ",".join('"' + str(f).replace('"', '""') + '"' for f in fields)


def raw_page(metrics, rows, nvtx=None):
    """A raw page: ``metrics`` {name: unit}, each row (kernel name, *values)."""
    extra = [PUSH_POP, START_STOP] if nvtx is not None else []
    lines = [csv_line(*IDENTITY, *extra, *metrics), csv_line(*[""] * (len(IDENTITY) + len(extra)), *metrics.values())]
    for i, (name, *values) in enumerate(rows):
        ranges = [nvtx, ""] if nvtx is not None else []
        lines.append(
            csv_line(i, 41, "python3", "node", name, 1, 7, "(128, 1, 1)", "(396, 1, 1)", 0, "9.0", *ranges, *values)
        )
    return "\n".join(lines) + "\n"


def details_page(rows):
    """A details page: each row (launch id, section, metric, unit, value)."""
    header = [*IDENTITY, "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Description"]
    lines = [csv_line(*header)]
    for launch, section, metric, unit, value in rows:
        lines.append(
            csv_line(
                launch,
                41,
                "python3",
                "node",
                "moe(int *)",
                1,
                7,
                "(64, 2, 1)",
                "(10, 1, 1)",
                0,
                "9.0",
                section,
                metric,
                unit,
                value,
                "",
                "",
            )
        )
    return "\n".join(lines) + "\n"


@pytest.fixture
def read(tmp_path):
    def _read(text, name="page.csv", **how):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode(how.get("encoding", "utf-8")))
        return read_trace(path)

    return _read


def test_units_row_is_not_a_kernel_and_driver_chatter_is_no_table(read):  # B92
    noise = "==PROF== Connected to process 39\nibtool.cpp:17: error status: 7 no device\n"
    page = raw_page(
        {"launch__registers_per_thread": "register/thread", "gpu__time_duration.sum": "ns"}, [("k", 79, 223008)]
    )
    trace = read(noise + page + "==PROF== Disconnected\n")
    assert trace.kind == "ncu-csv-raw"
    (row,) = trace.kernels.to_dict("records")
    assert (row["name"], row["time_us"], row["registers"], row["stream"]) == ("k", 223.008, 79, 7)
    assert (row["grid"], row["block"]) == ("396x1x1", "128x1x1")
    assert trace.metrics_of(0)["launch__registers_per_thread"] == {"value": 79, "unit": "register/thread"}


@pytest.mark.parametrize(
    ("unit", "time", "share", "bandwidth_unit", "bandwidth"),
    [
        ("ns", "192192", "87.43", "byte/s", "4206737262737.26"),
        ("us", "192.19", "87.43", "Tbyte/s", "4.21"),
        ("usecond", "192,19", "87,43", "Tbyte/second", "4,21"),
        ("nsecond", "192.192", "87,43", "Gbyte/s", "4.206,74"),
        ("ns", "192\u202f192", "87,43", "Gbyte/s", "4\u202f206,74"),
        ("ns", "192'192", "87.43", "Gbyte/s", "4'206.74"),
        ("ms", "0.19", "87.43", "Gbyte/s", "4,206.74"),
    ],
)
def test_same_kernel_in_any_unit_and_locale(read, unit, time, *, share, bandwidth_unit, bandwidth):
    metrics = {
        "gpu__time_duration.sum": unit,
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%",
        "dram__bytes.sum.per_second": bandwidth_unit,
    }
    trace = read(raw_page(metrics, [("k", time, share, bandwidth)]))
    assert trace.kernels["time_us"][0] == pytest.approx(192.192, rel=0.02)
    counters = counter_frame(trace)
    assert counters["dram_pct"][0] == pytest.approx(87.43)
    assert counters["dram_gbps"][0] == pytest.approx(4206.7, rel=0.002)


def test_ambiguous_numbers_are_said(read):
    trace = read(raw_page({"gpu__time_duration.sum": "ns"}, [("k", "223,008")]))
    assert trace.kernels["time_us"][0] == 223.008
    assert any("decimal sign not certain" in note for note in trace.notes)


def test_contradicting_numbers_are_refused(read):
    page = raw_page(
        {"gpu__time_duration.sum": "us", "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%"}, [("k", "0.5", "0,5")]
    )
    with pytest.raises(UserError, match="two ways of writing numbers"):
        read(page)


def test_absent_values_stay_absent(read):
    metrics = {"gpu__time_duration.sum": "ns", "dram__bytes_read.sum": "byte", "lts__t_sector_hit_rate.pct": "%"}
    trace = read(raw_page(metrics, [("k", "n/a", "", "50.0")]))
    assert math.isnan(trace.kernels["time_us"][0])
    assert "dram__bytes_read.sum" not in trace.metrics_of(0)
    assert any("2 metric values are n/a" in n for n in trace.notes)
    assert any("no duration" in n for n in trace.notes)


def test_nvtx_path_of_nested_ranges(read):
    tail = ":none:none:none:none:none:none"
    cell = f'1  "<default domain>:kimi-k2/ep8/decode{tail}"  "<default domain>:gate_up: 400 rows{tail}" '
    trace = read(raw_page({"gpu__time_duration.sum": "ns"}, [("k", 1000)], nvtx=cell))
    assert trace.kernels["nvtx"][0] == "kimi-k2/ep8/decode > gate_up: 400 rows"


def test_details_page_gathers_the_metrics_of_a_launch(read):
    trace = read(
        details_page(
            [
                (0, "GPU Speed Of Light Throughput", "Memory Throughput", "%", "87.43"),
                (0, "GPU Speed Of Light Throughput", "DRAM Throughput", "%", "87.43"),
                (0, "GPU Speed Of Light Throughput", "Duration", "usecond", "1,192.19"),
                (0, "Memory Workload Analysis", "Memory Throughput", "Tbyte/second", "4.21"),
                (0, "Launch Statistics", "Registers Per Thread", "register/thread", "122"),
                (0, "Launch Statistics", "Static Shared Memory Per Block", "byte/block", "0"),
                (0, "Launch Statistics", "Dynamic Shared Memory Per Block", "Kbyte/block", "45.06"),
                (0, "Warp State Statistics", "", "", ""),  # a rule's row
                (1, "GPU Speed Of Light Throughput", "Duration", "usecond", "10.50"),
            ]
        )
    )
    assert trace.kind == "ncu-csv-details"
    assert trace.kernels["time_us"].tolist() == [1192.19, 10.5]
    assert trace.kernels["registers"].tolist()[0] == 122
    assert trace.kernels["smem_bytes"][0] == 45060
    counters = counter_frame(trace)
    assert counters["dram_pct"][0] == pytest.approx(87.43)
    assert counters["dram_gbps"][0] == pytest.approx(4210)  # the rate, not the share of the same name


def test_a_rule_text_that_spans_lines_keeps_the_table_whole(read):
    page = details_page([(0, "Launch Statistics", "Registers Per Thread", "register/thread", "64")])
    rule = csv_line(
        0,
        41,
        "python3",
        "node",
        "moe(int *)",
        1,
        7,
        "(64, 2, 1)",
        "(10, 1, 1)",
        0,
        "9.0",
        "Occupancy",
        "",
        "",
        "",
        "Limiter",
        'first line, "quoted"\nsecond line',
    )
    trace = read(
        page
        + rule
        + "\n"
        + csv_line(
            0,
            41,
            "python3",
            "node",
            "moe(int *)",
            1,
            7,
            "(64, 2, 1)",
            "(10, 1, 1)",
            0,
            "9.0",
            "GPU Speed Of Light Throughput",
            "Duration",
            "us",
            "2.5",
            "",
            "",
        )
        + "\n"
    )
    assert len(trace.kernels) == 1
    assert trace.kernels["time_us"][0] == 2.5


def test_summary_page_is_said_to_be_a_mean(read):
    header = csv_line(
        "Process ID",
        "Kernel Name",
        "Invocations",
        "Section Name",
        "Metric Name",
        "Metric Unit",
        "Minimum",
        "Maximum",
        "Average",
    )
    trace = read(
        f"{header}\n" + csv_line(1, "k", 4, "GPU Speed Of Light Throughput", "Duration", "us", "1.5", "3.5", "2.5")
    )
    assert trace.kind == "ncu-csv-summary"
    assert (trace.kernels["time_us"][0], trace.kernels["launches"][0]) == (2.5, 4)
    assert any("mean" in n for n in trace.notes)


def test_powershell_utf16_and_unreadable_bytes(read):
    page = raw_page({"gpu__time_duration.sum": "ns"}, [("k", 1000)])
    assert read(page, encoding="utf-16").kernels["time_us"][0] == 1.0
    damaged = page.replace('"k"', '"k?"').encode().replace(b"k?", b"k\xff")
    trace = read(damaged)
    assert trace.kernels["name"][0] == "k\ufffd"
    assert any("not all UTF-8" in n for n in trace.notes)


def test_rows_torn_by_other_output_are_counted(read):
    page = raw_page({"gpu__time_duration.sum": "ns"}, [("a", 1000), ("b", 2000)])
    lines = page.splitlines()
    torn = "\n".join([*lines[:3], "step 12 loss 0.5", lines[3][:-20]])
    trace = read(torn)
    assert trace.kernels["name"].tolist() == ["a"]
    assert any("no rows of it, left out: 2" in n for n in trace.notes)


def test_a_header_alone_is_an_empty_table_that_says_so(read):
    trace = read(csv_line(*IDENTITY, "gpu__time_duration.sum") + "\n")
    assert len(trace.kernels) == 0
    assert any("nothing was profiled" in n for n in trace.notes)


def test_text_metrics_are_kept_as_text(read):
    trace = read(
        raw_page({"gpu__time_duration.sum": "ns", "device__attribute_display_name": ""}, [("k", 1000, "NVIDIA H200")])
    )
    assert trace.device == "NVIDIA H200"
    assert trace.metrics_of(0)["device__attribute_display_name"]["value"] == "NVIDIA H200"
