"""Tests of evaluation suites that are not ours, run by their own commands; `make test-suites` installs them."""
