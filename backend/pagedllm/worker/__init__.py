"""The worker: from a step's slots to tensors, through the model, to token ids.

Owner: an executor, which calls it from one thread.
"""
