"""Helpers of several coordinator programs: durable files, logs, child processes, safe text, refusals."""
