"""What work is worth: escrow and settlement, payouts and their rails, and the witnesses of the ledger."""
