"""The paged KV cache's bookkeeping: which page holds what, for whom, and until when.

Owner: the scheduler. Invariant: nothing in this package imports torch; pages are integers
here, and their contents live in the workers.
"""
