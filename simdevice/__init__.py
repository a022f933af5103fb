"""A simulated asynchronous device for tests: `import simdevice.sim` makes it torch's accelerator "sim"."""
