"""The coordinator: decides for everyone, and trusts nobody's word but its own checks.

- One asyncio loop serves HTTP; the learner and the seeder are child processes.
- Every change of state is one *effect*: a plain function of a connection, run in one transaction (`state`).
- Handlers in `api/` parse, call an effect and format; they decide nothing.
- Counters come from the store, never from memory: a restart continues where the last commit stood.
"""
