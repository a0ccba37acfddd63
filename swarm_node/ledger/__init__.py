"""The public ledger as this machine checks it: log, receipts, draws, payouts and reports of audits."""
