"""Answers of pagedllm's engines kept in Redis.

Owner: pagedllm-redis. Invariant: importing it does not import the client of Redis.
"""
