"""The forms of the OpenAI-compatible endpoint: queries from request bodies, reply bodies, and the text of samples.

- Pure: bytes and tokens in, values out. No socket, store, clock or event loop.
"""
