"""Rounds of shipped programs that several benches measure."""
