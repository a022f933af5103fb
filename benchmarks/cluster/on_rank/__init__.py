"""What runs in the processes that stand for ranks: each system, the virtual layers that they train, the worker."""
