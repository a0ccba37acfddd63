"""What the machine tells of itself without root and without a library: graphics cards, power, load, input, memory."""
