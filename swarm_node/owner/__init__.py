"""What the owner of a running agent sees and orders: status, live view, control socket."""
