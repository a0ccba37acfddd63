"""Other implementations of the protocol, talking to ours over real sockets."""
