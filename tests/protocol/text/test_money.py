"""Amounts, rates and units as people read them, for every size, sign and number of decimals."""

import pytest

from protocol.text.money import CREDITS, EarningPace, Unit, checked_name, pace_text, parse_unit, unitless_price

EUR = Unit("EUR", 2)
POINTS = Unit("points", 0)


@pytest.mark.parametrize(
    ("unit", "micros", "shown"),
    [
        (EUR, 0, "0.00 EUR"),
        (EUR, 38_703, "0.04 EUR"),
        (EUR, 4_999, "0.0050 EUR"),  # would be 0.00
        (EUR, 5_000, "0.01 EUR"),
        (EUR, 1, "0.000001 EUR"),
        (EUR, -38_703, "-0.04 EUR"),
        (EUR, -1, "-0.000001 EUR"),
        (EUR, 1_234_567_890_123, "1,234,567.89 EUR"),
        (EUR, 2**62, "4,611,686,018,427.39 EUR"),
        (EUR, 999_995_000, "1,000.00 EUR"),
        (POINTS, 0, "0 points"),
        (POINTS, 12_345_600_000, "12,346 points"),
        (POINTS, 400_000, "0.40 points"),
        (POINTS, -1_500_000, "-2 points"),
        (Unit("EUR", 6), 38_703, "0.038703 EUR"),
        (CREDITS, 38_703, "0.0387 credits"),
        (CREDITS, 360_000, "0.36 credits"),
        (CREDITS, 10**9, "1,000.00 credits"),
        (CREDITS, 0, "0.00 credits"),
        (Unit("EUR", 1), 2_000_000, "2.0 EUR"),
    ],
)
def test_an_amount_is_rounded_to_the_decimals_and_never_shown_as_zero(unit: Unit, micros: int, shown: str) -> None:
    assert unit.amount(micros) == shown


@pytest.mark.parametrize(
    ("unit", "micros", "shown"),
    [
        (EUR, 0, "0.00 EUR"),
        (EUR, 12_345_678, "12.345678 EUR"),
        (EUR, 12_300_000, "12.30 EUR"),
        (EUR, -12_345_670, "-12.34567 EUR"),
        (POINTS, 3_000_000, "3 points"),
        (POINTS, 3_500_000, "3.5 points"),
        (CREDITS, 10**9, "1,000.00 credits"),
    ],
)
def test_an_exact_amount_has_every_decimal_that_is_not_zero(unit: Unit, micros: int, shown: str) -> None:
    assert unit.exact(micros) == shown


def test_a_column_keeps_its_decimals_and_a_range_names_its_unit_once() -> None:
    assert CREDITS.figure(360_000) == "0.3600"
    assert CREDITS.between(360_000, 8_585_200) == "0.36 to 8.5852 credits"
    assert CREDITS.between(360_000, 360_001) == "0.36 credits"
    assert unitless_price(1_500_000) == "1.50"


def test_there_is_no_rate_of_a_finished_round() -> None:
    assert pace_text(EUR, EarningPace(1_100_000, 24_000_000, D), finished=True) == "none: the round is finished"


def test_a_page_separates_thousands_by_a_narrow_space() -> None:
    assert EUR.figure(1_234_560_000, separator="\u202f") == "1\u202f234.56"


@pytest.mark.parametrize("name", ["EUR", "points", "€", "$", "₿", "kWh", "test-EUR", "U.S.D", "a"])
def test_a_name_may_be_a_word_or_a_currency_sign(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "EUR ",
        "E U",
        "000 EUR",  # would read as part of the amount
        "E3",
        "<b>x</b>",
        "EUR\n",
        "\x1b[31m",
        "\u202eRUE",
        "EUR\u200b",
        "\u0415UR",  # a Cyrillic letter
        "€€",
        "\ufdfc",  # a currency sign that runs from right to left
        "-EUR",
        "EUR.",
        "a" * 13,
        "x" * 10_000,
    ],
)
def test_a_hostile_name_is_refused_and_is_not_shown(name: str) -> None:
    with pytest.raises(ValueError, match="a unit is"):
        checked_name(name)
    assert parse_unit({"name": name, "decimals": 2}) == CREDITS


@pytest.mark.parametrize(
    "value",
    [
        None,
        "EUR",
        [],
        {},
        {"name": "EUR"},
        {"name": "EUR", "decimals": 7},
        {"name": "EUR", "decimals": -1},
        {"name": "EUR", "decimals": "2"},
        {"name": "EUR", "decimals": 2.0},
        {"name": 5, "decimals": 2},
        {"name": None, "decimals": 2},
        {"name": ["EUR"], "decimals": 2},
    ],
)
def test_a_unit_of_an_invalid_form_is_none(value: object) -> None:
    assert parse_unit(value) == CREDITS


def test_a_unit_survives_its_document() -> None:
    assert parse_unit(EUR.to_json()) == EUR


H, D = 3600.0, 86_400.0


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        (EarningPace(), "no credit counted in the last day; new credit is counted within two minutes"),
        (EarningPace(5_000_000, 5_000_000, 60.0), "too early for a rate: the first credit is less than 5 min old"),
        (EarningPace(500_000, 500_000, 1_800.0), "about 1.00 EUR per hour (from 30 min)"),
        (EarningPace(1_000_000, 1_500_000, 1.5 * H), "1.00 EUR per hour, about 24.00 EUR per day (from 2 h)"),
        (
            EarningPace(1_100_000, 24_000_000, D),
            "1.10 EUR per hour, 24.00 EUR in the last day; the last hour is 10% above the mean of 1.00 per hour",
        ),
        (
            EarningPace(1_010_000, 24_000_000, D),
            "1.01 EUR per hour, 24.00 EUR in the last day; the last hour is near the mean of 1.00 per hour",
        ),
        (
            EarningPace(0, 24_000_000, D),
            "0.00 EUR per hour, 24.00 EUR in the last day; the last hour is 100% below the mean of 1.00 per hour",
        ),
        (
            EarningPace(-500_000, 24_000_000, D),
            "-0.50 EUR per hour, 24.00 EUR in the last day; the last hour is 150% below the mean of 1.00 per hour",
        ),
        (EarningPace(0, 0, D), "0.00 EUR per hour, 0.00 EUR in the last day"),  # all of it was taken back
    ],
)
def test_a_rate_is_stated_with_its_trend_and_its_basis(pace: EarningPace, said: str) -> None:
    assert pace_text(EUR, pace) == said


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"hour_micros": "1", "day_micros": 1, "earning_s": 1.0},
        {"hour_micros": 2**80, "day_micros": 1, "earning_s": 1.0},
    ],
)
def test_a_pace_of_an_invalid_form_is_not_known(value: object) -> None:
    assert EarningPace.parse(value) is None


def test_a_pace_whose_time_is_impossible_is_bounded() -> None:
    """A clock that jumps makes times negative or huge; the rate stays a number."""
    early = EarningPace.parse({"hour_micros": 1, "day_micros": 1, "earning_s": -5e9})
    late = EarningPace.parse({"hour_micros": 1, "day_micros": 24, "earning_s": 5e9})
    assert early == EarningPace(1, 1, 0.0)
    assert early.per_hour is None
    assert late == EarningPace(1, 24, D)
    assert late.mean_per_hour == 1.0
    assert EarningPace.parse({"hour_micros": 1, "day_micros": 1, "earning_s": None}) == EarningPace(1, 1, None)


def test_nodes_earn_together() -> None:
    assert EarningPace(1, 10, 60.0) + EarningPace(2, 20, 90.0) + EarningPace() == EarningPace(3, 30, 90.0)
