"""Style as a test: the rules of the house that a formatter cannot see."""
