"""Speculative decoding: drafts of the next tokens, which one step of the model verifies.

A token is sampled after every draft as it would be without drafts, with the same random number, and
a draft is accepted if it equals the token sampled before it. So the tokens do not depend on the
drafts, whether greedy or sampled.
"""
