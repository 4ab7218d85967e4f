"""Numbers and units as Nsight Compute prints them, in any locale."""

import math

import pytest

from chord_lab.traces.numerals import Numerals, base_unit, learn_numerals


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["223008", "0.82"], [223008, 0.82]),
        (["1,234,567.89", "0.5"], [1234567.89, 0.5]),
        (["1.234.567,89", "223.008"], [1234567.89, 223008]),  # German: the second is a grouped whole number
        (["0,82", "223.008"], [0.82, 223008]),
        (["1 234 567,8", "12"], [1234567.8, 12]),
        (["1\u202f234\u202f567,8", "1\u00a0234"], [1234567.8, 1234]),  # French
        (["1'234'567.8"], [1234567.8]),  # Swiss
        (["1\u2019234.5"], [1234.5]),
        (["12,34,567.5"], [1234567.5]),  # Indian English
        (["1.5e+06", "2E-3"], [1.5e6, 2e-3]),
        (["82.5%"], [82.5]),
        (["-3.25", "+4"], [-3.25, 4]),
        (["99,9999"], [99.9999]),
        (["580.65.06", "0,5"], [None, 0.5]),  # a version is no witness
    ],
)
def test_reads_any_locale(texts, values):
    numerals = learn_numerals(texts)
    assert numerals.certain
    for text, value in zip(texts, values, strict=True):
        if value is not None:
            assert numerals.number(text) == pytest.approx(value)


def test_says_when_no_value_tells_the_decimal_sign():
    numerals = learn_numerals(["223,008", "79"])
    assert not numerals.certain
    assert numerals.number("223,008") == 223008


def test_two_ways_of_writing_in_one_file_are_refused():
    with pytest.raises(ValueError, match="one file, two ways"):
        learn_numerals(["0.5", "0,5"])


@pytest.mark.parametrize("text", ["n/a", "N/A", "", "  ", "nan", "-nan(ind)", "(!) n/a", "no data"])
def test_absent_is_not_zero(text):
    assert Numerals(".", certain=True).number(text) is None


def test_infinity_and_nonsense():
    numerals = Numerals(".", certain=True)
    assert numerals.number("inf") == math.inf
    assert numerals.number("-inf") == -math.inf
    for text in ("seven", "1.2.3", "12,34.5", "0x10", "1,23"):
        with pytest.raises(ValueError, match="number"):
            numerals.number(text)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("usecond", ("ns", 1e3)), ("us", ("ns", 1e3)), ("µs", ("ns", 1e3)), ("msecond", ("ns", 1e6)),
        ("s", ("ns", 1e9)), ("nsecond", ("ns", 1)), ("Kbyte", ("byte", 1e3)), ("MB", ("byte", 1e6)),
        ("Gbyte/second", ("byte/s", 1e9)),
        ("Tbyte/s", ("byte/s", 1e12)), ("byte/nsecond", ("byte/s", 1e9)), ("Ghz", ("hz", 1e9)),
        ("cycle/nsecond", ("hz", 1e9)), ("cycle/second", ("hz", 1)), ("Kbyte/block", ("byte/block", 1e3)),
        ("inst/cycle", ("inst/cycle", 1)), ("Ginst", ("inst", 1e9)), ("%", ("%", 1)),
        ("register/thread", ("register/thread", 1)), ("", ("", 1)), ("furlong", ("furlong", 1)),
    ],
)  # fmt: skip
def test_units_come_to_one_base(unit, expected):
    assert base_unit(unit) == (expected[0], pytest.approx(expected[1]))
