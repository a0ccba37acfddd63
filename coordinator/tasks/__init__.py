"""The Data plane: problems, prompts and chat templates, and the functions that reward answers."""
