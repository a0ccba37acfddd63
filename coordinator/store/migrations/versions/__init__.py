"""The steps of the store's schema, in the order of their numbers."""
