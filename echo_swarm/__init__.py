"""The swarm as a library: sample with its nodes, and publish the versions that your own trainer makes.

    from echo_swarm import Swarm

    with Swarm("http://127.0.0.1:8700", key) as swarm:
        for rollout in swarm.sample(["12+34="], n=8):
            ...
        swarm.publish(model)

`AsyncSwarm` has the same methods as coroutines. docs/trainers.md is the guide.
"""

from echo_swarm.asynchronous import AsyncSwarm
from echo_swarm.blocking import Swarm
from echo_swarm.rollouts import Budget, Rollout, RolloutSample, Versions
from protocol.errors import SwarmError

__all__ = ["AsyncSwarm", "Budget", "Rollout", "RolloutSample", "Swarm", "SwarmError", "Versions"]
