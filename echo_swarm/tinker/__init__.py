"""A server for clients of Tinker: it trains a LoRA adapter in its own process, and the swarm samples.

    tinker client ── HTTP on loopback ──► server ── forward_backward, optim_step ──► adapter (torch)
                                             └───── save_weights_for_sampler, asample ──► echo_swarm ──► nodes

- To the round, the server is one more external trainer: it publishes with an API key, and that key pays the samples.
- Requests of a model run one at a time, in the order of their `seq_id`. A request is answered by the id of its reply,
  which the client fetches; the same `seq_id` again gets the same id, and nothing runs twice.
- What is not offered is refused by name: a call, a field or a value never has a meaning other than Tinker's.

docs/trainers.md has the first ten minutes, and the calls that exist.
"""
