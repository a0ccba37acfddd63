"""The owner's page: a web page on loopback that the agent serves to its owner alone."""
