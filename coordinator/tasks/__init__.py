"""The data of a round: problems, prompts and chat templates, and the functions that reward answers."""
