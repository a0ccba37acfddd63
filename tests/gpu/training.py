"""A batch whose log-probabilities are those of an untrained policy, so that no correction drops a sample."""

from bench.gpu.learner import Load
from tests.gpu.conftest import SIZES

BATCH = Load(groups=3, samples=4, prompt=24, completion=(8, 64), micro_batch_tokens=512).batch(
    SIZES["vocab_size"], seed=1
)
