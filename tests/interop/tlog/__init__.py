"""Programs that run in the environment of C2SP tools that others wrote."""
