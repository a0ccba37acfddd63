"""What an owner sees of a running agent: the lines of `status`, and the live view of `join`."""
