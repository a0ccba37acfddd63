"""HTTP handlers: parse, call an effect, format. They hold no state and take no decisions."""
