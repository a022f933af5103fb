"""What a plan needs in memory: bytes of layers, put together for csrc/core/memory, which walks the step.

Knows no models; `layer_bytes` is arithmetic only.
"""
