"""The Engine: builds what a rank needs, runs steps, plans and plans again, gathers the state.

The one component that knows all before it. Used by the Trainer, checkpoints and scripts with a loop of their own.
"""
