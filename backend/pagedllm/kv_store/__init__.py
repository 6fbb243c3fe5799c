"""Pages of keys and values beyond the engine's own memory, kept by a plugin's store.

Owner: the engine's loop. Invariants: the scheduler knows nothing of it: pages that the store
has are published in the pool before the request that wants them is queued, and the ordinary
prefix lookup finds them; pages are copied out between two steps; a store that is down, slow
or wrong costs one warning and the time of computing.
"""
