"""A distribution of its own: the taskset `vault`, as an author of environments for verifiers publishes one."""
