"""How an owner talks to the agent that runs in a home: a socket of its own, for nobody else on the machine."""
