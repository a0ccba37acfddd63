"""Cells of honest nodes with attackers beside them, measured as ratios to the undisturbed run."""
