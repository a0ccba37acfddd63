"""What free keys do to a round: honest nodes with attackers beside them, as ratios to the undisturbed run."""
