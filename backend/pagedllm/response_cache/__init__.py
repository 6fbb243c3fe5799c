"""Whole answers by exact request, kept by a plugin's store and shared by engines.

Owner: the client, in front of the engine, which knows nothing of it. Invariants: only what is
sure to come out the same is kept (greedy or seeded, no logits processors, complete); a store
that is down or slow costs one warning and one bounded delay, and no request; neither the
engine's thread nor an event loop ever waits for it.
"""
