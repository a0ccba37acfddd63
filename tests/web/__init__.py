"""The pages: their figures, their text, and how they look and behave in a real browser."""
