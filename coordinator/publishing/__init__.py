"""From the learner's files to signed versions: made, kept, mirrored, replaced, verified; and the keys that sign."""
