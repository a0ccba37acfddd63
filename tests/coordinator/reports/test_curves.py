"""The curves of the training page."""

from coordinator.pages import metric_words
from coordinator.reports.curves import Curves, Update


def test_every_metric_of_the_learner_has_a_curve() -> None:
    """Names late in the alphabet, such as `tokens`, once fell off a page with room for 24."""
    told = Curves()
    told.updates = [Update(1, 1.0, 1.0, 0, 0, dict.fromkeys(metric_words.KNOWN, 1.0))]
    assert set(told.metrics()) == metric_words.KNOWN
