from __future__ import annotations

import pytest

from chord_lab.measurement.cores import cgroup_cores, compilers, usable_cores


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("x", None)],
)
def test_a_containers_quota_is_respected(tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cgroup_cores(tmp_path) == expected


def test_version_1_control_groups_and_none_at_all(tmp_path):
    assert cgroup_cores(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cores(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("400000\n")
    assert cgroup_cores(tmp_path) == 4


def test_at_least_one_compiler_and_one_core():
    assert usable_cores() >= 1 and compilers() >= 1 and compilers(share=10**6) == 1 and compilers(7) == 7
