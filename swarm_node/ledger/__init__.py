"""Checks of the public ledger on this machine: log, receipts, draws, payouts and audit reports."""
