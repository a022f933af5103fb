"""What the tests share: process pools, tiny models, tiny data."""
