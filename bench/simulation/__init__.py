"""Simulated broadcasts: the real planner and picker over a network of fluid links, under a virtual clock.

- Time goes in ticks, a fraction of a chunk's time on a link. In a tick bytes flow, then frames arrive, then each node
  that has news decides once: what a node costs does not grow with the swarm.
- Hashing, disks, processors and headers cost nothing here.
- The same seed is the same run, where `PYTHONHASHSEED` is the same, too: the picker goes through sets of names.
"""
