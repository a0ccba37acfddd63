"""The coordinator's HTTP API and the origins of public files, as a node asks them."""
