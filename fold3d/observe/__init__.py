"""What a user sees of a run: where a step's time went, its timeline, memory, announcements.

Reads records of others, changes nothing. Used by the engine, DP.sync and the Trainer.
"""
