"""A simulated asynchronous device for tests: `import tests.simdevice.sim` makes it torch's accelerator "sim"."""
