"""The picker: decides which chunk to request from which source. No I/O; time and randomness are arguments."""
