"""Do policies learn in environments with tools, and in those of other libraries? A tool task, and one of verifiers."""
