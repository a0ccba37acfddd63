"""The order of rounds by what they pay per hour of work."""

from swarm_node.work.engine_turn import RoundPay, order_by_pay


def pay(price: int = 1_000_000, tokens_per_s: float = 0.0, *, unit: str = "EUR", is_new: bool = False) -> RoundPay:
    return RoundPay(unit, price, tokens_per_s, is_new)


def test_an_hour_pays_the_price_times_the_speed_of_this_machine() -> None:
    assert pay(2_000_000, 100.0).hour_micros == 720_000
    assert pay(0, 100.0).hour_micros == 0
    assert pay(2_000_000).hour_micros is None, "nothing is guessed"


def test_the_round_that_pays_the_most_per_hour_is_first_and_not_the_one_with_the_highest_price() -> None:
    assert order_by_pay([pay(3_000_000, 10.0), pay(1_000_000, 100.0), pay(2_000_000, 20.0)]) == (1, 2, 0)


def test_rounds_that_pay_the_same_stay_in_the_owners_order() -> None:
    assert order_by_pay([pay(1, 5.0), pay(1_000_000, 5.0), pay(1, 5.0), pay(1_000_000, 5.0)]) == (1, 3, 0, 2)
    assert order_by_pay([]) == ()


def test_a_round_that_was_not_in_the_engine_in_this_run_is_first_until_it_is_measured_or_has_failed() -> None:
    rich, poor = pay(tokens_per_s=100.0), pay(tokens_per_s=1.0)
    assert order_by_pay([rich, poor, pay(is_new=True)]) == (2, 0, 1)
    assert order_by_pay([rich, poor, pay(tokens_per_s=10.0, is_new=True)]) == (2, 0, 1), "not all cards are measured"
    assert order_by_pay([pay(), rich, poor]) == (1, 2, 0), "its first load failed"


def test_amounts_of_different_units_are_not_compared() -> None:
    euro, sat, rich_sat = pay(tokens_per_s=1.0), pay(tokens_per_s=50.0, unit="sat"), pay(tokens_per_s=70.0, unit="sat")
    assert order_by_pay([euro, sat, rich_sat]) == (0, 2, 1)
    assert order_by_pay([sat, euro, rich_sat]) == (2, 0, 1)
    new = pay(unit="sat", is_new=True)
    assert order_by_pay([euro, sat, new]) == (0, 2, 1), "it is measured when the rounds of the first unit have no work"
