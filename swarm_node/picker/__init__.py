"""Which chunk to ask of which source, as pure decisions; time and chance are arguments."""
