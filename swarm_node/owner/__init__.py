"""The owner's interface to a running agent: status, live view, control socket."""
