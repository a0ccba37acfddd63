"""A policy version: its manifest, chunks, patches, files, canary, and where they are served."""
