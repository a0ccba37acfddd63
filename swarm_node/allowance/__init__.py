"""What its owner allows a node: when it may work, what it may take of the machine and of the line."""
