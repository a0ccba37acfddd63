"""Readings of this machine without root and without libraries: graphics cards, power, load, input, memory."""
