"""Requests, scheduling, the KV cache's blocks, and the loop that runs steps."""
