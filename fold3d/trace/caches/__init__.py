"""What a model's code keeps between calls."""
