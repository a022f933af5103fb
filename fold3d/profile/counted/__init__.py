"""What a step would need, counted on tensors without values: the copy that runs, and what of it leaves the device."""
