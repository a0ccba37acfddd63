"""What the learner reads of the coordinator's answers."""

from coordinator.learner.client import read_batch
from protocol.learning import Batch, TrainingGroup, TrainingSample
from protocol.rollout import pack_logprobs, pack_tokens


def test_a_batch_of_the_largest_papers_is_read() -> None:
    """512 prompts with 16 samples each, as DAPO has them: more values than any message of a node may have."""
    sample = TrainingSample(tokens=pack_tokens([1, 2]), logprobs=pack_logprobs([-1.0, -2.0]), reward=1.0)
    group = TrainingGroup(claim_id="ab" * 32, prompt=pack_tokens([3]), policy_update=0, samples=(sample,) * 16)
    batch = Batch(number=1, groups=(group,) * 512, credit_micros=5)
    assert read_batch(batch.to_bytes()) == batch


def test_a_batch_of_long_answers_is_read() -> None:
    """Half a minute of 32 cards: 80 megabytes of tokens and log-probabilities."""
    long = [7] * 10_000
    sample = TrainingSample(tokens=pack_tokens(long), logprobs=pack_logprobs([-1.0] * len(long)), reward=1.0)
    group = TrainingGroup(claim_id="ab" * 32, prompt=pack_tokens([3]), policy_update=0, samples=(sample,) * 16)
    batch = Batch(number=1, groups=(group,) * 64, credit_micros=5)
    assert read_batch(batch.to_bytes()) == batch
