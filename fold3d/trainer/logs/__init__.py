"""What a Trainer prints and logs: lines on the console, throughput, peak FLOPs of devices, counts of parameters."""
