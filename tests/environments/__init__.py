"""Tests of the shipped kinds of environments; those that need further libraries run with `make test-environments`."""
