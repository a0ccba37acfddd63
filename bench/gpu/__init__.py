"""What can only be said on a GPU."""
