"""Rewards of the operator's: functions of any origin, run in processes that can be killed."""
