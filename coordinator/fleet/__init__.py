"""How many nodes a round needs, which of them work and which stand by, and at what price."""
