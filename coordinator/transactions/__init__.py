"""Every change of a round's state: one function is one transaction. Nothing else writes to the store."""
