"""Admission on the visible version: how many groups a node may start with the policy it has loaded.

With S the staleness bound, B the groups per update, and u the update of the version *that node* would sample with, a
group may start only while

    (S + u + 1) · B − issued > 0

where *issued* counts every group that is trained, accepted or in flight. The batch that leads to update n + 1 takes
groups in order of their version, so a group of update u enters at latest the batch S + u + 1, formed when the learner
stands at update S + u: its staleness is then at most S. Nothing needs to be thrown away, however slow the learner is.

Echo's replay buffer is the other way: a group may start for any version that is not too old yet, as long as there is
room in a buffer of so many updates' worth. Nodes never pause, and what grows too old on the way was sampled in vain.

A group that fails gives its place back. Whatever still arrives too late, since a node was slow, is stopped at intake
and when a batch is formed.
"""


def admissible_groups(*, staleness: int, groups_per_update: int, visible_update: int, issued_groups: int) -> int:
    """How many more groups may start for a node that holds the version of `visible_update`."""
    return max(0, (staleness + visible_update + 1) * groups_per_update - issued_groups)


def room_in_buffer(*, buffered_max: int, groups_per_update: int, unfinished_groups: int) -> int:
    """How many more groups may start where nothing is asked but that they fit into the buffer."""
    return max(0, buffered_max * groups_per_update - unfinished_groups)


def is_stale(*, staleness: int, policy_update: int, learner_update: int) -> bool:
    """Whether a rollout of that version may no longer be trained on by a learner that stands at that update."""
    return learner_update - policy_update > staleness
